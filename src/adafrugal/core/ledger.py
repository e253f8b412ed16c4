"""One account of what a run spent, by activity; it survives restarts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from adafrugal.core.values import Cost

LedgerState = dict[str, dict[str, Any]]


class Ledger:
    """Adds up costs by activity: ``"training"``, ``"evaluation"``, ``"checkpoint"`` and whatever else is billed.

    Nothing a run does is free: what is not training is billed under a name of its own, and the total is what
    a budget is compared with.

    Example:
        >>> ledger = Ledger()
        >>> ledger.bill("training", Cost(flops=6, tokens=1))
        >>> ledger.bill("evaluation", Cost(flops=2))
        >>> ledger.total().flops, ledger.total().tokens
        (8, 1)
    """

    def __init__(self) -> None:
        self._accounts: dict[str, Cost] = {}

    def bill(self, activity: str, cost: Cost) -> None:
        """Add a cost to the account of an activity, opening the account if need be."""
        self._accounts[activity] = self.account(activity) + cost

    def account(self, activity: str) -> Cost:
        """What one activity cost so far; nothing if it was never billed."""
        return self._accounts.get(activity, Cost())

    def activities(self) -> tuple[str, ...]:
        """The activities billed so far, in order of their first bill."""
        return tuple(self._accounts)

    def total(self) -> Cost:
        """The sum over all activities."""
        total = Cost()
        for cost in self._accounts.values():
            total = total + cost
        return total

    def state_dict(self) -> LedgerState:
        """All accounts as plain numbers, for a checkpoint."""
        return {name: asdict(cost) for name, cost in self._accounts.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace all accounts by those of a checkpoint."""
        self._accounts = {name: Cost(**account) for name, account in state.items()}
