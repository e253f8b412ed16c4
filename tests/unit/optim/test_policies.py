"""What moves in AdaFRUGAL: levels of density, growths of the gap, and one writer of each."""

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from adafrugal import FRUGAL, AdaFRUGAL
from adafrugal.core.errors import ConfigError
from adafrugal.core.values import Clock, Snapshot
from adafrugal.optim.schedules import ConstantPolicy, DensityDecay, LearningRate, PlateauGap
from problems import follow, gradient_sequence, parameters, split_group, tiny_model, train_tiny

SHAPE = (32, 48)


def optimizer(**settings):
    params = parameters([SHAPE])
    return params, AdaFRUGAL(split_group(params, ["w"]), **settings)


def run(params, opt, steps, before=None):
    follow(opt, params, gradient_sequence([SHAPE], steps), before)


# --- density ------------------------------------------------------------------------------------------------------


def test_eight_equal_falls_and_a_last_part_at_the_end_density() -> None:
    params, opt = optimizer(total_steps=160, density=0.5, density_end=0.1, update_gap=1000, update_gap_max=None)
    seen = []
    run(params, opt, 160, lambda k: seen.append(opt.param_groups[0]["density"]) if k else None)
    seen.append(opt.param_groups[0]["density"])
    changes = [k for k in range(1, 160) if seen[k] != seen[k - 1]]
    assert changes == [10, 30, 50, 70, 90, 110, 130, 150], "half-way between levels: round(8 k / 160) rises"
    levels = sorted(set(seen), reverse=True)
    assert levels == pytest.approx([0.5 - 0.05 * i for i in range(9)])
    assert seen[-1] == 0.1, "exactly the end"


def test_a_shrink_keeps_the_first_lines_restarts_nothing_and_frees_storage() -> None:
    params, opt = optimizer(total_steps=16, density=0.5, density_end=0.25, update_gap=1000, update_gap_max=None)
    grads = gradient_sequence([SHAPE], 3)
    follow(opt, params, grads[:1])
    state = opt.state[params[0]]
    frame = opt._places().frame(params[0], opt.param_groups[0], state)
    before = {k: state[k].clone() for k in ("exp_avg", "exp_avg_sq")}
    storages = [StorageWeakRef(state[k].untyped_storage()) for k in before]
    follow(opt, params, [[torch.zeros(SHAPE, dtype=torch.float64)]])  # progress 1/16: the first fall
    width = opt.param_groups[0]["widths"][0]
    assert width == math.floor((0.5 - 0.25 / 8) * 48 + 0.5) < frame.width
    after = opt._places().frame(params[0], opt.param_groups[0], state)
    assert after.lines().tolist() == frame.lines().tolist()[:width]
    torch.testing.assert_close(state["exp_avg"], 0.9 * before["exp_avg"][:, :, :width], rtol=0, atol=1e-15)
    assert state["step"] == 2, "nothing restarts"
    assert state["exp_avg"].untyped_storage().nbytes() == width * 32 * 8
    assert all(storage.expired() for storage in storages), "the wider moments are gone"


def test_the_first_shrink_from_density_one_takes_the_first_lines() -> None:
    params, opt = optimizer(total_steps=16, density=1.0, density_end=0.5, update_gap=1000, update_gap_max=None)
    run(params, opt, 3)
    frame = opt._places().frame(params[0], opt.param_groups[0], opt.state[params[0]])
    assert frame.lines().tolist() == list(range(frame.width))
    assert frame.width < 48


def test_progress_may_be_set_from_outside_and_falls_are_never_taken_back() -> None:
    params, opt = optimizer(total_steps=None, density=0.5, density_end=0.1, update_gap=1000, update_gap_max=None)
    for progress, density in ((0.0, 0.5), (0.5, 0.3), (0.2, 0.3), (1.0, 0.1)):
        opt.set_progress(progress)
        run(params, opt, 1)
        assert opt.param_groups[0]["density"] == pytest.approx(density)


def test_without_a_length_the_first_step_is_an_error_before_anything_moves() -> None:
    params, opt = optimizer(total_steps=None)
    before = params[0].detach().clone()
    with pytest.raises(ConfigError, match=r"total_steps=None\)\.step\(\).*call opt\.set_progress"):
        run(params, opt, 1)
    assert torch.equal(params[0], before)
    params, opt = optimizer(total_steps=None, density_end=None)
    run(params, opt, 1)


def test_paper_timing_ties_falls_to_refreshes() -> None:
    params, opt = optimizer(
        total_steps=40, density=0.5, density_end=0.1, update_gap=16, update_gap_max=None, paper_timing=True
    )
    changes, last = [], 0.5

    def note(k: int) -> None:
        nonlocal last
        if opt.param_groups[0]["density"] != last:
            changes.append(k - 1)
            last = opt.param_groups[0]["density"]

    run(params, opt, 40, note)
    assert changes == [16, 32]


def test_the_papers_variants_are_settings() -> None:
    params, density_only = optimizer(total_steps=20, update_gap=3, update_gap_max=None)
    assert [density_only.observe(1.0) for _ in range(5)] == [False] * 5
    run(params, density_only, 20)
    assert density_only.param_groups[0]["density"] == 0.05
    params, gap_only = optimizer(total_steps=20, density_end=None, update_gap=3)
    run(params, gap_only, 20)
    assert gap_only.param_groups[0]["density"] == 0.25
    assert [gap_only.observe(1.0) for _ in range(3)] == [False, True, True]


@given(start=st.floats(0, 1), end=st.floats(0, 1), progress=st.lists(st.floats(0, 1), max_size=20))
def test_density_decay_is_monotone_and_lands(start, end, progress) -> None:
    start, end = max(start, end), min(start, end)
    policy, memory, last = DensityDecay(start=start, end=end), {}, start
    for p in [*progress, 1.0]:
        snapshot = Snapshot(clock=Clock(step=0, progress=p), settings={"density": last})
        decision, memory = policy.decide(snapshot, None, memory)
        new = decision.settings.get("density", last)
        assert end <= new <= last or math.isclose(new, last)
        last = new
    assert last == end


# --- gap ----------------------------------------------------------------------------------------------------------


def test_on_a_planted_plateau_the_gap_grows_to_its_maximum_and_each_growth_is_logged(caplog) -> None:
    _, opt = optimizer(total_steps=10_000)
    losses = [4.0, 3.0, 2.0] + [2.0 - 1e-4 * i for i in range(1, 9)]
    gaps, grew = [], []
    with caplog.at_level(logging.INFO, logger="adafrugal"):
        for i, loss in enumerate(losses):
            grew.append(opt.observe(loss, step=100 * i))
            gaps.append(opt.param_groups[0]["update_gap"])
    assert gaps == [200, 200, 200, 300, 450, 675, 1000, 1000, 1000, 1000, 1000], "675 * 1.5 is over the maximum"
    assert grew == [False] * 3 + [True] * 4 + [False] * 4
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "step 300", "step 400", "step 500", "step 600",
    ]  # fmt: skip
    assert "update_gap 200 -> 300: the loss changed by 0.005%, under 0.500%" in caplog.text


def test_half_way_gaps_round_up() -> None:
    _, opt = optimizer(total_steps=10, update_gap=5, update_gap_max=100)
    opt.observe(1.0)
    opt.observe(1.0)
    assert opt.param_groups[0]["update_gap"] == 8, "7.5"


@pytest.mark.parametrize(("losses", "grows"), [
    ([1.0], False),                      # a first observation
    ([1.0, 0.9951], True),               # 0.49 %
    ([1.0, 0.995 - 1e-9], False),        # at the tolerance
    ([1.0, 1.0049], True),               # a small rise is flat
    ([1.0, 1.2], False),                 # a rise is instability
    ([0.0, 1.0], False),                 # nothing to compare with
    ([0.0, 0.0], False),
    ([-1.0, -1.001], True),              # any unit, any sign
])  # fmt: skip
def test_when_the_run_has_settled(losses, grows) -> None:
    _, opt = optimizer(total_steps=10)
    assert [opt.observe(loss) for loss in losses][-1] == grows


def test_a_non_finite_loss_is_left_out_with_a_warning_that_names_the_step() -> None:
    _, opt = optimizer(total_steps=10)
    opt.observe(1.0)
    for bad in (math.nan, math.inf):
        with pytest.warns(UserWarning, match=f"the validation loss at step 77 is {bad}"):
            assert not opt.observe(bad, step=77)
    assert opt.observe(torch.tensor(1.0, requires_grad=True)), "compared with the last finite one"


def test_the_window_looks_back_over_several_observations() -> None:
    _, opt = optimizer(total_steps=10, plateau_window=3, plateau_tolerance=0.01)
    # Against the neighbour every change is under 1 %; against the third last one the first five are not.
    losses = [1.0, 0.992, 0.984, 0.976, 0.968, 0.960, 0.959, 0.959, 0.959]
    assert [opt.observe(loss) for loss in losses] == [False] * 7 + [True, True]


def test_a_rise_may_restart_the_gap() -> None:
    _, opt = optimizer(total_steps=10, on_rise="restart")
    for loss in (1.0, 1.0, 1.0):
        opt.observe(loss)
    assert opt.param_groups[0]["update_gap"] == 450
    assert not opt.observe(2.0)
    assert opt.param_groups[0]["update_gap"] == 200


def test_steps_since_the_last_refresh_count_and_not_k_mod_t() -> None:
    params, opt = optimizer(total_steps=100, density_end=None, update_gap=4, update_gap_max=6)
    refreshes = []

    def before(k: int) -> None:
        if k in (3, 4):
            opt.observe(1.0)  # the gap becomes 6 before step 4

    for k in range(20):
        run(params, opt, 1, lambda _, k=k: before(k))
        if opt.param_groups[0]["refreshed_at"] == k:
            refreshes.append(k)
    assert refreshes == [0, 6, 12, 18]


def test_a_refresh_always_comes() -> None:
    params, opt = optimizer(total_steps=100, density_end=None, update_gap=7, update_gap_max=None)
    windows = []
    for _ in range(70):
        run(params, opt, 1)
        windows.append(opt._places().frame(params[0], opt.param_groups[0], opt.state[params[0]]).offset)
    runs = [k for k in range(1, 70) if windows[k] != windows[k - 1]]
    assert set(runs) <= set(range(7, 70, 7))
    assert len(runs) >= 8, "two windows in a row are the same once in 48 draws"


# --- who writes ---------------------------------------------------------------------------------------------------


def test_one_writer_at_a_time() -> None:
    _, own = optimizer(total_steps=10)
    for call in (lambda: own.set_density(0.1), lambda: own.set_update_gap(10)):
        with pytest.raises(ConfigError, match="policies='external'"):
            call()
    with pytest.raises(ConfigError, match="total_steps=10 as well"):
        own.set_progress(0.5)
    params, external = optimizer(policies="external")
    for call in (lambda: external.observe(1.0), lambda: external.set_progress(0.5)):
        with pytest.raises(ConfigError, match="policies='own'"):
            call()
    run(params, external, 1)
    external.set_density(0.125)
    external.set_update_gap(3)
    run(params, external, 1)
    assert external.param_groups[0]["widths"] == [6]
    external.set_density(0.25)
    run(params, external, 1)
    assert external.param_groups[0]["widths"] == [6], "a rise waits for the next refresh"
    run(params, external, 2)
    assert external.param_groups[0]["widths"] == [12]


def test_a_number_written_behind_the_policys_back_is_an_error() -> None:
    params, opt = optimizer(total_steps=10)
    run(params, opt, 1)
    opt.param_groups[0]["density"] = 0.11
    with pytest.raises(ConfigError, match=r"a second writer of density.*policies='external'"):
        run(params, opt, 1)
    _, opt = optimizer(total_steps=10)
    opt.param_groups[0]["update_gap"] = 5
    with pytest.raises(ConfigError, match="a second writer of update_gap"):
        opt.observe(1.0)


def test_frugal_takes_numbers_from_anyone() -> None:
    params = parameters([SHAPE])
    opt = FRUGAL(split_group(params, ["w"]), density=0.5)
    run(params, opt, 1)
    opt.set_density(0.25)
    run(params, opt, 1)
    assert opt.param_groups[0]["widths"] == [12]
    with pytest.raises(ConfigError, match=r"set_density\(density=1\.5\)"):
        opt.set_density(1.5)
    with pytest.raises(ConfigError, match=r"set_update_gap\(update_gap=0\)"):
        opt.set_update_gap(0)


def test_always_stateful_groups_never_move() -> None:
    model = tiny_model()
    opt = AdaFRUGAL(model, total_steps=10, update_gap=2)
    train_tiny(model, opt, range(10), lambda s, loss: opt.observe(1.0))
    for group in opt.param_groups:
        if group["role"] == "stateful":
            assert (group["density"], group["refreshed_at"]) == (1.0, 0)
            assert all(opt.state[p]["step"] == 10 for p in group["params"])


# --- bad settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "message"), [
    ({"density": 1.5}, r"AdaFRUGAL\(density=1\.5\): received 1\.5; allowed is a share in \[0, 1\]\. Write 0\.25"),
    ({"density": -0.1}, "a share in"),
    ({"density": math.nan}, "a share in"),
    ({"density": True}, "a share in"),
    ({"density": 0.02}, r"density=0\.02, density_end=0\.05.*at most the starting density"),
    ({"update_gap": 0}, "a whole number of steps, at least 1"),
    ({"update_gap": 2.5}, "a whole number of steps"),
    ({"update_gap": 2000}, r"update_gap=2000, update_gap_max=1000.*Raise update_gap_max"),
    ({"gap_growth": 1.0}, "a factor above 1"),
    ({"plateau_window": 0}, "at least 1 observation"),
    ({"plateau_tolerance": -1.0}, "at least 0"),
    ({"total_steps": 0}, "at least 1, or None"),
    ({"subspace": "colums"}, r"subspace='colums'.*Did you mean 'columns'\?"),
    ({"rule": "adam"}, "Did you mean 'adamw'"),
    ({"stateless_rule": "adamw"}, "one of sign, sgd, none"),
    ({"on_refresh": "project"}, r"one of keep, reset, carry for this subspace.*on_refresh=None for 'keep'"),
    ({"subspace": "svd", "on_refresh": "keep"}, "one of project, reset, carry"),
    ({"state_dtype": torch.float16}, r"state_dtype='float16'.*one of float64, float32, bfloat16"),
    ({"rounding": "up"}, "one of stochastic, kahan, nearest"),
    ({"check_finite": "always"}, "one of deferred, before, off"),
    ({"policies": "mine"}, "one of own, external"),
    ({"on_rise": "panic"}, "one of keep, restart"),
    ({"state_layout": "loose"}, "one of compact, padded"),
    ({"betas": (0.9, 1.0)}, r"two numbers in \[0, 1\)"),
    ({"eps": 0.0}, "a number above 0"),
    ({"weight_decay": -0.1}, "a number of at least 0"),
    ({"lr": -1.0}, "a number of at least 0"),
    ({"stateful_lr_scale": 0.0}, "a number above 0"),
    ({"seed": 0.5}, "a whole number"),
    ({"subspace": "blocks", "density": 0.5}, r"Raise density to 1, or use subspace=\"columns\""),
])  # fmt: skip
def test_bad_settings_are_one_clear_sentence_at_construction(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizer(**{"total_steps": 10, **settings})


# --- the other policies ---------------------------------------------------------------------------------------------


def test_the_learning_rate_follows_the_share_of_the_budget() -> None:
    cosine = LearningRate(warmup=0.1, shape="cosine", floor=0.1)
    assert cosine.factor(0.0) == 0.0
    assert cosine.factor(0.05) == pytest.approx(0.5)
    assert cosine.factor(0.1) == pytest.approx(1.0)
    assert cosine.factor(0.55) == pytest.approx(0.55)
    assert cosine.factor(1.0) == pytest.approx(0.1)
    hold = LearningRate(warmup=0.0, shape="hold", anneal=0.25, floor=0.0)
    assert [hold.factor(p) for p in (0.0, 0.5, 0.75, 0.875, 1.0)] == [1.0, 1.0, 1.0, 0.5, 0.0]
    with pytest.raises(ConfigError, match="shares whose sum is at most 1"):
        LearningRate(warmup=0.9, shape="hold", anneal=0.2)
    with pytest.raises(ConfigError, match=r"schedule\.floor=2"):
        LearningRate(floor=2)


def test_policies_are_pure_and_the_constant_one_changes_nothing() -> None:
    snapshot = Snapshot(clock=Clock(step=5, progress=0.5), val_loss=1.0, settings={"density": 0.25, "update_gap": 200})
    policy = PlateauGap(start=200, maximum=1000, growth=1.5, tolerance=0.005)
    memory = {"losses": [1.0]}
    first, second = policy.decide(snapshot, None, memory), policy.decide(snapshot, None, memory)
    assert first == second
    assert memory == {"losses": [1.0]}, "the memory passed in is left alone"
    assert dict(first[0].settings) == {"update_gap": 300}
    assert ConstantPolicy().decide(snapshot, None, memory)[0].action == "continue"
