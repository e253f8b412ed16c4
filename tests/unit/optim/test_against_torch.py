"""Density 1 is AdamW, by every road; and torch's schedulers, closures and state work on us as on it."""

import copy
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

from adafrugal import FRUGAL, AdaFRUGAL, SignSGD, param_groups
from adafrugal.core.errors import CheckpointError
from adafrugal.optim.subspaces import SUBSPACES
from problems import (
    draw,
    follow,
    gradient_sequence,
    parameters,
    same_parameters,
    split_group,
    tiny_loss,
    tiny_model,
    train_tiny,
)
from tolerances import AS_ADAMW

LINES = ["columns", "rows", "rows_striped", "columns_scattered", "rows_scattered"]
SHAPES = [(24, 20), (16, 40), (40, 16), (32,)]


@pytest.mark.parametrize("path", ["auto", "eager", "foreach"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("subspace", [*LINES, "blocks", "layers", "whole"])
def test_density_one_with_keep_equals_adamw(subspace, weight_decay, path) -> None:
    """Float32, lr 1e-3, 50 steps, refreshes every 3, two groups, and a scheduler that writes lr and betas."""
    grads = gradient_sequence(SHAPES, 50, torch.float32)
    ours, theirs = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    names = [f"layers.{i}.w" for i in range(3)]
    opt = FRUGAL(
        [
            {"params": ours[:3], "param_names": names, "role": "split"},
            {"params": ours[3:], "param_names": ["v"], "role": "stateful", "lr": 2e-3},
        ],
        1e-3, density=1.0, update_gap=3, subspace=subspace, on_refresh="keep", weight_decay=weight_decay,
    )  # fmt: skip
    opt.path = path
    adamw = torch.optim.AdamW(
        [{"params": theirs[:3]}, {"params": theirs[3:], "lr": 2e-3}], 1e-3, weight_decay=weight_decay
    )
    schedulers = [OneCycleLR(o, max_lr=[1e-3, 2e-3], total_steps=60, cycle_momentum=True) for o in (opt, adamw)]
    for step_grads in grads:
        follow(opt, ours, [step_grads])
        follow(adamw, theirs, [step_grads])
        for scheduler in schedulers:
            scheduler.step()
    assert opt.param_groups[0]["betas"] != (0.9, 0.999), "the scheduler wrote betas"
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=AS_ADAMW)


def test_whole_groups_on_a_cpu_are_bit_equal_to_torchs_fused_adamw() -> None:
    grads = gradient_sequence(SHAPES, 20, torch.float32)
    ours, theirs = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    opt = FRUGAL([{"params": ours, "role": "stateful"}], 1e-3, weight_decay=0.1)
    follow(opt, ours, grads)
    follow(torch.optim.AdamW(theirs, 1e-3, weight_decay=0.1, fused=True), theirs, grads)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_keeping_at_full_width_moves_no_moment() -> None:
    """A permuted full frame passes careless tests with moments in the wrong lines."""
    for subspace in LINES:
        params = parameters([(16, 24)])
        opt = FRUGAL(split_group(params, ["w"]), density=1.0, update_gap=2, subspace=subspace)
        for k, grads in enumerate(gradient_sequence([(16, 24)], 6)):
            before = opt.state[params[0]].get("exp_avg", torch.zeros(1, 16, 24)).clone().view(16, 24)
            follow(opt, params, [grads])
            after = opt.state[params[0]]["exp_avg"].view(16, 24)
            torch.testing.assert_close(after, 0.9 * before + 0.1 * grads[0], rtol=0, atol=1e-15)
            assert "entered" not in opt.state[params[0]], f"all lines are equally old at step {k}"


def test_shared_hyperparameters_have_torchs_names_and_defaults_but_for_decay() -> None:
    import inspect

    ours = inspect.signature(AdaFRUGAL).parameters
    theirs = inspect.signature(torch.optim.AdamW).parameters
    for name in ("lr", "betas", "eps"):
        assert ours[name].default == theirs[name].default
    assert ours["weight_decay"].default == 0.0, "FRUGAL's pre-training default, documented"


@pytest.mark.parametrize("make", [
    lambda o: LambdaLR(o, lambda s: 0.9**s),
    lambda o: CosineAnnealingLR(o, T_max=10),
    lambda o: SequentialLR(o, [LinearLR(o, total_iters=3), CosineAnnealingLR(o, T_max=7)], milestones=[3]),
])  # fmt: skip
def test_schedulers_drive_us_and_survive_a_round_trip(make) -> None:
    models = [tiny_model() for _ in range(2)]
    opts = [FRUGAL(m, 1e-2, update_gap=3) for m in models]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # SequentialLR calls its children's deprecated epoch form
        schedulers = [make(o) for o in opts]
        for step in range(4):
            train_tiny(models[0], opts[0], [step])
            schedulers[0].step()
        models[1].load_state_dict(models[0].state_dict())
        opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))
        schedulers[1].load_state_dict(copy.deepcopy(schedulers[0].state_dict()))
        for step in range(4, 9):
            for model, opt, scheduler in zip(models, opts, schedulers, strict=True):
                train_tiny(model, opt, [step])
                scheduler.step()
    assert opts[0].param_groups[0]["lr"] != 1e-2
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr() == [g["lr"] for g in opts[1].param_groups]
    assert same_parameters(*models)


@pytest.mark.parametrize("write", [
    lambda g, lr: g.update(lr=lr),
    lambda g, lr: g.update(lr=torch.tensor(lr)),
    lambda g, lr: g["lr"].fill_(lr) if isinstance(g["lr"], torch.Tensor) else g.update(lr=torch.tensor(lr)),
])  # fmt: skip
def test_a_rate_may_be_a_float_or_a_tensor_and_change_its_kind(write) -> None:
    reference, model = tiny_model(), tiny_model()
    plain, opt = FRUGAL(reference, 1e-2), FRUGAL(model, torch.tensor(1e-2))
    for step in range(5):
        for group in plain.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        for group in opt.param_groups:
            write(group, 1e-2 / (step + 1))
        train_tiny(reference, plain, [step])
        train_tiny(model, opt, [step])
    for a, b in zip(reference.parameters(), model.parameters(), strict=True):
        # A float32 rate differs from the double in its last bit: five roundings of weights of up to 4.
        torch.testing.assert_close(a, b, rtol=0, atol=5 * 2.4e-7)


@pytest.mark.parametrize("subspace", SUBSPACES.names())
def test_a_run_may_start_from_adamw_and_end_in_it(subspace) -> None:
    """At density 1 nothing is lost in either direction."""
    straight, switched = tiny_model(), tiny_model()
    adamw = torch.optim.AdamW(straight.parameters(), 1e-3, weight_decay=0.0)
    first = torch.optim.AdamW(switched.parameters(), 1e-3, weight_decay=0.0)
    train_tiny(straight, adamw, range(5))
    train_tiny(switched, first, range(5))
    opt = FRUGAL(param_groups(switched), 1e-3, density=1.0, update_gap=4, subspace=subspace)
    opt.load_adamw_state_dict(first.state_dict())
    if subspace in ("random", "svd", "empty") or subspace.startswith("one_layer"):
        train_tiny(switched, opt, range(5, 8))  # not AdamW at any density: it has to run, and to hand its state on
        assert torch.optim.AdamW(switched.parameters()).load_state_dict(opt.adamw_state_dict()) is None
        return
    train_tiny(straight, adamw, range(5, 10))
    train_tiny(switched, opt, range(5, 10))
    for a, b in zip(straight.parameters(), switched.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=AS_ADAMW)
    last = torch.optim.AdamW(switched.parameters(), 1.0)
    last.load_state_dict(opt.adamw_state_dict())
    assert last.param_groups[0]["lr"] == 1e-3
    train_tiny(straight, adamw, range(10, 15))
    train_tiny(switched, last, range(10, 15))
    for a, b in zip(straight.parameters(), switched.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2 * AS_ADAMW)


def test_adamw_state_matches_by_name_and_by_place_and_refuses_another_model() -> None:
    model, other = tiny_model(), tiny_model(hidden=48)
    named = torch.optim.AdamW(reversed(list(model.named_parameters())), 1e-3)
    train_tiny(model, named, range(3))
    opt = FRUGAL(model, density=1.0)
    opt.load_adamw_state_dict(named.state_dict())
    for param in model.parameters():
        torch.testing.assert_close(opt.state[param]["exp_avg"].view(param.shape), named.state[param]["exp_avg"])
    with pytest.raises(CheckpointError, match=r"a moment of shape .* allowed is .* Use the same model"):
        FRUGAL(other, density=1.0).load_adamw_state_dict(named.state_dict())
    with pytest.raises(CheckpointError, match="Only AdamW's moments can be exchanged"):
        FRUGAL(model, rule="lion").adamw_state_dict()


def test_missing_moments_are_exported_as_zeros_and_aged_lines_keep_their_corrected_moments() -> None:
    params = parameters([(16, 24)])
    opt = FRUGAL(split_group(params, ["w"]), density=0.5, update_gap=4)
    follow(opt, params, gradient_sequence([(16, 24)], 10))
    state = opt.state[params[0]]
    assert "entered" in state, "this test needs lines of several ages"
    frame = opt._places().frame(params[0], opt.param_groups[0], state)
    exported = opt.adamw_state_dict()["state"][0]
    outside = [j for j in range(24) if j not in frame.lines().tolist()]
    assert not exported["exp_avg"][:, outside].any()
    ages = (state["step"] - state["entered"]).double()
    for name, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.999)):
        corrected = state[name][0] / (1 - beta**ages)
        theirs = exported[name][:, frame.lines()] / (1 - beta ** exported["step"].double())
        torch.testing.assert_close(theirs, corrected, rtol=1e-12, atol=0)  # float64, one quotient more


def test_hooks_and_grad_mode_are_torchs() -> None:
    model = tiny_model()
    opt = FRUGAL(model)
    seen = []
    opt.register_step_pre_hook(lambda *a: seen.append("before"))
    opt.register_step_post_hook(lambda *a: seen.append("after"))
    opt.register_state_dict_post_hook(lambda o, s: seen.append("saved"))
    opt.register_load_state_dict_pre_hook(lambda o, s: seen.append("loading"))
    opt.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    train_tiny(model, opt, [0])
    opt.load_state_dict(opt.state_dict())
    assert seen == ["before", "after", "saved", "loading", "loaded"]


def test_param_groups_and_state_are_shared_by_identity_with_a_scheduler() -> None:
    opt = SignSGD([torch.nn.Parameter(draw((4,), 0))], lr=1.0)
    scheduler = LambdaLR(opt, lambda s: 0.5**s)
    assert scheduler.optimizer.param_groups is opt.param_groups


def test_an_accumulated_gradient_equals_that_of_the_big_batch() -> None:
    one, many = tiny_model(), tiny_model()
    opts = [FRUGAL(m, 1e-2) for m in (one, many)]
    tiny_loss(one, 0, batch=8).backward()
    for _ in range(2):
        (tiny_loss(many, 0, batch=8) / 2).backward()
    for opt in opts:
        opt.step()
    for a, b in zip(one.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # halves add up to the whole but for a rounding
