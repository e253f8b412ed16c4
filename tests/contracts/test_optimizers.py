"""What every method promises, over the whole catalogue and every subspace."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from adafrugal import FRUGAL, AdaFRUGAL, BAdam, GaLore, SignSGD
from adafrugal.optim.memory import held_bytes
from adafrugal.optim.split import SplitOptimizer
from adafrugal.optim.subspaces import SUBSPACES
from problems import same_parameters, state_tensors, tiny_loss, tiny_model, train_tiny

STEPS = 24


def ada(model, **settings):
    end = 0.34 if settings.get("subspace", "").startswith("layers") else 0.2  # one of the three layers has to fit
    numbers = {"total_steps": STEPS, "density": 0.7, "density_end": end, "update_gap": 4, "update_gap_max": 9}
    return AdaFRUGAL(model, 3e-3, plateau_tolerance=0.5, **{**numbers, **settings})


MAKERS = {
    "adafrugal": ada,
    "adafrugal external": lambda m, **s: ada(m, policies="external", **s),
    "galore": lambda m, **s: GaLore(m, 1e-2, update_gap=5, **s),
    "badam": lambda m, **s: BAdam(m, 3e-3, update_gap=5, **s),
    "signsgd": lambda m, **s: SignSGD(m, 1e-3, **s),
    "frugal lion": lambda m, **s: FRUGAL(m, 1e-3, update_gap=5, rule="lion", **s),
    "frugal momentum": lambda m, **s: FRUGAL(m, 1e-3, update_gap=5, rule="momentum", **s),
    "frugal sgd": lambda m, **s: FRUGAL(m, 1e-3, update_gap=5, rule="sgd", stateless_rule="sgd", **s),
}
for _name in SUBSPACES.names():
    MAKERS[f"adafrugal {_name}"] = lambda m, _s=_name, **s: ada(m, subspace=_s, **s)
for _name, _how in (
    ("columns", "reset"),
    ("rows", "carry"),
    ("random", "reset"),
    ("svd", "carry"),
    ("blocks", "reset"),
):
    MAKERS[f"adafrugal {_name} {_how}"] = lambda m, _s=_name, _h=_how, **s: ada(m, subspace=_s, on_refresh=_h, **s)

every_method = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def observe(optimizer):
    """Tell the loss at every fifth step, so that the gap grows."""

    def after(step: int, loss: float) -> None:
        if isinstance(optimizer, AdaFRUGAL) and optimizer.param_groups[0]["policies"] == "own" and step % 5 == 4:
            optimizer.observe(loss)

    return after


def train(model, optimizer, start=0, stop=STEPS) -> list[float]:
    return train_tiny(model, optimizer, range(start, stop), observe(optimizer))


def safe_copy(state: object) -> object:
    """Through a file, loaded with nothing but tensors and plain data allowed."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_plain(value: object) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            assert isinstance(key, (str, int))
            assert_plain(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            assert_plain(item)
    else:
        assert value is None or isinstance(value, (torch.Tensor, bool, int, float, str)), type(value)


@every_method
def test_it_learns_and_leaves_plain_data(make) -> None:
    model = tiny_model()
    optimizer = make(model)
    losses = train(model, optimizer)
    assert all(loss == loss for loss in losses)
    assert sum(losses[-5:]) < sum(losses[:5]), "the loss falls"
    state = optimizer.state_dict()
    assert_plain(state)
    assert_plain(safe_copy(state))


@every_method
@pytest.mark.parametrize("layout", ["compact", "padded"])
def test_resume_is_bitwise_wherever_the_run_is_cut(make, layout) -> None:
    """In mid-gap, at a refresh, in mid-level, after the gap has grown, before the first step."""
    for cut in (0, 3, 4, 7, 11, 17, 23):
        straight = tiny_model()
        optimizer = make(straight)
        optimizer.state_layout = layout
        train(straight, optimizer, 0, cut)
        saved, weights = safe_copy(optimizer.state_dict()), copy.deepcopy(straight.state_dict())
        train(straight, optimizer, cut, STEPS)

        resumed = tiny_model(seed=9)
        resumed.load_state_dict(weights)
        second = make(resumed)
        second.load_state_dict(saved)
        train(resumed, second, cut, STEPS)
        assert same_parameters(straight, resumed), f"cut at {cut}"
        assert second.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@every_method
def test_padded_shapes_depend_on_settings_alone(make) -> None:
    shapes = []
    for steps in (1, 5, 12, STEPS):
        model = tiny_model()
        optimizer = make(model)
        optimizer.state_layout = "padded"
        train(model, optimizer, 0, steps)
        state = optimizer.state_dict()["state"]
        shapes.append(
            {k: {n: tuple(t.shape) for n, t in v.items() if isinstance(t, torch.Tensor)} for k, v in state.items()}
        )
        assert len(state) == sum(1 for _ in model.parameters())
    assert all(s == shapes[0] for s in shapes)


@every_method
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16], ids=str)
def test_bytes_held_are_bytes_promised_before_and_after_each_shrink(make, state_dtype) -> None:
    settings = {} if make is MAKERS["signsgd"] else {"state_dtype": state_dtype}
    model = tiny_model()
    optimizer = make(model, **settings)
    for step in range(STEPS):
        train(model, optimizer, step, step + 1)
        memory = optimizer.memory()
        if make is MAKERS["badam"] and step % 5 == 4:
            assert memory["state_bytes"] in (0, memory["planned_state_bytes"]), "done, or next in turn again"
            continue
        assert memory["state_bytes"] == memory["planned_state_bytes"]
        moments = [
            tensor
            for group in optimizer.param_groups
            for param in group["params"]
            for name, tensor in optimizer.state.get(param, {}).items()
            if name in ("exp_avg", "exp_avg_sq", "momentum_buffer")
        ]
        assert memory["state_bytes"] == held_bytes(moments) == sum(t.nbytes for t in moments), "no storage is larger"
        assert memory["total_bytes"] >= held_bytes(state_tensors(optimizer))
        if state_dtype is not None:
            assert all(t.dtype == torch.bfloat16 for t in moments)


@every_method
def test_the_first_bytes_are_promised_before_the_first_step(make) -> None:
    model = tiny_model()
    optimizer = make(model)
    promised = optimizer.memory()
    assert promised["state_bytes"] == 0
    train(model, optimizer, 0, 1)
    assert optimizer.memory()["state_bytes"] == promised["planned_state_bytes"]
    assert promised["adamw_state_bytes"] == 8 * sum(p.numel() for p in model.parameters())


@every_method
def test_meta_tensors_hold_the_same_bytes_as_real_ones(make) -> None:
    real, meta = tiny_model(), tiny_model().to("meta")
    on_real, on_meta = make(real), make(meta)
    for step in range(STEPS):
        train(real, on_real, step, step + 1)
        for param in meta.parameters():
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        on_meta.step()
        if isinstance(on_real, AdaFRUGAL) and on_real.param_groups[0]["losses"] and step % 5 == 4:
            on_meta.observe(on_real.param_groups[0]["losses"][-1])
        keys = ("state_bytes", "index_bytes", "planned_state_bytes", "adamw_state_bytes")
        assert [on_real.memory()[k] for k in keys] == [on_meta.memory()[k] for k in keys]


@every_method
def test_copies_and_pickles_go_on_as_the_original(make) -> None:
    model = tiny_model()
    optimizer = make(model)
    train(model, optimizer, 0, 7)
    pair = copy.deepcopy((model, optimizer))
    pickled = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, 7, STEPS)
    for other_model, other in (pair, pickled):
        assert isinstance(other, SplitOptimizer)
        train(other_model, other, 7, STEPS)
        assert same_parameters(model, other_model)


@every_method
def test_the_same_seed_gives_the_same_run_whatever_the_global_stream(make) -> None:
    first, second = tiny_model(), tiny_model()
    train(first, make(first))
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        train(second, make(second))
    assert same_parameters(first, second)


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_weights_in_other_precisions_train(make, dtype) -> None:
    model = tiny_model().to(dtype)
    optimizer = make(model)
    losses = train(model, optimizer)
    assert sum(losses[-5:]) < sum(losses[:5])
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    moments = [t for s in optimizer.state.values() for k, t in s.items() if k.startswith("exp_avg")]
    assert all(t.dtype == wanted for t in moments)


@every_method
def test_a_zero_gradient_moves_a_weight_by_decay_alone(make) -> None:
    model = tiny_model()
    optimizer = make(model, weight_decay=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    lr = optimizer.param_groups[0]["lr"]
    for param, old in zip(model.parameters(), before, strict=True):
        frozen = make is MAKERS["badam"] and torch.equal(param, old)
        if not frozen:
            torch.testing.assert_close(param.detach(), old * (1 - lr * 0.1), rtol=2e-7, atol=0)  # one float32 rounding


@every_method
def test_a_step_of_zero_gradients_at_rate_zero_leaves_no_trace_after_a_load(make) -> None:
    """Distributed checkpointing makes such a step to have a state to load into."""
    straight = tiny_model()
    optimizer = make(straight)
    train(straight, optimizer, 0, 9)
    saved, weights = safe_copy(optimizer.state_dict()), copy.deepcopy(straight.state_dict())
    train(straight, optimizer, 9, STEPS)

    resumed = tiny_model()
    resumed.load_state_dict(weights)
    second = make(resumed)
    rates = [group["lr"] for group in second.param_groups]
    for param in resumed.parameters():
        param.grad = torch.zeros_like(param)
    for group in second.param_groups:
        group["lr"] = 0.0
    second.step()
    second.zero_grad()
    for group, rate in zip(second.param_groups, rates, strict=True):
        group["lr"] = rate
    assert all(torch.equal(p, weights[n]) for n, p in resumed.named_parameters()), "it moves no weight"
    second.load_state_dict(saved)
    train(resumed, second, 9, STEPS)
    assert same_parameters(straight, resumed)


@every_method
def test_missing_gradients_skip_a_tensor_and_nothing_hangs_on_it(make) -> None:
    model = tiny_model()
    optimizer = make(model)
    params = list(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        tiny_loss(model, step).backward()
        absent = params[step % len(params)]
        absent.grad = None
        before = absent.detach().clone()
        optimizer.step()
        assert torch.equal(absent, before)
    assert all(group["step"] == STEPS for group in optimizer.param_groups)


def test_without_any_gradient_nothing_advances() -> None:
    model = tiny_model()
    optimizer = ada(model)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 0
    assert not optimizer.state
    assert optimizer.param_groups[0]["refreshed_at"] is None


@every_method
def test_a_closure_runs_once_with_autograd_on_and_returns_its_loss(make) -> None:
    model = tiny_model()
    optimizer = make(model)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = tiny_loss(model, 0)
        loss.backward()
        return loss

    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("subspace", SUBSPACES.names())
def test_parameters_in_another_order_get_the_same_frames(subspace) -> None:
    runs = []
    for flip in (False, True):
        model = tiny_model()
        named = [(n, p) for n, p in model.named_parameters() if "blocks" in n and p.ndim == 2]
        optimizer = ada([{"params": named[::-1] if flip else named, "role": "split"}], subspace=subspace)
        for name, param in model.named_parameters():
            param.requires_grad_("blocks" in name and param.ndim == 2)
        train(model, optimizer)
        runs.append(model)
    assert same_parameters(*runs)


def test_subspaces_of_two_optimizers_over_one_model_in_different_wrappers_agree() -> None:
    """The canonical name is what a frame is keyed by, not what a wrapper makes of it."""
    plain, wrapped = tiny_model(), tiny_model()
    outer = nn.Module()
    outer.module = wrapped
    train(plain, ada(plain))
    train(wrapped, ada(outer))
    assert same_parameters(plain, wrapped)
