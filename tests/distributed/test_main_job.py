"""`adafrugal train` on two real processes: one job, equal to that of one process, that stops, resumes and fails as one.

Weights are float64 where runs are compared: in float32 a gradient that is rounding noise may change its sign, and then
two right runs differ by a whole step there.
"""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from launching import ACCELERATE, ALONE, HERE, TORCHRUN, launch

from adafrugal.data.tokenizer import TokenizerConfig, open_tokenizer
from adafrugal.train.checkpoint import Checkpoints

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

WORKER = HERE / "main_job_worker.py"
STEPS, HALF, SHORT = 60, 30, 12
# Halves of a batch are added in another order than the whole: float64 noise, and that of the float32 loss's gradient.
AGREES = 1e-6
REFUSED = {
    "rows": (["--parallel", "fsdp2", "--optim.subspace", "rows"], 'Use subspace="columns"'),
    "random": (["--parallel", "fsdp2", "--optim.subspace", "random"], "a basis would gather every matrix"),
    "svd": (["--parallel", "fsdp2", "--optim.name", "galore"], "subspaces of lines or blocks"),
    "badam": (["--parallel", "fsdp2", "--optim.name", "badam"], "a method that freezes what is idle"),
    "fused": (["--fused_backward", "true", "--max_grad_norm", "0"], "gradients are averaged over the processes"),
    "odd": (["--batch.sequences", "5"], "received 5; allowed is a multiple of 2"),
    "micro": (["--batch.micro_sequences", "3"], "at most the 2 windows of a step on each of 2 processes"),
    "none": (["--parallel", "none"], "received 2 processes; allowed is ddp, fsdp2 or auto"),
    "device": (["--device", "cuda:1"], "each process takes the GPU of its own number"),
}
MOVING = ["--optim.update_gap", "7", "--optim.update_gap_max", "20", "--optim.plateau_tolerance", "0.02"]


def options(folder: Path, moving: bool = True) -> list[str]:
    return [
        *("--model", str(folder / "start"), "--text.source", str(folder / "text.txt"), "--device", "cpu"),
        *("--batch.sequence_length", "16", "--batch.sequences", "4", "--eval.every_steps", "5", "--eval.windows", "5"),
        *("--checkpoint.every_steps", "1000", "--log_every_steps", "5", "--sample.tokens", "4"),
        *(MOVING if moving else []),
    ]


def run(folder: Path, name: str, *more: str, steps: int = STEPS, moving: bool = True, **stop: object) -> dict:
    words = ["train", "--out", str(folder / name), *options(folder, moving), "--budget.steps", str(steps), *more]
    return {"name": name, "words": words, **stop}


def resumed(folder: Path, name: str, source: str, *more: str) -> dict:
    """A copy of a stopped run goes on."""
    shutil.copytree(folder / source, folder / name)
    return {"name": name, "words": ["train", "--resume", str(folder / name), *more]}


def carry_out(folder: Path, name: str, plan: list[dict], by: tuple[str, ...] = TORCHRUN) -> None:
    (folder / f"{name}.json").write_text(json.dumps(plan))
    launch(WORKER, str(folder), str(folder / f"{name}.json"), by=by)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers and a text; then runs on one process and on two, and new processes that resume them."""
    where = tmp_path_factory.mktemp("main_job")
    generator = torch.Generator().manual_seed(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dog", "run", "to", "red", "barn", "rain", "fell"]
    drawn = [words[i] for i in torch.randint(len(words), (3000,), generator=generator).tolist()]
    (where / "text.txt").write_text(" ".join(drawn) + "\n")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=257, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(where / "start")
    open_tokenizer(TokenizerConfig(), None, where).save(where / "start")

    exact = ("--weights", "float64")
    small = ("--batch.micro_sequences", "1")  # of two windows on each rank: accumulation
    badam = ("--optim.name", "badam", "--optim.update_gap", "3")
    adamw = ("--optim.name", "adamw", "--parallel", "fsdp2")
    autocast = ("--autocast", "true", "--activation_checkpointing", "true")
    alone = [
        run(where, "one", *exact),
        run(where, "one_stopped", *exact, stop_at=HALF, stop_rank=0),
        run(where, "badam_one", *exact, *badam, steps=SHORT, moving=False),
        run(where, "sgd_one", "--optim.name", "sgd", steps=SHORT, moving=False),
    ]
    carry_out(where, "alone", alone, by=ALONE)
    both = [
        run(where, "ddp", *exact, *small),
        run(where, "ddp_stopped", *exact, *small, stop_at=HALF, stop_rank=1),
        run(where, "fsdp2", *exact, *small, "--parallel", "fsdp2"),
        run(where, "fsdp2_stopped", *exact, *small, "--parallel", "fsdp2", stop_at=HALF, stop_rank=1),
        run(where, "badam_two", *exact, *badam, steps=SHORT, moving=False),
        run(where, "sgd_two", "--optim.name", "sgd", steps=SHORT, moving=False),
        run(where, "low", "--weights", "bfloat16", *small, steps=SHORT),
        run(where, "low_fsdp2", "--weights", "bfloat16", "--parallel", "fsdp2", steps=SHORT),
        run(where, "autocast", *autocast, "--parallel", "fsdp2", steps=4),
        run(where, "adamw", *adamw, steps=SHORT, moving=False),
        run(where, "adamw_stopped", *adamw, steps=SHORT, moving=False, stop_at=5),
        run(where, "timed", "--budget.seconds", "1.5", steps=100_000),
        *(run(where, f"refused_{name}", *more, steps=4, moving=False) for name, (more, _) in REFUSED.items()),
    ]
    carry_out(where, "both", both)
    again = [
        resumed(where, "ddp_resumed", "ddp_stopped"),
        resumed(where, "fsdp2_resumed", "fsdp2_stopped"),
        resumed(where, "one_to_ddp", "one_stopped"),
        resumed(where, "one_to_fsdp2", "one_stopped", "--parallel", "fsdp2"),
        resumed(where, "adamw_resumed", "adamw_stopped"),
    ]
    carry_out(where, "again", again)
    back = [
        resumed(where, "one_resumed", "one_stopped"),
        resumed(where, "ddp_to_one", "ddp_stopped"),
        resumed(where, "fsdp2_to_one", "fsdp2_stopped", "--parallel", "auto"),
    ]
    carry_out(where, "back", back, by=ALONE)
    return where


def seen(folder: Path, name: str, rank: int = 0) -> dict:
    return torch.load(folder / f"{name}-rank{rank}.pt", weights_only=True)


def both_of(folder: Path, name: str) -> tuple[dict, dict]:
    return seen(folder, name, 0), seen(folder, name, 1)


def distance(found: dict, expected: dict) -> float:
    assert found["weights"].keys() == expected["weights"].keys() != set()
    return max(float((found["weights"][n] - w).abs().max()) for n, w in expected["weights"].items())


def summary(folder: Path, name: str) -> dict:
    return json.loads((folder / name / "summary.json").read_text())


@pytest.mark.parametrize("name", ["ddp", "low", "badam_two", "sgd_two"])
def test_replicas_stay_equal_to_the_last_bit(folder: Path, name: str) -> None:
    """After every step, stochastic rounding and frozen layers included."""
    first, second = both_of(folder, name)
    assert first["code"] == second["code"] == 0, first["err"]
    assert first["steps"] == second["steps"]
    assert distance(first, second) == 0.0


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_ranks_refresh_shrink_and_grow_the_gap_at_the_same_steps_as_one_process(folder: Path, name: str) -> None:
    keys = ("refreshed_at", "update_gap", "density", "lr")
    one, first, second = ([{k: s[k] for k in keys} for s in seen(folder, *who)["steps"]] for who in (
        ("one", 0), (name, 0), (name, 1)))  # fmt: skip
    assert first == second == one
    assert len({s["refreshed_at"] for s in one}) >= 4
    assert one[-1]["update_gap"] > one[0]["update_gap"], "the controller has moved the gap"
    assert one[-1]["density"] < one[0]["density"]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_equal_one(folder: Path, name: str) -> None:
    """Sixty steps of the default method with accumulation and clipping, losses and norms at every step included."""
    one, two = seen(folder, "one"), seen(folder, name)
    assert distance(two, one) <= AGREES
    assert len(one["steps"]) == len(two["steps"]) == STEPS
    for a, b in zip(one["steps"], two["steps"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5), "the loss itself is float32"
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
    assert any(s["grad_norm"] > 1.0 for s in one["steps"]), "clipping has acted"
    ours, theirs = summary(folder, name), summary(folder, "one")
    for key in ("tokens", "flops", "num_parameters"):
        assert ours[key] == theirs[key], key
    for key in ("peak_optimizer_state_bytes", "final_optimizer_state_bytes"):
        assert theirs[key] <= ours[key] <= 1.001 * theirs[key], "shards add up; where each window lies is on every rank"
    assert ours["final_val_loss"] == pytest.approx(theirs["final_val_loss"], rel=1e-5)
    assert (ours["parallel"], ours["num_processes"]) == (name, 2)
    assert (theirs["parallel"], theirs["num_processes"]) == ("none", 1)


@pytest.mark.parametrize("method", ["badam", "sgd"])
def test_other_methods_equal_one_process_under_ddp(folder: Path, method: str) -> None:
    """BAdam takes layers in turn, which DDP must follow; SGD has no sign, so float32 will do."""
    assert distance(seen(folder, f"{method}_two"), seen(folder, f"{method}_one")) <= AGREES


@pytest.mark.parametrize("name", ["low", "low_fsdp2", "autocast", "adamw"])
def test_low_precision_and_torchs_adamw_train(folder: Path, name: str) -> None:
    first, second = both_of(folder, name)
    assert first["code"] == second["code"] == 0, first["err"]
    assert distance(first, second) == 0.0, "weights gathered on each rank are the same"
    losses = [step["loss"] for step in first["steps"]]
    assert losses[-1] < losses[0]
    expected = torch.bfloat16 if name.startswith("low") else torch.float32
    assert {weight.dtype for weight in first["weights"].values()} == {expected}


def test_a_stop_on_one_rank_stops_all_at_the_same_step(folder: Path) -> None:
    for name in ("ddp_stopped", "fsdp2_stopped"):
        first, second = both_of(folder, name)
        assert len(first["steps"]) == len(second["steps"]) == HALF
        assert summary(folder, name)["ended_by"] == "interrupt"
        assert summary(folder, name)["steps"] == HALF


@pytest.mark.parametrize(("name", "straight", "limit"), [
    ("one_resumed", "one", 0.0),
    ("ddp_resumed", "ddp", 0.0),
    ("fsdp2_resumed", "fsdp2", 0.0),
    ("adamw_resumed", "adamw", 0.0),
    ("one_to_ddp", "one", AGREES),
    ("one_to_fsdp2", "one", AGREES),
    ("ddp_to_one", "one", AGREES),
    ("fsdp2_to_one", "one", AGREES),
])  # fmt: skip
def test_thirty_steps_saved_and_resumed_by_new_processes_are_the_sixty(folder, name, straight, limit) -> None:
    """On as many processes as before to the last bit; from one to two and back as near as two are to one."""
    found = seen(folder, name)
    assert found["code"] == 0, found["err"]
    assert "at step" in found["out"]
    assert distance(found, seen(folder, straight)) <= limit
    ours, theirs = summary(folder, name), summary(folder, straight)
    assert (ours["steps"], ours["tokens"]) == (theirs["steps"], theirs["tokens"])
    training = [each["ledger"]["training"]["flops"] for each in (ours, theirs)]
    assert training[0] == training[1]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_checkpoint_and_model_are_those_of_one_process(folder: Path, name: str) -> None:
    files = [Checkpoints(folder / who / "checkpoints", 2).newest() for who in (name, "one")]
    ours, theirs = (Checkpoints(path.parent, 2).load(path) for path in files)
    assert ours["model"].keys() == theirs["model"].keys()
    assert [g["param_names"] for g in ours["optimizer"]["param_groups"]] == [
        g["param_names"] for g in theirs["optimizer"]["param_groups"]
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name / "model", dtype=torch.float64)
    trained = seen(folder, name)["weights"]
    assert all(torch.equal(value, trained[key]) for key, value in model.named_parameters())
    assert json.loads((folder / name / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_the_first_ranks_clock_decides_for_all(folder: Path) -> None:
    first, second = both_of(folder, "timed")
    assert len(first["steps"]) == len(second["steps"]) > 2
    assert first["steps"] == second["steps"], "the schedules read one clock"
    assert summary(folder, "timed")["ended_by"] == "seconds"
    assert summary(folder, "timed")["seconds"] < 3.0, "within a step, and the one thread's load, of 1.5"


def test_only_the_first_rank_speaks_and_writes(folder: Path) -> None:
    first, second = both_of(folder, "ddp")
    assert "2 processes with ddp" in first["out"]
    assert second["out"] == second["err"] == first["err"] == ""
    records = [json.loads(line) for line in (folder / "ddp" / "metrics.jsonl").read_text().splitlines()]
    trained = [record["step"] for record in records if "train_loss" in record]
    assert trained == sorted(set(trained)), "each step is logged once"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_one_sentence_before_the_first_step(folder: Path, name: str) -> None:
    first, second = both_of(folder, f"refused_{name}")
    assert first["code"] == second["code"] == 2
    assert REFUSED[name][1] in first["err"]
    assert len(first["err"].splitlines()) == 1
    assert second["err"] == first["err"].replace("adafrugal:", "adafrugal (process 1 of 2):"), "if it is alone with it"
    assert first["steps"] == []
    assert not (folder / f"refused_{name}").exists()


# --- as a user starts it ----------------------------------------------------------------------------------------------


def command(by: tuple[str, ...], *words: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*by, *words], env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_the_command_runs_under_both_launchers(folder: Path, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    if launcher is ACCELERATE:
        pytest.importorskip("accelerate")
    words = ["train", "--out", str(tmp_path / "run"), *options(folder), "--budget.steps", "4", "--parallel", "fsdp2"]
    done = command(launcher, "-m", "adafrugal", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended by") == 1
    assert "2 processes with fsdp2" in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4


def test_a_refusal_ends_the_job_with_one_sentence_and_no_traceback(folder: Path, tmp_path: Path) -> None:
    words = ["train", "--out", str(tmp_path / "run"), *options(folder, moving=False), "--parallel", "fsdp2"]
    done = command(TORCHRUN, "-m", "adafrugal", *words, "--optim.name", "badam")
    ours = [line for line in done.stderr.splitlines() if line.startswith(("adafrugal:", "adafrugal ("))]
    assert len(ours) == 1
    assert "a method that freezes what is idle" in ours[0]
    assert "exitcode  : 2" in done.stderr, "torchrun's own table of what ended"
    assert "adafrugal/" not in done.stderr, "no traceback through the package"


def test_the_death_of_one_rank_ends_all(folder: Path) -> None:
    plan = [run(folder, "dies", steps=100_000, stop_at=5, stop_rank=1, dies=True)]
    (folder / "dies.json").write_text(json.dumps(plan))
    started = time.monotonic()
    done = command(TORCHRUN, str(WORKER), str(folder), str(folder / "dies.json"))
    assert done.returncode != 0
    assert time.monotonic() - started < 100
    assert not (folder / "dies" / "summary.json").exists()
    assert "Signal 9 (SIGKILL)" in done.stderr, "torchrun names the rank that died"
    assert "adafrugal/" not in done.stderr.replace("adafrugal/tests", ""), "no traceback through the package"
