"""`compile=True`: the same numbers, and no compilation for a new rate, a refresh or a smaller density."""

import pytest
import torch
from torch._dynamo.utils import counters

from adafrugal import FRUGAL, AdaFRUGAL
from problems import follow, gradient_sequence, parameters, split_group

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_moving_rates_refreshes_and_shrinks_compile_at_most_twice() -> None:
    shapes = [(32, 48), (64, 40)]
    compiled, plain = parameters(shapes, torch.float32), parameters(shapes, torch.float32)
    settings = {"total_steps": 30, "density": 0.5, "density_end": 0.125, "update_gap": 4, "weight_decay": 0.1}
    opts = [
        AdaFRUGAL(split_group(compiled, ["a", "b"]), torch.tensor(1e-2), compile=True, **settings),
        AdaFRUGAL(split_group(plain, ["a", "b"]), 1e-2, **settings),
    ]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=30) for o in opts]
    for grads in gradient_sequence(shapes, 30, torch.float32):
        follow(opts[0], compiled, [grads])
        follow(opts[1], plain, [grads])
        for scheduler in schedulers:
            scheduler.step()
    assert opts[0].param_groups[0]["density"] == 0.125
    assert 1 <= graphs() <= 2
    for a, b in zip(compiled, plain, strict=True):
        # 30 steps of lr 1e-2 in float32, by two programs: a rounding of weights up to 4 for each of them.
        torch.testing.assert_close(a, b, rtol=0, atol=30 * 2.4e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_compiled_rows_and_scattered_lines_equal_the_plain_path(dtype, rule) -> None:
    """bfloat16 weights too: the same noise for both, since it is named and not drawn from a stream."""
    shape = (32, 48)
    for subspace in ("rows", "columns_scattered"):
        results = []
        for compile_it in (False, True):
            params = parameters([shape], dtype)
            opt = FRUGAL(
                split_group(params, ["w"]),
                1e-2,
                density=0.3,
                update_gap=3,
                subspace=subspace,
                rule=rule,
                compile=compile_it,
            )
            follow(opt, params, gradient_sequence([shape], 8, dtype))
            results.append(params[0].detach().double())
        # float64: the order of operations; bfloat16: a rounding that falls the other way, of weights of up to 4.
        atol = 1e-12 if dtype == torch.float64 else 2.0**-6
        torch.testing.assert_close(*results, rtol=0, atol=atol)
        assert (results[0] == results[1]).double().mean() > 0.99 or dtype == torch.float64


def test_step_stays_an_ordinary_method_and_state_an_ordinary_state() -> None:
    params = parameters([(32, 48)], torch.float32)
    opt = FRUGAL(split_group(params, ["w"]), compile=True, update_gap=2)
    assert type(opt).step is FRUGAL.step
    follow(opt, params, gradient_sequence([(32, 48)], 5, torch.float32))
    again = FRUGAL(split_group(parameters([(32, 48)], torch.float32), ["w"]), compile=False)
    again.load_state_dict(opt.state_dict())
