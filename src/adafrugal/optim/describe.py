"""Who is split, stateful and stateless, and why: a table of every parameter of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from adafrugal.optim.groups import Group
from adafrugal.optim.placing import Placement, States


@dataclass(frozen=True, kw_only=True)
class DescribedParameter:
    """One parameter's row.

    Args:
        name: Canonical name, or (group, index) where none is known.
        shape: The tensor's shape.
        role: ``split``, ``stateful`` or ``stateless``.
        subspace: The subspace of its group.
        stateful_elements: How many of its elements have moments now.
        state_bytes: Bytes of its moments, index vectors and buffers now.
        why: The rule that decided its role.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    subspace: str
    stateful_elements: int
    state_bytes: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Description:
    """All rows, and what is to be said once. ``str()`` gives a table.

    Args:
        rows: One for each parameter, in the order of the groups.
        notes: Sentences: frozen parameters that were skipped, names that are not known.
    """

    rows: tuple[DescribedParameter, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        head = ("parameter", "shape", "role", "subspace", "stateful", "why")
        table = [head] + [
            (row.name, "x".join(map(str, row.shape)) or "scalar", row.role, row.subspace, _share(row), row.why)
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
        ]
        return "\n".join([*lines, *self.notes])


def _share(row: DescribedParameter) -> str:
    numel = math.prod(row.shape)
    return f"{row.stateful_elements / numel:.1%}" if numel else "-"


def describe(groups: Sequence[Group], states: States, placement: Placement) -> Description:
    """See `SplitOptimizer.describe`."""
    rows: list[DescribedParameter] = []
    notes: list[str] = []
    for group in groups:
        for param, name, why in zip(group["params"], group["param_names"], group["reasons"], strict=True):
            place = placement.places[param]
            state = states.get(param, {})
            width = state.get("width", 0)
            rows.append(
                DescribedParameter(
                    name=name,
                    shape=tuple(param.shape),
                    role=group["role"],
                    subspace=group["subspace"],
                    stateful_elements=math.prod(place.subspace.state_shape(place.item.geometry, width)),
                    state_bytes=sum(value.nbytes for value in state.values() if isinstance(value, Tensor)),
                    why=why,
                )
            )
    if groups and groups[0]["num_frozen"]:
        notes.append(f"{groups[0]['num_frozen']} frozen parameters are not optimized.")
    if any(not group["named"] for group in groups):
        notes.append(
            "Names are not known: tensors were sorted by shape, and frames are keyed by group and index. "
            "Build the optimizer from the model, or from named_parameters(), to have both."
        )
    return Description(rows=tuple(rows), notes=tuple(notes))
