"""Memory runs out in the middle of a run: the step is taken again in halves, and nothing is lost."""

import pytest
import torch

from adafrugal.cli import main
from adafrugal.core.errors import MemoryLimitError
from adafrugal.gradients.backprop import Backprop
from adafrugal.train.pieces import Pieces, is_out_of_memory


def too_large(monkeypatch: pytest.MonkeyPatch, limit: int, at: set[int], error=torch.OutOfMemoryError) -> list[int]:
    """At the given calls, backward over a micro-batch above a size fails late: when its gradients are there."""
    real, sizes = Backprop.run, []

    def run(self, model, batches, task, sink):
        sizes.append(len(batches[0]))
        if len(sizes) in at and len(batches[0]) > limit:
            real(self, model, batches, task, lambda param, grad: None)
            raise error("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, model, batches, task, sink)

    monkeypatch.setattr(Backprop, "run", run)
    return sizes


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_a_step_is_taken_again_in_halves_and_the_run_is_that_of_the_smaller_size(train, monkeypatch, kind) -> None:
    """Bit for bit: steps before it in pieces of four, it and all after it in pieces of two."""
    always = set(range(1, 100))
    expected = train("halves", "--budget.steps", "6", "--batch.micro_sequences", "2")
    with monkeypatch.context() as patch:
        error = torch.OutOfMemoryError if kind == "gpu" else lambda text: RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"
        )  # fmt: skip
        sizes = too_large(patch, 2, always, error)
        found = train("found", "--budget.steps", "6")
    assert sizes == [4, *[2] * 6], "one try, then halves"
    assert found.weights() == expected.weights()
    assert found.summary["steps"] == 6
    assert (found.summary["micro_sequences"], found.summary["halved_for_memory"]) == (2, True)
    assert expected.summary["halved_for_memory"] is False
    events = [record for record in found.records if "event" in record]
    assert [(e["step"], e["event"], e["micro_sequences"]) for e in events] == [(0, "out of memory", 2)]
    assert found.summary["tokens"] == expected.summary["tokens"], "the failed try bills no token"


def test_the_windows_of_a_failed_step_are_not_lost(train, monkeypatch) -> None:
    """In mid-run: what is read and how often is that of a run without the failure."""
    plain = train("plain", "--budget.steps", "6")
    with monkeypatch.context() as patch:
        too_large(patch, 2, {4})
        found = train("found", "--budget.steps", "6")
    for a, b in zip(plain.of("train_loss"), found.of("train_loss"), strict=True):
        assert a == pytest.approx(b, abs=2e-4)  # float32 sums in another order, magnified by signed steps


def test_a_resume_keeps_the_smaller_size(train, monkeypatch, tmp_path) -> None:
    with monkeypatch.context() as patch:
        too_large(patch, 2, {2})
        train("found", "--budget.steps", "8")
    for path in (tmp_path / "found" / "checkpoints").glob("step-000000008*"):
        for part in path.iterdir():
            part.unlink()
        path.rmdir()
    with monkeypatch.context() as patch:
        sizes = too_large(patch, 99, set())
        assert main(["train", "--resume", str(tmp_path / "found")]) == 0
    assert sizes == [2] * 4


def test_pieces_of_one_that_do_not_fit_are_one_sentence(train, options, monkeypatch, capsys, tmp_path) -> None:
    too_large(monkeypatch, 0, set(range(99)))
    assert main(["train", "--out", str(tmp_path / "run"), *options, "--budget.steps", "2"]) == 2
    error = capsys.readouterr().err
    assert "out of memory in pieces of one example" in error
    assert "adafrugal plan says what fits" in error


def test_sizes_are_halved_upwards_and_other_errors_pass() -> None:
    seen: list[int] = []
    pieces = Pieces(5, can_retry=True, told=seen.append)

    def fails(batches):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(MemoryLimitError, match="pieces of one example"):
        pieces.run(1, torch.zeros(5, 1), fails)
    assert seen == [3, 2, 1]
    with pytest.raises(torch.OutOfMemoryError):
        Pieces(4, can_retry=False, told=seen.append).run(1, torch.zeros(4, 1), fails)

    def breaks(batches):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        Pieces(4, can_retry=True, told=seen.append).run(1, torch.zeros(4, 1), breaks)
    assert not is_out_of_memory(RuntimeError("shapes"))
