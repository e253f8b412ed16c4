"""Gradients on several processes: every rank runs backward over its share, and all end with the global batch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adafrugal.core.protocols import GradSink, Task
from adafrugal.core.values import Backward, Cost
from adafrugal.gradients.backprop import backward_of, refuse_no_targets
from adafrugal.laws.flops import FlopMeter
from adafrugal.optim.sharding import is_dtensor
from adafrugal.train.distributed import Ranks


class ParallelBackprop:
    """Backpropagation over the global batch, of which each rank has a share.

    The gradient is that of the loss averaged over all targets of **all ranks**: g = sum over ranks of the gradient of
    the summed loss, / number of all targets. DDP and FSDP2 average over the ranks, so each rank's loss is multiplied
    by ranks / targets. Loss, FLOPs and tokens that are returned are those of the whole job.

    Args:
        ranks: The processes.
        wrap: Makes what is called forward: DDP's wrapper, or the model itself under FSDP2. Made anew when other weights
            are trained than before, as BAdam does: DDP would leave their gradients local without a word.
        meter: Counts FLOPs, once for each kind of micro-batch.
        max_grad_norm: Clip the global norm, over all ranks and shards, to it; None or 0 leaves gradients alone.

    Cost:
        Under DDP one all-reduce of the gradients a step, after the last micro-batch. Under FSDP2 one reduce-scatter a
        micro-batch, since whole gradients on every rank are what FSDP2 is there to avoid. Two small messages besides.
    """

    def __init__(
        self, ranks: Ranks, wrap: Callable[[], nn.Module], meter: FlopMeter, max_grad_norm: float | None = None
    ) -> None:
        self._ranks = ranks
        self._wrap = wrap
        self._wrapped: nn.Module | None = None
        self._trained: tuple[bool, ...] = ()
        self._meter = meter
        self._max_grad_norm = max_grad_norm or None

    def run(self, model: nn.Module, batches: Sequence[Tensor], task: Task, sink: GradSink) -> Backward:
        """See `core.protocols.GradientSource`; ``batches`` are this rank's, the rest is of all ranks."""
        model.zero_grad(set_to_none=True)
        (num_targets,), _ = self._ranks.total([sum(task.num_targets(batch) for batch in batches)])
        refuse_no_targets(num_targets)
        nats, flops = torch.zeros((), dtype=torch.float32), 0
        trained = tuple(param.requires_grad for param in model.parameters())
        wrapped = self._wrapped_for(trained)
        for i, batch in enumerate(batches):
            call = backward_of(wrapped, batch, task, num_targets / self._ranks.size)
            with _averaging(wrapped, last=i == len(batches) - 1):
                loss, counted = self._meter.measure(("backward", tuple(batch.shape), trained), call)
            nats += loss.to(nats.device)
            flops += counted
        params = [param for param in model.parameters() if param.grad is not None]
        norm = _whole(torch.nn.utils.get_total_norm([cast(Tensor, param.grad) for param in params]))
        if self._max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(params, self._max_grad_norm, norm)
        for param in params:
            sink(param, cast(Tensor, param.grad))
        counts, (all_nats,) = self._ranks.total(
            [flops, sum(task.num_tokens(batch) for batch in batches)], [float(nats)]
        )
        cost = Cost(flops=counts[0], tokens=counts[1])
        return Backward(loss=all_nats / num_targets, num_targets=num_targets, grad_norm=float(norm), cost=cost)

    def _wrapped_for(self, trained: tuple[bool, ...]) -> nn.Module:
        if self._wrapped is None or trained != self._trained:
            self._wrapped = None  # the old one's hooks go with it, before the new one's come
            self._wrapped, self._trained = self._wrap(), trained
        return self._wrapped


def _averaging(wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """DDP averages over the ranks in the last backward alone; before it, gradients add up locally."""
    if isinstance(wrapped, DistributedDataParallel) and not last:
        return wrapped.no_sync()
    return nullcontext()


def _whole(norm: Tensor) -> Tensor:
    """The norm over all shards."""
    return cast(Any, norm).full_tensor() if is_dtensor(norm) else norm
