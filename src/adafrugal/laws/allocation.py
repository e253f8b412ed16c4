"""How FLOPs are split, what a little more of them changes, and how far a law reaches: the words of all scaling laws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from adafrugal.core.errors import ConfigError

FLOPS_PER_PARAMETER_AND_TOKEN = 6  # two for forward, four for backward
PF_DAY_FLOPS = 1e15 * 86_400  # the unit of Kaplan et al.
LEAST_PUBLISHED_FLOPS = 1e17  # no run behind a published law was smaller


class Allocation(NamedTuple):
    """How FLOPs are split between parameters and tokens. Both are real numbers; round them as the model allows."""

    num_parameters: float
    tokens: float

    @property
    def flops(self) -> float:
        """6 * N * D."""
        return FLOPS_PER_PARAMETER_AND_TOKEN * self.num_parameters * self.tokens

    @property
    def tokens_per_parameter(self) -> float:
        """D / N."""
        return self.tokens / self.num_parameters


@dataclass(frozen=True, kw_only=True)
class Marginals:
    """What a little more of everything changes at one point; all at most 0.

    Args:
        per_parameter: dL/dN, in nats.
        per_token: dL/dD, in nats.
        per_log_flops: dL/d ln C along the path of best splits, at this point's compute: nats per e-fold of FLOPs.
        flops: The compute of this point.
    """

    per_parameter: float
    per_token: float
    per_log_flops: float
    flops: float

    @property
    def flops_per_nat(self) -> float:
        """FLOPs that the next nat costs, at this point's rate along best splits; infinite where nothing is gained."""
        return -self.flops / self.per_log_flops if self.per_log_flops else math.inf


@dataclass(frozen=True, kw_only=True)
class FittedRange:
    """What the runs behind a law spanned: (least, most) of each; None where it is not known."""

    num_parameters: tuple[float, float] | None = None
    tokens: tuple[float, float] | None = None
    flops: tuple[float, float] | None = None

    def caveats(self, num_parameters: float | None, tokens: float | None, flops: float | None) -> tuple[str, ...]:
        """Name what lies outside, one plain sentence each. FLOPs follow from the other two where they are not given."""
        if flops is None and num_parameters is not None and tokens is not None:
            flops = Allocation(num_parameters, tokens).flops
        spans = (("parameters", num_parameters, self.num_parameters), ("tokens", tokens, self.tokens))
        notes: list[str] = []
        for unit, value, span in (*spans, ("FLOPs", flops, self.flops)):
            if value is not None and span is not None and not span[0] <= value <= span[1]:
                spanned = f"{span[0]:.2g} to {span[1]:.2g}" if span[1] < math.inf else f"from {span[0]:.2g}"
                notes.append(
                    f"{value:.3g} {unit} is outside what the law was fitted on ({spanned}): this is an extrapolation. "
                    "Fit a ladder of your own runs."
                )
        return tuple(notes)


UNKNOWN_RANGE = FittedRange()


def check_positive(call: str, **numbers: float | None) -> None:
    """Every number that is given must be above 0; infinity is a limit, and allowed."""
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{call}({name}=...)", value, "a number above 0", "Give a count, such as 1e9.")


def within_limits(flops: float, best: float, max_parameters: float | None, max_tokens: float | None) -> Allocation:
    """Move along C = 6ND to the nearest split that is allowed; if none spends it all, take all that is allowed."""
    product = flops / FLOPS_PER_PARAMETER_AND_TOKEN
    num_parameters = min(best, math.inf if max_parameters is None else max_parameters)
    tokens = product / num_parameters
    if max_tokens is not None and tokens > max_tokens:
        tokens = max_tokens
        num_parameters = min(product / tokens, math.inf if max_parameters is None else max_parameters)
    return Allocation(num_parameters, tokens)
