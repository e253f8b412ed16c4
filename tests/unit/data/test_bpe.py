"""Training a BPE tokenizer: deterministic, on training text alone, and cached by content."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from adafrugal.core.errors import ConfigError
from adafrugal.data import bpe
from adafrugal.data.bpe import train_bpe
from adafrugal.data.corpus import Corpus, TextConfig, open_corpus

TRAIN = """
import sys
from adafrugal.data.bpe import train_bpe
from adafrugal.data.corpus import TextConfig, open_corpus
print(train_bpe(open_corpus(TextConfig(source=sys.argv[1])), 310, sys.argv[2]).fingerprint)
"""


@pytest.fixture
def corpus(text_folder: Path) -> Corpus:
    return open_corpus(TextConfig(source=str(text_folder)))


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The vocabulary sizes that were trained, not taken from the cache."""
    done: list[int] = []
    real = bpe._train

    def train(library: object, corpus: Corpus, vocab_size: int) -> object:
        done.append(vocab_size)
        return real(library, corpus, vocab_size)

    monkeypatch.setattr(bpe, "_train", train)
    return done


def test_the_second_time_it_comes_from_the_cache(corpus: Corpus, tmp_path: Path, trainings: list[int]) -> None:
    cache = tmp_path / "not" / "there" / "yet"
    first, second = train_bpe(corpus, 310, cache), train_bpe(corpus, 310, cache)
    assert trainings == [310]
    assert (first.name, first.vocab_size, first.separator_id) == ("bpe-310", 310, 0)
    assert first.fingerprint == second.fingerprint
    assert [path.suffix for path in cache.iterdir()] == [".json"], "no temporary file is left"


def test_other_text_size_or_version_is_trained_anew(
    corpus: Corpus, text_folder: Path, tmp_path: Path, trainings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    train_bpe(corpus, 310, tmp_path / "cache")
    train_bpe(corpus, 315, tmp_path / "cache")
    (text_folder / "more.txt").write_text("More text.\n")
    train_bpe(open_corpus(TextConfig(source=str(text_folder))), 310, tmp_path / "cache")
    monkeypatch.setattr(tokenizers, "__version__", "0.0.1")
    train_bpe(corpus, 310, tmp_path / "cache")
    assert trainings == [310, 315, 310, 310]
    assert len(list((tmp_path / "cache").iterdir())) == 4


@pytest.mark.parametrize("left", [0, 1, 400, -1])
def test_a_broken_file_in_the_cache_is_never_taken(
    corpus: Corpus, tmp_path: Path, trainings: list[int], left: int
) -> None:
    expected = train_bpe(corpus, 310, tmp_path / "cache").fingerprint
    (cached,) = (tmp_path / "cache").iterdir()
    whole = cached.read_text()
    cached.write_text(whole[:left])
    assert train_bpe(corpus, 310, tmp_path / "cache").fingerprint == expected
    assert trainings == [310, 310]
    assert cached.read_text() == whole, "and it is written anew"


def test_an_interrupted_write_leaves_nothing_behind(
    corpus: Corpus, tmp_path: Path, trainings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bpe.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            train_bpe(corpus, 310, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    train_bpe(corpus, 310, tmp_path / "cache")
    assert trainings == [310, 310]


def test_a_half_written_file_of_another_process_is_not_looked_at(
    corpus: Corpus, tmp_path: Path, trainings: list[int]
) -> None:
    train_bpe(corpus, 310, tmp_path / "cache")
    (cached,) = (tmp_path / "cache").iterdir()
    cached.rename(cached.with_name(f"{cached.name}abc.part"))
    train_bpe(corpus, 310, tmp_path / "cache")
    assert trainings == [310, 310]


def test_validation_text_is_never_read(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Corpus) -> Iterator[object]:
        raise AssertionError("validation text was read")

    monkeypatch.setattr(Corpus, "validation", refuse)
    train_bpe(corpus, 310, tmp_path / "cache")


def test_what_only_the_validation_side_holds_is_not_learnt(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("the cat sat on the mat. " * 40)
    (tmp_path / "valid.txt").write_text("zyzzyva quokka " * 400)
    config = TextConfig(source=str(tmp_path / "train.txt"), validation_paths=(str(tmp_path / "valid.txt"),))
    tokenizer = train_bpe(open_corpus(config), 400, tmp_path / "cache")
    assert len(tokenizer.encode("zyzzyva")) == 7
    assert len(tokenizer.encode("the mat")) == 2


def test_a_small_corpus_gives_a_small_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcabc abc\n" * 30)
    tokenizer = train_bpe(open_corpus(TextConfig(source=str(tmp_path / "a.txt"))), 5000, tmp_path / "cache")
    assert 257 < tokenizer.vocab_size < 270
    assert tokenizer.name == f"bpe-{tokenizer.vocab_size}"
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)


def test_the_smallest_vocabulary_is_bytes(corpus: Corpus, tmp_path: Path) -> None:
    tokenizer = train_bpe(corpus, 257, tmp_path)
    assert len(tokenizer.encode("Việt")) == len("Việt".encode())
    assert np.array_equal(np.sort(tokenizer.token_bytes), [0] + [1] * 256)
    expected = r"TokenizerConfig\(train=256\): received 256; allowed is a vocabulary from 257 on: .* Try 8000"
    with pytest.raises(ConfigError, match=expected):
        train_bpe(corpus, 256, tmp_path)


def test_reading_stops_at_the_limit(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(next(corpus.train()).text.encode())
    monkeypatch.setattr(bpe, "LARGEST_TRAINING_BYTES", int(2.5 * size))
    assert len(list(bpe._texts(corpus))) == 3


def test_another_process_trains_the_same_tokenizer(corpus: Corpus, text_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAIN, str(text_folder), str(tmp_path / "other")]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert train_bpe(corpus, 310, tmp_path / "cache").fingerprint == other
