"""One budget for several uses: give the next piece to the one whose next unit buys most, until all buy the same.

At the best division of a budget the marginal gains are equal: their common value is the shadow price of compute. Giving
each piece to the highest gain finds it without knowing it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adafrugal.core.errors import ConfigError
from adafrugal.govern.forecast import fit_curve

_FEWEST = 9  # evaluations of an arm before it is judged: three for the noise beside the six of a curve


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One use of the budget, such as a model size or a data mixture, by what is known of it.

    Args:
        compute: Spent on it at each evaluation; rising, above 0.
        losses: The loss at each in nats, above 0.
    """

    compute: Sequence[float]
    losses: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Who gets the next piece.

    Args:
        arm: Its name.
        rates: The marginal gain of each arm in nats per unit, by its curve; none while an arm is too young.
    """

    arm: str
    rates: Mapping[str, float]

    def elsewhere(self, name: str) -> float:
        """The best rate among the other arms: the ``elsewhere_rate`` of a governor under the shadow price.

        Raises:
            ConfigError: If there is no other arm with a rate.
        """
        others = [rate for other, rate in self.rates.items() if other != name]
        if not others:
            raise ConfigError(
                f"Choice.elsewhere({name!r})", f"rates of {list(self.rates)}", "the rate of another arm", "Train it."
            )
        return max(others)


def next_arm(arms: Mapping[str, Arm]) -> Choice:
    """Choose the arm with the highest marginal gain; arms that are too young to judge go first, the youngest of them.

    Args:
        arms: All uses of the budget, by name.

    Returns:
        The choice, with the rates that it rests on.

    Raises:
        ConfigError: Without an arm.

    Cost:
        Two milliseconds per arm.
    """
    if not arms:
        raise ConfigError("next_arm(arms)", "no arm", "at least one", "Name what the budget can be used for.")
    young = {name: len(arm.losses) for name, arm in arms.items() if len(arm.losses) < _FEWEST}
    if young:
        return Choice(arm=min(young, key=lambda name: young[name]), rates={})
    rates: dict[str, float] = {}
    for name, arm in arms.items():
        curve = fit_curve(arm.compute, arm.losses)
        rates[name] = -curve.slope(arm.compute[-1]) if curve is not None else 0.0
    return Choice(arm=max(rates, key=lambda name: rates[name]), rates=rates)
