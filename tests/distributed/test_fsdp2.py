"""FSDP2 on two real processes: equal to one process, half the state on each, and saved in every form that resumes."""

import json
from pathlib import Path

import pytest
import torch
from launching import ALONE, HERE, launch

WORKER = HERE / "sharded_worker.py"
SUBSPACES = ("columns", "columns_scattered", "rows_striped", "blocks")
SAVED_AT = (1, 25, 40)
# Two ranks add the halves of a batch in another order than one process does: float64 noise, which a sign may double.
AGREES = 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty steps on one process and on two, with two refreshes and a falling density, saved three times."""
    where = tmp_path_factory.mktemp("fsdp2")
    launch(WORKER, "plain", str(where), by=ALONE)
    launch(WORKER, "sharded", str(where))
    return where


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - weight).abs().max()) for name, weight in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("subspace", SUBSPACES)
def test_two_ranks_equal_one_process(folder: Path, subspace: str) -> None:
    """B70: no rank needs another's elements, and the frames are those of the whole tensor."""
    expected = load(folder / f"{subspace}.pt")
    ranks = [load(folder / f"{subspace}-rank{rank}.pt") for rank in (0, 1)]
    assert distance(ranks[0]["weights"], expected["weights"]) <= AGREES
    assert distance(ranks[0]["weights"], ranks[1]["weights"]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("subspace", SUBSPACES)
def test_each_rank_holds_half_of_the_state(folder: Path, subspace: str) -> None:
    whole = load(folder / f"{subspace}.pt")["bytes"]
    halves = [load(folder / f"{subspace}-rank{rank}.pt")["bytes"] for rank in (0, 1)]
    for step in (1, 20, 50):
        for half in halves:
            assert 0.45 <= half[step] / whole[step] <= 0.55
    assert halves[0][50] < halves[0][1], "the density has fallen"


@pytest.mark.slow
def test_plain_and_sharded_parameters_mix(folder: Path) -> None:
    """B71: norms are ignored by fully_shard, and stay plain tensors beside DTensors."""
    expected = load(folder / "columns.pt")["weights"]
    for rank in (0, 1):
        assert distance(load(folder / f"ignored-rank{rank}.pt")["weights"], expected) <= AGREES


@pytest.mark.slow
def test_two_ranks_resume_in_new_processes(folder: Path) -> None:
    """B73: at step 1, in mid-gap and after a shrink, by torch.distributed.checkpoint and by accelerate, bit for bit."""
    launch(WORKER, "resume", str(folder))
    for rank in (0, 1):
        found = json.loads((folder / f"resume-rank{rank}.json").read_text())
        names = {f"{s} {step} {how}" for s in SUBSPACES for step in SAVED_AT for how in ("dcp", "accelerate")}
        assert found.keys() == names
        assert set(found.values()) == {0.0}


@pytest.mark.slow
def test_one_process_resumes_what_two_ranks_saved(folder: Path) -> None:
    launch(WORKER, "plain_resume", str(folder), by=ALONE)
    found = json.loads((folder / "plain_resume.json").read_text())
    assert found.keys() == {f"{s} {step}" for s in SUBSPACES for step in SAVED_AT}
    assert max(found.values()) <= AGREES


@pytest.mark.slow
def test_what_does_not_stay_within_a_shard_is_refused_when_built(folder: Path) -> None:
    """Each refusal names the tensor and the way out; so do FSDP1's flat parameters."""
    said = [json.loads((folder / f"refused-rank{rank}.json").read_text()) for rank in (0, 1)]
    assert said[0] == said[1]
    ways_out = {
        "rows": 'Use subspace="columns"',
        "random": "a basis would gather every matrix on every rank",
        "svd": "a basis would gather every matrix on every rank",
        "badam": 'Use FRUGAL(subspace="blocks", stateless_rule="none")',
        "uneven stripes": "a number of processes that divides the stripes",
        "to AdamW": "Save with torch.distributed.checkpoint, load it on one process",
        "from AdamW": "Save with torch.distributed.checkpoint, load it on one process",
        "FSDP1": "Shard with torch.distributed.fsdp.fully_shard, or fsdp_version: 2 in accelerate",
        "FSDP1 use_orig_params": "Shard with torch.distributed.fsdp.fully_shard, or fsdp_version: 2 in accelerate",
    }
    assert said[0].keys() == ways_out.keys()
    for name, way_out in ways_out.items():
        assert way_out in said[0][name], said[0][name]
        assert "layers.0." in said[0][name] or "FSDP1" in name or "AdamW" in name
