"""Fit a scaling law to a ladder of your own runs, and say how well they determine it.

L(N, D) = E + A / N^alpha + B / D^beta. Given alpha and beta the law is linear in E, A and B, so two numbers are
searched and the other three solved, none of them below 0. Parabolas through runs of equal compute are not used: they
are biased.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adafrugal.core.errors import ConfigError
from adafrugal.laws.allocation import FLOPS_PER_PARAMETER_AND_TOKEN, FittedRange
from adafrugal.laws.bootstrap import Interval, check_settings, fit_and_refit, interval, numbers
from adafrugal.laws.chinchilla import ChinchillaLaw
from adafrugal.laws.projection import Points, Powers, refine, search

_FEWEST_RUNS = 9  # five constants, and four degrees of freedom for the noise
_FEWEST_SIZES = 3  # a floor, a scale and an exponent in each direction
_HUBER = 1.345  # standard deviations; the usual choice, 95 % as efficient as squares on normal noise
_MAD_TO_DEVIATION = 1.4826  # of normal noise
_VANISHED = 1e-9  # of the loss: a term of a bootstrap law that is 0 is written so, and its optimum stays a number


@dataclass(frozen=True, kw_only=True)
class ChinchillaFit:
    """A law fitted to runs, with its bootstrap.

    Args:
        law: The fit; its ``fitted_range`` is what the runs spanned.
        draws: The same fit to resampled losses.
        confidence: Of the intervals.
        noise_fraction: Standard deviation of the noise as a fraction of the loss.
        num_runs: Runs in the fit.
        excluded: Positions of the runs that were left out, from 0.
        exponent_bounds: What was searched.
    """

    law: ChinchillaLaw
    draws: tuple[ChinchillaLaw, ...]
    confidence: float
    noise_fraction: float
    num_runs: int
    excluded: tuple[int, ...]
    exponent_bounds: tuple[float, float]

    def interval(self, statistic: Callable[[ChinchillaLaw], float]) -> Interval:
        """The interval of anything that a law says, such as ``lambda law: law.optimum(1e18).num_parameters``."""
        values = torch.tensor([statistic(law) for law in self.draws], dtype=torch.float64)
        return interval(values, self.confidence, self.num_runs - 5)

    def caveats(
        self, *, num_parameters: float | None = None, tokens: float | None = None, flops: float | None = None
    ) -> tuple[str, ...]:
        """What to know before trusting the fit at a point, as plain sentences; none if there is nothing."""
        notes: list[str] = []
        low, high = self.exponent_bounds
        for name, exponent in (("alpha", self.law.alpha), ("beta", self.law.beta)):
            if not low * 1.001 < exponent < high * 0.999:
                notes.append(f"{name} is at the bound of its search, {exponent:g}: the runs do not determine it.")
        for name, scale in (("A", self.law.A), ("B", self.law.B), ("E", self.law.E)):
            if scale == 0:
                notes.append(f"{name} is 0: the runs show no such term.")
        if self.excluded:
            notes.append(f"Left out as outliers: runs {', '.join(map(str, self.excluded))}, counted from 0.")
        return (*notes, *self.law.caveats(num_parameters=num_parameters, tokens=tokens, flops=flops))


def fit_chinchilla(
    num_parameters: Sequence[float] | Tensor,
    tokens: Sequence[float] | Tensor,
    loss: Sequence[float] | Tensor,
    *,
    outlier_threshold: float | None = 5.0,
    exponent_bounds: tuple[float, float] = (0.02, 2.0),
    num_draws: int = 400,
    confidence: float = 0.9,
    seed: int = 0,
    name: str = "chinchilla",
) -> ChinchillaFit:
    """Fit L(N, D) = E + A / N^alpha + B / D^beta to runs, with bootstrap draws.

    Least squares on (loss - fitted) / fitted, with E, A and B at least 0.

    **Exclusion rule**: a first fit limits the pull of far points (Huber's loss). A run whose relative residual from it
    is more than ``outlier_threshold`` robust standard deviations (1.4826 times the median of absolute residuals,
    without the five smallest) is left out, once, and named in the result. A handful matters: five of 245 decide beta in
    the data of Chinchilla.

    Args:
        num_parameters: N of each run, embeddings included, of at least three different values.
        tokens: D of each run, of at least three different values, not in one ratio to N.
        loss: Final validation loss of each run on one fixed set, learning rate annealed.
        outlier_threshold: See above; None keeps every run.
        exponent_bounds: Lowest and highest exponent.
        num_draws: Bootstrap draws, at least 50.
        confidence: Of the intervals.
        seed: Of the draws.
        name: Of the draws.

    Returns:
        The law, its draws and what was left out.

    Raises:
        ConfigError: If runs are too few, unequal in number or not positive, N and D do not vary apart, or a setting is
            out of range.

    Cost:
        Some 50 milliseconds on one core for 40 runs and 400 draws.

    Source:
        Variable projection as in arXiv 2603.22339; the need for exclusion from Besiroglu et al. (arXiv 2404.10102).

    Deviations:
        Squares, not Huber's loss with a width of 0.001, which is nearly absolute errors; residuals are resampled, not
        runs.

    Example:
        >>> law = ChinchillaLaw(E=1.8, A=480, B=2000, alpha=0.35, beta=0.37)
        >>> runs = [(n, n * ratio) for n in (1e6, 3e6, 1e7, 3e7) for ratio in (5, 20, 80)]
        >>> losses = [law.loss(*run) + 0.002 * (-1) ** number for number, run in enumerate(runs)]
        >>> fit = fit_chinchilla([n for n, _ in runs], [d for _, d in runs], losses)
        >>> 0.35 in fit.interval(lambda law: law.alpha)
        True
    """
    sizes = numbers("fit_chinchilla(num_parameters=...)", num_parameters)
    texts = numbers("fit_chinchilla(tokens=...)", tokens)
    losses = numbers("fit_chinchilla(loss=...)", loss)
    if not len(sizes) == len(texts) == len(losses):
        raise ConfigError(
            "fit_chinchilla(num_parameters, tokens, loss)",
            f"{len(sizes)}, {len(texts)} and {len(losses)} values",
            "one of each for every run",
            "Give three lists of one length.",
        )
    low, high = exponent_bounds
    if not 0 < low < high:
        raise ConfigError(
            "fit_chinchilla(exponent_bounds=...)", exponent_bounds, "two rising numbers above 0", "Write (0.02, 2.0)."
        )
    if outlier_threshold is not None and not outlier_threshold >= 3:
        raise ConfigError(
            "fit_chinchilla(outlier_threshold=...)",
            outlier_threshold,
            "a number of standard deviations from 3, or None",
            "Write 5: closer runs are noise, not outliers.",
        )
    check_settings("fit_chinchilla", num_draws, confidence, 1, max(len(losses), 2))
    logs = torch.stack([sizes, texts], dim=1).log()
    _check_ladder(logs)
    kept = torch.arange(len(losses))
    if outlier_threshold is not None:
        kept = kept[_within(logs - logs.mean(0), losses, exponent_bounds, outlier_threshold)]
        _check_ladder(logs[kept])
    centre = logs[kept].mean(0)
    found = fit_and_refit(
        logs[kept] - centre,
        losses[kept],
        bounds=exponent_bounds,
        num_draws=num_draws,
        block_length=1,
        seed=seed,
        name=name,
    )
    spans = [
        (float(x[kept].min()), float(x[kept].max()))
        for x in (sizes, texts, FLOPS_PER_PARAMETER_AND_TOKEN * sizes * texts)
    ]
    fitted_range = FittedRange(num_parameters=spans[0], tokens=spans[1], flops=spans[2])
    (law,) = _laws(found.best, centre, fitted_range, least=0)
    left = {int(run) for run in kept}
    return ChinchillaFit(
        law=law,
        draws=_laws(found.draws, centre, fitted_range, least=_VANISHED * float(losses.mean())),
        confidence=confidence,
        noise_fraction=found.noise_fraction,
        num_runs=len(kept),
        excluded=tuple(run for run in range(len(losses)) if run not in left),
        exponent_bounds=exponent_bounds,
    )


def _laws(fits: Powers, centre: Tensor, fitted_range: FittedRange, *, least: float) -> tuple[ChinchillaLaw, ...]:
    """One law per curve, in parameters and tokens instead of their ratios to the centre."""
    scales = fits.coefficients[:, 1:].clamp(min=least) * torch.exp(fits.exponents * centre)
    table = torch.cat([fits.coefficients[:, :1], scales, fits.exponents], dim=1)
    return tuple(
        ChinchillaLaw(E=floor, A=size, B=text, alpha=alpha, beta=beta, fitted_range=fitted_range)
        for floor, size, text, alpha, beta in (map(float, row) for row in table)
    )


def _check_ladder(logs: Tensor) -> None:
    """Refuse runs that cannot determine five constants."""
    distinct = [len({float(x) for x in column}) for column in logs.T]
    centred = logs - logs.mean(0)
    size, both, text = (float((centred[:, a] * centred[:, b]).sum()) for a, b in ((0, 0), (0, 1), (1, 1)))
    apart = size * text - both**2 > 1e-6 * size * text
    if len(logs) < _FEWEST_RUNS or min(distinct) < _FEWEST_SIZES or not apart:
        raise ConfigError(
            "fit_chinchilla(num_parameters, tokens, loss)",
            f"{len(logs)} runs of {distinct[0]} sizes and {distinct[1]} numbers of tokens"
            + ("" if apart else ", in one line"),
            f"at least {_FEWEST_RUNS} runs, {_FEWEST_SIZES} sizes and {_FEWEST_SIZES} numbers of tokens, varied apart",
            "Train each of three sizes for 5, 20 and 80 tokens per parameter.",
        )


def _within(log_inputs: Tensor, loss: Tensor, bounds: tuple[float, float], threshold: float) -> Tensor:
    """Which runs lie near a fit that far points cannot pull: squares reweighted to Huber's loss."""
    points = Points(log_inputs=log_inputs, weights=1 / loss, bounds=bounds)
    fit = search(points, loss)
    deviation, residuals = torch.zeros((), dtype=loss.dtype), loss
    for _ in range(8):
        residuals = ((loss - fit.values(points)[0]) / loss).abs()
        # Five constants pass close to five runs: the median of the others is what measures noise.
        deviation = _MAD_TO_DEVIATION * residuals.sort().values[5:].median()
        softened = (_HUBER * deviation / residuals.clamp(min=1e-300)).clamp(max=1)
        points = Points(log_inputs=log_inputs, weights=softened.clamp(min=1e-12).sqrt() / loss, bounds=bounds)
        fit = refine(points, loss.unsqueeze(0), fit.exponents, tolerance=1e-6)
    return residuals <= threshold * deviation + 1e-9
