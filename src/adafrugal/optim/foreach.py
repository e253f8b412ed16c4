"""The update in lists of tensors, for devices where launching kernels is what costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adafrugal.core.protocols import ListRule, Rule, State
from adafrugal.optim.finite import FiniteGuard
from adafrugal.optim.frames import BasisFrame, RunFrame
from adafrugal.optim.kernels import Job, Numbers, hides_nan, is_idle, update_eager

_BATCH_BYTES = 256 * 2**20


def update_foreach(jobs: Sequence[Job], numbers: Numbers, guard: FiniteGuard | None) -> None:
    """Update lists of tensors; what lists cannot hold (bases, low precision) goes through `update_eager`.

    Args:
        jobs: Tensors on one device.
        numbers: The group's numbers.
        guard: Sees the gradients where a NaN could pass unseen.

    Cost:
        Temporaries of two copies of a batch; a batch ends at 256 MiB of gradients.
    """
    batch: list[Job] = []
    size = 0
    for job in jobs:
        plain = job.param.dtype in (torch.float32, torch.float64) and job.grad.dtype == job.param.dtype
        if is_idle(job, numbers) or isinstance(job.frame, BasisFrame) or not plain:
            update_eager(job, numbers, guard)
            continue
        if batch and (size + job.grad.nbytes > _BATCH_BYTES or job.param.dtype != batch[0].param.dtype):
            _update_batch(batch, numbers, guard)
            batch, size = [], 0
        batch.append(job)
        size += job.grad.nbytes
    if batch:
        _update_batch(batch, numbers, guard)


def _update_batch(jobs: Sequence[Job], numbers: Numbers, guard: FiniteGuard | None) -> None:
    """Split a batch into whole, empty and split tensors, and update each kind."""
    kinds: dict[str, list[Job]] = {}
    for job in jobs:
        if guard is not None and hides_nan(job, numbers):
            guard.see(job.slot, job.grad)
        whole = isinstance(job.frame, RunFrame) and job.frame.is_whole
        kinds.setdefault("whole" if whole else "empty" if job.frame.width == 0 else "split", []).append(job)
    for kind, members in kinds.items():
        grads = [job.full_grad() for job in members]
        if kind == "whole":
            updates, scale = _stateful(members, grads, numbers.rule), numbers.stateful_scale
        elif kind == "empty":
            updates, scale = _stateless(grads, numbers.rest_rule), numbers.stateless_scale
        else:
            updates, scale = _split(members, grads, numbers)
        params = [job.param for job in members]
        if numbers.decay != 1.0:
            torch._foreach_mul_(params, numbers.decay)
        shaped = [update.view(param.shape) for update, param in zip(updates, params, strict=True)]
        torch._foreach_add_(params, shaped, alpha=-numbers.lr * scale)


def _split(jobs: Sequence[Job], grads: list[Tensor], numbers: Numbers) -> tuple[list[Tensor], float]:
    """The updates of tensors with a stateful part and a rest, and the scale to multiply them by."""
    part_grads = [job.frame.down(grad).contiguous() for job, grad in zip(jobs, grads, strict=True)]
    parts = _stateful(jobs, part_grads, numbers.rule)
    if numbers.stateless_scale == 0.0:
        updates, scale = [torch.zeros_like(grad) for grad in grads], numbers.stateful_scale
    else:
        updates, scale = _stateless(grads, numbers.rest_rule), numbers.stateless_scale
        torch._foreach_mul_(parts, numbers.stateful_scale / numbers.stateless_scale)
    for job, update, part in zip(jobs, updates, parts, strict=True):
        job.frame.merge(update, part)
    return updates, scale


def _stateful(jobs: Sequence[Job], grads: list[Tensor], rule: Rule) -> list[Tensor]:
    """The stateful direction of each tensor; lines of mixed age are done one tensor at a time."""
    steps = [job.line_steps() for job in jobs]
    listed = [i for i, step in enumerate(steps) if isinstance(step, int)]
    found: dict[int, Tensor] = {}
    if isinstance(rule, ListRule) and len(listed) > 1:
        states: list[State] = [jobs[i].moments for i in listed]
        directions = rule.direction_many([grads[i] for i in listed], states, [jobs[i].step for i in listed])
        found = dict(zip(listed, directions, strict=True))
    return [
        found[i] if i in found else rule.direction(grad, job.moments, step)
        for i, (job, grad, step) in enumerate(zip(jobs, grads, steps, strict=True))
    ]


def _stateless(grads: list[Tensor], rule: Rule) -> list[Tensor]:
    """The stateless direction of each tensor."""
    if isinstance(rule, ListRule):
        return rule.direction_many(grads, [{} for _ in grads], [0 for _ in grads])
    return [rule.direction(grad, {}, 0) for grad in grads]
