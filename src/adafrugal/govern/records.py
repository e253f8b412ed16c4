"""Every decision as one JSON line, with all that it was made from; replay makes the decisions again from the lines.

A line holds the snapshot as well as the decision. So the log alone, with the policy and the budget of the run, gives
the decisions anew: who doubts one can recompute it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, cast

from adafrugal.core.protocols import Policy, PolicyMemory
from adafrugal.core.values import Budget, Clock, Cost, Decision, Snapshot

_SAME = 1e-6  # relative, of numbers: another machine adds in another order. Actions and settings must be equal.


def to_record(snapshot: Snapshot, decision: Decision) -> dict[str, Any]:
    """One line of the log, as plain data that JSON keeps exactly.

    Args:
        snapshot: What the policy saw.
        decision: What it decided.

    Returns:
        ``step``, ``snapshot`` and ``decision``. Numbers that are not finite become words, which JSON has no other
        form for, and which come back as numbers.

    Example:
        >>> seen = Snapshot(clock=Clock(step=3, progress=0.5), val_loss=math.inf)
        >>> record = to_record(seen, Decision(action="stop"))
        >>> record["step"], record["snapshot"]["val_loss"], read_snapshot(record) == seen
        (3, 'inf', True)
    """
    return {
        "step": snapshot.clock.step,
        "snapshot": _plain(asdict(snapshot)),
        "decision": _plain(asdict(decision)),
    }


def read_snapshot(record: Mapping[str, Any]) -> Snapshot:
    """The snapshot of a line that `to_record` made."""
    plain: dict[str, Any] = dict(record["snapshot"])
    loss = plain["val_loss"]
    plain["val_loss"] = None if loss is None else float(loss)
    plain["clock"] = Clock(**plain["clock"])
    plain["spent"] = Cost(**plain["spent"])
    plain["costs"] = {name: Cost(**cost) for name, cost in plain["costs"].items()}
    plain["measured"] = {name: float(value) for name, value in plain["measured"].items()}
    return Snapshot(**plain)


def replay(records: Iterable[Mapping[str, Any]], policy: Policy, budget: Budget | None) -> list[Decision]:
    """Decide again, line by line, from an empty memory.

    Args:
        records: Lines that `to_record` made, in their order, from the beginning of a run.
        policy: Of the run, with the same configuration.
        budget: Of the run.

    Returns:
        One decision per line.
    """
    memory: PolicyMemory = {}
    decisions: list[Decision] = []
    for record in records:
        decision, memory = policy.decide(read_snapshot(record), budget, memory)
        decisions.append(decision)
    return decisions


def differences(records: Iterable[Mapping[str, Any]], policy: Policy, budget: Budget | None) -> list[str]:
    """Where a replay decides otherwise than the log says.

    Args:
        records: As for `replay`.
        policy: As for `replay`.
        budget: As for `replay`.

    Returns:
        One sentence per difference; none where the log is true. Actions and settings are compared exactly, other
        numbers to a millionth, and the words of reasons not at all, since they repeat the numbers.
    """
    lines = list(records)
    found: list[str] = []
    for record, decision in zip(lines, replay(lines, policy, budget), strict=True):
        logged, made = record["decision"], _plain(asdict(decision))
        for name in ("action", "settings", "numbers", "alternatives"):
            exact = name in ("action", "settings")
            if not _same(logged[name], made[name], 0.0 if exact else _SAME):
                found.append(f"step {record['step']}: {name} was {logged[name]}, and is {made[name]} in the replay")
    return found


def _same(left: object, right: object, tolerance: float) -> bool:
    """Whether two pieces of plain data are equal, numbers up to a relative tolerance."""
    if isinstance(left, dict) and isinstance(right, dict):
        mine, other = cast("dict[str, object]", left), cast("dict[str, object]", right)
        return mine.keys() == other.keys() and all(_same(mine[key], other[key], tolerance) for key in mine)
    if isinstance(left, list) and isinstance(right, list):
        ours, theirs = cast("list[object]", left), cast("list[object]", right)
        return len(ours) == len(theirs) and all(_same(*pair, tolerance) for pair in zip(ours, theirs, strict=True))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance * 1e-6)
    return left.__class__ is right.__class__ and left == right


def _plain(value: object) -> Any:
    """Dictionaries, lists, numbers and words; a number that is not finite as its word."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("Iterable[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
