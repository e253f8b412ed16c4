"""Packing and packed windows: nothing is lost, the order depends on the seed alone, and a resume is exact."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adafrugal.core.errors import CheckpointError, ConfigError, DataError
from adafrugal.core.rng import named_generator
from adafrugal.data import loader
from adafrugal.data.corpus import TextConfig, open_corpus
from adafrugal.data.documents import Document
from adafrugal.data.loader import PackedWindows, open_windows, pack, scored_bytes, validation_windows
from adafrugal.data.tokenizer import ByteTokenizer

DOCUMENTS = [Document(name=str(index), text=text) for index, text in enumerate(("abc", "", "é", "x" * 50))]


def numbered(num_windows: int, sequence_length: int, tail: int = 0) -> np.ndarray:
    """Tokens whose windows are told apart by any of their tokens."""
    return np.arange(num_windows * sequence_length + tail, dtype=np.int32)


class WideTokenizer(ByteTokenizer):
    vocab_size = 70_000
    separator_id = 69_999


# Packing.


def test_documents_are_joined_with_a_separator_after_each() -> None:
    tokens = pack(DOCUMENTS, ByteTokenizer())
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [97, 98, 99, 256, 256, 195, 169, 256, *[120] * 50, 256]


def test_a_large_vocabulary_takes_four_bytes_a_token() -> None:
    tokens = pack(DOCUMENTS[:1], WideTokenizer())
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [97, 98, 99, 69_999]


def test_groups_change_nothing_and_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pack(DOCUMENTS, ByteTokenizer())
    monkeypatch.setattr(loader, "GROUP_CHARACTERS", 3)
    told: list[tuple[int, int]] = []
    assert np.array_equal(pack(iter(DOCUMENTS), ByteTokenizer(), lambda *counts: told.append(counts)), whole)
    assert told == [(1, 4), (4, len(whole))]


def test_no_documents_are_no_tokens() -> None:
    assert len(pack([], ByteTokenizer())) == 0


# Windows.


def test_an_epoch_is_a_permutation_of_windows_that_do_not_overlap() -> None:
    windows = PackedWindows(numbered(13, 4, tail=3), sequence_length=4, seed=1)
    assert windows.num_windows == 13
    batch = windows.next_batch(13)
    assert batch.dtype == torch.int64
    assert sorted(batch.tolist()) == numbered(13, 4).reshape(13, 4).tolist()
    assert windows.epoch == 1


def test_the_order_is_the_documented_draw() -> None:
    windows = PackedWindows(numbered(11, 2), sequence_length=2, seed=5)
    for epoch in range(3):
        assert windows.epoch == epoch
        order = torch.randperm(11, generator=named_generator(5, "data order", "", epoch))
        assert torch.equal(windows.next_batch(11)[:, 0], 2 * order)


def test_the_order_changes_with_epoch_and_seed() -> None:
    def order(seed: int) -> torch.Tensor:
        return PackedWindows(numbered(50, 2), 2, seed).next_batch(100)[:, 0]

    assert torch.equal(order(0), order(0))
    assert not torch.equal(order(0), order(1))
    assert not torch.equal(order(0)[:50], order(0)[50:])


def test_the_caller_may_write_into_a_batch() -> None:
    tokens = numbered(4, 3).astype(np.int64)
    windows = PackedWindows(tokens, 3, seed=0)
    windows.next_batch(4).fill_(-1)
    assert tokens.min() == 0


def test_a_memory_map_will_do(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", numbered(9, 3).astype(np.uint16))
    mapped = np.load(tmp_path / "tokens.npy", mmap_mode="r")
    expected = PackedWindows(numbered(9, 3), 3, seed=2).next_batch(20)
    assert torch.equal(PackedWindows(mapped, 3, seed=2).next_batch(20), expected)


@settings(max_examples=80, deadline=None)
@given(num_windows=st.integers(1, 20), cuts=st.lists(st.integers(1, 25), min_size=1, max_size=8))
def test_how_it_is_cut_into_batches_changes_nothing(num_windows: int, cuts: list[int]) -> None:
    whole = PackedWindows(numbered(num_windows, 2), 2, seed=3).next_batch(sum(cuts))
    windows = PackedWindows(numbered(num_windows, 2), 2, seed=3)
    assert torch.equal(torch.cat([windows.next_batch(cut) for cut in cuts]), whole)
    assert windows.epoch == sum(cuts) // num_windows
    counts = torch.bincount(whole[:, 0] // 2, minlength=num_windows)
    assert counts.max() - counts.min() <= 1, "no window comes twice before each has come once"


@settings(max_examples=80, deadline=None)
@given(num_windows=st.integers(1, 20), before=st.lists(st.integers(1, 25), max_size=4), after=st.integers(1, 60))
def test_a_resume_at_any_place_is_exact(num_windows: int, before: list[int], after: int) -> None:
    windows = PackedWindows(numbered(num_windows, 2), 2, seed=3)
    for cut in before:
        windows.next_batch(cut)
    state = windows.state_dict()
    resumed = PackedWindows(numbered(num_windows, 2), 2, seed=3)
    resumed.load_state_dict(state)
    assert resumed.epoch == windows.epoch
    assert torch.equal(resumed.next_batch(after), windows.next_batch(after))


def test_the_state_is_plain_numbers(tmp_path: Path) -> None:
    windows = PackedWindows(numbered(9, 3), 3, seed=2)
    windows.next_batch(5)
    state = windows.state_dict()
    assert state == {"windows": 5, "num_windows": 3 * 3, "sequence_length": 3, "seed": 2}
    assert {type(value) for value in state.values()} == {int}
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state


@pytest.mark.parametrize(
    ("num_windows", "sequence_length", "seed", "said"),
    [
        (9, 3, 1, "received seed=0; allowed is seed=1, as this run has it"),
        (8, 3, 0, "received num_windows=9; allowed is num_windows=8"),
        (9, 4, 0, "received sequence_length=3; allowed is sequence_length=4"),
    ],
)
def test_the_place_in_another_text_is_refused(num_windows: int, sequence_length: int, seed: int, said: str) -> None:
    state = PackedWindows(numbered(9, 3), 3, seed=0).state_dict()
    windows = PackedWindows(numbered(num_windows, sequence_length), sequence_length, seed=seed)
    with pytest.raises(CheckpointError, match=said):
        windows.load_state_dict(state)


def test_a_long_document_is_spread_over_the_epoch() -> None:
    """Windows are shuffled, not documents: one that is half of the text is about half of each run of batches."""
    short = [Document(name=str(index), text="s" * 40) for index in range(1000)]
    long = Document(name="long", text="L" * 41_000)
    tokens = pack([*short[:300], long, *short[300:]], ByteTokenizer())
    windows = PackedWindows(tokens, sequence_length=41, seed=0)
    share = (windows.next_batch(windows.num_windows) == ord("L")).double().mean(dim=1)
    assert share.mean() == pytest.approx(0.5, abs=0.01)
    # Runs of 8 batches of 8: the share of 64 fair draws has a deviation of 1/16; of 31 runs none is beyond four of it.
    runs = share[: len(share) // 64 * 64].reshape(-1, 64).mean(dim=1)
    assert (runs - 0.5).abs().max() < 4 / 16
    longest = max(len(run) for run in "".join("L" if value > 0.5 else "s" for value in share).split("s"))
    assert longest < 3 * math.log2(len(share)), "the longest run of heads in n tosses is about log2(n)"


# Validation.


def test_validation_windows_are_spread_over_the_text_and_stay() -> None:
    tokens = numbered(1000, 4, tail=2)
    chosen = validation_windows(tokens, sequence_length=4, max_windows=10)
    assert chosen.shape == (10, 4)
    assert chosen.dtype == torch.int64
    first = chosen[:, 0] // 4
    assert (first // 100).tolist() == list(range(10)), "one from each tenth"
    assert torch.equal(chosen - chosen[:, :1], torch.arange(4).expand(10, 4))
    assert torch.equal(validation_windows(tokens, 4, 10, seed=0), chosen)
    assert not torch.equal(validation_windows(tokens, 4, 10, seed=1), chosen)


@settings(max_examples=60, deadline=None)
@given(total=st.integers(1, 50), wanted=st.integers(1, 60), seed=st.integers(0, 99))
def test_validation_windows_are_distinct_and_as_many_as_there_are(total: int, wanted: int, seed: int) -> None:
    first = validation_windows(numbered(total, 2), 2, wanted, seed)[:, 0].tolist()
    assert len(first) == len(set(first)) == min(total, wanted)
    assert first == sorted(first)
    assert set(first) <= set(range(0, 2 * total, 2))


def test_the_first_token_of_a_window_is_not_scored() -> None:
    tokenizer = ByteTokenizer()
    tokens = pack([Document(name="a", text="Việt Nam")], tokenizer)  # ten bytes and a separator
    windows = validation_windows(tokens, sequence_length=11, max_windows=5)
    assert scored_bytes(windows, tokenizer.token_bytes) == 9
    windows = validation_windows(tokens, sequence_length=5, max_windows=5)
    assert scored_bytes(windows, tokenizer.token_bytes) == 2 * 4


# From a corpus.


def test_a_corpus_becomes_windows(text_folder: Path) -> None:
    corpus = open_corpus(TextConfig(source=str(text_folder)))
    windows = open_windows(corpus, ByteTokenizer(), sequence_length=32, seed=0)
    assert isinstance(windows, PackedWindows)
    num_train_bytes = (corpus.num_bytes or 0) - corpus.num_validation_bytes
    num_train_documents = (corpus.num_documents or 0) - corpus.num_validation_documents
    assert windows.num_windows == (num_train_bytes + num_train_documents) // 32


def test_a_corpus_shorter_than_one_sequence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A short text of one line.")
    corpus = open_corpus(TextConfig(source=str(tmp_path / "a.txt")))
    num_tokens = len(next(corpus.train()).text) + 1
    expected = (
        rf"sequence_length=512: received a training text of {num_tokens} tokens, shorter than one sequence; allowed is "
        rf"a text of at least 512 tokens. Set sequence_length to {num_tokens} or less, or give more text."
    )
    with pytest.raises(DataError, match=expected):
        open_windows(corpus, ByteTokenizer(), sequence_length=512, seed=0)
    with pytest.raises(DataError, match="a validation text of 3 tokens, shorter than one sequence"):
        validation_windows(np.arange(3, dtype=np.int32), 4, 1)
    with pytest.raises(DataError, match=r"a training text of 0 tokens, .*512 tokens\. Give more text\."):
        PackedWindows(pack([], ByteTokenizer()), 512, seed=0)


@pytest.mark.parametrize("sequence_length", [1, 0, -5])
def test_a_sequence_length_without_a_target(text_folder: Path, sequence_length: int) -> None:
    expected = rf"sequence_length={sequence_length}: received {sequence_length}; allowed is a whole number from 2 on"
    with pytest.raises(ConfigError, match=expected):
        PackedWindows(numbered(9, 3), sequence_length, seed=0)
    with pytest.raises(ConfigError, match=expected):
        validation_windows(numbered(9, 3), sequence_length, 1)
    with pytest.raises(ConfigError, match=expected):
        open_windows(open_corpus(TextConfig(source=str(text_folder))), ByteTokenizer(), sequence_length, seed=0)


def test_counts_from_one_on() -> None:
    with pytest.raises(ConfigError, match=r"next_batch\(0\): received 0; allowed is a whole number from 1 on"):
        PackedWindows(numbered(9, 3), 3, seed=0).next_batch(0)
    with pytest.raises(ConfigError, match=r"max_windows=0: received 0; allowed is a whole number from 1 on"):
        validation_windows(numbered(9, 3), 3, 0)
