"""Every example runs as it is, offline on its tiny defaults, is short, and does what its first line says."""

import ast
import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("plain_loop", "accelerate", "lightning", "compile")]
LONGEST = 80
NEEDS = {"accelerate", "lightning", "peft", "transformers", "trl"}
ON_TWO_PROCESSES = {"fsdp2"}


def imported(code: str) -> set[str]:
    """The libraries that some code imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_example(name: str, folder: Path, *words: str) -> str:
    path = ROOT / "examples" / f"{name}.py"
    for library in sorted(imported(path.read_text()) & NEEDS):
        pytest.importorskip(library)
    launcher = [sys.executable]
    if name in ON_TWO_PROCESSES:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run([*launcher, str(path), *words], folder)


@functools.cache
def default_run(name: str) -> str:
    """What an example prints on its defaults; several tests look at it."""
    with tempfile.TemporaryDirectory() as folder:
        return run_example(name, Path(folder))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_runs_on_its_defaults(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LONGEST
    first, *rest = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    assert len(first) > 20
    assert any(f"examples/{path.stem}.py" in line for line in rest), "says how to run it"
    assert default_run(path.stem).strip(), "prints what it did"


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, text
    return [float(number) for number in found.groups()]


def test_the_drop_in_learns_and_lands_at_its_last_density(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    out = run_example("drop_in", tmp_path, "--text", str(text), "--steps", "60")
    (first,) = numbers(r"step 10: held-out loss ([\d.]+)", out)
    last, density = numbers(r"step 60: held-out loss ([\d.]+), density ([\d.]+)", out)
    assert last < first
    assert density == 0.05
    held, adamw = numbers(r"state: (\d+) bytes; AdamW would hold (\d+)", out)
    assert held < 0.5 * adamw


def test_a_resumed_run_ends_at_the_same_checksum(tmp_path: Path) -> None:
    whole = run_example("resume", tmp_path, "--out", "whole").splitlines()[-1]
    run_example("resume", tmp_path, "--out", "cut", "--stop_at", "30")
    resumed = run_example("resume", tmp_path, "--out", "cut").splitlines()
    assert resumed[0].startswith("resumed at step 30")
    assert resumed[-1] == whole


def test_the_fused_backward_is_the_same_and_its_peak_is_lower() -> None:
    out = default_run("fused_backward")
    assert "losses are the same, bit for bit" in out
    gradients, plain, fused = numbers(r"gradients: (\d+) bytes; peak of a step: (\d+) plain, (\d+) fused", out)
    assert fused <= plain - 0.8 * gradients


def test_a_run_that_moves_from_adamw_goes_on_learning_with_less() -> None:
    out = default_run("move_from_adamw")
    (before,) = numbers(r"AdamW: loss ([\d.]+)", out)
    (after,) = numbers(r"AdaFRUGAL: loss ([\d.]+)", out)
    (again,) = numbers(r"AdamW again: loss ([\d.]+)", out)
    assert after < before
    assert again < before
    held, adamw = numbers(r"after the change: (\d+) bytes; AdamW held (\d+)", out)
    assert held < 0.5 * adamw


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_code_on_a_page_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    """All blocks of a page are one program, and what its shell blocks start exists."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", path.read_text(), re.DOTALL)
    code = "\n".join(text for kind, text in blocks if kind == "python")
    assert code
    for library in sorted(imported(code) & NEEDS):
        pytest.importorskip(library)
    (tmp_path / "page.py").write_text(code)
    run([sys.executable, "page.py"], tmp_path)
    for words in [text.split() for kind, text in blocks if kind == "bash"]:
        files = [word for word in words if word.startswith("examples/")]
        assert files
        assert all((ROOT / file).exists() for file in files)
