"""The house itself: file sizes, first lines, names, and the cost of importing it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
LONGEST = 450
FORBIDDEN_NAMES = {"utils", "util", "helpers", "common", "base", "misc"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_file_says_its_idea_first_and_is_no_longer_than_one_idea(path: Path) -> None:
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring, "begins with a docstring"
    assert len(docstring.splitlines()[0]) > 20, "whose first line says the idea"
    assert text.count("\n") <= LONGEST
    assert path.stem not in FORBIDDEN_NAMES


def test_importing_needs_torch_alone_and_adds_little_time() -> None:
    probe = (
        "import sys, time; import torch; start = time.perf_counter(); before = set(sys.modules); import adafrugal; "
        "print(time.perf_counter() - start); "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
        time_line, modules = done.stdout.splitlines()
        seconds.append(float(time_line))
        assert modules.split() == ["adafrugal"]
    assert min(seconds) <= 0.2, "seconds that importing adafrugal adds to importing torch"
