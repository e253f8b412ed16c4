"""Streamed windows: nothing is lost between passes, and a resume continues from buffer, remainder and stream."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adafrugal.core.errors import CheckpointError, ConfigError, DataError
from adafrugal.data.corpus import TextConfig, open_corpus
from adafrugal.data.documents import CountedStream, Document
from adafrugal.data.loader import StreamedWindows, open_windows, pack
from adafrugal.data.tokenizer import ByteTokenizer

Serve = Callable[..., list[dict[str, Any]]]

# Each document is told apart by its number, and lengths run from nothing to many windows.
DOCUMENTS = [
    Document(name=str(index), text=f"<{index}>" * (index % 7) * (9 if index == 5 else 1)) for index in range(31)
]
STORIES = [f"Record {index} tells a short story." for index in range(60)]


def open_stream(
    buffer_windows: int = 6, sequence_length: int = 8, seed: int = 0, documents: list[Document] = DOCUMENTS
) -> StreamedWindows:
    stream = CountedStream(lambda: iter(documents))
    return StreamedWindows(stream, ByteTokenizer(), sequence_length, seed, buffer_windows)


def through_a_file(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


def test_each_window_of_the_endless_text_comes_once() -> None:
    per_pass = len(pack(DOCUMENTS, ByteTokenizer()))
    tokens = torch.from_numpy(pack(DOCUMENTS * 4, ByteTokenizer()).astype("int64"))
    expected = tokens[: len(tokens) // 8 * 8].reshape(-1, 8).tolist()
    windows = open_stream()
    seen = windows.next_batch(len(expected) - 5).tolist()
    assert windows.epoch in (3, 4)
    assert per_pass % 8 != 0, "so that windows cross from pass to pass"
    for window in seen:
        expected.remove(window)
    assert len(expected) == 5, "what is left is in the buffer"


def test_windows_leave_the_buffer_in_another_order() -> None:
    in_order = open_stream(buffer_windows=1).next_batch(40)
    shuffled = open_stream(buffer_windows=16).next_batch(40)
    assert not torch.equal(in_order, shuffled)
    assert torch.equal(
        in_order.reshape(-1)[:20], torch.from_numpy(pack(DOCUMENTS, ByteTokenizer())[:20].astype("int64"))
    )
    assert torch.equal(shuffled, open_stream(buffer_windows=16).next_batch(40))
    assert not torch.equal(shuffled, open_stream(buffer_windows=16, seed=1).next_batch(40))


def test_a_long_document_is_spread_over_the_buffer() -> None:
    short = [Document(name=str(index), text="s" * 7) for index in range(400)]
    long = Document(name="long", text="L" * 799)
    windows = open_stream(buffer_windows=200, documents=[*short, long, *short])
    share = (windows.next_batch(900) == ord("L")).double().mean(dim=1)
    assert share.sum() > 80, "of 100; 600 draws later, exp(-600 / 200) = 5 % of them are still in the buffer"
    runs = share.reshape(-1, 30).mean(dim=1)
    # In order, 100 windows in a row would be the long document's: three whole runs. From a buffer of twice its
    # length, it is at most 40 % of a run in expectation (1 - exp(-100/200)), and 0.4 + 3 deviations of 0.09 is 0.67.
    assert runs.max() < 0.67


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(1, 30), min_size=1, max_size=6), length=st.integers(2, 12), buffer=st.integers(1, 10))
def test_how_it_is_cut_into_batches_changes_nothing(cuts: list[int], length: int, buffer: int) -> None:
    whole = open_stream(buffer, length).next_batch(sum(cuts))
    windows = open_stream(buffer, length)
    assert torch.equal(torch.cat([windows.next_batch(cut) for cut in cuts]), whole)


@settings(max_examples=50, deadline=None)
@given(before=st.integers(0, 200), length=st.integers(2, 12), buffer=st.integers(1, 10))
def test_a_resume_at_any_place_is_exact(
    tmp_path_factory: pytest.TempPathFactory, before: int, length: int, buffer: int
) -> None:
    windows = open_stream(buffer, length)
    if before:
        windows.next_batch(before)
    resumed = open_stream(buffer, length)
    resumed.load_state_dict(through_a_file(windows.state_dict(), tmp_path_factory.mktemp("state")))
    assert torch.equal(resumed.next_batch(120), windows.next_batch(120))
    assert resumed.epoch == windows.epoch


def test_a_state_does_not_change_as_training_goes_on() -> None:
    windows = open_stream()
    windows.next_batch(3)
    state = windows.state_dict()
    expected = windows.next_batch(40)
    resumed = open_stream()
    resumed.load_state_dict(state)
    assert torch.equal(resumed.next_batch(40), expected)
    again = open_stream()
    again.load_state_dict(state)
    assert torch.equal(again.next_batch(40), expected)


@pytest.mark.parametrize("before", [1, 17, 63, 64, 65, 150, 333])
def test_a_hub_stream_resumes_through_the_library(hub: Serve, tmp_path: Path, before: int) -> None:
    hub({"train": [STORIES[:25], STORIES[25:]]})
    corpus = open_corpus(TextConfig(source="owner/stories"))
    windows = open_windows(corpus, ByteTokenizer(), sequence_length=16, seed=4)
    assert isinstance(windows, StreamedWindows)
    small = StreamedWindows(corpus.stream(), ByteTokenizer(), 16, 4, buffer_windows=20)
    small.next_batch(before)
    resumed = StreamedWindows(corpus.stream(), ByteTokenizer(), 16, 4, buffer_windows=20)
    resumed.load_state_dict(through_a_file(small.state_dict(), tmp_path))
    assert torch.equal(resumed.next_batch(200), small.next_batch(200))
    assert resumed.epoch == small.epoch > 0


def test_held_out_records_are_never_streamed(hub: Serve) -> None:
    hub({"train": [STORIES]})
    corpus = open_corpus(TextConfig(source="owner/stories", held_out_modulus=3))
    windows = StreamedWindows(corpus.stream(), ByteTokenizer(), 16, seed=0, buffer_windows=1)
    text = ByteTokenizer().decode(windows.next_batch(400).reshape(-1).tolist())
    held_out = [document.text for document in corpus.validation()]
    assert held_out
    assert not any(story in text for story in held_out)
    assert all(document.text in text for document in corpus.train())


@pytest.mark.parametrize(
    ("settings_of_the_run", "said"),
    [
        ({"seed": 1}, "received seed=0; allowed is seed=1, as this run has it"),
        ({"sequence_length": 9}, "received sequence_length=8; allowed is sequence_length=9"),
        ({"buffer_windows": 7}, "received buffer_windows=6; allowed is buffer_windows=7"),
    ],
)
def test_the_place_of_another_run_is_refused(settings_of_the_run: dict[str, int], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_stream(**settings_of_the_run).load_state_dict(open_stream().state_dict())


def test_the_place_of_another_tokenizer_is_refused() -> None:
    class OtherTokenizer(ByteTokenizer):
        fingerprint = "another"

    state = StreamedWindows(CountedStream(lambda: iter(DOCUMENTS)), OtherTokenizer(), 8, 0, 6).state_dict()
    with pytest.raises(CheckpointError, match=r"received tokenizer='another'; .* Resume with the text, tokenizer"):
        open_stream().load_state_dict(state)


def test_a_stream_shorter_than_one_sequence_ends_with_an_error() -> None:
    with pytest.raises(DataError, match=r"a training text of 4 tokens, shorter than one sequence; .* 4 or less"):
        open_stream(documents=[Document(name="a", text="abc")]).next_batch(1)
    with pytest.raises(DataError, match="a training text of 0 tokens, shorter than one sequence"):
        open_stream(documents=[]).next_batch(1)


def test_counts_from_one_on() -> None:
    with pytest.raises(ConfigError, match=r"buffer_windows=0: received 0; allowed is a whole number from 1 on"):
        open_stream(buffer_windows=0)
    with pytest.raises(ConfigError, match=r"next_batch\(0\): received 0"):
        open_stream().next_batch(0)
    with pytest.raises(ConfigError, match="sequence_length=1: received 1"):
        open_stream(sequence_length=1)
