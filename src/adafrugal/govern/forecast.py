"""What more training buys, from the validation losses of one phase: a curve for all of them, a line for the last ones.

The curve, L(C) = floor + scale * C^(-exponent), uses every point and says little wrong while the run behaves. The line,
L against ln C over the last evaluations, uses few points and believes nothing: it sees a plateau that the curve would
smooth away. The curve of the points **before** the line says what had been promised; the line says what was delivered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from adafrugal.core.errors import ConfigError
from adafrugal.laws.bootstrap import Interval, _student_quantile
from adafrugal.laws.powerlaw import SaturatingCurve, SaturatingFit, fit_saturating
from adafrugal.laws.projection import Points, refine, search

_FEWEST_FOR_CURVE = 6  # what `fit_saturating` needs
_MOST_POINTS = 64  # in one fit: more are averaged with their neighbours, which keeps a fit in milliseconds
_EXPONENTS = (0.02, 1.5)  # a loss that falls faster than C^-1.5 is a transient, not a learning curve
_TELLING = 4.0  # a slope of four standard errors: half of it is then told from all of it at 95 %


@dataclass(frozen=True, kw_only=True)
class Line:
    """Least squares of loss on ln(compute) over a few neighbouring evaluations.

    Args:
        log_slope: dL / d ln C in nats per e-fold; negative while the loss falls.
        error: Its standard error, from the residuals of the line itself.
        num_points: Evaluations in it.
        compute: Where the rates are read: at its last point.

    Example:
        >>> line = fit_line([1.0, math.e, math.e**2, math.e**3], [3.0, 2.8, 2.6, 2.4])
        >>> round(line.log_slope, 6), round(line.error, 6), round(line.rate, 6) == round(0.2 / math.e**3, 6)
        (-0.2, 0.0, True)
    """

    log_slope: float
    error: float
    num_points: int
    compute: float

    @property
    def rate(self) -> float:
        """The marginal gain, -dL/dC, in nats per unit of compute."""
        return -self.log_slope / self.compute

    def interval(self, confidence: float) -> Interval:
        """The interval of the marginal gain, by Student's t.

        Args:
            confidence: Two-sided, such as 0.9 for bounds of 95 % each.
        """
        half = _student_quantile((1 + confidence) / 2, self.num_points - 2) * self.error / self.compute
        return Interval(low=self.rate - half, high=self.rate + half, confidence=confidence)


def fit_line(compute: Sequence[float], losses: Sequence[float]) -> Line:
    """Fit a line to loss against ln(compute).

    Args:
        compute: At least four rising values above 0.
        losses: The loss at each, in nats.

    Returns:
        The line; its error assumes that noise is independent from one evaluation to the next.

    Raises:
        ConfigError: For fewer than four points.
    """
    if len(compute) < 4 or len(compute) != len(losses):
        raise ConfigError(
            "fit_line(compute, losses)",
            f"{len(compute)} and {len(losses)} values",
            "one loss for each of at least four values of compute",
            "Wait for more evaluations.",
        )
    logs = [math.log(value) for value in compute]
    middle, level = sum(logs) / len(logs), sum(losses) / len(losses)
    spread = sum((x - middle) ** 2 for x in logs)
    slope = sum((x - middle) * (y - level) for x, y in zip(logs, losses, strict=True)) / spread
    residual = sum((y - level - slope * (x - middle)) ** 2 for x, y in zip(logs, losses, strict=True))
    error = math.sqrt(residual / (len(logs) - 2) / spread)
    return Line(log_slope=slope, error=error, num_points=len(logs), compute=compute[-1])


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is known of the rest of a run.

    Args:
        compute: Spent so far.
        horizon: Spent when the budget is spent; above ``compute``, or equal to it at the end.
        fit: The curve of all points, with its bootstrap.
        line: The last evaluations.
        earlier: The curve of the points before the line, or None where they are too few.
    """

    compute: float
    horizon: float
    fit: SaturatingFit
    line: Line
    earlier: SaturatingCurve[float] | None

    def rate(self) -> float:
        """The marginal gain now, by the curve of all points, in nats per unit of compute."""
        return -self.fit.curve.slope(self.compute)

    def rate_interval(self) -> Interval:
        """The interval of `rate`."""
        return self.fit.interval(lambda curve: -curve.slope(self.compute))

    def end_rate(self) -> float:
        """The marginal gain where the budget ends: what a saved unit of compute would buy there."""
        return -self.fit.curve.slope(self.horizon)

    def final_loss(self) -> float:
        """The loss when the budget is spent, at the learning rate of this phase; an anneal takes it lower."""
        return self.fit.curve.loss(self.horizon)

    def final_band(self) -> Interval:
        """The interval of `final_loss`."""
        return self.fit.band(self.horizon)

    def promise(self) -> float:
        """The loss that the rest of the budget removes, in nats."""
        return self.fit.curve.gain(self.compute, self.horizon)

    def promise_interval(self) -> Interval:
        """The interval of `promise`."""
        return self.fit.interval(lambda curve: curve.gain(self.compute, self.horizon))


def thinned(
    compute: Sequence[float], losses: Sequence[float], most: int = _MOST_POINTS
) -> tuple[list[float], list[float]]:
    """Average neighbours, the same number in each, until no more than ``most`` points are left.

    Args:
        compute: Rising, above 0.
        losses: One for each.
        most: Points in the answer, at most.

    Returns:
        Geometric means of compute and means of losses. The oldest points that fill no whole average are left out.

    Example:
        >>> thinned([1.0, 2.0, 4.0, 8.0, 16.0], [9.0, 3.0, 2.0, 2.0, 1.0], most=3)[1]
        [2.5, 1.5]
    """
    size = math.ceil(len(compute) / most)
    if size <= 1:
        return list(compute), list(losses)
    starts = range(len(compute) % size, len(compute), size)
    logs = [sum(math.log(value) for value in compute[i : i + size]) / size for i in starts]
    return [math.exp(mean) for mean in logs], [sum(losses[i : i + size]) / size for i in starts]


def make_forecast(
    compute: Sequence[float],
    losses: Sequence[float],
    *,
    horizon: float,
    window: int,
    confidence: float,
    span: float,
    num_draws: int = 100,
    seed: int = 0,
) -> Forecast | None:
    """Fit the curve, the line, and the curve before the line.

    Args:
        compute: Spent at each evaluation of one phase; rising, above 0.
        losses: The validation loss at each in nats, above 0.
        horizon: Spent when the budget is spent.
        window: Evaluations in the line. It is doubled, up to a third of all, while noise hides the slope.
        confidence: Two-sided, of all intervals.
        span: Points older than the present compute divided by this are left out: early training follows another curve.
        num_draws: Bootstrap draws of the curve.
        seed: Of the draws.

    Returns:
        The forecast, or None while there are fewer points than the window and three.

    Cost:
        Ten milliseconds on one busy core, whatever the number of points: three small fits, one of them resampled.
    """
    first = next(i for i, value in enumerate(compute) if value * span >= compute[-1])
    inside, values = compute[first:], losses[first:]
    if len(inside) < max(window, _FEWEST_FOR_CURVE) + 3:
        return None
    fit = fit_saturating(
        *thinned(inside, values),
        exponent_bounds=_EXPONENTS,
        num_draws=num_draws,
        confidence=confidence,
        seed=seed,
        name="forecast",
    )
    line, earlier = _line_and_before(inside, values, window)
    return Forecast(compute=compute[-1], horizon=max(horizon, compute[-1]), fit=fit, line=line, earlier=earlier)


def _line_and_before(
    compute: Sequence[float], losses: Sequence[float], window: int
) -> tuple[Line, SaturatingCurve[float] | None]:
    """The last points, as few as show the slope that the points before them promised, and the curve of those."""
    size = window
    while True:
        line = fit_line(compute[-size:], losses[-size:])
        earlier = fit_curve(compute[:-size], losses[:-size])
        if earlier is not None:
            residuals = [loss - earlier.loss(c) for c, loss in zip(compute[:-size], losses[:-size], strict=True)]
            line = replace(line, error=line.error * lasting(residuals))
        longer = 2 * size
        if earlier is None or _TELLING * line.error <= -earlier.log_slope(line.compute) or 3 * longer > len(compute):
            return line, earlier
        size = longer


def lasting(residuals: Sequence[float]) -> float:
    """By how much noise that lasts from one evaluation to the next makes the error of a slope larger.

    sqrt((1 + r) / (1 - r)), with r the correlation of neighbours, where that is above two standard errors; else 1. The
    few points of a line cannot show it themselves, the many before it can.

    Args:
        residuals: In the order of measurement, in nats.

    Returns:
        A factor, at least 1.

    Example:
        >>> lasting([1.0, -1.0] * 10), round(lasting([1.0] * 10 + [-1.0] * 10), 2)
        (1.0, 3.51)
    """
    size = sum(value * value for value in residuals)
    if size == 0.0:
        return 1.0
    shared = sum(one * two for one, two in itertools.pairwise(residuals)) / size
    return math.sqrt((1 + shared) / (1 - shared)) if shared > 2 / math.sqrt(len(residuals)) else 1.0


def fit_curve(compute: Sequence[float], losses: Sequence[float]) -> SaturatingCurve[float] | None:
    """Fit the curve without its bootstrap.

    Args:
        compute: Rising, above 0.
        losses: The loss at each, above 0.

    Returns:
        The curve, or None for fewer than six points.

    Cost:
        Two milliseconds on one busy core.
    """
    if len(compute) < _FEWEST_FOR_CURVE:
        return None
    few, means = thinned(compute, losses)
    logs = torch.tensor(few, dtype=torch.float64).log()
    level = torch.tensor(means, dtype=torch.float64)
    centre = float(logs.mean())
    points = Points(log_inputs=(logs - centre).unsqueeze(1), weights=1 / level, bounds=_EXPONENTS)
    found = refine(points, level.unsqueeze(0), search(points, level).exponents)
    exponent = float(found.exponents[0, 0])
    floor, share = float(found.coefficients[0, 0]), float(found.coefficients[0, 1])
    return SaturatingCurve(floor=floor, scale=share * math.exp(exponent * centre), exponent=exponent)
