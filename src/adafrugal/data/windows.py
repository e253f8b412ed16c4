"""Windows of tokens: what training reads, in an order that depends on the seed alone, from any saved place on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from adafrugal.core.errors import CheckpointError, ConfigError, DataError
from adafrugal.data.order import ShuffledOrder
from adafrugal.data.tokenizer import Tokens


class Windows(Protocol):
    """An endless sequence of training windows, whose place can be saved. How it is cut into batches changes nothing."""

    @property
    def epoch(self) -> int:
        """How many passes over the text are complete."""
        ...

    def next_batch(self, num_windows: int) -> torch.Tensor:
        """The next windows, int64 (num_windows, sequence_length)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The place reached, as numbers, strings and tensors that survive a weights-only load."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place of an earlier state."""
        ...


def check_length(num_tokens: int, sequence_length: int, side: str) -> None:
    """Refuse a sequence length that has no target, or a text that does not fill one window.

    Args:
        num_tokens: Tokens of the text, separators included.
        sequence_length: Tokens of a window.
        side: Which text it is, for the error: ``"training"`` or ``"validation"``.

    Raises:
        ConfigError: If the sequence length is below 2.
        DataError: If the text is shorter than one window.
    """
    if sequence_length < 2:
        raise ConfigError(
            f"sequence_length={sequence_length}",
            sequence_length,
            "a whole number from 2 on, since the first token of a window has no target",
            "Try 256.",
        )
    if num_tokens < sequence_length:
        raise DataError(
            f"sequence_length={sequence_length}",
            f"a {side} text of {num_tokens} tokens, shorter than one sequence",
            f"a text of at least {sequence_length} tokens",
            f"Set sequence_length to {num_tokens} or less, or give more text." if num_tokens > 1 else "Give more text.",
        )


def check_same(state: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse the saved place of another text or other settings.

    Raises:
        CheckpointError: If a value in the state differs from the present one.
    """
    for name, value in present.items():
        if state.get(name) != value:
            raise CheckpointError(
                "load_state_dict of the data order",
                f"{name}={state.get(name)!r}",
                f"{name}={value!r}, as this run has it",
                "Resume with the text, tokenizer and settings that the checkpoint was written with.",
            )


class PackedWindows:
    """Windows of one flat array of tokens, shuffled anew in each epoch after they were cut.

    The text is cut into windows that do not overlap, and the tail that fills none is dropped. Since it is windows that
    are shuffled, not documents, a long document is spread over the epoch like any other.

    The place is one number, the windows read since the start; `ShuffledOrder` says in which order they come.

    Args:
        tokens: What `pack` returned; a memory map will do.
        sequence_length: Tokens of a window, 2 or more.
        seed: The run's seed.

    Raises:
        ConfigError: If the sequence length is below 2.
        DataError: If there is less than one window of text.

    Cost:
        8 bytes a window for the permutation.

    Example:
        >>> windows = PackedWindows(np.arange(7, dtype=np.int32), sequence_length=2, seed=0)
        >>> windows.num_windows, sorted(windows.next_batch(3).tolist()), windows.epoch
        (3, [[0, 1], [2, 3], [4, 5]], 1)
    """

    # Not torchdata's StatefulDataLoader, as of 0.11: it fixes the batch size when it is made, where the micro-batch may
    # change during a run; its iterator draws a seed from the global stream; and its import warns under torch 2.13. It
    # would wrap the one number that is the whole state here.

    def __init__(self, tokens: Tokens, sequence_length: int, seed: int) -> None:
        check_length(len(tokens), sequence_length, "training")
        self.sequence_length = sequence_length
        self.seed = seed
        self.num_windows = len(tokens) // sequence_length
        self._rows = tokens[: self.num_windows * sequence_length].reshape(self.num_windows, sequence_length)
        self._order = ShuffledOrder(self.num_windows, seed)

    @property
    def epoch(self) -> int:
        """How many epochs are complete."""
        return self._order.epoch

    def next_batch(self, num_windows: int) -> torch.Tensor:
        """The next windows, int64 (num_windows, sequence_length); they may cross from one epoch into the next.

        Raises:
            ConfigError: If fewer than one is asked for.
        """
        return torch.from_numpy(self._rows[self._order.take(num_windows)].astype(np.int64))

    def _same(self) -> dict[str, int]:
        return {"num_windows": self.num_windows, "sequence_length": self.sequence_length, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        """``windows``, the count read since the start, and the numbers that must be the same at a resume."""
        return {"windows": self._order.taken, **self._same()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            CheckpointError: If it was saved with another text, sequence length or seed.
        """
        check_same(state, self._same())
        self._order.taken = int(state["windows"])
