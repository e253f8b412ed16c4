"""Hub data sets: routing of names, whole and streamed, with the real library on local files."""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from adafrugal.core.errors import ConfigError, DataError
from adafrugal.data import corpus as corpus_module
from adafrugal.data import splitting
from adafrugal.data.corpus import TextConfig, open_corpus

Serve = Callable[..., list[dict[str, Any]]]

TEXTS = [f"Record {index} tells a short story." for index in range(120)]
SHARDS = [TEXTS[:50], TEXTS[50:51], TEXTS[51:]]


def rule(index: int) -> bool:
    return int(hashlib.sha256(f"owner/stories:{index}".encode()).hexdigest(), 16) % 20 == 0


def texts(documents: Any) -> list[str]:
    return [document.text for document in documents]


@pytest.mark.parametrize("streaming", [True, False])
def test_records_are_held_out_by_name_and_index(hub: Serve, streaming: bool) -> None:
    calls = hub({"train": SHARDS})
    corpus = open_corpus(TextConfig(source="owner/stories", hub_config="en", streaming=streaming))
    assert calls[0] == {"name": "owner/stories", "config": "en", "split": "train", "streaming": streaming}
    assert texts(corpus.validation()) == [text for index, text in enumerate(TEXTS) if rule(index)] != []
    assert texts(corpus.train()) == [text for index, text in enumerate(TEXTS) if not rule(index)]
    assert corpus.is_streaming == streaming
    assert corpus.name == "owner/stories (en)"
    assert (corpus.num_bytes is None) == (corpus.num_documents is None) == streaming


def test_a_short_name_stands_for_its_full_one(hub: Serve) -> None:
    calls = hub({"train": [TEXTS]})
    open_corpus(TextConfig(source="tinystories", streaming=False))
    assert calls[0]["name"] == "roneneldan/TinyStories"


def test_a_folder_here_comes_before_the_hub(hub: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub({"train": [TEXTS]})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "stories").mkdir(parents=True)
    (tmp_path / "owner" / "stories" / "a.txt").write_text("local text\n" * 50)
    assert open_corpus(TextConfig(source="owner/stories")).name == "stories"
    assert calls == []


@pytest.mark.parametrize("streaming", [True, False])
def test_a_validation_split_leaves_the_training_split_whole(
    hub: Serve, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    monkeypatch.setattr(corpus_module, "VALIDATION_STREAM_RECORDS", 2)
    hub({"train": SHARDS, "validation": [["one", "two", "three"]]})
    config = TextConfig(source="owner/stories", hub_validation_split="validation", streaming=streaming)
    corpus = open_corpus(config)
    assert texts(corpus.train()) == TEXTS
    assert texts(corpus.validation()) == (["one", "two"] if streaming else ["one", "two", "three"])
    note = ("The first 2 records of the split 'validation' are validated on.",)
    assert corpus.notes == (note if streaming else ())


def test_of_a_stream_only_first_records_are_held_out(hub: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "HELD_OUT_STREAM_RECORDS", 60)
    hub({"train": SHARDS})
    corpus = open_corpus(TextConfig(source="owner/stories"))
    held_out = [index for index in range(60) if rule(index)]
    assert any(rule(index) for index in range(60, 120)), "or the test would say nothing"
    assert texts(corpus.validation()) == [TEXTS[index] for index in held_out] != []
    assert texts(corpus.train()) == [text for index, text in enumerate(TEXTS) if index not in held_out]
    assert corpus.notes == (f"Held out of the first 60 records of the stream: {len(held_out)} documents.",)


def test_local_validation_files_with_a_stream(hub: Serve, tmp_path: Path) -> None:
    hub({"train": SHARDS})
    (tmp_path / "valid.txt").write_text("Held apart.")
    config = TextConfig(source="owner/stories", validation_paths=(str(tmp_path / "valid.txt"),))
    corpus = open_corpus(config)
    assert texts(corpus.validation()) == ["Held apart."]
    assert texts(corpus.train()) == TEXTS


def test_the_hash_of_a_stream_covers_description_and_validation(hub: Serve) -> None:
    def hash_of(shards: list[list[str]], **settings: Any) -> str:
        hub({"train": shards, "test": shards})
        return open_corpus(TextConfig(source="owner/stories", **settings)).content_hash

    assert hash_of(SHARDS) == hash_of(SHARDS)
    held_out = next(index for index in range(120) if rule(index))
    changed = [*TEXTS[:held_out], "changed", *TEXTS[held_out + 1 :]]
    hashes = [
        hash_of(SHARDS),
        hash_of([changed]),
        hash_of(SHARDS, hub_config="vi"),
        hash_of(SHARDS, hub_split="test"),
        hash_of(SHARDS, held_out_modulus=10),
    ]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize("cut", [0, 1, 30, 48, 49, 60, 118, 119, 120, 130, 260])
def test_a_streamed_training_side_resumes_at_any_record(hub: Serve, tmp_path: Path, cut: int) -> None:
    hub({"train": SHARDS, "validation": [["x"]]})
    corpus = open_corpus(TextConfig(source="owner/stories", hub_validation_split="validation"))
    stream, expected = corpus.stream(), [*TEXTS, None] * 4
    for position in range(cut):
        document = stream.next_document()
        assert (document and document.text) == expected[position]
    torch.save(stream.state_dict(), tmp_path / "state.pt")
    resumed = corpus.stream()
    resumed.next_document()  # a stream that has been used goes to the place all the same
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    rest = [resumed.next_document() for _ in range(150)]
    assert [document and document.text for document in rest] == expected[cut : cut + 150]


def test_empty_records_are_left_out_and_counted_all_the_same(hub: Serve) -> None:
    held_out = next(index for index in range(2, 120) if rule(index))
    hub({"train": [["", "", *TEXTS[2:]]]})
    for streaming in (True, False):
        corpus = open_corpus(TextConfig(source="owner/stories", streaming=streaming))
        assert texts(corpus.validation())[0] == TEXTS[held_out]
        assert texts(corpus.train()) == [text for index, text in enumerate(TEXTS) if index > 1 and not rule(index)]


def test_a_field_that_is_not_there_lists_the_fields(hub: Serve) -> None:
    for streaming in (True, False):
        hub({"train": [TEXTS]}, field="story")
        with pytest.raises(DataError, match=r"owner/stories, split train, .* without the field 'text'; .*: id, story"):
            open_corpus(TextConfig(source="owner/stories", streaming=streaming))
    corpus = open_corpus(TextConfig(source="owner/stories", field="story"))
    assert len(list(corpus.train())) + corpus.num_validation_documents == len(TEXTS)


@pytest.mark.parametrize("error", [ConnectionError("no route"), ValueError("Unknown split"), FileNotFoundError("gone")])
def test_a_data_set_that_does_not_load(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    expected = (
        rf"TextConfig\(source='owner/nmae'\): received the data set 'owner/nmae' \(hub_config=None, split='train'\), "
        rf"which did not load: {type(error).__name__}: {error}; allowed is .* Correct the name"
    )
    with pytest.raises(DataError, match=expected):
        open_corpus(TextConfig(source="owner/nmae"))


def test_a_missing_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"no module 'datasets'; .*pip install \"adafrugal\[train\]\""):
        open_corpus(TextConfig(source="owner/stories"))


def test_two_ways_to_validate(hub: Serve) -> None:
    hub({"train": [TEXTS], "validation": [["x"]]})
    with pytest.raises(ConfigError, match=r"held_out_modulus=5\): received hub_validation_split beside it"):
        open_corpus(TextConfig(source="owner/stories", hub_validation_split="validation", held_out_modulus=5))
    with pytest.raises(ConfigError, match=r"hub_validation_split='validation'\): received validation_paths beside it"):
        open_corpus(TextConfig(source="owner/s", hub_validation_split="validation", validation_paths=("a.txt",)))
