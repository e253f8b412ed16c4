"""The values that travel between the layers: budgets, costs, snapshots, decisions, reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from adafrugal.core.errors import BudgetError

Setting = float | int | str | bool | None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What an action cost, in the currencies of the ledger.

    Args:
        flops: Floating-point operations, counted exactly (a multiply-add is two).
        tokens: Training tokens consumed; evaluation and padding bill none.
        seconds: Wall-clock seconds.
        peak_bytes: Highest number of bytes held at once, or 0 where it was not measured.
        written_bytes: Bytes written to disk.

    Example:
        >>> (Cost(flops=2, tokens=1) + Cost(flops=3)).flops
        5
    """

    flops: int = 0
    tokens: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    written_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        """Add currency by currency; a peak is not a sum, so of two peaks the higher one stays."""
        return Cost(
            flops=self.flops + other.flops,
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
            written_bytes=self.written_bytes + other.written_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a run may spend; whichever limit binds first ends it.

    Args:
        seconds: Wall-clock seconds of the run, evaluation and checkpoints included.
        steps: Optimizer steps.
        tokens: Training tokens.
        flops: Floating-point operations, evaluation included.

    Raises:
        BudgetError: If a limit is not a positive number.

    Example:
        >>> Budget(steps=100, tokens=1000).share(steps=10, cost=Cost(tokens=500))
        0.5
    """

    seconds: float | None = None
    steps: int | None = None
    tokens: int | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            limit = getattr(self, item.name)
            if limit is not None and not (limit > 0 and math.isfinite(limit)):
                raise BudgetError(
                    f"budget.{item.name}={limit}",
                    limit,
                    "a positive number, or nothing for no limit",
                    f"Leave budget.{item.name} out, or give it a number above zero.",
                )

    def shares(self, *, steps: int, cost: Cost) -> dict[str, float]:
        """The spent share of every limit that is set, by its name; 1 is all of it."""
        spent = {
            "seconds": cost.seconds,
            "steps": float(steps),
            "tokens": float(cost.tokens),
            "flops": float(cost.flops),
        }
        limits = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: spent[name] / limit for name, limit in limits.items() if limit is not None}

    def share(self, *, steps: int, cost: Cost) -> float:
        """The share in [0, 1] of the limit that binds first, or 0 where no limit is set."""
        return min(1.0, max(self.shares(steps=steps, cost=cost).values(), default=0.0))

    def binding(self, *, steps: int, cost: Cost) -> str:
        """The name of the limit that binds first, or ``"none"``."""
        shares = self.shares(steps=steps, cost=cost)
        return max(shares, key=lambda name: shares[name]) if shares else "none"


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Where a run stands.

    Args:
        step: Optimizer steps taken.
        progress: Share in [0, 1] of whatever budget binds.
    """

    step: int
    progress: float


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a policy may look at: a clock, the last loss, the settings in force, and what things cost and measure.

    Args:
        clock: Where the run stands.
        val_loss: The newest validation loss in nats per token, or None between evaluations.
        settings: Numbers in force, such as ``density`` and ``update_gap``.
        spent: All that was billed so far.
        costs: What one more of an action costs, by its name: ``"step"``, ``"evaluation"``, ``"refresh"``, ``"update"``.
        measured: Other measurements by name, such as ``peak_bytes``; what is not measured is not there.
        phase: What makes losses comparable: ``"warmup"``, ``"hold"``, or any name that changes with the evaluation
            set, the data or a reset of the state.
        finite: Whether all training losses since the last snapshot were finite.
        checkpoint: The newest good checkpoint, or None where there is none.
    """

    clock: Clock
    val_loss: float | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    spent: Cost = field(default_factory=Cost)
    costs: Mapping[str, Cost] = field(default_factory=dict[str, Cost])
    measured: Mapping[str, float] = field(default_factory=dict[str, float])
    phase: str = "hold"
    finite: bool = True
    checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a policy wants changed, and why, with the numbers that led to it.

    Args:
        action: ``"continue"``, ``"reallocate"`` (settings change) or ``"stop"``.
        settings: The settings to write; empty where nothing changes.
        reason: One sentence.
        numbers: What was compared with what.
        alternatives: What else was weighed and lost, each with its own numbers.
    """

    action: Literal["continue", "reallocate", "stop"] = "continue"
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    reason: str = ""
    numbers: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    alternatives: tuple[Mapping[str, Setting], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Backward:
    """What one forward and backward over a global batch gave.

    Args:
        loss: Mean loss over all targets, in nats.
        num_targets: How many targets there were.
        grad_norm: Global norm of the gradient before clipping, or None where no one saw all of it at once.
        cost: FLOPs and tokens; seconds are the caller's to bill.
    """

    loss: float
    num_targets: int
    grad_norm: float | None
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one training step did.

    Args:
        step: Its number, counted from 1.
        loss: Mean training loss in nats per target token.
        tokens: Target and context tokens in the global batch, without padding.
        lr: The learning rate of the first group.
        grad_norm: Global norm before clipping, or None where it was not computed.
        cost: What the step cost.
    """

    step: int
    loss: float
    tokens: int
    lr: float
    grad_norm: float | None
    cost: Cost
