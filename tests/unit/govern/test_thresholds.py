"""Thresholds: the closed form of the price, a stall against a promise, and no verdict out of noise."""

import math
from dataclasses import replace

import pytest
import torch

from adafrugal.core.errors import ConfigError
from adafrugal.core.rng import named_generator
from adafrugal.govern.config import GovernorConfig, LeverConfig
from adafrugal.govern.forecast import Forecast, make_forecast
from adafrugal.govern.thresholds import judge
from adafrugal.laws.powerlaw import SaturatingCurve

TRUE = SaturatingCurve(floor=2.0, scale=0.5, exponent=0.3)


def seen(upto: float, noise: float = 0.0, flat_from: float = math.inf, horizon: float = 2.0, seed: int = 0) -> Forecast:
    places = [index / 40 for index in range(1, int(40 * upto) + 1)]
    draws = torch.randn(len(places), generator=named_generator(seed, "thresholds"), dtype=torch.float64).tolist()
    values = [TRUE.loss(min(c, flat_from)) + noise * draw for c, draw in zip(places, draws, strict=True)]
    found = make_forecast(places, values, horizon=horizon, window=10, confidence=0.9, span=1e9, num_draws=50)
    assert found is not None
    return found


def test_without_noise_the_price_is_crossed_at_the_closed_form() -> None:
    price = 0.12
    best = TRUE.compute_at_price(price)
    assert 0.9 < best < 1.3
    config = GovernorConfig(threshold="price", price=price)
    before, after = seen(best - 0.03), seen(best + 0.03)  # evaluations are 0.025 apart
    assert not judge(before, config).below
    assert judge(after, config).below
    assert judge(after, config).basis == "curve"
    assert judge(seen(0.5), config).above
    assert not judge(before, config).above  # within the tenth of hysteresis


def test_the_shadow_price_is_what_another_use_offers() -> None:
    config = GovernorConfig(threshold="shadow")
    forecast = seen(1.0)
    assert judge(forecast, config, elsewhere_rate=0.2).below
    assert not judge(forecast, config, elsewhere_rate=0.1).below
    with pytest.raises(ConfigError, match="no elsewhere_rate; allowed is the rate that another use"):
        judge(forecast, config)


def test_a_healthy_curve_is_never_below_its_own_promise() -> None:
    for upto in (0.5, 1.0, 1.9):
        verdict = judge(seen(upto), GovernorConfig())
        assert not verdict.below
        assert verdict.threshold == pytest.approx(
            GovernorConfig().phi * TRUE.gain(upto, 2.0) / (2.0 - upto), rel=0.02
        )  # the earlier curve is exact; the last place is rounded down to an evaluation


def test_a_stall_is_below_the_promise_and_below_a_price_that_the_curve_still_clears() -> None:
    stalled = seen(1.0, noise=0.001, flat_from=0.75)
    assert judge(stalled, GovernorConfig()).below
    config = GovernorConfig(threshold="price", price=0.02)
    verdict = judge(stalled, config)
    assert verdict.below
    assert verdict.basis == "line"
    assert "stalled" in verdict.reason
    assert not judge(seen(1.0, noise=0.001), config).below


def test_noise_alone_is_no_stall() -> None:
    """One window in twenty is under any threshold by chance; a line that could not tell has no say."""
    alarms = 0
    for seed in range(60):
        forecast = seen(1.0, noise=0.1, seed=seed)
        alarms += judge(forecast, replace(GovernorConfig(), smallest_gain_nats=0.0)).below
    assert alarms == 0


def test_a_gain_too_small_to_see_is_below() -> None:
    config = GovernorConfig(smallest_gain_nats=0.05)
    verdict = judge(seen(1.0, horizon=1.1), config)  # the rest removes 0.014 nats
    assert verdict.below
    assert verdict.threshold == pytest.approx(0.5, rel=1e-9)  # 0.05 nats over 0.1 units
    assert not judge(seen(1.0, horizon=3.0), config).below


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"threshold": "prize"}, "Did you mean 'price'"),
        ({"threshold": "price"}, "nats per unit of flops, above 0"),
        ({"price": 1e-15}, "nothing, unless the threshold is price"),
        ({"phi": 0.0}, r"a share in \(0, 1\]"),
        ({"window": 3}, "a whole number from 4"),
        ({"confidence": 0.5}, r"a share in \(0.5, 1\)"),
        ({"anneal_fraction": 1.0}, "a share"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        GovernorConfig(**settings)


def test_levers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'density'"):
        LeverConfig(names=("densty",))
    with pytest.raises(ConfigError, match=r"governor.levers.gap_growth=1.0: .*a factor above 1"):
        LeverConfig(gap_growth=1.0)
