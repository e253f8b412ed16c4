"""Windows of a stream of documents: tokenised as they come, shuffled within a bounded buffer, resumed exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from adafrugal.core.errors import ConfigError
from adafrugal.core.rng import named_generator
from adafrugal.data.documents import DocumentStream
from adafrugal.data.order import check_count
from adafrugal.data.tokenizer import Tokenizer, Tokens, token_dtype
from adafrugal.data.windows import check_length, check_same


class StreamedWindows:
    """Windows of a text too long to pack first.

    Documents are read, tokenised and joined with the separator after each; the tokens are cut into windows that do not
    overlap, and fill a buffer. Window k is drawn from the full buffer by (seed, "data order", k), and its slot
    is filled again. Tokens and buffer carry over from one pass to the next, so that none is lost or read twice.

    Args:
        stream: The training side, ``corpus.stream()``.
        tokenizer: Turns documents into ids.
        sequence_length: Tokens of a window, 2 or more.
        seed: The run's seed.
        buffer_windows: How many windows are shuffled together.

    Raises:
        ConfigError: If the sequence length is below 2, or the buffer holds no window.

    Cost:
        4 bytes a token of the buffer, in memory and in each checkpoint: 1 MB at 1024 windows of 256 tokens.
    """

    def __init__(
        self, stream: DocumentStream, tokenizer: Tokenizer, sequence_length: int, seed: int, buffer_windows: int = 1024
    ) -> None:
        check_length(sequence_length, sequence_length, "training")
        if buffer_windows < 1:
            raise ConfigError(
                f"buffer_windows={buffer_windows}", buffer_windows, "a whole number from 1 on", "Try 1024."
            )
        self.sequence_length = sequence_length
        self.seed = seed
        self.buffer_windows = buffer_windows
        self._stream = stream
        self._tokenizer = tokenizer
        self._buffer = np.zeros((buffer_windows, sequence_length), dtype=np.int32)
        self._filled = 0
        self._remainder: Tokens = np.zeros(0, dtype=token_dtype(tokenizer.vocab_size))
        self._windows = 0
        self._passes = 0
        self._pass_tokens = 0

    @property
    def epoch(self) -> int:
        """How many passes over the stream have been read to their end; up to a buffer of them is still to come."""
        return self._passes

    def next_batch(self, num_windows: int) -> torch.Tensor:
        """The next windows, int64 (num_windows, sequence_length).

        Raises:
            ConfigError: If fewer than one is asked for.
            DataError: If a whole pass over the stream is shorter than one sequence.
        """
        check_count(num_windows)
        batch = np.empty((num_windows, self.sequence_length), dtype=np.int64)
        for row in batch:
            while self._filled < self.buffer_windows:
                self._buffer[self._filled] = self._next_window()
                self._filled += 1
            generator = named_generator(self.seed, "data order", "", self._windows)
            drawn = int(torch.randint(self._filled, (), generator=generator))
            self._filled -= 1
            row[:] = self._buffer[drawn]
            self._buffer[drawn] = self._buffer[self._filled]
            self._windows += 1
        return torch.from_numpy(batch)

    def _next_window(self) -> Tokens:
        while len(self._remainder) < self.sequence_length:
            self._read_document()
        window, self._remainder = np.split(self._remainder, [self.sequence_length])
        return window

    def _read_document(self) -> None:
        document = self._stream.next_document()
        if document is None:
            check_length(self._pass_tokens, self.sequence_length, "training")
            self._passes += 1
            self._pass_tokens = 0
            return
        ids = np.append(self._tokenizer.encode(document.text), self._tokenizer.separator_id)
        self._pass_tokens += len(ids)
        self._remainder = np.concatenate([self._remainder, ids.astype(self._remainder.dtype)])

    def _same(self) -> dict[str, Any]:
        return {
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "buffer_windows": self.buffer_windows,
            "tokenizer": self._tokenizer.fingerprint,
        }

    def state_dict(self) -> dict[str, Any]:
        """Counts, the place in the stream, and the tokens read but not yet given out, as int32 tensors."""
        remainder = np.array(self._remainder, dtype=np.int32)
        return {
            "windows": self._windows,
            "passes": self._passes,
            "pass_tokens": self._pass_tokens,
            "stream": self._stream.state_dict(),
            "remainder": torch.from_numpy(remainder),
            "buffer": torch.from_numpy(np.array(self._buffer[: self._filled], dtype=np.int32)),
            **self._same(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            CheckpointError: If it was saved with another tokenizer, sequence length, buffer or seed.
        """
        check_same(state, self._same())
        self._windows = int(state["windows"])
        self._passes = int(state["passes"])
        self._pass_tokens = int(state["pass_tokens"])
        self._stream.load_state_dict(state["stream"])
        self._remainder = state["remainder"].cpu().numpy().astype(self._remainder.dtype)
        self._filled = len(state["buffer"])
        self._buffer[: self._filled] = state["buffer"].cpu().numpy()
