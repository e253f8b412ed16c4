"""The methods under Lightning: the optimizer comes from `configure_optimizers`, and a callback tells it of the run.

The optimizer is an ordinary one, so that closures, accumulation, clipping, precision plugins, schedulers and
checkpoints are Lightning's own. What only the Trainer knows comes through `AdaFrugalCallback`: how much of the run is
done, and what the last validation gave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from adafrugal.core.errors import ConfigError, nearest_name
from adafrugal.optim.attach import refuse_unfusable, refuse_wrapped
from adafrugal.optim.methods import AdaFRUGAL
from adafrugal.optim.split import SplitOptimizer

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, Timer
except ImportError as error:
    raise ImportError(
        f"import adafrugal.integrations.lightning: received {error}; allowed is an environment with lightning 2.4 or "
        'later. Run: pip install "adafrugal[lightning]".'
    ) from error


class AdaFrugalCallback(Callback):
    """Sets the progress, hands validation losses over, and logs what the optimizer holds.

    It acts on every optimizer of this package in ``trainer.optimizers`` and leaves others alone.

    - **Progress** goes to each `AdaFRUGAL` that was built with ``total_steps=None``: the share of ``max_steps``,
      ``max_epochs`` or ``max_time`` that is done, whichever is furthest. An optimizer with ``total_steps`` counts by
      itself.
    - **The validation loss** goes to `AdaFRUGAL.observe` after each validation, but not after the sanity check.
    - **Logged** every ``log_every_n_steps`` steps: density, update gap, and bytes of state.

    The callback holds nothing that has to be saved: all memory is in the optimizer.

    Args:
        monitor: The metric to observe, as the module logs it in validation; None observes nothing.
        fused_backward: Attach the optimizers to backward while `fit` runs, so that gradients are used and freed one by
            one.
        log: Whether to log, through ``LightningModule.log``.

    Raises:
        ConfigError: When `fit` starts, if no optimizer is of this package, or if the run has no known length; at the
            sanity check or the first validation, if the metric is missing (lists those that exist).
        NotSupportedError: When `fit` starts, for a fused backward with accumulation, clipping, a scaler or DDP.

    Example:
        >>> callback = AdaFrugalCallback(monitor="val_loss")
        >>> callback.monitor, callback.fused_backward
        ('val_loss', False)
    """

    def __init__(self, monitor: str | None = "val_loss", *, fused_backward: bool = False, log: bool = True) -> None:
        super().__init__()
        self.monitor = monitor
        self.fused_backward = fused_backward
        self.log = log
        self._attached: list[SplitOptimizer] = []

    # --- before the first step ------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find our optimizers; attach them, or refuse what cannot be had with a fused backward."""
        optimizers = _ours(trainer)
        if not optimizers:
            kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "no optimizer"
            raise ConfigError(
                "Trainer(callbacks=[AdaFrugalCallback()]).fit(module)",
                kinds,
                "at least one of AdaFRUGAL, FRUGAL, GaLore, BAdam and SignSGD",
                "Return AdaFRUGAL(param_groups(self), lr=...) from configure_optimizers, or leave the callback out.",
            )
        for optimizer in optimizers:
            if optimizer.attached:
                _refuse_fused(trainer, optimizer)
            elif self.fused_backward:
                _refuse_fused(trainer, optimizer)
                optimizer.attach(pl_module)
                self._attached.append(optimizer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a run whose end nobody knows, before its first step."""
        waiting = [optimizer for optimizer in _moving(trainer) if _needs_progress(optimizer)]
        if waiting and _progress(trainer, pl_module) is None:
            raise ConfigError(
                "Trainer(...).fit(module) with AdaFRUGAL(total_steps=None)",
                f"max_steps={trainer.max_steps}, max_epochs={trainer.max_epochs} and "
                f"{trainer.num_training_batches} batches in an epoch",
                "a known length of the run, since density follows it",
                "Set max_steps or max_time of the Trainer, or density_end=None for a density that stays.",
            )

    # --- while it trains ------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Say how far the run is, before backward may already update."""
        for optimizer in _moving(trainer):
            if _needs_progress(optimizer):
                share = _progress(trainer, pl_module)
                if share is not None:
                    optimizer.set_progress(share)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log density, update gap and bytes; with several optimizers of ours, each under its number."""
        every: int = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue,reportUnknownVariableType]
        if not self.log or not every or trainer.global_step % every:
            return
        for number, optimizer in enumerate(_ours(trainer)):
            prefix = "adafrugal" if number == 0 else f"adafrugal_{number}"
            values: dict[str, float] = {"state_bytes": float(optimizer.memory()["total_bytes"])}
            if optimizer.split_groups:
                group = optimizer.split_groups[0]
                values |= {"density": float(group["density"]), "update_gap": float(group["update_gap"])}
            for name, value in values.items():
                pl_module.log(f"{prefix}/{name}", value, on_step=True, on_epoch=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Observe the validation loss; one from the sanity check is only looked for."""
        optimizers = _moving(trainer)
        if self.monitor is None or not optimizers or trainer.state.fn != "fit":
            return
        metrics: Mapping[str, Any] = trainer.callback_metrics
        if self.monitor not in metrics:
            raise ConfigError(
                f"AdaFrugalCallback(monitor={self.monitor!r})",
                f"{self.monitor!r}, which was not logged by the validation",
                f"a logged metric: {', '.join(sorted(metrics)) or 'there is none'}",
                "Log it in validation_step, or set monitor=None to observe nothing."
                + nearest_name(self.monitor, metrics),
            )
        if not trainer.sanity_checking:
            for optimizer in optimizers:
                optimizer.observe(metrics[self.monitor], step=trainer.global_step)

    # --- afterwards -----------------------------------------------------------------------------------------------

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the hooks off again, so that a second `fit` may put on its own."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the hooks off after a failure too."""
        self._detach()

    def _detach(self) -> None:
        for optimizer in self._attached:
            optimizer.detach()
        self._attached.clear()


def _ours(trainer: Trainer) -> list[SplitOptimizer]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, SplitOptimizer)]


def _moving(trainer: Trainer) -> list[AdaFRUGAL]:
    """Those that move density and gap themselves."""
    found = [optimizer for optimizer in _ours(trainer) if isinstance(optimizer, AdaFRUGAL)]
    return [o for o in found if o.split_groups and all(g["policies"] == "own" for g in o.split_groups)]


def _needs_progress(optimizer: AdaFRUGAL) -> bool:
    groups = optimizer.split_groups
    return any(g["density_end"] is not None for g in groups) and all(
        group["total_steps"] is None for group in optimizer.param_groups
    )


def _progress(trainer: Trainer, module: LightningModule) -> float | None:
    """The share of the run that is done, in [0, 1]; None if nothing ends it.

    Under automatic optimization Lightning knows the number of optimizer steps; by hand, one batch may take several.
    """
    shares: list[float] = []
    if module.automatic_optimization:
        total = trainer.estimated_stepping_batches
        if 0 < total < math.inf:
            shares.append(trainer.global_step / total)
    else:
        if trainer.max_steps > 0:
            shares.append(trainer.global_step / trainer.max_steps)
        if trainer.max_epochs is not None and trainer.max_epochs > 0 and trainer.num_training_batches < math.inf:
            shares.append(trainer.fit_loop.total_batch_idx / (trainer.num_training_batches * trainer.max_epochs))
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue,reportUnknownVariableType]
        left = callback.time_remaining() if isinstance(callback, Timer) else None
        if left is not None and isinstance(callback, Timer):
            spent = callback.time_elapsed()
            shares.append(spent / max(spent + left, 1e-9))
    return min(1.0, max(0.0, *shares)) if shares else None


def _refuse_fused(trainer: Trainer, optimizer: SplitOptimizer) -> None:
    """Refuse what the Trainer was told to do and a fused backward cannot."""
    counts = [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue,reportUnknownVariableType]
        if isinstance(callback, GradientAccumulationScheduler):
            counts += callback.scheduling.values()
    refuse_unfusable(
        accumulation_steps=max(counts),
        max_grad_norm=trainer.gradient_clip_val,
        grad_scaler=getattr(trainer.precision_plugin, "scaler", None),
        check_finite=optimizer.check_finite,
    )
    if trainer.model is not None:
        refuse_wrapped(trainer.model)
