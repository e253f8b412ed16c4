"""Which path each tensor takes: fused where torch allows it, and else what suits its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from adafrugal.optim.compiled import CompiledUpdate
from adafrugal.optim.finite import FiniteGuard
from adafrugal.optim.foreach import update_foreach
from adafrugal.optim.frames import RunFrame
from adafrugal.optim.groups import Group
from adafrugal.optim.kernels import Job, Numbers, fits_fused, update_eager, update_fused
from adafrugal.optim.rules import rule_of
from adafrugal.optim.settings import as_number
from adafrugal.optim.workspace import Workspace

Path = Literal["auto", "fused", "eager", "foreach", "compile"]


def numbers_of(group: Group) -> Numbers:
    """What a group's update is made of, read from its settings now."""
    return Numbers(
        rule=rule_of(group["rule"], group),
        rest_rule=rule_of(group["stateless_rule"], group),
        lr=as_number(group["lr"]),
        weight_decay=as_number(group["weight_decay"]),
        stateful_scale=group["stateful_lr_scale"],
        stateless_scale=0.0 if group["stateless_rule"] == "none" else group["stateless_lr_scale"],
        rounding=group["rounding"],
    )


def path_of(job: Job, numbers: Numbers, wanted: Path) -> Path:
    """The path of one tensor: as wanted, or chosen by device.

    On a CPU, contiguous pieces are fused and all else goes tensor by tensor, since lists leave the cache. On a GPU,
    whole tensors are fused and all else goes in lists.
    """
    if wanted in ("eager", "foreach", "compile"):
        return wanted
    device = job.param.device.type
    whole = isinstance(job.frame, RunFrame) and job.frame.is_whole
    if (device == "cpu" or (device == "cuda" and whole)) and fits_fused(job, numbers):
        return "fused"
    return "eager" if device in ("cpu", "meta") else "foreach"


class Dispatch:
    """Sorts the tensors of a group by path and updates them; holds the compiled function, once there is one."""

    def __init__(self) -> None:
        self._compiled: CompiledUpdate | None = None

    def update(self, jobs: Sequence[Job], numbers: Numbers, guard: FiniteGuard | None, wanted: Path) -> None:
        """Update all tensors.

        Args:
            jobs: Of one group.
            numbers: The group's.
            guard: Sees gradients in which a NaN could pass unseen; None switches the check off.
            wanted: ``"auto"`` chooses by device and frame.
        """
        workspace = Workspace()
        lists: dict[tuple[Path, torch.device, torch.dtype], list[Job]] = {}
        for job in jobs:
            key = (path_of(job, numbers, wanted), job.param.device, job.param.dtype)
            lists.setdefault(key, []).append(job)
        for (path, _, _), members in lists.items():
            if path == "fused":
                update_fused(members, numbers, guard, workspace)
            elif path == "foreach":
                update_foreach(members, numbers, guard)
            else:
                for job in members:
                    self._one(job, numbers, guard, path, workspace)

    def _one(self, job: Job, numbers: Numbers, guard: FiniteGuard | None, path: Path, workspace: Workspace) -> None:
        if path != "compile":
            update_eager(job, numbers, guard, workspace)
            return
        if self._compiled is None:
            self._compiled = CompiledUpdate()
        self._compiled.update(job, numbers, guard)
