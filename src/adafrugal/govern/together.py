"""Several policies as one: each decides for itself, and what they write is put together.

So the paper's policy is a density that falls, a gap that grows and a learning rate, and takes the governor's place in a
run without any other change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adafrugal.core.errors import ConfigError
from adafrugal.core.protocols import Policy, PolicyMemory
from adafrugal.core.values import Budget, Decision, Setting, Snapshot


@dataclass(frozen=True, kw_only=True)
class Together:
    """A policy made of others, by name.

    Args:
        policies: Each keeps its own memory under its name. No two may write one setting.

    Example:
        >>> from adafrugal.core.values import Clock
        >>> from adafrugal.optim.schedules import DensityDecay, LearningRate
        >>> paper = Together(policies={"density": DensityDecay(start=0.25, end=0.05), "lr": LearningRate(warmup=0.0)})
        >>> now = Snapshot(clock=Clock(step=5, progress=0.5), settings={"density": 0.25})
        >>> dict(paper.decide(now, None, {})[0].settings)
        {'density': 0.15, 'lr_factor': 0.55}
    """

    policies: Mapping[str, Policy]

    def decide(self, snapshot: Snapshot, budget: Budget | None, memory: PolicyMemory) -> tuple[Decision, PolicyMemory]:
        """Ask each in turn; one that stops the run stops it for all.

        Args:
            snapshot: All see the same.
            budget: All see the same.
            memory: Of each, under its name.

        Returns:
            The settings of all, each number under ``name/number``.

        Raises:
            ConfigError: If two write one setting.
        """
        settings: dict[str, Setting] = {}
        numbers: dict[str, Setting] = {}
        alternatives: list[Mapping[str, Setting]] = []
        reasons: list[str] = []
        after: dict[str, Any] = {}
        stopped = False
        for name, policy in self.policies.items():
            decision, after[name] = policy.decide(snapshot, budget, memory.get(name, {}))
            twice = sorted(settings.keys() & decision.settings.keys())
            if twice:
                raise ConfigError(
                    f"Together(policies={{{name!r}: ...}})",
                    f"a second writer of {', '.join(twice)}",
                    "one writer of each setting",
                    "Leave one of the two policies out.",
                )
            settings.update(decision.settings)
            numbers.update({f"{name}/{key}": value for key, value in decision.numbers.items()})
            alternatives.extend(decision.alternatives)
            reasons.extend([decision.reason] if decision.reason else [])
            stopped = stopped or decision.action == "stop"
        return Decision(
            action="stop" if stopped else "reallocate" if settings else "continue",
            settings=settings,
            reason="; ".join(reasons),
            numbers=numbers,
            alternatives=tuple(alternatives),
        ), after
