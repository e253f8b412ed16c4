"""The loop of a run, to be read top to bottom: look at the budget, train a step, judge, save, until it is spent."""

from __future__ import annotations

import signal
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from adafrugal.core.errors import CheckpointError, NonFiniteError
from adafrugal.core.ledger import Ledger
from adafrugal.core.rng import own_stream
from adafrugal.core.values import Backward, Budget, Cost, StepReport
from adafrugal.optim.methods import AdaFRUGAL
from adafrugal.optim.split import SplitOptimizer
from adafrugal.train.assemble import Parts
from adafrugal.train.checkpoint import Checkpoints
from adafrugal.train.config import TrainConfig
from adafrugal.train.console import Console, Status
from adafrugal.train.evaluate import Evaluation
from adafrugal.train.gathering import gathered, load_optimizer, load_weights, whole_weights
from adafrugal.train.metrics import MetricsLog
from adafrugal.train.optimizers import state_bytes
from adafrugal.train.pieces import Pieces

_DEAF_SECONDS = 2.0


@dataclass(kw_only=True)
class Progress:
    """What a run remembers besides weights, moments and data order; saved whole in every checkpoint.

    Args:
        step: Steps taken.
        ledger: What was spent, by activity.
        best_val_loss: Lowest validation loss so far, and below the bits per byte there.
        val_loss: Newest validation loss, and below the bits per byte.
        peak_state_bytes: Most optimizer state held after any step; of shards all, of replicas one.
        sum_state_bytes: Optimizer state held after each step, added up, for the mean.
        evaluation_cost: Cost of one evaluation, which the last one will need again.
        step_cost: Cost of the newest step.
        scores: Of the newest evaluation, where labelled examples are answered.
        micro_sequences: Windows of a micro-batch now, if memory ran out and it was halved.
    """

    step: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    best_val_loss: float | None = None
    best_bits_per_byte: float | None = None
    val_loss: float | None = None
    bits_per_byte: float | None = None
    peak_state_bytes: int = 0
    sum_state_bytes: int = 0
    evaluation_cost: Cost = field(default_factory=Cost)
    step_cost: Cost = field(default_factory=Cost)
    scores: dict[str, float] = field(default_factory=dict[str, float])
    micro_sequences: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        costs = {"evaluation_cost": self.evaluation_cost, "step_cost": self.step_cost}
        plain = {name: value for name, value in vars(self).items() if name != "ledger" and name not in costs}
        return {**plain, "ledger": self.ledger.state_dict(), **{name: dict(vars(cost)) for name, cost in costs.items()}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """The progress that a checkpoint holds."""
        ledger = Ledger()
        ledger.load_state_dict(state["ledger"])
        made: dict[str, Any] = {name: Cost(**state[name]) for name in ("evaluation_cost", "step_cost")}
        made["ledger"] = ledger
        return cls(**{**state, **made})


class Stop:
    """Turns the first Ctrl-C, or a polite kill, into a wish to end after the present step; a second one ends now.

    Args:
        deaf_seconds: For so long after the first, another is taken for the same: a launcher hands on to its processes
            what the terminal has sent to all of them.
    """

    def __init__(self, deaf_seconds: float = 0.0) -> None:
        self.wanted = False
        self._deaf_seconds = deaf_seconds
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: the caller's own handling stays
                return self
        return self

    def __exit__(self, *reason: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.wanted and time.monotonic() - self._since >= self._deaf_seconds:
            raise KeyboardInterrupt
        if not self.wanted:
            self.wanted, self._since = True, time.monotonic()


class Trainer:
    """One run: its parts, its budget and its progress.

    Args:
        config: The configuration.
        parts: What `assemble` made.
        budget: What may be spent.
        checkpoints: Where the run is saved.
        log: Where it is logged.
        console: Where it is shown.
        progress: Where it stands.
    """

    def __init__(
        self,
        *,
        config: TrainConfig,
        parts: Parts,
        budget: Budget,
        checkpoints: Checkpoints,
        log: MetricsLog,
        console: Console,
        progress: Progress,
    ) -> None:
        self._config = config
        self._parts = parts
        self._budget = budget
        self._checkpoints = checkpoints
        self._log = log
        self._console = console
        for group in parts.optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))  # the peak, under the name that schedulers use
        self._ranks = parts.ranks
        self._stop = Stop(0.0 if self._ranks.alone else _DEAF_SECONDS)
        self._watch = self._ranks.now()
        self._pieces = Pieces(
            parts.micro_sequences,
            can_retry=self._ranks.alone and not config.fused_backward,
            told=self._note_smaller_pieces,
        )
        self._recent: list[StepReport] = []
        self._state_key: tuple[Any, ...] | None = None
        self._state_bytes = 0
        self.progress = progress

    def run(self) -> str:
        """Train until the budget is spent or somebody stops it.

        Returns:
            What ended it: the name of the limit, or ``"interrupt"``.

        Raises:
            NonFiniteError: If the loss is not finite; names the last good checkpoint.
        """
        self._meet()
        self._watch = self._ranks.now()
        if self.progress.step == 0 and self.progress.val_loss is None:
            self._evaluate()
        with self._stop:
            while not self._stopping() and not self._spent():
                self._train_step()
                step = self.progress.step
                if step % self._config.log_every_steps == 0:
                    self._log_training()
                if step % self._config.eval.every_steps == 0:
                    self._evaluate()
                if step % self._config.checkpoint.every_steps == 0:
                    self.save()
            ended_by = "interrupt" if self._stopping() else self._binding()
            if self.progress.step % self._config.checkpoint.every_steps != 0 or self._none_saved():
                self.save()
            if self.progress.step % self._config.eval.every_steps != 0:
                self._evaluate(final=True)
        return ended_by

    def _meet(self) -> None:
        """Read the one clock of all ranks, and tell them of a wish to stop."""
        self._ranks.meet(self._stop.wanted)

    def _stopping(self) -> bool:
        return self._ranks.stopping(self._stop.wanted)

    def _none_saved(self) -> bool:
        return self._ranks.from_first(lambda: self._checkpoints.newest() is None)

    # --- the budget ---------------------------------------------------------------------------------------------

    def _committed(self) -> Cost:
        """What is spent, and what the last evaluation will cost."""
        self._bill_time("training")
        return self.progress.ledger.total() + self.progress.evaluation_cost

    def share(self) -> float:
        """The share in [0, 1] of the budget that is spent or spoken for."""
        return self._budget.share(steps=self.progress.step, cost=self._committed())

    def _spent(self) -> bool:
        """Whether one more step like the last one would go over a limit."""
        after = self._committed() + self.progress.step_cost
        shares = self._budget.shares(steps=self.progress.step + 1, cost=after)
        return any(share > 1.0 for share in shares.values())

    def _binding(self) -> str:
        after = self._committed() + self.progress.step_cost
        return self._budget.binding(steps=self.progress.step + 1, cost=after)

    def _bill_time(self, activity: str) -> None:
        """Bill the seconds since the last bill."""
        now = self._ranks.now()
        self.progress.ledger.bill(activity, Cost(seconds=now - self._watch))
        self._watch = now

    # --- one step -----------------------------------------------------------------------------------------------

    def _train_step(self) -> None:
        """Set what follows the budget, take the gradient, update, bill."""
        started, spent_before = self._ranks.now(), self.share()
        optimizer, parts = self._parts.optimizer, self._parts
        factor = self._config.schedule.factor(spent_before)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        if isinstance(optimizer, AdaFRUGAL):
            optimizer.set_progress(spent_before)
        batch = self._ranks.share(parts.windows.next_batch(self._config.batch.sequences)).to(parts.device)
        backward = self._pieces.run(self.progress.step + 1, batch, self._backward)
        self._refuse_broken(backward.loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.ledger.bill("training", backward.cost)
        self._meet()
        self._bill_time("training")
        seconds = self._ranks.now() - started
        self.progress.step_cost = backward.cost + Cost(seconds=seconds)
        self._count_state()
        self._recent.append(
            StepReport(
                step=self.progress.step,
                loss=backward.loss,
                tokens=backward.cost.tokens,
                lr=float(optimizer.param_groups[0]["lr"]),
                grad_norm=backward.grad_norm,
                cost=self.progress.step_cost,
            )
        )
        self._show()

    def _backward(self, pieces: tuple[Tensor, ...]) -> Backward:
        """The gradient of a step; what the model draws depends on the step alone."""
        parts, rank = self._parts, str(self._ranks.layout.rank)
        with own_stream(self._config.seed, "dropout", rank, self.progress.step, parts.device):
            return parts.source.run(parts.model, pieces, parts.task, parts.sink)

    def _note_smaller_pieces(self, size: int) -> None:
        self.progress.micro_sequences = size
        self._log.append({**self._common(), "micro_sequences": size, "event": "out of memory"})
        self._console.say(f"step {self.progress.step + 1}: out of memory; taken again with micro-batches of {size}")

    def _refuse_broken(self, loss: float) -> None:
        if loss - loss != 0.0:
            last = self._checkpoints.newest()
            raise NonFiniteError(
                f"training step {self.progress.step + 1}",
                f"a loss of {loss}",
                "finite losses",
                f"Resume from {last} with a lower rate." if last else "Start again with a lower --optim.lr.",
            )

    def _count_state(self) -> None:
        """Add the optimizer's bytes of this step to peak and mean; counted anew only when they may have changed."""
        optimizer = self._parts.optimizer
        groups = optimizer.param_groups
        key = tuple((g.get("density"), g.get("refreshed_at")) for g in groups)
        if key != self._state_key or self.progress.step <= 2:
            self._state_key, self._state_bytes = key, self.whole_state_bytes()
        self.progress.peak_state_bytes = max(self.progress.peak_state_bytes, self._state_bytes)
        self.progress.sum_state_bytes += self._state_bytes

    def whole_state_bytes(self) -> int:
        """Bytes of the optimizer's state: all shards together, or one replica."""
        held = state_bytes(self._parts.optimizer)
        return self._ranks.total([held])[0][0] if self._ranks.layout.kind == "fsdp2" else held

    # --- judging, saving, showing -------------------------------------------------------------------------------

    def _evaluate(self, final: bool = False) -> Evaluation:
        """Judge the model, tell the optimizer, log. A last one, after the checkpoint, tells the optimizer nothing."""
        found = self._judge()
        now = self.progress
        now.evaluation_cost = found.cost
        now.ledger.bill("evaluation", Cost(flops=found.cost.flops))
        self._bill_time("evaluation")
        now.val_loss, now.bits_per_byte, now.scores = found.loss, found.bits_per_byte, dict(found.scores)
        if now.best_val_loss is None or found.loss < now.best_val_loss:
            now.best_val_loss, now.best_bits_per_byte = found.loss, found.bits_per_byte
        grew = False
        optimizer = self._parts.optimizer
        if isinstance(optimizer, AdaFRUGAL) and not final:
            grew = optimizer.observe(found.loss, step=now.step)
        self._log.append({**self._common(), **found.record()})
        self._console.say(
            f"step {now.step}: {found.words()}"
            + (f"; the gap grows to {optimizer.param_groups[0]['update_gap']} steps" if grew else "")
        )
        return found

    def _judge(self) -> Evaluation:
        """Judge the model; several ranks bill the first one's time."""
        self._meet()
        before = self._ranks.now()
        found = self._parts.evaluator.run(self._parts.model)
        if self._ranks.alone:
            return found
        self._meet()
        return replace(found, cost=replace(found.cost, seconds=self._ranks.now() - before))

    def _log_training(self) -> None:
        recent, self._recent = self._recent, []
        norms = [report.grad_norm for report in recent if report.grad_norm is not None]
        self._log.append(
            {
                **self._common(),
                "train_loss": sum(report.loss for report in recent) / len(recent),
                "grad_norm": sum(norms) / len(norms) if norms else None,
                "tokens_per_second": _pace(recent),
                "lr": recent[-1].lr,
            }
        )

    def _common(self) -> dict[str, Any]:
        """What every record holds."""
        total = self.progress.ledger.total()
        density, gap = self._moving()
        return {
            "step": self.progress.step,
            "tokens": total.tokens,
            "flops": total.flops,
            "seconds": total.seconds,
            "density": density,
            "update_gap": gap,
            "optimizer_state_bytes": self._state_bytes,
        }

    def _moving(self) -> tuple[float | None, int | None]:
        """Density and gap of the groups that split."""
        optimizer = self._parts.optimizer
        groups = optimizer.split_groups if isinstance(optimizer, SplitOptimizer) else []
        return (groups[0]["density"], groups[0]["update_gap"]) if groups else (None, None)

    def _show(self) -> None:
        density, gap = self._moving()
        recent = self._recent[-10:]
        self._console.show(
            Status(
                step=self.progress.step,
                progress=self.share(),
                binding=self._binding(),
                loss=sum(report.loss for report in recent) / len(recent),
                bits_per_byte=self.progress.bits_per_byte,
                tokens_per_second=_pace(recent),
                density=density,
                update_gap=gap,
                state_bytes=self._state_bytes,
                elapsed_seconds=self.progress.ledger.total().seconds,
            )
        )

    def save(self) -> None:
        """Write a checkpoint; where the disk refuses, warn, and go on from the last good one.

        Shards are gathered first, so that the files are those of one process and any number of them can go on.
        """
        if self._recent:
            self._log_training()
        self._bill_time("training")
        weights = whole_weights(self._parts.model, self._ranks)
        optimizer = gathered(self._parts.optimizer.state_dict(), self._ranks.is_first)
        parts = {
            "identity": self._identity(),
            "model": weights,
            "optimizer": optimizer,
            "windows": self._parts.windows.state_dict(),
            "progress": self.progress.state_dict(),
        }
        written = self._write(parts) if self._ranks.is_first else 0
        self._meet()
        if written is not None:
            self.progress.ledger.bill("checkpoint", Cost(written_bytes=written))
            self._bill_time("checkpoint")

    def _write(self, parts: dict[str, Any]) -> int | None:
        """Bytes written, or None where the disk refused."""
        try:
            return self._checkpoints.save(self.progress.step, parts)
        except OSError as error:
            newest = self._checkpoints.newest()
            warnings.warn(
                f"checkpoint at step {self.progress.step} could not be written ({error}); "
                f"the last good one is {newest or 'none'}, and training goes on",
                stacklevel=3,
            )
            return None

    def _identity(self) -> dict[str, str]:
        """What a checkpoint can only be resumed with."""
        return {"text": self._parts.corpus.content_hash, "tokenizer": self._parts.tokenizer.fingerprint}

    def restore(self, path: Path) -> None:
        """Go to a checkpoint.

        Raises:
            CheckpointError: If it belongs to another model, optimizer, text or tokenizer.
        """
        loaded = self._checkpoints.load(path)
        for name, mine in self._identity().items():
            if loaded["identity"][name] != mine:
                raise CheckpointError(
                    f"--resume from {path}",
                    f"a {name} with hash {loaded['identity'][name][:12]}",
                    f"the {name} of the checkpoint; the one here has hash {mine[:12]}",
                    "It has changed since the run began: put it back, or start a new run from the saved model.",
                )
        try:
            load_weights(self._parts.model, loaded["model"], self._ranks)
        except RuntimeError as error:
            raise CheckpointError(
                f"--resume from {path}", "weights of another model", f"{self._config.model}'s weights", str(error)
            ) from error
        load_optimizer(self._parts.optimizer, loaded["optimizer"], self._ranks)
        self._parts.windows.load_state_dict(loaded["windows"])
        self.progress = Progress.from_state(loaded["progress"])
        self._pieces.size = self.progress.micro_sequences or self._pieces.size


def _pace(reports: list[StepReport]) -> float:
    """Training tokens per second over some steps."""
    seconds = sum(report.cost.seconds for report in reports)
    return sum(report.tokens for report in reports) / seconds if seconds > 0 else 0.0
