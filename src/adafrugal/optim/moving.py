"""`move`, the one operation on state: shrink, keep, project, carry and reset are moves between two frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from adafrugal.core.protocols import State
from adafrugal.optim.frames import DIM_OF, AnyFrame, BasisFrame, LineFrame, RunFrame

OnRefresh = Literal["keep", "reset", "project", "carry"]
_MANY_RUNS = 16


def matching_runs(old: Tensor, new: Tensor) -> list[tuple[int, int, int]]:
    """Where two lists of lines hold the same lines.

    Args:
        old: Lines of the old frame, int64, shape (old width,).
        new: Lines of the new frame, int64, shape (new width,).

    Returns:
        (old position, new position, count) of each run in which both positions grow by one.

    Example:
        >>> matching_runs(torch.tensor([6, 7, 0, 1]), torch.tensor([7, 0, 1, 2]))
        [(1, 0, 3)]
    """
    old_lines = cast(list[int], old.tolist())
    new_lines = cast(list[int], new.tolist())
    where = {line: position for position, line in enumerate(old_lines)}
    runs: list[tuple[int, int, int]] = []
    for position, line in enumerate(new_lines):
        source = where.get(line)
        if source is None:
            continue
        if runs and runs[-1][0] + runs[-1][2] == source and runs[-1][1] + runs[-1][2] == position:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((source, position, 1))
    return runs


def _transfer(old: Tensor, new: Tensor, dim: int, runs: Sequence[tuple[int, int, int]]) -> Tensor:
    """Copy matching lines of ``old`` into ``new`` along ``dim``."""
    if len(runs) > _MANY_RUNS:
        source = torch.cat([torch.arange(start, start + count) for start, _, count in runs]).to(old.device)
        target = torch.cat([torch.arange(start, start + count) for _, start, count in runs]).to(old.device)
        return new.index_copy_(dim, target, old.index_select(dim, source))
    for source_start, target_start, count in runs:
        new.narrow(dim, target_start, count).copy_(old.narrow(dim, source_start, count))
    return new


def move(
    state: State,
    old: AnyFrame,
    new: AnyFrame,
    how: OnRefresh,
    powers: Mapping[str, int],
    entered: Tensor | None,
    step: int,
) -> Tensor | None:
    """Carry the moments of one tensor from one frame to the next, in place in ``state``.

    One moment at a time is held twice, never more. The old tensors are let go.

    Args:
        state: The moments by name, each of ``old.state_shape``; replaced by tensors of ``new.state_shape``.
        old: The frame that the moments belong to.
        new: The frame that they shall belong to.
        how: ``keep`` moves line to line and lets entering lines start at zero; ``reset`` starts all at zero;
            ``project`` multiplies by R = B_new^T B_old; ``carry`` copies the numbers, whatever they now stand for.
        powers: The power of the gradient that each moment averages. Under ``project`` a second moment is multiplied
            by the squares of R: exact in expectation for uncorrelated coordinates, a heuristic otherwise.
        entered: The step at which each line of ``old`` entered, int32 on the CPU, shape (old width,), or None for
            all at 0.
        step: Updates that the tensor has had so far: the entry step of a line that enters now.

    Returns:
        The entry step of each line of ``new`` after ``keep``, int32 on the CPU; None after the other three, which
        leave all lines equally old.

    Cost:
        Two reads and writes of the moments; for ``project`` one product of (width, width) with the moments.
    """
    if isinstance(old, BasisFrame) and isinstance(new, BasisFrame):
        rotation = torch.bmm(new.basis.mT, old.basis) if how == "project" else None
        for name in list(state):
            moment = state.pop(name)
            if rotation is not None:
                state[name] = _rotated(moment, old, rotation, powers[name])
            else:
                kept = min(old.width, new.width) if how == "carry" else 0
                fresh = moment.new_zeros(new.state_shape)
                state[name] = _transfer(moment, fresh, 1 if old.left else 2, [(0, 0, kept)])
        return None
    if not isinstance(old, (RunFrame, LineFrame)) or not isinstance(new, (RunFrame, LineFrame)):
        raise TypeError("moments move between two line frames or between two bases")
    dim = DIM_OF[new.axis]
    if how == "keep":
        runs = matching_runs(old.lines(), new.lines())
    else:
        runs = [(0, 0, min(old.width, new.width))] if how == "carry" else []
    for name in list(state):
        moment = state.pop(name)
        state[name] = _transfer(moment, moment.new_zeros(new.state_shape), dim, runs)
    if how != "keep":
        return None
    ages = torch.full((new.width,), step, dtype=torch.int32)
    before = entered if entered is not None else torch.zeros(old.width, dtype=torch.int32)
    return _transfer(before, ages, 0, runs)


def _rotated(moment: Tensor, old: BasisFrame, rotation: Tensor, power: int) -> Tensor:
    """One moment in the coordinates of a new basis."""
    factor = (rotation if power == 1 else rotation.square()).to(moment.dtype)
    return torch.bmm(factor, moment) if old.left else torch.bmm(moment, factor.mT)
