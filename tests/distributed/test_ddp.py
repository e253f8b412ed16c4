"""DistributedDataParallel on two real processes: replicas stay bit-equal, whatever their global seeds and losses."""

import json
from pathlib import Path

import pytest
import torch
from launching import ACCELERATE, HERE, launch
from replicas_worker import STEPS, loss_seen_by

from adafrugal import AdaFRUGAL

WORKER = HERE / "replicas_worker.py"
RUNS = ("columns-float32", "random-float32", "svd-float32", "blocks-float32", "columns-bfloat16")


def ranks_of(folder: Path, name: str) -> list[dict]:
    return [torch.load(folder / f"{name}-rank{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun")
    launch(WORKER, "torchrun", str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_replicas_stay_bit_equal(by_torchrun: Path, name: str) -> None:
    """B68, B30: frames, bases and stochastic rounding are drawn from names and steps, never from a global stream."""
    one, other = ranks_of(by_torchrun, name)
    assert one["weights"].keys() == other["weights"].keys()
    for key, weight in one["weights"].items():
        assert torch.equal(weight, other["weights"][key]), key


def controlled_by(losses: list[float]) -> tuple[list[int], int]:
    """When a controller that saw these losses, one each fifth step, would refresh, and the gap that it comes to."""
    weight = torch.nn.Parameter(torch.zeros(32, 32))
    optimizer = AdaFRUGAL([weight], total_steps=STEPS, density=0.5, density_end=0.25, update_gap=8, update_gap_max=32)
    refreshes = []
    for step in range(STEPS):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        refreshes.append(optimizer.split_groups[0]["refreshed_at"])
        if step % 5 == 4:
            optimizer.observe(losses[step // 5])
    return sorted(set(refreshes)), optimizer.split_groups[0]["update_gap"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_rank_refreshes_at_the_steps_of_the_mean_loss(by_torchrun: Path, name: str) -> None:
    """Alone, the ranks would grow their gaps at different steps."""
    seen = [[loss_seen_by(rank, step) for step in range(4, STEPS, 5)] for rank in (0, 1)]
    expected = controlled_by([(a + b) / 2 for a, b in zip(*seen, strict=True)])
    assert expected != controlled_by(seen[0])
    for rank in ranks_of(by_torchrun, name):
        assert (rank["refreshes"], rank["gap"]) == expected


@pytest.mark.slow
def test_accelerate_prepares_it_and_its_clocks_follow_optimizer_steps(tmp_path: Path) -> None:
    """B76: accelerate steps a scheduler once a process; the density falls once a step, whatever the scheduler does."""
    launch(WORKER, "accelerate", str(tmp_path), by=ACCELERATE)
    one, other = ranks_of(tmp_path, "accelerate")
    assert all(torch.equal(weight, other["weights"][key]) for key, weight in one["weights"].items())
    assert one["refreshes"] == other["refreshes"]
    for rank in (0, 1):
        clocks = json.loads((tmp_path / f"clocks-rank{rank}.json").read_text())
        # a line to zero over 100 steps is at zero after 50, since it was stepped twice a step
        assert clocks == {"step": STEPS, "progress": (STEPS - 1) / STEPS, "lr": 0.0, "density": 0.25}


@pytest.mark.slow
def test_an_update_fused_into_backward_is_refused(by_torchrun: Path) -> None:
    """B66: also where the model is wrapped after attach, before any weight moves."""
    for rank in (0, 1):
        said = json.loads((by_torchrun / f"fused-rank{rank}.json").read_text())
        assert said.keys() == {"DDP", "FSDP2", "wrapped later"}
        for text in said.values():
            assert "DDP and FSDP2 average it later. Train without attach on several processes" in text
