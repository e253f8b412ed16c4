"""Does the next unit of compute still pay? The marginal gain against a price, another use, or what was promised.

A verdict is *below* only when the upper bound of the gain is under the threshold: doubt goes on training. Three forms:

- price: tau = lambda nats per unit. For L = floor + k C^-g the best end is C* = (g k / lambda)^(1 / (1 + g)).
- shadow: tau = the best rate that another use of the same remaining budget offers, measured outside.
- opportunity: tau = phi times the average rate that the earlier curve promised over the rest of the budget.

A falling convex curve always delivers more now than on average later. So the opportunity form never ends a healthy run:
it acts on a stall, where the line delivers less than the curve had promised before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from adafrugal.core.errors import ConfigError
from adafrugal.govern.config import GovernorConfig
from adafrugal.govern.forecast import Forecast

_TELLING = 2.0  # standard errors between promise and threshold: noise alone then crosses in 0.3 % of windows


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was compared with what.

    Args:
        below: Whether the gain is surely under the threshold.
        above: Whether it is so far above, hysteresis included, that agreement so far is forgotten.
        rate: The marginal gain in nats per unit of compute.
        low: Its lower bound.
        high: Its upper bound.
        threshold: What it was compared with, in the same unit.
        basis: ``"curve"`` of all points, or ``"line"`` of the last ones.
        reason: One sentence.
    """

    below: bool
    above: bool
    rate: float
    low: float
    high: float
    threshold: float
    basis: str
    reason: str


def judge(forecast: Forecast, config: GovernorConfig, elsewhere_rate: float | None = None) -> Verdict:
    """Compare the marginal gain with the threshold of the configuration.

    Args:
        forecast: What is known of the run.
        config: Which threshold, and how sure to be.
        elsewhere_rate: Under ``shadow``: nats per unit that another use of the budget buys.

    Returns:
        The verdict.

    Raises:
        ConfigError: Under ``shadow`` without a rate.
    """
    if config.threshold == "opportunity":
        return _opportunity(forecast, config)
    tau = config.price if config.threshold == "price" else elsewhere_rate
    if tau is None:
        raise ConfigError(
            "Snapshot(measured={...})",
            "no elsewhere_rate",
            "the rate that another use of the budget offers, under threshold='shadow'",
            "Measure it with a forecast of the other run, or choose the threshold price or opportunity.",
        )
    if _stalls(forecast, config, config.phi * _promised_now(forecast)):
        return _line_verdict(forecast, config, tau, f"{config.threshold}, and the run has stalled")
    bounds, rate = forecast.rate_interval(), forecast.rate()
    return Verdict(
        below=bounds.high < tau,
        above=bounds.high > tau * (1 + config.hysteresis),
        rate=rate,
        low=bounds.low,
        high=bounds.high,
        threshold=tau,
        basis="curve",
        reason=_compare(rate, bounds.high, tau, config.threshold),
    )


def _opportunity(forecast: Forecast, config: GovernorConfig) -> Verdict:
    """The line against the earlier promise; or all of the rest against a gain too small to see."""
    promise = forecast.promise_interval()
    left = forecast.horizon - forecast.compute
    if left > 0 and promise.high < config.smallest_gain_nats:
        tau = config.smallest_gain_nats / left
        return Verdict(
            below=True,
            above=False,
            rate=forecast.promise() / left,
            low=promise.low / left,
            high=promise.high / left,
            threshold=tau,
            basis="curve",
            reason=f"all that is left removes at most {promise.high:.2g} nats, under {config.smallest_gain_nats:.2g}",
        )
    tau = config.phi * _promised_average(forecast)
    verdict = _line_verdict(forecast, config, tau, f"{config.phi:g} of the promised average rate")
    if verdict.below and not _stalls(forecast, config, tau):
        reason = f"{verdict.reason}, but too noisy to tell from the promise"
        return replace(verdict, below=False, reason=reason)
    return verdict


def _promised_now(forecast: Forecast) -> float:
    """The rate that the earlier curve expected by now; 0 where there is no such curve."""
    return -forecast.earlier.slope(forecast.compute) if forecast.earlier is not None else 0.0


def _promised_average(forecast: Forecast) -> float:
    """The average rate that the earlier curve expected over the rest of the budget."""
    left = forecast.horizon - forecast.compute
    if forecast.earlier is None:
        return 0.0
    if left <= 0:
        return _promised_now(forecast)
    return forecast.earlier.gain(forecast.compute, forecast.horizon) / left


def _stalls(forecast: Forecast, config: GovernorConfig, tau: float) -> bool:
    """Whether the line is surely under tau, and could have told what was promised from tau.

    Among windows so noisy that they cannot, one in twenty is under any threshold by chance: they have no say.
    """
    error = forecast.line.error / forecast.compute
    telling = _TELLING * error <= _promised_now(forecast) - tau
    return tau > 0 and telling and forecast.line.interval(config.two_sided).high < tau


def _line_verdict(forecast: Forecast, config: GovernorConfig, tau: float, name: str) -> Verdict:
    bounds, rate = forecast.line.interval(config.two_sided), forecast.line.rate
    return Verdict(
        below=bounds.high < tau,
        above=bounds.high > tau * (1 + config.hysteresis),
        rate=rate,
        low=bounds.low,
        high=bounds.high,
        threshold=tau,
        basis="line",
        reason=_compare(rate, bounds.high, tau, name),
    )


def _compare(rate: float, high: float, tau: float, name: str) -> str:
    """One sentence with the numbers that were compared."""
    side = "under" if high < tau else "not surely under"
    shown = f"{high:.3g}" if math.isfinite(high) else "unknown"
    return f"the next unit removes {rate:.3g} nats, at most {shown}: {side} {tau:.3g} ({name})"
