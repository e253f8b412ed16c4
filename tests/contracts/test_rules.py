"""What every rule of the catalogue promises."""

import pytest
import torch

from adafrugal.core.protocols import FusedRule, ListRule, Rule
from adafrugal.optim.rules import RULES, STATELESS_RULES, AdamW
from problems import draw

NAMES = RULES.names()
DTYPES = [torch.float32, torch.float64]


def make(name: str) -> Rule:
    return RULES.create(name, (0.9, 0.99), 1e-8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 5), (7,), (), (0, 3)])
def test_state_is_named_zero_tensors_of_exactly_the_promised_bytes(name, dtype, shape) -> None:
    rule = make(name)
    state = rule.init(shape, dtype, torch.device("cpu"))
    assert set(state) == set(rule.moment_powers)
    assert all(tuple(t.shape) == shape and t.dtype == dtype and not t.any() for t in state.values())
    assert sum(t.untyped_storage().nbytes() for t in state.values()) == rule.state_bytes(shape, dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_direction_has_the_gradients_shape_and_shares_no_memory(name, dtype) -> None:
    rule = make(name)
    state = rule.init((4, 6), dtype, torch.device("cpu"))
    grad = draw((4, 6), 1, dtype)
    before = grad.clone()
    direction = rule.direction(grad, state, 1)
    assert direction.shape == grad.shape
    assert direction.dtype == dtype
    assert torch.equal(grad, before), "the gradient is left alone"
    kept = {k: v.clone() for k, v in state.items()}
    direction.fill_(7.0)
    assert torch.equal(grad, before)
    assert all(torch.equal(state[k], kept[k]) for k in kept)


@pytest.mark.parametrize("name", NAMES)
def test_a_zero_gradient_on_fresh_state_moves_nothing(name) -> None:
    rule = make(name)
    direction = rule.direction(torch.zeros(5), rule.init((5,), torch.float32, torch.device("cpu")), 1)
    assert not direction.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_step_for_all_or_a_step_for_each_line_is_the_same(name, dtype) -> None:
    rule = make(name)
    one = rule.init((2, 3, 4), dtype, torch.device("cpu"))
    each = rule.init((2, 3, 4), dtype, torch.device("cpu"))
    for step in range(1, 6):
        grad = draw((2, 3, 4), step, dtype)
        expected = rule.direction(grad, one, step)
        direction = rule.direction(grad, each, torch.full((1, 1, 4), step, dtype=dtype))
        # The kernels differ by a rounding or two in each of five steps, on directions of order 1.
        torch.testing.assert_close(direction, expected, rtol=0, atol=30 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", NAMES)
def test_moments_in_bfloat16_are_computed_in_the_gradients_precision(name) -> None:
    """The state is rounded once a step; the direction itself is not."""
    rule = make(name)
    low = rule.init((64,), torch.bfloat16, torch.device("cpu"))
    high = rule.init((64,), torch.float32, torch.device("cpu"))
    grad = draw((64,), 3, torch.float32)
    direction = rule.direction(grad, low, 1)
    # The first direction comes from unrounded moments: only the kernels' own roundings differ.
    torch.testing.assert_close(
        direction, rule.direction(grad, high, 1), rtol=0, atol=30 * torch.finfo(torch.float32).eps
    )
    assert all(t.dtype == torch.bfloat16 for t in low.values())
    assert all(torch.equal(low[k], high[k].bfloat16()) for k in low)


@pytest.mark.parametrize("name", [n for n in NAMES if isinstance(make(n), ListRule)])
def test_lists_give_what_single_calls_give(name) -> None:
    rule = make(name)
    assert isinstance(rule, ListRule)
    shapes = [(3, 4), (5,), (2, 2, 2)]
    single = [rule.init(s, torch.float64, torch.device("cpu")) for s in shapes]
    listed = [rule.init(s, torch.float64, torch.device("cpu")) for s in shapes]
    for k in range(3):
        grads = [draw(s, 10 * k + i) for i, s in enumerate(shapes)]
        steps = [k + 1, k + 4, k + 9]
        expected = [rule.direction(g, s, t) for g, s, t in zip(grads, single, steps, strict=True)]
        found = rule.direction_many(grads, listed, steps)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)  # float64, the order of operations differs


def test_the_fused_kernel_refuses_strided_views_that_it_would_write_outside_of() -> None:
    rule = AdamW((0.9, 0.999), 1e-8)
    assert isinstance(rule, FusedRule)
    weight, grad = torch.zeros(8, 8), torch.ones(8, 8)
    state = {"exp_avg": torch.zeros(8, 3), "exp_avg_sq": torch.zeros(8, 3)}
    with pytest.raises(ValueError, match="contiguous"):
        rule.update_many([weight[:, 2:5]], [grad[:, 2:5]], [state], [1], lr=0.1, weight_decay=0.0)
    assert not weight.any()


def test_stateless_rules_hold_nothing() -> None:
    for name in STATELESS_RULES:
        assert make(name).state_bytes((1000,), torch.float32) == 0
        assert make(name).moment_powers == {}


def test_momentum_starts_at_zero_and_equals_torch_sgd() -> None:
    rule = make("momentum")
    state = rule.init((4,), torch.float64, torch.device("cpu"))
    mine, theirs = draw((4,), 0), torch.nn.Parameter(draw((4,), 0))
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    for k in range(5):
        grad = draw((4,), k + 1)
        theirs.grad = grad.clone()
        sgd.step()
        mine -= 0.1 * rule.direction(grad, state, k + 1)
    torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-14)


def test_lion_is_the_papers_algorithm() -> None:
    rule = RULES.create("lion", (0.9, 0.99), 1e-8)
    state = rule.init((50,), torch.float64, torch.device("cpu"))
    momentum = torch.zeros(50, dtype=torch.float64)
    for k in range(5):
        grad = draw((50,), k)
        expected = torch.sign(0.9 * momentum + 0.1 * grad)
        momentum = 0.99 * momentum + 0.01 * grad
        assert torch.equal(rule.direction(grad, state, k + 1), expected)
        torch.testing.assert_close(state["exp_avg"], momentum, rtol=0, atol=1e-15)
