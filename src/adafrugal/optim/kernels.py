"""The update itself, on views: fused pieces, and tensor by tensor. Lists are in foreach.py, compilation in compiled.py.

All paths compute the same thing:

    p <- p * (1 - lr * wd) - lr * (stateful_scale * rule(part of g) + stateless_scale * rest_rule(rest of g))

- `update_fused`: frames that are runs of contiguous elements (whole, blocks, rows, stripes) go through torch's fused
  kernel in place, and the rest is updated on views. The fastest on a CPU.
- `update_eager`: any frame, rule and dtype. One direction buffer a tensor, filled by the stateless rule, overwritten
  inside the frame, and subtracted in one pass. Short-lived temporaries stay in a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from adafrugal.core.protocols import FusedRule, Rule, State
from adafrugal.optim.finite import FiniteGuard
from adafrugal.optim.frames import AnyFrame, Geometry, LineFrame, RunFrame
from adafrugal.optim.rounding import Rounding, compute_dtype, round_into, widen
from adafrugal.optim.workspace import Workspace

_MANY_AGES = 8
# Elements of a temporary that stays in a cache. Measured on two cores: the sign of a matrix of 11M elements takes 0.6
# of its time in pieces of at most 2M; one of 3M, 0.95.
CACHED_ELEMENTS = 2**21


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a group's update is made of, read once a step.

    Args:
        rule: For the stateful part.
        rest_rule: For the rest; has no state.
        lr: Learning rate.
        weight_decay: Decoupled; multiplied by ``lr`` alone.
        stateful_scale: Multiplies the stateful part's rate.
        stateless_scale: Multiplies the rest's rate.
        rounding: For weights in bfloat16.
    """

    rule: Rule
    rest_rule: Rule
    lr: float
    weight_decay: float
    stateful_scale: float
    stateless_scale: float
    rounding: Rounding

    @property
    def decay(self) -> float:
        """The factor of every weight."""
        return 1.0 - self.lr * self.weight_decay

    @cached_property
    def fused(self) -> FusedRule | None:
        """The stateful rule, where it has a fused kernel."""
        return self.rule if isinstance(self.rule, FusedRule) else None


@dataclass(kw_only=True)
class Job:
    """One tensor to update.

    Args:
        slot: Its number in the finiteness guard.
        param: The weight.
        grad: Its gradient.
        moments: Its state tensors, of ``frame.state_shape``.
        frame: Which part is stateful.
        step: Updates including this one.
        entered: The step at which each line entered, int32 on the weight's device; None where all are equally old.
        ages: (position, count, step) of each run of lines equally old.
        compensation: Kahan's buffer, or None.
        noise: Makes the generator of stochastic rounding.
    """

    slot: int
    param: Tensor
    grad: Tensor
    moments: State
    frame: AnyFrame
    step: int
    entered: Tensor | None
    ages: Sequence[tuple[int, int, int]]
    compensation: Tensor | None
    noise: Callable[[], torch.Generator | None]

    def full_grad(self) -> Tensor:
        """The gradient as (stack, rows, cols), in the compute dtype."""
        return self.grad.to(compute_dtype(self.param.dtype)).reshape(self.frame.geometry.shape)

    def line_steps(self) -> int | Tensor:
        """How many updates each stateful coordinate has had: one number, or a tensor that broadcasts."""
        if self.entered is None:
            return self.step
        steps = (self.step - self.entered).to(self.param.device, compute_dtype(self.param.dtype))
        assert isinstance(self.frame, (RunFrame, LineFrame))
        return steps.view(1, -1, 1) if self.frame.axis == "rows" else steps.view(1, 1, -1)

    def write(self, update: Tensor, rate: float, numbers: Numbers) -> None:
        """P <- p * decay - rate * update, rounded where the weight is of lower precision."""
        update = update.reshape(self.param.shape)
        low = self.param.dtype not in (torch.float32, torch.float64)
        wide = widen(self.param, self.compensation) if low else self.param
        if numbers.decay != 1.0:
            wide.mul_(numbers.decay)
        wide.add_(update, alpha=-rate)
        if low:
            self.round(wide, numbers)

    def round(self, wide: Tensor, numbers: Numbers) -> None:
        """Store a float32 result in the weight."""
        generator = self.noise() if numbers.rounding == "stochastic" else None
        round_into(self.param, wide, numbers.rounding, generator, self.compensation)


def is_idle(job: Job, numbers: Numbers) -> bool:
    """Whether the tensor is frozen: nothing stateful, and a rest rule that does nothing (`none`)."""
    return job.frame.width == 0 and numbers.stateless_scale == 0.0


def fits_fused(job: Job, numbers: Numbers) -> bool:
    """Whether `update_fused` can take the tensor: contiguous pieces, few of them, in one dtype."""
    frame = job.frame
    if numbers.fused is None or not isinstance(frame, RunFrame):
        return False
    partial = frame.width > 0 and not frame.is_whole
    if partial and (frame.axis == "cols" or frame.geometry.stack > 1):
        return False
    if job.ages and (len(job.ages) > _MANY_AGES or 2 * frame.width > frame.geometry.length(frame.axis)):
        return False
    dtype = job.param.dtype
    return (
        dtype in (torch.float32, torch.float64)
        and job.grad.dtype == dtype
        and job.param.is_contiguous()
        and job.grad.is_contiguous()
        and all(moment.dtype == dtype for moment in job.moments.values())
    )


def update_fused(
    jobs: Sequence[Job], numbers: Numbers, guard: FiniteGuard | None, workspace: Workspace | None = None
) -> None:
    """Update contiguous pieces in one fused call, then the rest tensor by tensor on views.

    Args:
        jobs: Tensors for which `fits_fused` holds, on one device.
        numbers: The group's numbers.
        guard: Sees the stateless gradient just before it is used, while it comes into the cache.
        workspace: Buffers to share.
    """
    workspace = workspace or Workspace()
    params: list[Tensor] = []
    grads: list[Tensor] = []
    states: list[State] = []
    steps: list[int] = []
    for job in jobs:
        param, grad = job.param.view(-1), job.grad.view(-1)
        for start, position, length, step in _aged_pieces(job):
            params.append(param.narrow(0, start, length))
            grads.append(grad.narrow(0, start, length))
            states.append({k: m.view(-1).narrow(0, position, length) for k, m in job.moments.items()})
            steps.append(step)
    if params:
        scale = numbers.stateful_scale
        assert numbers.fused is not None
        numbers.fused.update_many(
            params, grads, states, steps, lr=numbers.lr * scale, weight_decay=numbers.weight_decay / scale
        )
    rate, decay = numbers.lr * numbers.stateless_scale, numbers.decay
    for job in jobs:
        assert isinstance(job.frame, RunFrame)
        param, grad = job.param.view(-1), job.grad.view(-1)
        for start, length in _cached_pieces(job.frame):
            part = grad.narrow(0, start, length)
            target = param.narrow(0, start, length)
            if guard is not None and rate != 0.0:
                guard.see(job.slot, part)
            if decay != 1.0 and not is_idle(job, numbers):
                target.mul_(decay)
            if rate != 0.0:
                target.add_(_rest_direction(part, job.step, numbers, workspace), alpha=-rate)


def _rest_direction(part: Tensor, step: int, numbers: Numbers, workspace: Workspace) -> Tensor:
    """The stateless direction, in a shared buffer that nothing but the result holds on to."""
    return numbers.rest_rule.direction(part, {}, step, out=workspace.take("update", part.shape, part))


def _cached_pieces(frame: RunFrame) -> Iterator[tuple[int, int]]:
    """(start, length) of what is outside the frame, cut into equal pieces whose temporaries stay in the cache."""
    for start, _, length in frame.rest_pieces() or ():
        size = -(-length // -(-length // CACHED_ELEMENTS))
        for offset in range(0, length, size):
            yield start + offset, min(size, length - offset)


def _aged_pieces(job: Job) -> list[tuple[int, int, int, int]]:
    """(start in the tensor, start in the state, length, step) of contiguous pieces whose lines are equally old."""
    assert isinstance(job.frame, RunFrame)
    pieces = job.frame.pieces() or []
    if not job.ages:
        return [(start, position, length, job.step) for start, position, length in pieces]
    line = job.frame.geometry.cols
    width = job.frame.width
    found: list[tuple[int, int, int, int]] = []
    for start, position, length in pieces:
        first = (position // line) % width
        for run_start, count, entered in job.ages:
            low, high = max(first, run_start), min(first + length // line, run_start + count)
            if low < high:
                shift = (low - first) * line
                found.append((start + shift, position + shift, (high - low) * line, job.step - entered))
    return found


def update_eager(job: Job, numbers: Numbers, guard: FiniteGuard | None, workspace: Workspace | None = None) -> None:
    """Update one tensor through one direction buffer; takes any frame, rule, dtype and strides.

    Args:
        job: The tensor.
        numbers: The group's numbers.
        guard: Sees the gradient where a NaN could pass unseen.
        workspace: Buffers to share.
    """
    if is_idle(job, numbers):
        return
    if guard is not None and hides_nan(job, numbers):
        guard.see(job.slot, job.grad)
    workspace = workspace or Workspace()
    for piece in _row_pieces(job):
        update, rate = _direction(piece, piece.full_grad(), numbers, workspace)
        piece.write(update, rate, numbers)


def in_row_pieces(frame: AnyFrame, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `update_eager` cuts a tensor into blocks of rows: windows of columns of one matrix, on a CPU."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.float64):
        return False
    return isinstance(frame, RunFrame) and frame.axis == "cols" and frame.geometry.stack == 1


def _row_pieces(job: Job) -> Iterator[Job]:
    """Blocks of rows of a large tensor, each a job of its own whose temporaries stay in the cache."""
    frame = job.frame
    num_pieces = -(-job.param.numel() // CACHED_ELEMENTS)
    if num_pieces < 2 or not in_row_pieces(frame, job.param.dtype, job.param.device) or not job.param.is_contiguous():
        yield job
        return
    assert isinstance(frame, RunFrame)
    rows, cols = frame.geometry.rows, frame.geometry.cols
    param, grad = job.param.view(rows, cols), job.grad.reshape(rows, cols)
    size = -(-rows // num_pieces)
    for start in range(0, rows, size):
        count = min(size, rows - start)
        yield replace(
            job,
            param=param.narrow(0, start, count),
            grad=grad.narrow(0, start, count),
            moments={name: moment.narrow(1, start, count) for name, moment in job.moments.items()},
            frame=RunFrame(Geometry(1, count, cols), "cols", frame.offset, frame.width),
        )


def hides_nan(job: Job, numbers: Numbers) -> bool:
    """Whether a NaN of the gradient may leave no trace in the first moment."""
    whole = isinstance(job.frame, RunFrame) and job.frame.is_whole
    return not job.moments or (not whole and numbers.stateless_scale != 0.0)


def _direction(job: Job, grad: Tensor, numbers: Numbers, workspace: Workspace) -> tuple[Tensor, float]:
    """The update of one tensor as (buffer, rate): what is subtracted is their product."""
    frame, rule, rest_rule = job.frame, numbers.rule, numbers.rest_rule
    stateful, stateless = numbers.stateful_scale, numbers.stateless_scale
    full = workspace.take("update", grad.shape, grad)
    if isinstance(frame, RunFrame) and frame.is_whole:
        return rule.direction(grad, job.moments, job.line_steps(), out=full), numbers.lr * stateful
    if frame.width == 0:
        return rest_rule.direction(grad, {}, job.step, out=full), numbers.lr * stateless
    shape = frame.state_shape
    part_grad = frame.down(grad, out=workspace.take("part of the gradient", shape, grad))
    part = rule.direction(part_grad, job.moments, job.line_steps(), out=workspace.take("part", shape, grad))
    if stateless == 0.0:
        full.zero_()
        frame.merge(full, part)
        return full, numbers.lr * stateful
    full = rest_rule.direction(frame.rest(grad, part_grad), {}, job.step, out=full)
    frame.merge(full, part, stateful / stateless)
    return full, numbers.lr * stateless
