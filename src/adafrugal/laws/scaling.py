"""Scaling laws: loss from parameters and tokens, the best split of FLOPs, and what the next nat costs.

All take compute as C = 6 * N * D FLOPs, with N parameters and D tokens. Losses are in nats per token, of the text and
tokenizer of each paper: differences between two points carry over to other texts better than levels do. `LAWS` has all
laws by name; ``"besiroglu"`` is the default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from adafrugal.core.catalog import Catalog
from adafrugal.laws.allocation import (
    LEAST_PUBLISHED_FLOPS,
    PF_DAY_FLOPS,
    UNKNOWN_RANGE,
    Allocation,
    FittedRange,
    Marginals,
    check_positive,
    within_limits,
)
from adafrugal.laws.chinchilla import ChinchillaLaw
from adafrugal.laws.repetition import RepeatedDataLaw

__all__ = [
    "DEFAULT_LAW",
    "LAWS",
    "Allocation",
    "ChinchillaLaw",
    "FittedRange",
    "KaplanLaw",
    "Marginals",
    "RepeatedDataLaw",
    "ScalingLaw",
]

DEFAULT_LAW = "besiroglu"


@dataclass(frozen=True, kw_only=True)
class KaplanLaw:
    """L(N, D) = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D; N excludes embeddings.

    Args:
        size_exponent: alpha_N, exponent of the parameters.
        size_scale: N_c, scale of the parameters.
        token_exponent: alpha_D, exponent of the tokens.
        token_scale: D_c, scale of the tokens.
        optimum_scale: Parameters of the best model at one petaflop-day.
        optimum_exponent: Its growth with compute.
        source: Where the constants come from.
        fitted_range: What the runs behind them spanned.

    Source:
        Kaplan et al. (arXiv 2001.08361), equations 1.1, 1.2 and 1.5, and table 6 for the best model.

    Deviations:
        The best model is the published power law, not the minimum of L(N, D), which grows as C^0.56 only: L(N, D) was
        fitted to runs stopped early, the split to training curves. Tokens are what C = 6ND leaves.
    """

    size_exponent: float
    size_scale: float
    token_exponent: float
    token_scale: float
    optimum_scale: float = 1.3e9
    optimum_exponent: float = 0.73
    source: str = "Kaplan et al., arXiv 2001.08361"
    fitted_range: FittedRange = UNKNOWN_RANGE

    def loss(self, num_parameters: float, tokens: float) -> float:
        """Loss in nats per token. With infinite tokens it is L(N), with infinite parameters L(D)."""
        check_positive("KaplanLaw.loss", num_parameters=num_parameters, tokens=tokens)
        size = (self.size_scale / num_parameters) ** (self.size_exponent / self.token_exponent)
        return (size + self.token_scale / tokens) ** self.token_exponent

    def optimum(
        self, flops: float, *, max_parameters: float | None = None, max_tokens: float | None = None
    ) -> Allocation:
        """The published split, N* = optimum_scale * (C / petaflop-day)^optimum_exponent, within limits.

        Args:
            flops: C, without embeddings.
            max_parameters: The largest model that fits, or None.
            max_tokens: Tokens that there are, or None.

        Returns:
            The split. It spends C exactly, unless both limits bind: then it is both limits.
        """
        check_positive("KaplanLaw.optimum", flops=flops, max_parameters=max_parameters, max_tokens=max_tokens)
        best = self.optimum_scale * (flops / PF_DAY_FLOPS) ** self.optimum_exponent
        return within_limits(flops, best, max_parameters, max_tokens)

    def marginals(self, num_parameters: float, tokens: float) -> Marginals:
        """Derivatives of the loss at one point, and along the published splits at its compute."""
        check_positive("KaplanLaw.marginals", num_parameters=num_parameters, tokens=tokens)
        flops = Allocation(num_parameters, tokens).flops
        per_parameter, per_token = self._slopes(num_parameters, tokens)
        best = self.optimum(flops)
        along_size, along_tokens = self._slopes(*best)
        growth = self.optimum_exponent
        return Marginals(
            per_parameter=per_parameter,
            per_token=per_token,
            per_log_flops=along_size * best.num_parameters * growth + along_tokens * best.tokens * (1 - growth),
            flops=flops,
        )

    def _slopes(self, num_parameters: float, tokens: float) -> tuple[float, float]:
        size = (self.size_scale / num_parameters) ** (self.size_exponent / self.token_exponent)
        outer = (size + self.token_scale / tokens) ** (self.token_exponent - 1)
        return (
            -self.size_exponent * outer * size / num_parameters,
            -self.token_exponent * outer * self.token_scale / tokens**2,
        )

    def caveats(
        self, *, num_parameters: float | None = None, tokens: float | None = None, flops: float | None = None
    ) -> tuple[str, ...]:
        """What to know before trusting the law at a point, as plain sentences; never none."""
        note = (
            "N excludes embeddings, and the split favours models that are too large: it leaves out the head's FLOPs, "
            "warms up long and tunes no optimizer for small models (arXiv 2406.19146)."
        )
        return (
            note,
            *self.fitted_range.caveats(num_parameters, tokens, flops),
        )


ScalingLaw = ChinchillaLaw | KaplanLaw | RepeatedDataLaw
LAWS: Catalog[ScalingLaw] = Catalog("scaling law")

_HOFFMANN = "Hoffmann et al., arXiv 2203.15556, approach 3"
_HOFFMANN_RANGE = FittedRange(num_parameters=(7e7, 1.6e10), tokens=(5e9, 5e11), flops=(LEAST_PUBLISHED_FLOPS, math.inf))
_KAPLAN_RANGE = FittedRange(num_parameters=(768, 1.5e9), tokens=(2.2e7, 2.3e10))
_MUENNIGHOFF = "Muennighoff et al., arXiv 2305.16264, appendix A"
_MUENNIGHOFF_RANGE = FittedRange(num_parameters=(7e6, 9e9), tokens=(1e8, 9e11), flops=(LEAST_PUBLISHED_FLOPS, math.inf))
_BESIROGLU_RANGE = FittedRange(num_parameters=(5.7e7, 1.6e10), tokens=(2.5e8, 3.2e11), flops=(1.4e18, 1.3e22))

LAWS.add(
    "besiroglu",
    lambda: ChinchillaLaw(
        E=1.8172,
        A=482.01,
        B=2085.43,
        alpha=0.3478,
        beta=0.3658,
        source="Besiroglu et al., arXiv 2404.10102: the runs of Hoffmann et al., without five, fitted anew",
        fitted_range=_BESIROGLU_RANGE,
    ),
)
LAWS.add(
    "chinchilla",
    lambda: ChinchillaLaw(
        E=math.exp(0.5267),
        A=math.exp(6.0073),
        B=math.exp(6.0179),
        alpha=0.3392,
        beta=0.2849,
        source=_HOFFMANN + ", unrounded",
        fitted_range=_HOFFMANN_RANGE,
    ),
)
LAWS.add(
    "chinchilla-rounded",
    lambda: ChinchillaLaw(
        E=1.69,
        A=406.4,
        B=410.7,
        alpha=0.34,
        beta=0.28,
        source=_HOFFMANN + ", as printed",
        fitted_range=_HOFFMANN_RANGE,
    ),
)
LAWS.add(
    "kaplan",
    lambda: KaplanLaw(
        size_exponent=0.076,
        size_scale=8.8e13,
        token_exponent=0.095,
        token_scale=5.4e13,
        source="Kaplan et al., arXiv 2001.08361, equations 1.1 and 1.2",
        fitted_range=_KAPLAN_RANGE,
    ),
)
LAWS.add(
    "kaplan-joint",
    lambda: KaplanLaw(
        size_exponent=0.076,
        size_scale=6.4e13,
        token_exponent=0.103,
        token_scale=1.8e13,
        source="Kaplan et al., arXiv 2001.08361, table 2: all four constants fitted together",
        fitted_range=_KAPLAN_RANGE,
    ),
)
LAWS.add(
    "muennighoff",
    lambda: RepeatedDataLaw(
        fresh=ChinchillaLaw(
            E=math.exp(0.6254804),
            A=math.exp(6.255414),
            B=math.exp(7.3049974),
            alpha=0.3526596,
            beta=0.3526596,
            source=_MUENNIGHOFF,
            fitted_range=_MUENNIGHOFF_RANGE,
        ),
        token_decay=15.387756,
        parameter_decay=5.309743,
        source=_MUENNIGHOFF,
        fitted_range=_MUENNIGHOFF_RANGE,
    ),
)
