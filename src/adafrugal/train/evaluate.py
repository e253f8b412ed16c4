"""Judging a model on a fixed set of held-out windows: loss, perplexity, bits per byte, and what judging cost."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from adafrugal.core.protocols import Task
from adafrugal.core.values import Cost
from adafrugal.laws.flops import FlopMeter
from adafrugal.train.distributed import Ranks


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What one evaluation found.

    Args:
        loss: Mean loss in nats per scored token.
        bits_per_byte: Nats of the scored tokens / ln 2 / UTF-8 bytes of the scored tokens; None where no text is.
        cost: FLOPs and seconds; no training tokens.
        scores: Of answers to labelled examples, by metric; none for text.
    """

    loss: float
    bits_per_byte: float | None
    cost: Cost
    scores: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def perplexity(self) -> float:
        """exp(loss); infinity where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def record(self) -> dict[str, float | None]:
        """What the log says of it."""
        if self.bits_per_byte is None:
            return {"val_loss": self.loss, **{f"val_{name}": value for name, value in self.scores.items()}}
        return {"val_loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}

    def words(self) -> str:
        """What a person is told of it."""
        if self.bits_per_byte is None:
            return ", ".join([f"held-out loss {self.loss:.4f}", *(f"{k} {v:.4f}" for k, v in self.scores.items())])
        return f"held-out loss {self.loss:.4f}, {self.bits_per_byte:.4f} bits per byte"


class Judge(Protocol):
    """Judges a model on what is held out."""

    def run(self, model: nn.Module) -> Evaluation:
        """Judge the model as it is; its mode is put back."""
        ...


class Evaluator:
    """Scores the same windows at every call, in the same pieces, so that evaluations are comparable bit by bit.

    Several processes share the windows, and all learn the result. Under FSDP2 every forward takes all of them, so a
    rank whose windows are through goes along with one that is not counted.

    Args:
        windows: Ids, int64 (num_windows, sequence_length).
        num_bytes: UTF-8 bytes of the scored tokens.
        task: The loss.
        piece: Windows of one forward.
        meter: Counts FLOPs.
        ranks: The processes.
    """

    def __init__(
        self, windows: Tensor, num_bytes: int, task: Task, piece: int, meter: FlopMeter, ranks: Ranks | None = None
    ) -> None:
        self._ranks = ranks or Ranks()
        parts = windows.tensor_split(self._ranks.size)
        self._windows = parts[self._ranks.layout.rank]
        self._num_calls = -(-len(parts[0]) // piece)
        self._first_window = windows[:1]
        self._num_bytes = num_bytes
        self._task = task
        self._piece = piece
        self._meter = meter

    @torch.no_grad()
    def run(self, model: nn.Module) -> Evaluation:
        """Judge the model as it is; its mode is put back."""
        start = time.monotonic()
        was_training = model.training
        device = next(model.parameters()).device
        model.eval()
        nats, num_targets, flops = 0.0, 0, 0
        for i in range(self._num_calls):
            piece = self._windows[i * self._piece : (i + 1) * self._piece]
            batch = (piece if len(piece) else self._first_window).to(device)
            score = partial(self._task.loss_sum, model, batch)
            loss, counted = self._meter.measure(("evaluation", tuple(batch.shape)), score)
            if not len(piece):
                continue
            nats += float(loss)
            num_targets += self._task.num_targets(batch)
            flops += counted
        model.train(was_training)
        (num_targets, flops), (nats,) = self._ranks.total([num_targets, flops], [nats])
        return Evaluation(
            loss=nats / num_targets,
            bits_per_byte=nats / math.log(2) / self._num_bytes if self._num_bytes else math.nan,
            cost=Cost(flops=flops, seconds=time.monotonic() - start),
        )
