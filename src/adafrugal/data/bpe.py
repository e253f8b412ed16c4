"""Byte-level BPE trained on the training side of a corpus, and cached by the content it was trained on."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adafrugal.core.errors import ConfigError
from adafrugal.data.libraries import load_library
from adafrugal.data.pretrained import SEPARATOR, PretrainedTokenizer, byte_alphabet
from adafrugal.data.splitting import Corpus

SMALLEST_VOCABULARY = 257  # the bytes and the separator

# Merges hardly change beyond this much text, while the trainer's table of words keeps growing.
LARGEST_TRAINING_BYTES = 128 * 2**20


def train_bpe(corpus: Corpus, vocab_size: int, cache_folder: str | Path) -> PretrainedTokenizer:
    """Train a byte-level BPE tokenizer, or take it from the cache.

    The training documents are read up to 128 MiB; validation documents never are. The same corpus, size and version
    of `tokenizers` give the same tokenizer on every machine.

    Args:
        corpus: What to train on.
        vocab_size: How many ids at most, the 256 bytes and the separator included. A small corpus runs out of pairs
            to merge before that: ``vocab_size`` of the result is what it reached.
        cache_folder: Where trained tokenizers are kept, a file each; made if it is not there.

    Returns:
        The tokenizer; id 0 is the separator ``<|endoftext|>``.

    Raises:
        ConfigError: If ``vocab_size`` is below 257.
        DataError: If `tokenizers` is not installed.

    Cost:
        About 6 MB of text a second the first time, milliseconds from the cache.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"TokenizerConfig(train={vocab_size})",
            vocab_size,
            f"a vocabulary from {SMALLEST_VOCABULARY} on: the 256 bytes and the separator",
            "Try 8000, or leave `train` out for plain bytes.",
        )
    tokenizers = load_library("tokenizers", f"TokenizerConfig(train={vocab_size})")
    limit = LARGEST_TRAINING_BYTES
    key = f"byte-level BPE\0{corpus.content_hash}\0{vocab_size}\0{limit}\0{tokenizers.__version__}"
    cached = Path(cache_folder) / f"bpe-{vocab_size}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    backend = _load(tokenizers, cached)
    if backend is None:
        backend = _train(tokenizers, corpus, vocab_size)
        _store(backend, cached)
    separator_id: int = backend.token_to_id(SEPARATOR)
    return PretrainedTokenizer(backend, separator_id=separator_id, name=f"bpe-{backend.get_vocab_size()}")


def _load(tokenizers: Any, cached: Path) -> Any:
    if not cached.is_file():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(cached))
    except Exception:  # the library raises plain Exception; a file that is broken is trained and written anew
        return None
    return None if backend.token_to_id(SEPARATOR) is None else backend


def _store(backend: Any, cached: Path) -> None:
    cached.parent.mkdir(parents=True, exist_ok=True)
    handle, written = tempfile.mkstemp(prefix=cached.name, suffix=".part", dir=cached.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(backend.to_str())
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, cached)
    except BaseException:
        Path(written).unlink(missing_ok=True)
        raise


def _texts(corpus: Corpus) -> Iterator[str]:
    num_bytes = 0
    for document in corpus.train():
        yield document.text
        num_bytes += len(document.text.encode())
        if num_bytes >= LARGEST_TRAINING_BYTES:
            return


def _train(tokenizers: Any, corpus: Corpus, vocab_size: int) -> Any:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[SEPARATOR], initial_alphabet=byte_alphabet(), show_progress=False
    )
    backend.train_from_iterator(_texts(corpus), trainer)
    return backend
