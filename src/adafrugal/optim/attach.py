"""The update fused into backward: each gradient is used and freed as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from adafrugal.core.errors import NotSupportedError
from adafrugal.core.ranks import num_ranks
from adafrugal.optim.sharding import is_dtensor


def refuse_unfusable(
    *, accumulation_steps: int, max_grad_norm: float | None, grad_scaler: object | None, check_finite: str
) -> None:
    """Refuse what cannot be had when gradients are gone before backward ends.

    Raises:
        NotSupportedError: For accumulation, clipping by a global norm, a GradScaler, or a check before weights move.
    """
    refusals = (
        (
            accumulation_steps > 1,
            f"accumulation_steps={accumulation_steps}",
            "one backward for each step, since the update happens inside it",
            "Use a larger micro-batch, or train without attach.",
        ),
        (
            bool(max_grad_norm),
            f"max_grad_norm={max_grad_norm}",
            "no clipping by a global norm, known only after the last gradient, when the first weights have moved",
            "Set max_grad_norm=0, or train without attach.",
        ),
        (
            grad_scaler is not None,
            "a GradScaler",
            "no GradScaler, since weights have moved before an overflow shows",
            "Train in bfloat16, which needs no scaler, or without attach.",
        ),
        (
            check_finite == "before",
            "check_finite='before'",
            "'deferred' or 'off', since weights move before the last gradient is there",
            "Build the optimizer with check_finite='deferred'.",
        ),
    )
    for refused, value, allowed, action in refusals:
        if refused:
            raise NotSupportedError("optimizer.attach(model)", value, allowed, action)


class Attachment:
    """Hooks that hand each complete gradient over and free it.

    Args:
        update: Called with the parameter once its gradient is complete.
        names: The parameters, each with what to call it in errors; those that are trainable are watched.

    Raises:
        NotSupportedError: See `watch`; no hook is left behind then.
    """

    def __init__(self, update: Callable[[Tensor], None], names: dict[Tensor, str]) -> None:
        self._update = update
        self._names = names
        self._handles: dict[Tensor, Any] = {}
        self.done: set[Tensor] = set()
        try:
            for param in names:
                self.watch(param)
        except NotSupportedError:
            self.remove()
            raise

    def watch(self, param: Tensor) -> None:
        """Hook one trainable parameter; one that is frozen, or watched already, is left alone.

        Raises:
            NotSupportedError: If somebody else's hook on the parameter's gradient is there: two would step twice.
        """
        if not param.requires_grad or param in self._handles:
            return
        if getattr(param, "_post_accumulate_grad_hooks", None):
            raise NotSupportedError(
                "optimizer.attach(model)",
                f"a foreign post-accumulate hook on {self._names[param]}",
                "no other hook that uses or frees gradients inside backward",
                "Remove the other library's hook first, or train without attach.",
            )
        self._handles[param] = param.register_post_accumulate_grad_hook(self._on_gradient)

    @torch.no_grad()
    def _on_gradient(self, param: Tensor) -> None:
        if not self.done:
            refuse_wrapped()  # a library may have wrapped the model since
        if param in self.done:
            raise NotSupportedError(
                "loss.backward() with an attached optimizer",
                f"a second gradient for {self._names[param]} before optimizer.step()",
                "one backward for each step, and one gradient for each parameter in it",
                "Call optimizer.step() after each backward; with tied weights use non-reentrant checkpointing.",
            )
        self._update(param)
        param.grad = None
        self.done.add(param)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def refuse_wrapped(model: nn.Module | None = None) -> None:
    """Refuse what makes gradients complete only after the hooks would have used them.

    Args:
        model: The model that is trained, if it is at hand.

    Raises:
        NotSupportedError: For DistributedDataParallel, FSDP2, and any other training on several processes.
    """
    kind = f"{num_ranks()} processes" if num_ranks() > 1 else None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        kind = "DistributedDataParallel"
    elif model is not None and any(is_dtensor(param) for param in model.parameters()):
        kind = "FSDP2"
    if kind is not None:
        raise NotSupportedError(
            "optimizer.attach(model)",
            f"a model trained by {kind}",
            "one process, where a gradient is complete when backward hands it over; DDP and FSDP2 average it later",
            "Train without attach on several processes, or on one.",
        )
