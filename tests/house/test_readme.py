"""README tells the truth: its tree is the house, its code runs, its bytes are the formula's."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import adafrugal
from adafrugal.plan.memory import GIB_BYTES, state_bytes_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)


def tree() -> set[str]:
    """The paths in the tree, from the root, folders without their slash."""
    (drawn,) = [text for kind, text in BLOCKS if not kind]
    paths, open_folders = set(), {}
    for line in drawn.splitlines():
        depth, name = len(line) - len(line.lstrip()), line.split()[0]
        assert len(line.split()) > 1 or name.endswith("/"), f"{name} says what it is"
        path = open_folders.get(depth - 2, "") + name
        open_folders[depth] = path
        paths.add(path.rstrip("/"))
    return paths


def test_the_tree_is_the_house() -> None:
    drawn = tree()
    assert not [path for path in drawn if not (ROOT / path).exists()]
    rooms = {str(p.parent.relative_to(ROOT)) for p in (ROOT / "src").rglob("__init__.py")} - {"src"}
    rooms |= {str(p.relative_to(ROOT)) for p in (ROOT / "tests").iterdir() if p.is_dir() and p.name[0] not in "_."}
    assert rooms <= drawn


def test_the_drop_in_runs_as_it_is_printed(capsys: pytest.CaptureFixture) -> None:
    (code,) = [text for kind, text in BLOCKS if kind == "python"]
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 64), nn.Linear(64, 16))
    given: dict = {"model": model, "validation_loss": 3.0}
    exec(code, given)
    optimizer = given["optimizer"]
    assert isinstance(optimizer, adafrugal.AdaFRUGAL)
    model(torch.arange(4)).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert "adamw_state_bytes" in capsys.readouterr().out


def test_the_bytes_are_those_of_the_formula() -> None:
    rows = {row.model.removeprefix("llama-").upper(): row for row in state_bytes_table()}
    found = re.findall(r"^\| (\d+[MB]) \| (.*) \|$", README, re.MULTILINE)
    assert [size for size, _ in found] == list(rows)
    for size, line in found:
        row = rows[size]
        expected = [row.adamw_bytes, *(row.split_bytes[d] for d in (0.25, 0.05, 0.0))]
        assert line.split(" | ") == [f"{count / GIB_BYTES:.2f}" for count in expected]


def test_commands_and_links_lead_somewhere() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (\w+)", README)) <= targets | {"train"}
    for command in ("make test", "make check"):
        assert command in (ROOT / ".ci" / "run").read_text()
    assert "make test" in README
    links = re.findall(r"\]\((?!http)([^)#\s]+)", README)
    assert len(links) >= 8
    assert not [link for link in links if not (ROOT / link).exists()]
    assert not re.search(r"^[A-Z_]+_TABLE$", README, re.MULTILINE), "every table is filled in"


def test_every_cell_of_the_loops_names_a_test_that_is_there() -> None:
    cells = re.findall(r'\[[^]]+\]\((tests/[^ )]+) "(\w+)"\)', README)
    assert len(cells) >= 45
    for path, name in cells:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"
