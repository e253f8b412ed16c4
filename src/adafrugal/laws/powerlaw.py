"""Loss against compute as a power law that levels off, with a bootstrap band: what the next FLOP still buys.

L(C) = floor + scale * C^(-exponent). The fit looks at relative residuals, keeps floor and scale from falling below 0,
and searches one number only. It gives the same answer for the same points and seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from adafrugal.core.errors import ConfigError
from adafrugal.laws.bootstrap import Interval, check_settings, fit_and_refit, interval, numbers

V = TypeVar("V", float, Tensor)

_FEWEST_POINTS = 6  # three parameters, and three degrees of freedom for the noise


@dataclass(frozen=True, kw_only=True)
class SaturatingCurve(Generic[V]):
    """L(C) = floor + scale * C^(-exponent), as numbers, or as tensors with one entry per bootstrap draw.

    Args:
        floor: The loss that no compute removes, in the unit of the loss.
        scale: k, in the unit of the loss at one unit of compute.
        exponent: g, above 0.

    Example:
        >>> curve = SaturatingCurve(floor=2.0, scale=100.0, exponent=0.25)
        >>> curve.loss(1e8), curve.gain(1e8, 1e12)
        (3.0, 0.9)
    """

    floor: V
    scale: V
    exponent: V

    def excess(self, compute: float) -> V:
        """The part of the loss above the floor, at some compute."""
        power: Any = compute**-self.exponent
        return self.scale * power

    def loss(self, compute: float) -> V:
        """The loss at some compute."""
        return self.floor + self.excess(compute)

    def slope(self, compute: float) -> V:
        """dL/dC, in loss per unit of compute; at most 0. Its negative is the marginal gain."""
        return -self.exponent * self.excess(compute) / compute

    def log_slope(self, compute: float) -> V:
        """dL/d ln C: loss per e-fold of compute; at most 0."""
        return -self.exponent * self.excess(compute)

    def gain(self, start: float, stop: float) -> V:
        """The loss that training from ``start`` to ``stop`` removes."""
        return self.excess(start) - self.excess(stop)

    def compute_at_price(self, price: float) -> V:
        """Where the marginal gain has fallen to a price: C* = (g * k / price)^(1 / (1 + g)).

        Args:
            price: Loss that one unit of compute must remove to be worth it; above 0.
        """
        best: Any = (self.exponent * self.scale / price) ** (1 / (1 + self.exponent))
        return best


@dataclass(frozen=True, kw_only=True)
class SaturatingFit:
    """A fitted curve with its bootstrap.

    Args:
        curve: The fit.
        draws: The same fit to resampled losses; its tensors have one entry per draw.
        confidence: Of the intervals.
        noise_fraction: Standard deviation of the noise as a fraction of the loss.
        num_points: Points in the fit.
        compute_range: Least and most compute among them.
        exponent_bounds: What was searched.
    """

    curve: SaturatingCurve[float]
    draws: SaturatingCurve[Tensor]
    confidence: float
    noise_fraction: float
    num_points: int
    compute_range: tuple[float, float]
    exponent_bounds: tuple[float, float]

    def interval(self, statistic: Callable[[SaturatingCurve[Tensor]], Tensor]) -> Interval:
        """The interval of anything that a curve says.

        Args:
            statistic: From a curve of tensors to a tensor with one entry per draw.

        Example:
            >>> compute = [10.0 ** (8 + n / 4) for n in range(12)]
            >>> noisy = [2 + 100 * c**-0.25 + 0.001 * (-1) ** n for n, c in enumerate(compute)]
            >>> fit = fit_saturating(compute, noisy)
            >>> 2.0 in fit.interval(lambda curve: curve.floor)
            True
        """
        return interval(statistic(self.draws), self.confidence, self.num_points - 3)

    def band(self, compute: float) -> Interval:
        """The interval of the curve at some compute. A new measurement scatters around it by ``noise_fraction``."""
        return self.interval(lambda curve: curve.loss(compute))

    def caveats(self, compute: float | None = None) -> tuple[str, ...]:
        """What to know before trusting the fit, as plain sentences; none if there is nothing.

        Args:
            compute: Where the curve will be read, or None.
        """
        notes: list[str] = []
        low, high = self.exponent_bounds
        if self.curve.scale == 0:
            notes.append("The loss does not fall: the fit is flat, and its exponent means nothing.")
        elif not low * 1.001 < self.curve.exponent < high * 0.999:
            notes.append(
                f"The exponent is at the bound of its search, {self.curve.exponent:g}: the points do not determine it."
            )
        if compute is not None and compute > 4 * self.compute_range[1]:
            notes.append(
                f"{compute:g} is {compute / self.compute_range[1]:.1f} times the most compute in the fit; "
                "beyond four times, the form of the curve is an assumption that the band does not show."
            )
        return tuple(notes)


def fit_saturating(
    compute: Sequence[float] | Tensor,
    loss: Sequence[float] | Tensor,
    *,
    exponent_bounds: tuple[float, float] = (0.02, 3.0),
    num_draws: int = 200,
    confidence: float = 0.9,
    block_length: int = 1,
    seed: int = 0,
    name: str = "saturating",
) -> SaturatingFit:
    """Fit L(C) = floor + scale * C^(-exponent) with bootstrap draws.

    Least squares on (loss - fitted) / fitted. Floor and scale are at least 0, so a loss that rises gives a flat curve.

    Args:
        compute: At least six points, of four different values: FLOPs, tokens or steps, above 0, in any order. Blocks
            take neighbours as they are listed.
        loss: The loss at each, above 0: of validation, on one fixed set.
        exponent_bounds: Lowest and highest exponent; at the lowest the curve is as good as logarithmic.
        num_draws: Bootstrap draws, at least 50.
        confidence: Of the intervals.
        block_length: Evaluations along one run are not independent; with blocks of several, noise that lasts that long
            widens the band as it should.
        seed: Of the draws.
        name: Of the draws: fits of one name and length shuffle alike, so that their intervals can be compared.

    Returns:
        The curve and its draws.

    Raises:
        ConfigError: If points are too few, unequal in number or not positive, or a setting is out of range.

    Cost:
        Six milliseconds on one busy core for 40 points and 200 draws, a thousand small tensor operations.

    Source:
        The form is that of Kaplan et al. (arXiv 2001.08361) with a floor. The percentile interval is widened after
        Hesterberg (arXiv 1411.5279).
    """
    costs = numbers("fit_saturating(compute=...)", compute)
    losses = numbers("fit_saturating(loss=...)", loss)
    if len(costs) != len(losses):
        raise ConfigError(
            "fit_saturating(compute, loss)", f"{len(costs)} and {len(losses)} values", "one loss for each", "Pair them."
        )
    distinct = 1 + int((costs.sort().values.diff() > 0).sum())
    if len(costs) < _FEWEST_POINTS or distinct < 4:
        raise ConfigError(
            "fit_saturating(compute, loss)",
            f"{len(costs)} points at {distinct} values of compute",
            f"at least {_FEWEST_POINTS} points at 4 values",
            "Wait for more evaluations.",
        )
    low, high = exponent_bounds
    if not 0 < low < high < math.inf:
        raise ConfigError(
            "fit_saturating(exponent_bounds=...)", exponent_bounds, "two rising numbers above 0", "Write (0.02, 3.0)."
        )
    check_settings("fit_saturating", num_draws, confidence, block_length, len(costs))
    logs = costs.log()
    centre = logs.mean()
    found = fit_and_refit(
        (logs - centre).unsqueeze(1),
        losses,
        bounds=exponent_bounds,
        num_draws=num_draws,
        block_length=block_length,
        seed=seed,
        name=name,
    )
    best, draws = (
        SaturatingCurve(
            floor=fit.coefficients[:, 0],
            scale=fit.coefficients[:, 1] * torch.exp(fit.exponents[:, 0] * centre),
            exponent=fit.exponents[:, 0],
        )
        for fit in (found.best, found.draws)
    )
    return SaturatingFit(
        curve=SaturatingCurve(floor=float(best.floor), scale=float(best.scale), exponent=float(best.exponent)),
        draws=draws,
        confidence=confidence,
        noise_fraction=found.noise_fraction,
        num_points=len(costs),
        compute_range=(float(costs.min()), float(costs.max())),
        exponent_bounds=exponent_bounds,
    )
