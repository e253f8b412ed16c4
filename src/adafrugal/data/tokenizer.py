"""Tokenizers: text to ids and back, and how many bytes each id stands for. Bytes are the default."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from adafrugal.core.errors import ConfigError, DataError
from adafrugal.data.bpe import train_bpe
from adafrugal.data.libraries import load_library
from adafrugal.data.pretrained import (
    SEPARATOR,
    PretrainedTokenizer,
    Tokens,
    byte_alphabet,
    load_tokenizer,
    token_dtype,
    write_folder,
)
from adafrugal.data.splitting import Corpus

__all__ = [
    "ByteTokenizer",
    "PretrainedTokenizer",
    "Tokenizer",
    "TokenizerConfig",
    "Tokens",
    "check_vocabulary",
    "load_tokenizer",
    "open_tokenizer",
    "token_dtype",
    "train_bpe",
]


class Vocabulary(Protocol):
    """What has a name and so many ids."""

    @property
    def name(self) -> str:
        """What to call it in a summary."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back. Ids lie in [0, vocab_size)."""

    @property
    def name(self) -> str:
        """What to call it in a summary."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included."""
        ...

    @property
    def separator_id(self) -> int:
        """The id put after each document."""
        ...

    @property
    def fingerprint(self) -> str:
        """sha256 in hexadecimal of all that decides which ids a text gets."""
        ...

    @property
    def token_bytes(self) -> NDArray[np.int64]:
        """UTF-8 bytes that each id stands for, (vocab_size,); 0 for special tokens."""
        ...

    @property
    def exact_bytes(self) -> bool:
        """Whether the bytes of a text's tokens add up to the bytes of the text; bits per byte are exact only then."""
        ...

    def encode(self, text: str) -> Tokens:
        """The ids of a text, without separator."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[Tokens]:
        """The ids of each text, faster than one at a time."""
        ...

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """The text of ids; special tokens are left out."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write it so that ``transformers.AutoTokenizer.from_pretrained(folder)`` gives the same ids."""
        ...


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer to use.

    Args:
        name: ``"bytes"``, a folder that holds a tokenizer, or a hub id.
        train: Train a byte-level BPE tokenizer of so many ids on the corpus instead; cached by content.

    Raises:
        ConfigError: If both are given.

    Example:
        >>> TokenizerConfig(train=8000).name
        'bytes'
    """

    name: str = "bytes"
    train: int | None = None

    def __post_init__(self) -> None:
        if self.train is not None and self.name != "bytes":
            raise ConfigError(
                f"TokenizerConfig(name={self.name!r}, train={self.train})",
                "two tokenizers",
                "one of both",
                "Leave out `train` to load this one, or `name` to train one.",
            )


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 is the separator. No text is out of its vocabulary.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("é!").tolist(), tokenizer.decode([195, 169, 33, 256])
        ([195, 169, 33], 'é!')
    """

    name = "bytes"
    vocab_size = 257
    separator_id = 256
    exact_bytes = True
    fingerprint = hashlib.sha256(b"bytes 0 to 255, separator 256").hexdigest()

    @property
    def token_bytes(self) -> NDArray[np.int64]:
        """One byte for each id but the separator, (257,)."""
        return np.array([1] * 256 + [0], dtype=np.int64)

    def encode(self, text: str) -> Tokens:
        """The bytes of a text as uint16 ids."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def encode_many(self, texts: Sequence[str]) -> list[Tokens]:
        """The bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """The text of ids; separators are left out, and broken bytes become the replacement character."""
        return bytes(int(index) for index in ids if index < 256).decode(errors="replace")

    def save(self, folder: str | Path) -> None:
        """Write it as a byte-level BPE without merges, which transformers loads.

        Raises:
            DataError: If `tokenizers` is not installed.
        """
        write_folder(self._backend(), Path(folder))

    def _backend(self) -> Any:
        tokenizers = load_library("tokenizers", "saving the tokenizer 'bytes'")
        vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        backend.add_special_tokens([SEPARATOR])
        return backend


def open_tokenizer(config: TokenizerConfig, corpus: Corpus, cache_folder: str | Path) -> Tokenizer:
    """Make, train or load the tokenizer that a configuration asks for.

    Args:
        config: Which one.
        corpus: What to train it on, if it is to be trained.
        cache_folder: Where trained tokenizers are kept.

    Raises:
        ConfigError: If a vocabulary to train is too small.
        DataError: If it cannot be loaded, or its library is not installed.
    """
    if config.train is not None:
        return train_bpe(corpus, config.train, cache_folder)
    if config.name == "bytes":
        return ByteTokenizer()
    return load_tokenizer(config.name)


def check_vocabulary(tokenizer: Vocabulary, model_vocab_size: int) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for.

    Args:
        tokenizer: The tokenizer.
        model_vocab_size: Rows of the model's embedding; more than the tokenizer needs are fine.

    Raises:
        DataError: If the tokenizer is larger than the model's vocabulary.

    Example:
        >>> check_vocabulary(ByteTokenizer(), 260)
    """
    if tokenizer.vocab_size > model_vocab_size:
        raise DataError(
            f"tokenizer {tokenizer.name!r}",
            f"{tokenizer.vocab_size} ids for a model with a vocabulary of {model_vocab_size}",
            f"at most {model_vocab_size} ids",
            "Choose a smaller tokenizer, or a model with a larger vocabulary.",
        )
