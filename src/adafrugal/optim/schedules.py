"""Policies that move numbers as training goes on: density, update gap, learning rate. All are pure.

Each is a function of values alone; what it remembers is plain data that the caller keeps and passes in again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from adafrugal.core.errors import ConfigError
from adafrugal.core.protocols import PolicyMemory
from adafrugal.core.values import Budget, Decision, Snapshot

OnRise = Literal["keep", "restart"]


def round_half_up(value: float) -> int:
    """Round to the nearest whole number, halves upward.

    Example:
        >>> round_half_up(2.5), round_half_up(0.49)
        (3, 0)
    """
    return math.floor(value + 0.5)


@dataclass(frozen=True, kw_only=True)
class ConstantPolicy:
    """Changes nothing: passing it switches governing off."""

    def decide(self, snapshot: Snapshot, budget: Budget | None, memory: PolicyMemory) -> tuple[Decision, PolicyMemory]:
        """Continue."""
        return Decision(), memory


@dataclass(frozen=True, kw_only=True)
class DensityDecay:
    """Density falls from start to end in equal falls: rho_start - (rho_start - rho_end) * level / num_levels.

    round(num_levels * progress) falls have been taken at a progress, so the last sixteenth of a run (for 8) trains at
    the end density. A fall is never taken back.

    Args:
        start: Density at progress 0.
        end: Density at progress 1.
        num_levels: How many falls; they bound how often shapes change, and so recompilation.

    Source:
        AdaFRUGAL (arXiv 2601.11568), dynamic rho.

    Deviations:
        Levels are ours; the paper's density falls at every refresh.

    Example:
        >>> [DensityDecay(start=0.25, end=0.05).density(level) for level in (0, 4, 8)]
        [0.25, 0.15, 0.05]
    """

    start: float
    end: float
    num_levels: int = 8

    def level(self, progress: float) -> int:
        """How many falls have been taken at a progress in [0, 1]."""
        return min(self.num_levels, round_half_up(self.num_levels * progress))

    def density(self, level: int) -> float:
        """The density after so many falls."""
        if level >= self.num_levels:
            return self.end
        return self.start - (self.start - self.end) * level / self.num_levels

    def decide(self, snapshot: Snapshot, budget: Budget | None, memory: PolicyMemory) -> tuple[Decision, PolicyMemory]:
        """Fall to the level that the progress asks for; the memory holds ``level``."""
        level = max(int(memory.get("level", 0)), self.level(snapshot.clock.progress))
        density = self.density(level)
        if density == snapshot.settings.get("density"):
            return Decision(), {"level": level}
        numbers = {"level": level, "progress": snapshot.clock.progress}
        reason = f"density falls to level {level} of {self.num_levels}"
        return Decision(action="reallocate", settings={"density": density}, reason=reason, numbers=numbers), {
            "level": level
        }


@dataclass(frozen=True, kw_only=True)
class PlateauGap:
    """The gap between refreshes grows when the validation loss has settled.

    The newest loss is compared with the one ``window`` observations ago. A relative change below the tolerance means
    that the run has settled: gap <- min(maximum, round_half_up(gap * growth)). A rise of the tolerance or more is
    instability, not a plateau.

    Args:
        start: The gap at the beginning, in steps.
        maximum: The gap never exceeds it, in steps.
        growth: Factor of each growth, above 1.
        tolerance: Relative change per observation; whoever observes n times as often divides it by about n.
        window: How many observations lie between the two losses.
        on_rise: What a rise does: nothing, or ``"restart"`` from the starting gap.

    Source:
        AdaFRUGAL (arXiv 2601.11568), dynamic T.

    Deviations:
        A rising loss counts as flat in the paper's absolute value; here it does not.
    """

    start: int
    maximum: int
    growth: float
    tolerance: float
    window: int = 1
    on_rise: OnRise = "keep"

    def decide(self, snapshot: Snapshot, budget: Budget | None, memory: PolicyMemory) -> tuple[Decision, PolicyMemory]:
        """Judge the newest loss; the memory holds the last ``losses``, oldest first."""
        loss = snapshot.val_loss
        if loss is None or not math.isfinite(loss):
            return Decision(), memory
        losses: list[float] = list(memory.get("losses", ()))
        new_memory: dict[str, Any] = {"losses": [*losses, float(loss)][-self.window :]}
        if len(losses) < self.window or losses[0] == 0.0:
            return Decision(), new_memory
        then = losses[0]
        change = (then - loss) / abs(then)
        gap = int(snapshot.settings["update_gap"] or self.start)
        numbers = {"loss": float(loss), "loss_then": then, "change": change, "gap_before": gap}
        grown = min(self.maximum, round_half_up(gap * self.growth))
        if abs(change) < self.tolerance and grown > gap:
            reason = f"the loss changed by {change:.3%}, under {self.tolerance:.3%}: the gap grows"
            settings = {"update_gap": grown}
        elif change <= -self.tolerance and self.on_rise == "restart" and gap != self.start:
            reason = f"the loss rose by {-change:.3%}: the gap starts again"
            settings = {"update_gap": self.start}
        else:
            return Decision(numbers=numbers), new_memory
        return Decision(action="reallocate", settings=settings, reason=reason, numbers=numbers), new_memory


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """A factor of the peak learning rate, from the share of the budget spent: warm up, hold or cosine, anneal.

    Args:
        warmup: Share of the budget over which the factor climbs linearly to 1.
        shape: ``"cosine"`` falls to ``floor`` over all that follows; ``"hold"`` stays at 1 until the anneal.
        anneal: Under ``"hold"``, the share at the end over which the factor falls linearly to ``floor``.
        floor: The factor at the end.

    Example:
        >>> rate = LearningRate(warmup=0.1, shape="hold", anneal=0.2, floor=0.0)
        >>> [round(rate.factor(p), 3) for p in (0.05, 0.5, 0.9, 1.0)]
        [0.5, 1.0, 0.5, 0.0]
    """

    warmup: float = 0.05
    shape: Literal["cosine", "hold"] = "cosine"
    anneal: float = 0.2
    floor: float = 0.1

    def __post_init__(self) -> None:
        for name in ("warmup", "anneal", "floor"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"schedule.{name}={value}", value, "a share in [0, 1]", "Try 0.1.")
        if self.warmup + (self.anneal if self.shape == "hold" else 0.0) > 1.0:
            raise ConfigError(
                f"schedule.warmup={self.warmup}, schedule.anneal={self.anneal}",
                self.warmup + self.anneal,
                "shares whose sum is at most 1",
                "Shorten the warm-up or the anneal.",
            )

    def factor(self, progress: float) -> float:
        """The factor at a progress in [0, 1]."""
        if progress < self.warmup:
            return progress / self.warmup
        if self.shape == "cosine":
            share = (progress - self.warmup) / max(1.0 - self.warmup, 1e-12)
            return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))
        left = 1.0 - progress
        if left >= self.anneal:
            return 1.0
        return self.floor + (1.0 - self.floor) * left / self.anneal

    def decide(self, snapshot: Snapshot, budget: Budget | None, memory: PolicyMemory) -> tuple[Decision, PolicyMemory]:
        """Write ``lr_factor``."""
        return Decision(action="reallocate", settings={"lr_factor": self.factor(snapshot.clock.progress)}), memory
