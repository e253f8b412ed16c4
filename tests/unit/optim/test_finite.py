"""A NaN is found: in the stateless rest, where its sign would hide it, and in the stateful part, where it stays."""

import copy

import pytest
import torch
from torch import nn

from adafrugal import FRUGAL, AdaFRUGAL, SignSGD
from adafrugal.core.errors import NonFiniteError
from problems import draw, split_group, tiny_loss, tiny_model, train_tiny

SUBSPACES = ["columns", "rows", "rows_striped", "columns_scattered", "blocks", "random", "whole", "empty"]


def poisoned(subspace: str, path: str, column: int, bad: float = torch.nan, **settings):
    """Two tensors, ten steps; the third gradient of the first one has one bad number."""
    params = [nn.Parameter(draw((32, 40), i, torch.float32)) for i in range(2)]
    opt = FRUGAL(split_group(params, ["first", "second"]), density=0.5, subspace=subspace, **settings)
    opt.path = path
    for step in range(5):
        for i, param in enumerate(params):
            param.grad = draw((32, 40), 10 * step + i, torch.float32)
        if step == 2:
            params[0].grad[7, column] = bad
        yield opt, params, step


@pytest.mark.parametrize("path", ["auto", "eager", "foreach"])
@pytest.mark.parametrize("subspace", SUBSPACES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_deferred_names_the_parameter_and_the_step_wherever_the_number_falls(subspace, bad, path) -> None:
    for column in (0, 9, 20, 39):
        for opt, _, _ in poisoned(subspace, path, column, bad):
            opt.step()
        with pytest.raises(NonFiniteError, match=r"NaN or infinity in first \((step 3|a step from 1 to 5)\)") as caught:
            opt.state_dict()
        assert "second" not in str(caught.value)
        assert "Go back to the last good checkpoint" in str(caught.value)


READS = {
    "refresh": lambda model, opt: train_tiny(model, opt, range(3, 9)),
    "observe": lambda model, opt: opt.observe(1.0),
    "verify": lambda model, opt: opt.verify_finite(),
    "add": lambda model, opt: opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_deferred_is_read_at_refresh_observation_and_on_request(read) -> None:
    model = tiny_model()
    opt = AdaFRUGAL(model, 1e-3, total_steps=20, update_gap=4)
    train_tiny(model, opt, range(2))
    tiny_loss(model, 2).backward()
    model.blocks[1].up.weight.grad[3, 3] = torch.nan
    opt.step()
    opt.zero_grad()
    with pytest.raises(NonFiniteError, match=r"blocks\.1\.up\.weight"):
        read(model, opt)


@pytest.mark.parametrize("subspace", SUBSPACES)
def test_before_names_the_parameter_before_any_weight_moves(subspace) -> None:
    for opt, params, step in poisoned(subspace, "auto", 9, check_finite="before"):
        before = [p.detach().clone() for p in params]
        if step == 2:
            with pytest.raises(NonFiniteError, match=r"check_finite='before'.*first \(step 3\).*No weight has moved"):
                opt.step()
            assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
            assert opt.param_groups[0]["step"] == 2, "nothing advances on a refused step"
            continue
        opt.step()
    assert opt.param_groups[0]["step"] == 4
    assert all(torch.isfinite(p).all() for p in params)


def test_off_looks_at_nothing() -> None:
    for opt, _, _ in poisoned("columns", "auto", 9, check_finite="off"):
        opt.step()
    assert opt.state_dict()


def test_healthy_gradients_of_any_size_raise_nothing() -> None:
    param = nn.Parameter(torch.zeros(64, 64))
    opt = SignSGD([param], 1e-3)
    for scale in (1e-38, 1.0, 1e30):
        param.grad = draw((64, 64), 0, torch.float32) * scale
        opt.step()
    opt.verify_finite()


def test_a_float16_gradient_whose_sum_overflows_float16_is_finite() -> None:
    param = nn.Parameter(torch.zeros(64, 64, dtype=torch.float16))
    opt = SignSGD([param], 1e-3, rounding="kahan")
    param.grad = torch.full((64, 64), 5000.0, dtype=torch.float16)
    opt.step()
    opt.verify_finite()


def test_a_load_forgets_what_was_found() -> None:
    model = tiny_model()
    opt = FRUGAL(model)
    train_tiny(model, opt, range(2))
    good = copy.deepcopy(opt.state_dict())
    tiny_loss(model, 2).backward()
    model.blocks[0].up.weight.grad.fill_(torch.nan)
    opt.step()
    with pytest.raises(NonFiniteError):
        opt.verify_finite()
    opt.load_state_dict(good)
    opt.verify_finite()


def test_the_deferred_check_never_waits_for_a_device() -> None:
    """No tensor is turned into a Python number during a step: it would wait for a GPU."""
    model = tiny_model()
    opt = FRUGAL(model, update_gap=100)
    opt.path = "foreach"
    train_tiny(model, opt, range(2))
    tiny_loss(model, 2).backward()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch() as watch:
        opt.step()
    reads = [name for name in watch.seen if "_local_scalar_dense" in name or "is_nonzero" in name or "nonzero" in name]
    assert len(watch.seen) > 20
    assert reads == []
