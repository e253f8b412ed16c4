"""The Trainer's callback: progress and losses go to the optimizer; density, gap and bytes go to the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

from accelerate.optimizer import AcceleratedOptimizer
from transformers.trainer import Trainer
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from adafrugal.core.errors import ConfigError
from adafrugal.integrations.optim_args import refuse_unfusable_arguments
from adafrugal.optim.methods import METHODS, AdaFRUGAL
from adafrugal.optim.split import SplitOptimizer

_log = logging.getLogger("adafrugal")
_CALL = "Trainer(callbacks=[AdaFrugalCallback()])"


class AdaFrugalCallback(TrainerCallback, ExportableState):
    """Tells the optimizer how far the run is and what the evaluation gave, and logs what it does.

    Before each step it sets AdaFRUGAL's progress to ``global_step / max_steps``, whether the run was given in steps or
    in epochs. After each evaluation it hands the loss to `observe`. It adds ``density``, ``update_gap`` (steps) and
    ``optimizer_bytes`` to the log history, and the table of `memory` to ``trainer_state.json``. Under a fused backward
    it takes ``grad_norm`` out of the log: no gradient is left when the Trainer measures, so it would read 0.

    Args:
        metric: Key of the loss to observe; None takes ``eval_loss``. With several evaluation sets name one, such as
            ``"eval_held_out_loss"``; the others are left alone.

    Raises:
        ConfigError: At the beginning of training, if the optimizer is not one of ours; at an evaluation, if AdaFRUGAL's
            gap may move and ``eval_loss`` is not there.
        NotSupportedError: At the beginning of training, if an attached optimizer meets clipping or accumulation.

    Example:
        >>> AdaFrugalCallback().state()["args"]
        {'metric': None}
    """

    def __init__(self, metric: str | None = None) -> None:
        self.metric = metric
        self.memory: dict[str, int] = {}
        self._optimizer: SplitOptimizer | None = None
        self._seen = False
        self._missed: set[str] = set()

    def go_first(self, trainer: Trainer) -> None:
        """Move this callback before the trackers, so that they too are sent its values.

        A Trainer calls trackers (TensorBoard, W&B) before the callbacks that it was given. Its own log history has the
        values in any order.
        """
        handler = trainer.callback_handler
        others = [one for one in cast(list[TrainerCallback], handler.callbacks) if one is not self]
        handler.callbacks = [self, *others]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Find the optimizer, and refuse what it cannot honour."""
        optimizer: object = given["optimizer"]
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = cast(object, optimizer.optimizer)
        if not isinstance(optimizer, SplitOptimizer):
            raise ConfigError(
                _CALL,
                f"an optimizer of type {type(optimizer).__name__}",
                f"one of {', '.join(METHODS.names())}",
                "Pass optimizer_cls_and_kwargs=adafrugal_cls_and_kwargs(args), or leave the callback out.",
            )
        if optimizer.attached:
            refuse_unfusable_arguments(args, optimizer.check_finite)
        self._optimizer = optimizer
        if self._moves("update_gap_max") and str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "no":
            _log.warning("this run never evaluates, so that update_gap stays where it is; set eval_strategy")
        self._keep_table(state)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Set the progress, unless ``total_steps`` does."""
        optimizer = self._optimizer
        if isinstance(optimizer, AdaFRUGAL) and self._moves("density_end"):
            if any(group["total_steps"] is not None for group in optimizer.param_groups):
                return
            optimizer.set_progress(min(1.0, state.global_step / state.max_steps))

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Observe the loss; the entry of this evaluation in the log history says what came of it.

        Every rank makes the call, since `observe` is collective. The metrics themselves stay as they are: a search for
        hyperparameters may sum them up.
        """
        optimizer = self._optimizer
        if optimizer is None:  # an evaluation outside of training
            return
        if isinstance(optimizer, AdaFRUGAL) and self._moves("update_gap_max"):
            self._observe(optimizer, dict(metrics or {}), state.global_step)
        if state.log_history:
            state.log_history[-1].update(self._values(optimizer))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add our values to what a training step logs, and take out a norm that nobody measured."""
        optimizer = self._optimizer
        if optimizer is None or logs is None or "loss" not in logs:
            return
        for entry in (logs, state.log_history[-1]):
            if optimizer.attached:
                entry.pop("grad_norm", None)
            entry.update(self._values(optimizer))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Keep the table, and let the optimizer go: later evaluations are not training's."""
        if self._missed and not self._seen:
            others = ", ".join(sorted(self._missed))
            _log.warning("no evaluation gave %s, only %s, so that update_gap never moved", self.metric, others)
        self._keep_table(state)
        self._optimizer = None

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into ``trainer_state.json``: how this was built, and the bytes held now."""
        if self._optimizer is not None:
            self.memory = self._optimizer.memory()
        return {"args": {"metric": self.metric}, "attributes": {"memory": dict(self.memory)}}

    def _observe(self, optimizer: AdaFRUGAL, metrics: Mapping[str, float], step: int) -> None:
        key, losses = self.metric or "eval_loss", [name for name in metrics if name.endswith("loss")]
        if key in metrics:
            self._seen = True
            optimizer.observe(metrics[key], step=step)
        elif self.metric is not None:  # one of several evaluation sets, perhaps
            self._missed.update(losses)
        else:
            raise ConfigError(
                _CALL,
                f"an evaluation that gives {', '.join(losses) or 'no loss'}",
                "eval_loss, which decides when update_gap grows",
                "Name one: AdaFrugalCallback(metric=...), or keep the gap with update_gap_max=None.",
            )

    def _keep_table(self, state: TrainerState) -> None:
        cast(dict[str, Any], state.stateful_callbacks)[type(self).__name__] = self.state()

    def _moves(self, setting: str) -> bool:
        """Whether AdaFRUGAL's own policy moves something that split groups have."""
        groups = self._optimizer.split_groups if isinstance(self._optimizer, AdaFRUGAL) else []
        return any(group["policies"] == "own" and group[setting] is not None for group in groups)

    @staticmethod
    def _values(optimizer: SplitOptimizer) -> dict[str, float]:
        settings = {name: group[name] for group in optimizer.split_groups[:1] for name in ("density", "update_gap")}
        return {**settings, "optimizer_bytes": optimizer.memory()["total_bytes"]}
