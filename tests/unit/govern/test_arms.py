"""Arms: the next piece goes where it buys most, and the rates of the others are a governor's shadow price."""

import pytest

from adafrugal.core.errors import ConfigError
from adafrugal.govern.arms import Arm, Choice, next_arm
from adafrugal.govern.config import GovernorConfig
from adafrugal.govern.forecast import make_forecast
from adafrugal.govern.thresholds import judge
from adafrugal.laws.powerlaw import SaturatingCurve

STEEP = SaturatingCurve(floor=2.0, scale=1.0, exponent=0.4)
SHALLOW = SaturatingCurve(floor=1.5, scale=0.5, exponent=0.2)


def trained(curve: SaturatingCurve[float], upto: int) -> Arm:
    places = [index / 20 for index in range(1, upto + 1)]
    return Arm(compute=places, losses=[curve.loss(place) for place in places])


def test_the_arm_with_the_highest_true_rate_is_next() -> None:
    choice = next_arm({"steep": trained(STEEP, 20), "shallow": trained(SHALLOW, 20)})
    assert choice.arm == "steep"
    assert choice.rates["steep"] == pytest.approx(0.4, rel=1e-4)  # g k at C = 1, from curves without noise
    assert choice.rates["shallow"] == pytest.approx(0.1, rel=1e-4)
    later = next_arm({"steep": trained(STEEP, 80), "shallow": trained(SHALLOW, 20)})
    assert later.arm == "shallow"  # 0.4 * 4^-1.4 is 0.057


def test_whoever_is_too_young_to_judge_goes_first() -> None:
    arms = {"steep": trained(STEEP, 20), "a": trained(SHALLOW, 8), "b": trained(SHALLOW, 5)}
    assert next_arm(arms) == Choice(arm="b", rates={})
    with pytest.raises(ConfigError, match=r"next_arm\(arms\): received no arm"):
        next_arm({})


def test_the_rate_elsewhere_ends_the_arm_that_buys_less() -> None:
    arms = {"steep": trained(STEEP, 40), "shallow": trained(SHALLOW, 60)}
    choice = next_arm(arms)
    verdicts = {}
    for name, arm in arms.items():
        forecast = make_forecast(
            arm.compute, arm.losses, horizon=10.0, window=10, confidence=0.9, span=1e9, num_draws=50
        )
        assert forecast is not None
        verdicts[name] = judge(forecast, GovernorConfig(threshold="shadow"), choice.elsewhere(name)).below
    assert verdicts == {"steep": False, "shallow": True}
    with pytest.raises(ConfigError, match="the rate of another arm"):
        Choice(arm="a", rates={"a": 1.0}).elsewhere("a")
