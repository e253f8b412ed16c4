"""From a corpus to windows: documents become one line of tokens, cut into windows for training and validation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from adafrugal.core.errors import ConfigError
from adafrugal.core.rng import named_generator
from adafrugal.data.documents import Document
from adafrugal.data.splitting import Corpus
from adafrugal.data.streamed import StreamedWindows
from adafrugal.data.tokenizer import Tokenizer, Tokens, token_dtype
from adafrugal.data.windows import PackedWindows, Windows, check_length

__all__ = [
    "PackedWindows",
    "StreamedWindows",
    "Windows",
    "open_windows",
    "pack",
    "scored_bytes",
    "validation_windows",
]

# Documents go to the tokenizer in groups, since it encodes a group on all cores.
GROUP_CHARACTERS = 2**21


def pack(
    documents: Iterable[Document], tokenizer: Tokenizer, progress: Callable[[int, int], None] | None = None
) -> Tokens:
    """Join the tokens of all documents, with the separator after each.

    Args:
        documents: The texts, in order.
        tokenizer: Turns each into ids.
        progress: Called now and then with the documents and tokens so far.

    Returns:
        One flat array, uint16 if the vocabulary fits into it, else int32.

    Cost:
        2 or 4 bytes a token at the end, an eighth more on the way, and the text of one group of documents.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    separator = np.array([tokenizer.separator_id], dtype=dtype).tobytes()
    joined = bytearray()  # grows in place, so that the tokens are never held twice
    num_documents = 0
    for texts in _groups(documents):
        for ids in tokenizer.encode_many(texts):
            joined += ids.astype(dtype, copy=False).tobytes()
            joined += separator
        num_documents += len(texts)
        if progress is not None:
            progress(num_documents, len(joined) // np.dtype(dtype).itemsize)
    return np.frombuffer(joined, dtype=dtype)


def _groups(documents: Iterable[Document]) -> Iterator[list[str]]:
    texts: list[str] = []
    size = 0
    for document in documents:
        texts.append(document.text)
        size += len(document.text)
        if size >= GROUP_CHARACTERS:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def open_windows(
    corpus: Corpus,
    tokenizer: Tokenizer,
    sequence_length: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Windows:
    """The training windows of a corpus: packed in memory, or read as a stream if the corpus is one.

    Args:
        corpus: Its training side is read.
        tokenizer: Turns documents into ids.
        sequence_length: Tokens of a window, 2 or more.
        seed: The run's seed.
        progress: Called now and then with the documents and tokens packed so far; never of a stream.

    Raises:
        ConfigError: If the sequence length is below 2.
        DataError: If there is less than one window of text; of a stream this shows at the first batch.
    """
    check_length(sequence_length, sequence_length, "training")  # before the corpus is packed, not after
    if corpus.is_streaming:
        return StreamedWindows(corpus.stream(), tokenizer, sequence_length, seed)
    return PackedWindows(pack(corpus.train(), tokenizer, progress), sequence_length, seed)


def validation_windows(tokens: Tokens, sequence_length: int, max_windows: int, seed: int = 0) -> torch.Tensor:
    """A fixed set of windows spread evenly over the validation text.

    The windows are divided into as many runs of equal length as are wanted, and one is drawn from each. All are taken
    if they are not more than that.

    Args:
        tokens: What `pack` returned for the validation side.
        sequence_length: Tokens of a window, 2 or more.
        max_windows: How many at most.
        seed: Which set. Runs that are to be compared need the same one, so leave it alone when their seeds differ.

    Returns:
        int64 (num_windows, sequence_length), in the order of the text.

    Raises:
        ConfigError: If the sequence length is below 2, or no window is wanted.
        DataError: If there is less than one window of text.

    Example:
        >>> validation_windows(np.arange(8, dtype=np.int32), sequence_length=2, max_windows=9)[:, 0].tolist()
        [0, 2, 4, 6]
    """
    check_length(len(tokens), sequence_length, "validation")
    if max_windows < 1:
        raise ConfigError(f"max_windows={max_windows}", max_windows, "a whole number from 1 on", "Try 64.")
    total = len(tokens) // sequence_length
    count = min(total, max_windows)
    starts = np.arange(count + 1) * total // count
    draws = torch.rand(count, generator=named_generator(seed, "validation windows"), dtype=torch.float64).numpy()
    chosen = starts[:-1] + (draws * np.diff(starts)).astype(np.int64)
    rows = tokens[: total * sequence_length].reshape(total, sequence_length)
    return torch.from_numpy(rows[chosen].astype(np.int64))


def scored_bytes(windows: torch.Tensor, token_bytes: NDArray[np.int64]) -> int:
    """UTF-8 bytes of the tokens that are scored: all but the first of each window, which has no target.

    Bits per byte = nats of these tokens / ln 2 / these bytes. A separator is scored, and stands for no byte.

    Args:
        windows: Ids, (num_windows, sequence_length).
        token_bytes: Of the tokenizer, (vocab_size,).

    Example:
        >>> scored_bytes(torch.tensor([[0, 1, 2]]), np.array([5, 3, 0]))
        3
    """
    return int(token_bytes[windows[:, 1:].cpu().numpy()].sum())
