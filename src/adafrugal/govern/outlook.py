"""What a lever sees, and what it proposes: savings and harms of one move, made comparable in nats of final loss.

A saving is worth what it buys where the budget ends: the saved share of the limit that binds, times the budget, times
the marginal gain there; under a price it is worth at least that. So seconds are worth nothing to a run that FLOPs
limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from adafrugal.core.values import Budget, Cost, Setting, Snapshot
from adafrugal.govern.config import Currency, LeverConfig


def in_currency(cost: Cost, currency: Currency) -> float:
    """A cost as one number.

    Example:
        >>> in_currency(Cost(flops=6, tokens=1), "tokens")
        1.0
    """
    return float({"flops": cost.flops, "tokens": cost.tokens, "seconds": cost.seconds}[currency])


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One move of one lever.

    Args:
        lever: Its name.
        settings: What it would write.
        saves: What it saves over the rest of the run.
        costs: What the move itself spends.
        harm_nats: What it is expected to add to the final loss.
        value_nats: What it is worth in all: savings, less costs, less harm.
        required: Whether a hard limit demands it, whatever it is worth.
        disturbs: Whether losses before and after cannot be compared.
        reason: One sentence.
    """

    lever: str
    settings: Mapping[str, Setting]
    saves: Cost = field(default_factory=Cost)
    costs: Cost = field(default_factory=Cost)
    harm_nats: float = 0.0
    value_nats: float = 0.0
    required: bool = False
    disturbs: bool = False
    reason: str = ""

    @property
    def is_free(self) -> bool:
        """Whether it harms and costs nothing, and saves something, be it in a currency that does not bind."""
        return self.harm_nats <= 0.0 and self.costs == Cost() and (self.saves.seconds > 0 or self.saves.flops > 0)

    def record(self) -> dict[str, Setting]:
        """Plain numbers, for the list of what was weighed."""
        written = {f"set_{name}": value for name, value in self.settings.items()}
        return {
            "lever": self.lever,
            "value_nats": self.value_nats,
            "harm_nats": self.harm_nats,
            "saves_flops": self.saves.flops,
            "saves_seconds": self.saves.seconds,
            "required": self.required,
            **written,
        }


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The run as a lever sees it.

    Args:
        snapshot: Where it stands.
        budget: What it may spend.
        config: How far levers go.
        end_rate: The marginal gain where the budget ends, in nats per unit of the currency; at least 0.
        horizon: Units of the currency that will be spent then.
        promise_nats: Loss that the rest of the budget removes.
        loss_change: Relative change of the loss from one evaluation to the next, by the line.
        price: Nats per unit, or None.
        currency: The unit.
        confirmations: Evaluations that a decision takes.
        first_density: The density at the beginning.
        most_micro_sequences: Micro-batches above it were too large, or None.
    """

    snapshot: Snapshot
    budget: Budget
    config: LeverConfig
    end_rate: float
    horizon: float
    promise_nats: float
    loss_change: float
    price: float | None
    currency: Currency
    confirmations: int
    first_density: float | None
    most_micro_sequences: int | None

    def number(self, name: str) -> float | None:
        """A setting in force, or None where this run has none of that name."""
        value = self.snapshot.settings.get(name)
        return None if value is None or isinstance(value, str | bool) else float(value)

    @property
    def remaining_steps(self) -> float:
        """Steps that the rest of the budget holds, at their present cost."""
        clock = self.snapshot.clock
        return clock.step * (1.0 - clock.progress) / clock.progress if clock.progress > 0 else 0.0

    def worth(self, saves: Cost) -> float:
        """What a saving buys, in nats."""
        name = self.budget.binding(steps=self.snapshot.clock.step, cost=self.snapshot.spent)
        share = self.budget.shares(steps=0, cost=saves).get(name, 0.0)
        bought = share * self.horizon * self.end_rate
        return bought if self.price is None else max(bought, in_currency(saves, self.currency) * self.price)

    def propose(
        self,
        lever: str,
        settings: Mapping[str, Setting],
        reason: str,
        *,
        saves: Cost,
        harm_nats: float = 0.0,
        required: bool = False,
        disturbs: bool = False,
    ) -> Proposal:
        """Make a proposal with its worth worked out."""
        return Proposal(
            lever=lever,
            settings=settings,
            saves=saves,
            harm_nats=harm_nats,
            value_nats=self.worth(saves) - harm_nats,
            required=required,
            disturbs=disturbs,
            reason=reason,
        )
