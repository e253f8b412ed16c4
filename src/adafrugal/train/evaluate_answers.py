"""Judging a model on held-out labelled examples: loss, GLUE's metrics, and what judging cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from adafrugal.core.values import Cost
from adafrugal.data.labelled import LabelledTask
from adafrugal.data.rows import filled, targets_of
from adafrugal.data.scores import score
from adafrugal.data.tasks import Answer
from adafrugal.laws.flops import FlopMeter
from adafrugal.train.evaluate import Evaluation


class AnswerEvaluator:
    """Answers the same examples at every call, in the same pieces, and scores all answers together.

    Args:
        rows: Of `data.rows.encode_rows`; rows of like length go together.
        labelled: Says which metrics.
        task: Gives the model's outputs.
        piece: Examples of one forward.
        meter: Counts FLOPs.
        num_processes: Each of them answers all examples, and is billed for it.
    """

    def __init__(
        self,
        rows: Sequence[Tensor],
        labelled: LabelledTask,
        task: Answer,
        piece: int,
        meter: FlopMeter,
        num_processes: int = 1,
    ) -> None:
        by_length = sorted(rows, key=len)
        self._pieces = [filled(by_length[i : i + piece]) for i in range(0, len(by_length), piece)]
        self._labelled = labelled
        self._task = task
        self._meter = meter
        self._num_processes = num_processes

    @torch.no_grad()
    def run(self, model: nn.Module) -> Evaluation:
        """Judge the model as it is; its mode is put back."""
        start = time.monotonic()
        was_training = model.training
        device = next(model.parameters()).device
        model.eval()
        outputs: list[Tensor] = []
        flops = 0
        for piece in self._pieces:
            answer = partial(self._task.outputs, model, piece.to(device))
            found, counted = self._meter.measure(("evaluation", tuple(piece.shape)), answer)
            outputs.append(found.cpu())
            flops += counted
        model.train(was_training)
        answers, targets = torch.cat(outputs), torch.cat([targets_of(piece) for piece in self._pieces])
        return Evaluation(
            loss=float(self._task.loss_of(answers, targets)) / len(targets),
            bits_per_byte=None,
            cost=Cost(flops=flops * self._num_processes, seconds=time.monotonic() - start),
            scores=score(self._labelled, answers, targets),
        )
