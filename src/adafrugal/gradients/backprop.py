"""Gradients by backpropagation: collected over micro-batches and clipped, or used and freed as each is complete."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from adafrugal.core.errors import NotSupportedError
from adafrugal.core.protocols import GradSink, Task
from adafrugal.core.values import Backward, Cost
from adafrugal.laws.flops import FlopMeter
from adafrugal.optim.attach import Attachment, refuse_unfusable, refuse_wrapped


def keep_gradient(param: Tensor, grad: Tensor) -> None:
    """The sink of an optimizer that reads gradients from its parameters at `step`: leave it there."""
    param.grad = grad


def _trained(model: nn.Module) -> Hashable:
    """Which parameters are trained, as FLOPs depend on it."""
    return tuple(param.requires_grad for param in model.parameters())


class Backprop:
    """Plain backpropagation: gradients of all micro-batches add up, are clipped, and go to the sink.

    The gradient is that of the loss averaged over all **targets** of the global batch, however they are spread over
    micro-batches; with a short last one it is still that of the one big batch.

    Args:
        meter: Counts FLOPs, once for each kind of micro-batch; None counts none.
        max_grad_norm: Clip the global norm to it; None or 0 leaves gradients alone. The norm is measured anyway.

    Cost:
        The gradients of all parameters are held at once.
    """

    def __init__(self, meter: FlopMeter | None = None, max_grad_norm: float | None = None) -> None:
        self._meter = meter
        self._max_grad_norm = max_grad_norm or None

    def run(self, model: nn.Module, batches: Sequence[Tensor], task: Task, sink: GradSink) -> Backward:
        """See `core.protocols.GradientSource`; gradients that are there already are dropped first."""
        model.zero_grad(set_to_none=True)
        loss, num_targets, flops = _accumulate(model, batches, task, self._meter)
        params = [param for param in model.parameters() if param.grad is not None]
        norm = torch.nn.utils.get_total_norm([cast(Tensor, param.grad) for param in params])
        if self._max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(params, self._max_grad_norm, norm)
        for param in params:
            sink(param, cast(Tensor, param.grad))
        tokens = sum(task.num_tokens(batch) for batch in batches)
        cost = Cost(flops=flops, tokens=tokens)
        return Backward(loss=loss, num_targets=num_targets, grad_norm=float(norm), cost=cost)


class FusedBackprop:
    """Backpropagation that hands each gradient over, and frees it, as soon as it is complete.

    Args:
        meter: Counts FLOPs; None counts none.
        max_grad_norm: Here to be refused unless None or 0: the norm is known only when the first weights have moved.

    Raises:
        NotSupportedError: For clipping, at construction; for more than one micro-batch, before any weight moves.

    Cost:
        One gradient at a time.
    """

    def __init__(self, meter: FlopMeter | None = None, max_grad_norm: float | None = None) -> None:
        refuse_unfusable(accumulation_steps=1, max_grad_norm=max_grad_norm, grad_scaler=None, check_finite="off")
        self._meter = meter

    def run(self, model: nn.Module, batches: Sequence[Tensor], task: Task, sink: GradSink) -> Backward:
        """See `core.protocols.GradientSource`; the norm is not known."""
        refuse_unfusable(accumulation_steps=len(batches), max_grad_norm=None, grad_scaler=None, check_finite="off")
        refuse_wrapped(model)
        names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        hooks = Attachment(lambda param: sink(cast(nn.Parameter, param), cast(Tensor, param.grad)), names)
        try:
            loss, num_targets, flops = _accumulate(model, batches, task, self._meter)
        finally:
            hooks.remove()
        cost = Cost(flops=flops, tokens=task.num_tokens(batches[0]))
        return Backward(loss=loss, num_targets=num_targets, grad_norm=None, cost=cost)


def _accumulate(
    model: nn.Module, batches: Sequence[Tensor], task: Task, meter: FlopMeter | None
) -> tuple[float, int, int]:
    """Backward through every micro-batch; returns the mean loss, the number of targets, and FLOPs."""
    num_targets = sum(task.num_targets(batch) for batch in batches)
    refuse_no_targets(num_targets)
    total = torch.zeros((), dtype=torch.float32)
    flops = 0
    trained = _trained(model)
    for batch in batches:
        call = backward_of(model, batch, task, num_targets)
        if meter is None:
            loss = call()
        else:
            loss, counted = meter.measure(("backward", tuple(batch.shape), trained), call)
            flops += counted
        total += loss.to(total.device)
    return float(total) / num_targets, num_targets, flops


def refuse_no_targets(num_targets: int) -> None:
    """Refuse a global batch of which nothing is to be predicted.

    Raises:
        NotSupportedError: If there is no target.
    """
    if num_targets == 0:
        raise NotSupportedError(
            "training on a batch without targets",
            "no token to predict",
            "at least one target in each global batch",
            "Leave out examples whose labels are all masked.",
        )


def backward_of(model: nn.Module, batch: Tensor, task: Task, divisor: float) -> Callable[[], Tensor]:
    """A call that runs forward and backward over a micro-batch, and returns its summed loss, detached.

    Args:
        model: Called forward.
        batch: The micro-batch.
        task: Gives the sum of its losses.
        divisor: What that sum is divided by before backward.
    """

    def call() -> Tensor:
        loss = task.loss_sum(model, batch)
        (loss / divisor).backward()
        return loss.detach()

    return call
