"""Levers: each says what it frees and what that is worth, worked out by hand, and rests where it cannot move."""

import pytest

from adafrugal.core.values import Budget, Clock, Cost, Setting, Snapshot
from adafrugal.govern.config import LeverConfig
from adafrugal.govern.levers import batch, density, eval_interval, micro_batch, proposals, update_gap
from adafrugal.govern.outlook import Outlook

STEP = Cost(flops=1000, tokens=100, seconds=2.0)
SETTINGS: dict[str, Setting] = {
    "density": 0.25,
    "update_gap": 200,
    "micro_sequences": 2,
    "sequences": 8,
    "eval_every_steps": 50,
}


def outlook(
    *,
    settings: dict[str, Setting] | None = None,
    costs: dict[str, Cost] | None = None,
    measured: dict[str, float] | None = None,
    budget: Budget | None = None,
    config: LeverConfig | None = None,
    most_micro_sequences: int | None = None,
    price: float | None = None,
) -> Outlook:
    """Half of a run of 1,000 steps and 2,000 seconds; a thousandth of the budget buys 1e-3 nats at its end."""
    return Outlook(
        snapshot=Snapshot(
            clock=Clock(step=500, progress=0.5),
            settings=SETTINGS if settings is None else settings,
            spent=Cost(flops=500_000, tokens=50_000, seconds=1000.0),
            costs={"step": STEP, **(costs or {})},
            measured=measured or {},
        ),
        budget=budget or Budget(seconds=2000.0),
        config=config or LeverConfig(),
        end_rate=1e-6,
        horizon=1_000_000.0,
        promise_nats=0.5,
        loss_change=-1e-4,
        price=price,
        currency="flops",
        confirmations=3,
        first_density=0.25,
        most_micro_sequences=most_micro_sequences,
    )


def test_a_saving_is_worth_the_share_of_the_limit_that_binds() -> None:
    now = outlook()
    assert now.worth(Cost(seconds=2.0)) == pytest.approx(1e-3)  # a thousandth of 2,000 s, of 1e6 units at 1e-6
    assert now.worth(Cost(flops=1000)) == 0.0
    by_flops = outlook(budget=Budget(flops=1e6, seconds=1e9))
    assert by_flops.worth(Cost(flops=1000)) == pytest.approx(1e-3)
    assert by_flops.worth(Cost(seconds=2.0)) == pytest.approx(0.0)
    assert outlook(price=1e-5).worth(Cost(flops=1000)) == pytest.approx(1e-2)
    assert now.remaining_steps == 500.0


# --- micro-batches and density: bytes ---------------------------------------------------------------------------

BYTES = {"peak_bytes": 600.0, "bytes_per_sequence": 50.0, "bytes_per_density": 1000.0}


def limited(bytes_: int, **more: float) -> LeverConfig:
    return LeverConfig(memory_bytes=bytes_, reserve_fraction=0.0, **more)


def test_free_bytes_take_the_largest_micro_batch_that_divides_the_batch() -> None:
    found = micro_batch(outlook(measured=BYTES, config=limited(800, density_end=0.25)))
    assert found is not None
    assert found.settings == {"micro_sequences": 4}  # 8 would need 300 bytes
    # Four pieces become two. Each has a fixed part of a tenth of its 0.5 seconds; over 500 steps that is 50 seconds.
    assert found.saves.seconds == pytest.approx(500 * 0.05 * 2)
    assert found.value_nats == pytest.approx(50 / 2000)
    assert found.harm_nats == 0.0
    assert found.is_free


def test_a_measured_fixed_part_takes_the_place_of_the_assumed_one() -> None:
    found = micro_batch(outlook(measured={**BYTES, "piece_seconds": 0.2}, config=limited(1000)))
    assert found is not None
    assert found.settings == {"micro_sequences": 8}
    assert found.saves.seconds == pytest.approx(500 * 0.2 * 3)


def test_a_falling_density_pays_for_bytes_that_are_lacking() -> None:
    """100 bytes more are needed and 20 free: 80 are four falls of .025, harm .064 * .1 * .5."""
    found = micro_batch(outlook(measured=BYTES, config=limited(620)))
    assert found is not None
    assert found.settings["micro_sequences"] == 4
    assert found.settings["density"] == pytest.approx(0.15)
    assert found.harm_nats == pytest.approx(0.064 * 0.1 * 0.5)
    assert found.value_nats == pytest.approx(0.025 - found.harm_nats)
    assert not found.is_free


def test_a_peak_over_the_limit_demands_bytes_back_whatever_they_are_worth() -> None:
    measured = {**BYTES, "peak_bytes": 640.0}
    made = proposals(outlook(measured=measured, config=limited(600)))
    assert [one.lever for one in made if one.required] == ["density", "micro_batch"]
    lower = made[0].settings["density"]
    assert isinstance(lower, float)
    assert (0.25 - lower) * 1000 >= 40.0
    smaller = micro_batch(outlook(measured=measured, config=limited(600)))
    assert smaller is not None
    assert smaller.settings == {"micro_sequences": 1}
    assert smaller.harm_nats == pytest.approx(500 * 0.05 * 4 / 2000)


def test_a_size_that_overflowed_is_not_tried_again() -> None:
    roomy = limited(10_000)
    found = micro_batch(outlook(measured=BYTES, config=roomy, most_micro_sequences=7))
    assert found is not None
    assert found.settings == {"micro_sequences": 4}
    assert micro_batch(outlook(measured=BYTES, config=roomy, most_micro_sequences=2)) is None


def test_without_a_limit_or_a_measurement_bytes_move_nothing() -> None:
    assert micro_batch(outlook(measured=BYTES)) is None
    assert micro_batch(outlook(config=limited(800))) is None
    assert micro_batch(outlook(settings={}, measured=BYTES, config=limited(800))) is None
    assert micro_batch(outlook(measured=BYTES, config=limited(610, density_end=0.24))) is None  # a fall frees 10 bytes


def test_density_weighs_seconds_against_harm() -> None:
    found = density(outlook(measured={"update_seconds_per_density": 1.0}))
    assert found is not None
    assert found.settings == {"density": pytest.approx(0.225)}
    assert found.saves.seconds == pytest.approx(500 * 0.025)
    assert found.value_nats == pytest.approx(12.5 / 2000 - 0.064 * 0.025 * 0.5)
    worthless = density(outlook(budget=Budget(flops=1e6), measured={"update_seconds_per_density": 1.0}))
    assert worthless is not None
    assert worthless.value_nats < 0  # a run that FLOPs limit has no use for seconds
    assert density(outlook(settings={**SETTINGS, "density": 0.05})) is None


# --- refreshes, batch, evaluations ------------------------------------------------------------------------------


def test_a_longer_gap_saves_refreshes_once_the_loss_has_settled() -> None:
    refresh = {"refresh": Cost(seconds=30.0)}
    found = update_gap(outlook(costs=refresh))
    assert found is not None
    assert found.settings == {"update_gap": 300}
    assert found.saves.seconds == pytest.approx(30.0 * 500 * (1 / 200 - 1 / 300))
    assert update_gap(outlook(costs=refresh, config=LeverConfig(gap_tolerance=1e-5))) is None
    assert update_gap(outlook(costs=refresh, settings={**SETTINGS, "update_gap": 1000})) is None
    assert update_gap(outlook()) is None


def test_a_larger_batch_weighs_updates_saved_against_tokens_that_teach_less() -> None:
    given = {"costs": {"update": Cost(seconds=1.0)}, "config": LeverConfig(sequences_max=16)}
    found = batch(outlook(measured={"noise_tokens": 900.0}, **given))
    assert found is not None
    assert found.settings == {"sequences": 16}
    assert found.harm_nats == pytest.approx(0.5 * 0.1)  # x = 100 / 900, x / (1 + x) = 0.1 of what is promised
    assert found.value_nats == pytest.approx(250 / 2000 - 0.05)
    assert found.disturbs
    quiet = batch(outlook(measured={"noise_tokens": 100.0}, **given))
    assert quiet is not None
    assert quiet.value_nats < 0
    assert batch(outlook(measured={"noise_tokens": 900.0}, costs={"update": Cost(seconds=1.0)})) is None


def test_evaluations_are_spread_out_where_they_cost_more_than_a_late_decision() -> None:
    dear = eval_interval(outlook(costs={"evaluation": Cost(seconds=100.0)}))
    assert dear is not None
    assert dear.settings == {"eval_every_steps": 100}
    assert dear.saves.seconds == pytest.approx(100.0 * 500 / 100)
    assert dear.harm_nats == pytest.approx(3 * 50 * 2.0 / 2000)
    assert dear.value_nats > 0
    cheap = eval_interval(outlook(costs={"evaluation": Cost(seconds=1.0)}))
    assert cheap is not None
    assert cheap.value_nats < 0


def test_the_best_comes_first_and_only_named_levers_speak() -> None:
    costs = {"evaluation": Cost(seconds=100.0), "refresh": Cost(seconds=300.0)}
    made = proposals(outlook(costs=costs))
    assert [one.lever for one in made] == ["update_gap", "eval_interval", "density"]
    assert [one.value_nats for one in made] == sorted((one.value_nats for one in made), reverse=True)
    assert [one.lever for one in proposals(outlook(costs=costs, config=LeverConfig(names=("density",))))] == ["density"]
