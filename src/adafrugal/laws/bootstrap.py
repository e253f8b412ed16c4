"""Intervals from resampled residuals: fit again to the fitted curve plus shuffled noise, and see what moves.

The inputs of a fit (sizes, tokens, FLOPs) were chosen, and only the noise is random. So residuals are resampled and the
inputs stay. Each residual is first divided by sqrt(1 - leverage): a fit pulls itself towards its own points, and this
gives them back the spread that the noise had.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, cast

import torch
from torch import Tensor

from adafrugal.core.errors import ConfigError
from adafrugal.core.rng import named_generator
from adafrugal.laws.projection import Points, Powers, refine, search

_DRAW_TOLERANCE = 0.02  # of the exponent's standard error: what remains moves no end of an interval by a hundredth
_DRAW_ROUNDS = 6  # draws that are slower lie beyond an interval's ends, at a bound


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A range that covers the true value in a stated share of repetitions.

    Args:
        low: Its lower end.
        high: Its upper end.
        confidence: That share, such as 0.9.

    Example:
        >>> 2.0 in Interval(low=1.5, high=2.5, confidence=0.9)
        True
    """

    low: float
    high: float
    confidence: float

    def __contains__(self, value: float) -> bool:
        """Whether a value lies inside, ends included."""
        return self.low <= value <= self.high

    @property
    def width(self) -> float:
        """From end to end."""
        return self.high - self.low


def numbers(call: str, values: Sequence[float] | Tensor) -> Tensor:
    """Turn measurements into a float64 vector of positive, finite numbers.

    Raises:
        ConfigError: If there is another number among them.
    """
    vector = torch.as_tensor(values, dtype=torch.float64).detach().cpu().flatten()
    wrong = vector[~(torch.isfinite(vector) & (vector > 0))]
    if len(wrong):
        raise ConfigError(call, float(wrong[0]), "finite numbers above 0", "Leave these points out of the fit.")
    return vector


def check_settings(call: str, num_draws: int, confidence: float, block_length: int, num_points: int) -> None:
    """Refuse settings that give no interval.

    Raises:
        ConfigError: Naming the setting.
    """
    if num_draws < 50:
        raise ConfigError(
            f"{call}(num_draws=...)", num_draws, "a whole number from 50", "Try 200; 90 % intervals rest on the tails."
        )
    if not 0 < confidence < 1:
        raise ConfigError(f"{call}(confidence=...)", confidence, "a share between 0 and 1", "Write 0.9 for 90 %.")
    if not 1 <= block_length <= num_points // 2:
        raise ConfigError(
            f"{call}(block_length=...)",
            block_length,
            f"a whole number from 1 to {num_points // 2}, half of the points",
            "Write 1 for independent noise.",
        )


@dataclass(frozen=True, kw_only=True)
class Refits:
    """A fit and its bootstrap.

    Args:
        best: The fit, one curve.
        draws: The same fit to resampled losses, one curve per draw.
        noise_fraction: Standard deviation of the noise as a fraction of the loss.
        degrees_of_freedom: Points minus parameters.
    """

    best: Powers
    draws: Powers
    noise_fraction: float
    degrees_of_freedom: int


def fit_and_refit(
    log_inputs: Tensor,
    loss: Tensor,
    *,
    bounds: tuple[float, float],
    num_draws: int,
    block_length: int,
    seed: int,
    name: str,
) -> Refits:
    """Fit floor + sum of powers by least squares on relative residuals, then fit resampled losses.

    A relative residual, (loss - fitted) / fitted, is the residual of the logarithm up to its square. The first fit
    divides by the observed loss, the second one by the first's, so that noise does not choose its own weight.

    Args:
        log_inputs: (points, powers) natural logarithms, each column with mean 0.
        loss: (points,).
        bounds: Lowest and highest exponent.
        num_draws: Resampled fits.
        block_length: See `resampled`.
        seed: See `resampled`.
        name: See `resampled`.

    Returns:
        The fit and its draws.
    """
    points = Points(log_inputs=log_inputs, weights=1 / loss, bounds=bounds)
    rough = search(points, loss)
    points = Points(log_inputs=log_inputs, weights=1 / rough.values(points)[0], bounds=bounds)
    best = refine(points, loss.unsqueeze(0), rough.exponents)
    fitted = best.values(points)[0]
    jacobian = best.jacobian(points)
    degrees_of_freedom = len(loss) - jacobian.shape[1]
    residuals = (loss - fitted) * points.weights
    variance = float(residuals.square().sum()) / degrees_of_freedom
    pool = noise(residuals, jacobian)
    shuffled = resampled(pool, num_draws, block_length=block_length, seed=seed, name=name)
    draws = refine(
        points,
        fitted + shuffled / points.weights,
        best.exponents.expand(num_draws, -1),
        tolerance=_DRAW_TOLERANCE * _smallest_error(jacobian, variance),
        max_rounds=_DRAW_ROUNDS,
    )
    return Refits(best=best, draws=draws, noise_fraction=math.sqrt(variance), degrees_of_freedom=degrees_of_freedom)


def _smallest_error(jacobian: Tensor, variance: float) -> float:
    """The least standard error among the exponents, were all else known: enough to set a tolerance."""
    slopes = jacobian[:, (jacobian.shape[1] + 1) // 2 :].square().sum(0)
    steepest = float(slopes.max()) ** 0.5
    return math.sqrt(variance) / steepest if variance > 0 and steepest > 0 else 1e-6


def noise(residuals: Tensor, jacobian: Tensor) -> Tensor:
    """Give residuals the spread of the noise: divide by sqrt(1 - leverage), then take the mean off.

    Args:
        residuals: (points,) weighted residuals of a fit.
        jacobian: (points, parameters) weighted derivatives; columns of 0 are parameters held at a bound.

    Returns:
        (points,) the noise. A point that decides a parameter alone has leverage 1; its residual stays as it is.
    """
    sizes = jacobian.square().sum(0)
    directions: Tensor = cast("Any", torch.linalg.qr((jacobian / sizes.sqrt())[:, sizes > 0])).Q
    leverage = directions.square().sum(1)
    spread = residuals / (1 - leverage).clamp(min=0).sqrt()
    spread = torch.where(leverage < 1 - 1e-6, spread, residuals)
    return spread - spread.mean()


def resampled(pool: Tensor, num_draws: int, *, block_length: int, seed: int, name: str) -> Tensor:
    """Draw noise with replacement, in blocks of neighbours that wrap around the end.

    Args:
        pool: (points,) what is drawn from, in the order of measurement.
        num_draws: Rows of the result.
        block_length: Neighbours that stay together, so that noise which lasts over several points keeps doing so.
        seed: Of the run.
        name: Which fit this is; fits of one name draw the same indices.

    Returns:
        (num_draws, points).
    """
    length = len(pool)
    generator = named_generator(seed, "bootstrap", name)
    blocks = math.ceil(length / block_length)
    first = torch.randint(length, (num_draws, blocks, 1), generator=generator)
    return pool[((first + torch.arange(block_length)) % length).flatten(1)[:, :length]]


def interval(draws: Tensor, confidence: float, degrees_of_freedom: int) -> Interval:
    """The percentile interval, widened as Student's t is wider than the normal.

    Args:
        draws: (draws,) a statistic, once per bootstrap fit.
        confidence: Share of repetitions in which the interval shall cover the true value.
        degrees_of_freedom: Points minus fitted parameters.

    Source:
        Hesterberg (arXiv 1411.5279), section 5.2: the expanded percentile interval.
    """
    tail = NormalDist().cdf(-_student_quantile((1 + confidence) / 2, degrees_of_freedom))
    # Of n draws in order, number k is the quantile k / (n + 1): the truth is one more draw among them.
    position = max((tail * (len(draws) + 1) - 1) / (len(draws) - 1), 0.0)
    ends = torch.quantile(draws, torch.tensor([position, 1 - position], dtype=draws.dtype))
    return Interval(low=float(ends[0]), high=float(ends[1]), confidence=confidence)


def _student_quantile(share: float, degrees_of_freedom: int) -> float:
    """Student's t by its expansion around the normal; right to 0.5 % from three degrees of freedom at 95 %.

    Source:
        Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z, nu = NormalDist().inv_cdf(share), degrees_of_freedom
    terms = (
        z,
        (z**3 + z) / (4 * nu),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * nu**3),
    )
    return sum(terms)
