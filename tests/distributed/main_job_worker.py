"""Runs `adafrugal train` on this rank, several times in turn, and writes down what happened here at every step.

torchrun ... main_job_worker.py FOLDER PLAN, where PLAN is a JSON file with a list of runs: their name, their words, and
the step at which one rank is asked to stop, or dies.
"""

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed

from adafrugal.cli import main
from adafrugal.train import distributed as ours
from adafrugal.train.trainer import Trainer

torch.set_num_threads(1)
ours._PATIENCE_SECONDS = 0.0  # here the launcher ends nobody, so that the next run can begin


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class Watched(contextlib.AbstractContextManager):
    """Looks at the trainer after each step, and keeps the weights that are there in the end."""

    def __init__(self, stop_at: int | None, stop_rank: int, dies: bool) -> None:
        self.steps: list = []
        self.weights: dict = {}
        self.real = Trainer._train_step, Trainer.run
        self.stop_at, self.stop_rank, self.dies = stop_at, stop_rank, dies

    def __enter__(self) -> "Watched":
        step, run = self.real

        def watched_step(trainer: Trainer) -> None:
            step(trainer)
            group = trainer._parts.optimizer.param_groups[0]
            now = {key: group.get(key) for key in ("density", "update_gap", "refreshed_at", "lr")}
            now["loss"] = trainer._recent[-1].loss
            now["grad_norm"] = trainer._recent[-1].grad_norm
            now["sum"] = sum(
                float(p.detach().to_local().double().sum() if hasattr(p, "to_local") else p.detach().double().sum())
                for p in trainer._parts.model.parameters()
            )
            self.steps.append(now)
            if trainer.progress.step == self.stop_at and ours.launched()[0] == self.stop_rank:
                os.kill(os.getpid(), signal.SIGKILL if self.dies else signal.SIGTERM)

        def watched_run(trainer: Trainer) -> str:
            ended_by = run(trainer)
            self.weights = {name: whole(p) for name, p in trainer._parts.model.named_parameters()}
            return ended_by

        Trainer._train_step, Trainer.run = watched_step, watched_run
        return self

    def __exit__(self, *error: object) -> None:
        Trainer._train_step, Trainer.run = self.real


def one(
    folder: Path, name: str, words: list[str], stop_at: int | None = None, stop_rank: int = 1, dies: bool = False
) -> None:
    """One run, and a file of what was seen of it."""
    out, err = io.StringIO(), sys.stderr if dies else io.StringIO()
    with Watched(stop_at, stop_rank, dies) as seen, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    said = {"out": out.getvalue(), "err": "" if dies else err.getvalue()}
    found = {"code": code, **said, "steps": seen.steps, "weights": seen.weights}
    torch.save(found, folder / f"{name}-rank{ours.launched()[0]}.pt")


if __name__ == "__main__":
    if ours.launched()[1] > 1:
        distributed.init_process_group("gloo")  # one for all runs: torch forms the same group once in a process
    for each in json.loads(Path(sys.argv[2]).read_text()):
        one(Path(sys.argv[1]), **each)
    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
