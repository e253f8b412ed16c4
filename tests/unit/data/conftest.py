"""Small corpora, and a check that no stream of random numbers but our own is touched."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def other_global_streams_are_left_alone() -> Iterator[None]:
    python, (kind, keys, *rest) = random.getstate(), np.random.get_state()
    yield
    assert random.getstate() == python, "the global stream of random was touched"
    after = np.random.get_state()
    assert (after[0], *after[2:]) == (kind, *rest), "the global stream of numpy was touched"
    assert np.array_equal(after[1], keys), "the global stream of numpy was touched"


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Forty files in two folders, of a few hundred bytes each; some are held out by the rule of 20."""
    folder = tmp_path / "texts"
    for index in range(40):
        path = folder / ("odd" if index % 2 else "even") / f"{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"File {index} has a line {line}, with Việt words.\n" for line in range(9)))
    return folder


def write_records(path: Path, texts: list[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": index, field: text}) + "\n" for index, text in enumerate(texts)))
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Serve local files under the name of a hub data set: the library is real, only the network is not there."""

    def serve(splits: dict[str, list[list[str]]], field: str = "text") -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        shards = {
            split: [
                str(write_records(tmp_path / "hub" / f"{split}-{n}.jsonl", shard, field)) for n, shard in enumerate(s)
            ]
            for split, s in splits.items()
        }
        real = datasets.load.load_dataset  # the package's own name for it is the one that is replaced

        def load_dataset(name: str, config: str | None = None, *, split: str, streaming: bool) -> Any:
            calls.append({"name": name, "config": config, "split": split, "streaming": streaming})
            cache = None if streaming else str(tmp_path / "cache")
            return real("json", data_files=shards, split=split, streaming=streaming, cache_dir=cache)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    return serve
