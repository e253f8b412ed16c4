"""A run that is killed, stopped or starved goes on as if nothing had happened, or from the last good checkpoint."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from adafrugal.cli import main
from adafrugal.core.errors import CheckpointError
from adafrugal.train.checkpoint import Checkpoints, write_atomically

pytest.importorskip("transformers")

STEPS = 30
KILLS = """
import json, os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from adafrugal.cli import main
import transformers.models.llama.modeling_llama  # paid once, before the forks

folder, options, num_kills = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
draws = random.Random(7)

def child(words, quiet=True):
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        if quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main(words))
    return pid

def finish(words):
    _, status = os.waitpid(child(words), 0)
    assert os.waitstatus_to_exitcode(status) == 0, words

def logged(run):
    try:
        with open(f"{run}/metrics.jsonl", "rb") as log:
            return log.read().count(b"\\n")
    except FileNotFoundError:
        return 0

start = time.monotonic()
finish(["train", "--out", f"{folder}/straight", *options])
whole, num_lines = time.monotonic() - start, logged(f"{folder}/straight")
killed = []
for i in range(num_kills):
    run = f"{folder}/killed{i}"
    pid = child(["train", "--out", run, *options])
    lines = draws.randrange(num_lines - 4)  # of the log: a moment that does not depend on how busy the machine is
    while logged(run) < lines or not os.path.exists(f"{run}/config.yaml"):
        time.sleep(0.001)
    time.sleep(draws.uniform(0.0, 2 * whole / num_lines))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    killed.append(os.WIFSIGNALED(status) and not os.path.exists(f"{run}/summary.json"))
    left = sorted(os.listdir(f"{run}/checkpoints")) if os.path.isdir(f"{run}/checkpoints") else []
    finish(["train", "--resume", run])
    print(i, killed[-1], left, flush=True)
print(json.dumps(killed))
"""


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def log_of(folder: Path) -> list[dict]:
    drop = ("seconds", "tokens_per_second")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in drop} for line in lines]


@pytest.mark.slow
def test_twenty_kills_at_random_moments_leave_no_trace(tmp_path: Path, options: list[str]) -> None:
    """Checkpoints at every third step, so that many kills fall into the writing of one."""
    given = [*options, "--budget.steps", str(STEPS), "--checkpoint.every_steps", "3", "--sample.tokens", "0"]
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), json.dumps(given), "20"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    killed = json.loads(done.stdout.splitlines()[-1])
    assert sum(killed) >= 15, "most kills came before the end"
    straight = tmp_path / "straight"
    for i in range(20):
        run = tmp_path / f"killed{i}"
        assert weights(run) == weights(straight), done.stdout
        assert log_of(run) == log_of(straight), "every step is logged once"
        drop = ("seconds", "setup_seconds", "tokens_per_second", "command", "ledger")
        ours, theirs = (json.loads((r / "summary.json").read_text()) for r in (run, straight))
        assert {k: v for k, v in ours.items() if k not in drop} == {k: v for k, v in theirs.items() if k not in drop}
        for name in ("training", "evaluation"):
            for currency in ("flops", "tokens"):
                assert ours["ledger"][name][currency] == theirs["ledger"][name][currency], "spent once"
        assert not [p for p in (run / "checkpoints").iterdir() if p.name.startswith(".")], (
            "nothing half-written is left"
        )


@pytest.mark.parametrize("optimizer", ["adafrugal", "badam", "adamw", "galore"])
def test_a_finished_run_resumed_from_its_middle_is_the_same_run(train, tmp_path, optimizer) -> None:
    more = [
        "--optim.name",
        optimizer,
        "--optim.update_gap_max",
        "null",
        "--budget.steps",
        "14",
        "--checkpoint.keep",
        "9",
    ]
    if optimizer == "adamw":
        more += ["--optim.update_gap", "null"]
    run = train("run", *more)
    before = weights(run.folder)
    logged = log_of(run.folder)
    for name in ("step-000000014", "step-000000012"):
        for path in (run.folder / "checkpoints" / name).iterdir():
            path.unlink()
        (run.folder / "checkpoints" / name).rmdir()
    (run.folder / "summary.json").unlink()
    assert main(["train", "--resume", str(run.folder)]) == 0
    assert weights(run.folder) == before
    assert log_of(run.folder) == logged


def test_a_resume_says_where_it_goes_on(train, capsys) -> None:
    run = train("run", "--budget.steps", "8")
    capsys.readouterr()
    assert main(["train", "--resume", str(run.folder)]) == 0
    out = capsys.readouterr().out
    assert "at step 8: held-out loss" in out
    assert "1,024 tokens" in out


def test_a_stop_by_ctrl_c_saves_and_sums_up_and_goes_on(tmp_path: Path, options: list[str]) -> None:
    given = [*options, "--budget.steps", "400", "--checkpoint.every_steps", "1000", "--eval.every_steps", "1000"]
    command = [sys.executable, "-m", "adafrugal", "train", "--out", str(tmp_path / "stopped"), *given]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "stopped" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and '"train_loss"' in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    summary = json.loads((tmp_path / "stopped" / "summary.json").read_text())
    assert summary["ended_by"] == "interrupt"
    assert 0 < summary["steps"] < 400
    assert "ended by" in out
    assert (tmp_path / "stopped" / "checkpoints" / f"step-{summary['steps']:09d}").is_dir()
    assert main(["train", "--resume", str(tmp_path / "stopped")]) == 0
    assert main(["train", "--out", str(tmp_path / "straight"), *given]) == 0
    assert weights(tmp_path / "stopped") == weights(tmp_path / "straight")


def test_a_time_budget_survives_a_kill_and_is_kept(tmp_path: Path, options: list[str]) -> None:
    budget, folder = 6.0, tmp_path / "run"
    given = [*options, "--budget.seconds", str(budget), "--checkpoint.every_steps", "2", "--log_every_steps", "1"]
    process = subprocess.Popen([sys.executable, "-m", "adafrugal", "train", "--out", str(folder), *given])
    while not ((folder / "metrics.jsonl").exists() and len((folder / "metrics.jsonl").read_text().splitlines()) > 5):
        assert process.poll() is None, "it is still to be killed, however slow the machine"
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not (folder / "summary.json").exists()
    assert main(["train", "--resume", str(folder)]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert summary["ended_by"] == "seconds"
    steps = [r for r in records if "train_loss" in r]
    slowest = max(b["seconds"] - a["seconds"] for a, b in pairwise(steps))
    assert budget - 2 * slowest - 0.5 <= summary["seconds"] <= budget + slowest + 0.5, "within a step, over both lives"
    assert steps[-1]["density"] == 0.05, "the schedules have landed"
    assert steps[-1]["lr"] < 0.15 * max(r["lr"] for r in steps)


def test_what_may_and_what_may_not_change_on_a_resume(train, capsys, tmp_path: Path) -> None:
    run = train("run", "--budget.steps", "4")
    capsys.readouterr()
    for option, value, message in (
        ("--seed", "5", "seed=5; allowed is seed=0, as the run began"),
        ("--model", "llama-60m", "model=llama-60m; allowed is model=tiny"),
        ("--optim.density", "0.5", "optim.density=0.5; allowed is optim.density=None"),
        ("--budget.steps", "40", "budget.steps=40; allowed is budget.steps=4"),
    ):
        assert main(["train", "--resume", str(run.folder), option, value]) == 2
        assert message in capsys.readouterr().err
    assert main(["train", "--resume", str(run.folder), "--log_every_steps", "1"]) == 0
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "which holds no config.yaml" in capsys.readouterr().err


def test_a_changed_text_is_refused(train, text: Path, capsys) -> None:
    run = train("run", "--budget.steps", "4")
    (text / "part00.txt").write_text("something else entirely\n" * 20)
    capsys.readouterr()
    assert main(["train", "--resume", str(run.folder)]) == 2
    assert "a text with hash" in capsys.readouterr().err


def test_another_models_weights_are_refused(train, capsys) -> None:
    run = train("run", "--budget.steps", "4")
    checkpoints = Checkpoints(run.folder / "checkpoints", 2)
    newest = checkpoints.newest()
    parts = checkpoints.load(newest)
    parts["model"] = {"nothing": torch.zeros(1)}
    checkpoints.save(4, parts)
    capsys.readouterr()
    assert main(["train", "--resume", str(run.folder)]) == 2
    assert "weights of another model" in capsys.readouterr().err


def test_a_full_disk_leaves_the_last_good_checkpoint_and_training_goes_on(train, monkeypatch) -> None:
    straight = train("straight", "--budget.steps", "12")
    real, calls = torch.save, []

    def save(part, stream):
        calls.append(1)
        if len(calls) == 8:  # in the middle of the second checkpoint
            stream.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(part, stream)

    monkeypatch.setattr(torch, "save", save)
    with pytest.warns(UserWarning, match=r"checkpoint at step 8 could not be written.*No space left.*step-000000004"):
        run = train("run", "--budget.steps", "12")
    assert weights(run.folder) == weights(straight.folder)
    assert sorted(p.name for p in (run.folder / "checkpoints").iterdir()) == ["step-000000004", "step-000000012"]


def test_a_real_limit_on_file_sizes_is_survived_too(tmp_path: Path) -> None:
    """The kernel refuses to write more than a megabyte to any file: no checkpoint fits, and none is taken for one."""
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "from adafrugal.train.checkpoint import Checkpoints; from pathlib import Path; import torch;"
        "c = Checkpoints(Path(sys.argv[1]), 2); c.save(1, {'small': torch.zeros(10)})\n"
        "try:\n    c.save(2, {'small': torch.zeros(10), 'large': torch.zeros(1 << 20)})\n"
        "except OSError as error:\n    print('refused', error.errno)\n"
        "print(c.newest().name)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused", str(errno.EFBIG), "step-000000001"]
    assert os.listdir(tmp_path) == ["step-000000001"]


# --- the checkpoint folder itself ---------------------------------------------------------------------------------


def test_a_broken_checkpoint_is_passed_over_and_never_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 9)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, {"a": torch.full((100,), float(step)), "b": {"n": step}})
    (tmp_path / "step-000000004" / "manifest.json").unlink()
    data = bytearray((tmp_path / "step-000000003" / "a.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "step-000000003" / "a.pt").write_bytes(bytes(data))
    (tmp_path / "step-000000002" / "b.pt").write_bytes(b"")
    with pytest.warns(UserWarning, match="is broken"):
        newest = checkpoints.newest()
    assert newest == tmp_path / "step-000000001"
    assert checkpoints.load(newest)["b"] == {"n": 1}
    with pytest.raises(CheckpointError, match=r"a\.pt is not what was written"):
        checkpoints.load(tmp_path / "step-000000003")


def test_rotation_keeps_the_newest_and_sweeps_what_a_kill_left(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (5, 10, 15):
        checkpoints.save(step, {"a": torch.zeros(2)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000010", "step-000000015"]
    (tmp_path / ".writing-000000020").mkdir()
    (tmp_path / ".old-step-000000005").mkdir()
    (tmp_path / "step-7").mkdir()
    assert checkpoints.newest() == tmp_path / "step-000000015"
    checkpoints.sweep()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000010", "step-000000015", "step-7"]


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(1, {"a": torch.zeros(2)})
    manifest = tmp_path / "step-000000001" / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "format_version": 99}))
    with pytest.raises(CheckpointError, match="format version 99"):
        checkpoints.load(tmp_path / "step-000000001")


def test_a_checkpoint_holds_tensors_and_plain_data_only(train) -> None:
    run = train("run", "--budget.steps", "4")
    for path in (run.folder / "checkpoints" / "step-000000004").glob("*.pt"):
        torch.load(path, weights_only=True)


def test_text_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / "summary.json"
    write_atomically(target, "before")

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(target, "after")
    assert target.read_text() == "before"
    assert os.listdir(tmp_path) == ["summary.json"]
