"""The update as one compiled function.

Offsets, widths, steps and rates are tensors or symbolic, so that neither a refresh nor a schedule compiles again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adafrugal.core.protocols import Rule, State
from adafrugal.optim.finite import FiniteGuard
from adafrugal.optim.frames import BasisFrame, LineFrame, RunFrame
from adafrugal.optim.kernels import Job, Numbers, hides_nan, is_idle, update_eager
from adafrugal.optim.rounding import compute_dtype, widen


def _update_lines(
    wide: Tensor,
    grad: Tensor,
    moments: State,
    index: Tensor,
    position: Tensor,
    step: Tensor,
    rates: Tensor,
    dim: int,
    rule: Rule,
    rest_rule: Rule,
) -> None:
    """Update a weight in the compute dtype, in place, for a frame of lines.

    Args:
        wide: The weight as (stack, rows, cols); changed in place.
        grad: The gradient, likewise.
        moments: State tensors; advanced in place.
        index: The line behind each position of the state, int64, shape (width,).
        position: The position in the state of each line, or -1, int64, shape (length,).
        step: Updates that each stateful coordinate has had, this one included; broadcasts against the state.
        rates: (decay factor, stateful rate, stateless rate).
        dim: The dimension of the lines.
        rule: For the stateful part.
        rest_rule: For the rest.
    """
    part = rule.direction(grad.index_select(dim, index), moments, step) * rates[1]
    spread = part.index_select(dim, position.clamp_min(0))
    inside = (position >= 0).view([-1 if i == dim else 1 for i in range(3)])
    update = torch.where(inside, spread, rest_rule.direction(grad, {}, 0) * rates[2])
    wide.mul_(rates[0]).sub_(update)


class CompiledUpdate:
    """Compiles `_update_lines` once with symbolic sizes and applies it tensor by tensor.

    Frames of lines (windows and scattered) are compiled. Whole and empty tensors, bases and frozen tensors go through
    `update_eager`, which is a handful of kernels for them.

    Cost:
        One compilation at the first step (some ten seconds), at most one more for each further dtype, rule or axis.
    """

    def __init__(self) -> None:
        self._function = torch.compile(_update_lines, dynamic=True)
        self._rates: tuple[Numbers, Tensor] | None = None
        self._places: dict[int, tuple[object, Tensor, Tensor]] = {}

    def update(self, job: Job, numbers: Numbers, guard: FiniteGuard | None) -> None:
        """Update one tensor."""
        frame = job.frame
        whole = isinstance(frame, RunFrame) and frame.is_whole
        if whole or frame.width == 0 or isinstance(frame, BasisFrame) or is_idle(job, numbers):
            update_eager(job, numbers, guard)
            return
        grad = job.full_grad()
        if guard is not None and hides_nan(job, numbers):
            guard.see(job.slot, grad)
        index, position = self._place(job.slot, frame, grad.device)
        dtype = compute_dtype(job.param.dtype)
        step = job.line_steps()
        if isinstance(step, int):
            step = torch.full((1, 1, 1), step, dtype=dtype, device=grad.device)
        param, shape = job.param, frame.geometry.shape
        in_place = param.dtype == dtype and param.is_contiguous()
        wide = param.view(shape) if in_place else widen(param, job.compensation).to(dtype).reshape(shape).contiguous()
        dim = 1 if frame.axis == "rows" else 2
        rates = self._rates_of(numbers, dtype, grad.device)
        self._function(wide, grad, job.moments, index, position, step, rates, dim, numbers.rule, numbers.rest_rule)
        if in_place:
            return
        wide = wide.view(param.shape)
        if param.dtype == dtype:
            param.copy_(wide)
        else:
            job.round(wide, numbers)

    def _rates_of(self, numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The three rates as one tensor, made once a step and group."""
        if self._rates is None or self._rates[0] is not numbers or self._rates[1].dtype != dtype:
            values = [numbers.decay, numbers.lr * numbers.stateful_scale, numbers.lr * numbers.stateless_scale]
            self._rates = (numbers, torch.tensor(values, dtype=dtype, device=device))
        return self._rates[1].to(device)

    def _place(self, slot: int, frame: RunFrame | LineFrame, device: torch.device) -> tuple[Tensor, Tensor]:
        """The two index vectors of a frame, kept until the tensor's frame changes."""
        kept = self._places.get(slot)
        if kept is None or kept[0] is not frame:
            lines = frame.lines()
            position = torch.full((frame.geometry.length(frame.axis),), -1, dtype=torch.int64)
            position[lines] = torch.arange(frame.width)
            kept = (frame, lines.to(device), position.to(device))
            self._places[slot] = kept
        return kept[1], kept[2]
