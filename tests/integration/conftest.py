"""A text of a few kilobytes and the options of a run of a second, for the tests of the main job."""

import json
from pathlib import Path

import pytest

from adafrugal.cli import main

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "saw",
    "the",
    "dog",
    "run",
    "to",
    "the",
    "red",
    "barn",
    "while",
    "rain",
    "fell",
    "over",
    "old",
    "stone",
    "walls",
]


def prose(num_lines: int) -> str:
    """Lines that a byte model can learn something from, and that depend on nothing."""
    state, lines = 1, []
    for _ in range(num_lines):
        line = []
        for _ in range(8):
            state = (state * 1103515245 + 12345) % 2**31
            line.append(WORDS[(state >> 16) % len(WORDS)])
        lines.append(" ".join(line) + ".")
    return "\n".join(lines) + "\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of forty small files, of which some are held out."""
    folder = tmp_path / "text"
    folder.mkdir()
    content = prose(400).splitlines(keepends=True)
    for i in range(40):
        (folder / f"part{i:02d}.txt").write_text("".join(content[10 * i : 10 * i + 10]))
    return folder


@pytest.fixture
def options(text: Path) -> list[str]:
    """A run of the smallest size: 32-byte windows, four of them a step."""
    return [
        *("--text.source", str(text), "--batch.sequence_length", "32", "--batch.sequences", "4"),
        *("--eval.every_steps", "5", "--eval.windows", "4", "--checkpoint.every_steps", "4"),
        *("--log_every_steps", "2", "--sample.tokens", "8", "--optim.update_gap", "3", "--optim.update_gap_max", "8"),
    ]


class Run:
    """A finished run, and what it left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary = json.loads((folder / "summary.json").read_text())
        self.records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def weights(self) -> bytes:
        return (self.folder / "model" / "model.safetensors").read_bytes()

    def of(self, key: str) -> list:
        return [record[key] for record in self.records if record.get(key) is not None]


@pytest.fixture
def train(tmp_path: Path, options: list[str], monkeypatch):
    """Run `adafrugal train` in this process and read what it left."""
    monkeypatch.setenv("ADAFRUGAL_CACHE", str(tmp_path / "cache"))

    def run(name: str, *more: str) -> Run:
        folder = tmp_path / name
        assert main(["train", "--out", str(folder), *options, *more]) == 0
        return Run(folder)

    return run
