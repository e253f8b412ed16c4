"""Labelled examples as rows of whole numbers, so that batches are shuffled, cut, moved and shared like windows of text.

A row is [bits of the target, where the second text begins, id, id, ..., -1, -1]; the target's 64 bits are those of a
float64, and -1 fills up to the longest row of its batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from adafrugal.core.errors import DataError
from adafrugal.data.labelled import Example
from adafrugal.data.libraries import load_library
from adafrugal.data.order import ShuffledOrder
from adafrugal.data.windows import check_same

HEAD = 2  # cells before the ids
FILL = -1
# Batches are filled up to a multiple of this, so that they come in few shapes and FLOPs are counted few times.
_STEP = 8


class PairTokenizer:
    """A pretrained tokenizer with its special tokens around and between texts, as encoders want them.

    Args:
        name_or_folder: A folder or a hub id.

    Raises:
        DataError: If it does not load, or has no token to fill up with.
    """

    def __init__(self, name_or_folder: str) -> None:
        transformers = load_library("transformers", f"the tokenizer of {name_or_folder}")
        folder = Path(name_or_folder).expanduser()
        try:
            self._original: Any = transformers.AutoTokenizer.from_pretrained(
                str(folder) if folder.exists() else name_or_folder
            )
        except (
            Exception
        ) as error:  # transformers raises many types here: its own, the hub's, the network's, the parser's
            reason = (str(error).strip().splitlines() or [""])[0]
            raise DataError(
                f"the tokenizer of {name_or_folder}",
                f"one that did not load ({type(error).__name__}: {reason})",
                "a folder that holds a tokenizer, or a hub id",
                "Give --tokenizer.name.",
            ) from error
        self.name = folder.resolve().name if folder.exists() else name_or_folder
        pad: int | None = self._original.pad_token_id
        if pad is None:
            pad = self._original.eos_token_id
        if pad is None:
            raise DataError(
                f"the tokenizer of {name_or_folder}",
                "no padding and no end-of-sequence token",
                "one of the two",
                "Set its pad_token with transformers, save it, and name that folder.",
            )
        self.padding_id = pad
        self.vocab_size = len(self._original)
        self.has_segments = "token_type_ids" in self._original.model_input_names
        vocabulary = sorted(cast(dict[str, int], self._original.get_vocab()).items())
        self.fingerprint = hashlib.sha256(repr((vocabulary, pad, self.has_segments)).encode()).hexdigest()

    def encode(self, texts: tuple[str, ...], max_length: int) -> tuple[list[int], int]:
        """Ids of one text or a pair, cut to a length, and where the second segment begins (the length if nowhere)."""
        found: Mapping[str, list[int]] = self._original(
            *texts, truncation=True, max_length=max_length, return_token_type_ids=True
        )
        ids, segments = found["input_ids"], found["token_type_ids"]
        return ids, segments.index(1) if 1 in segments else len(ids)

    def save(self, folder: str | Path) -> None:
        """Write it so that ``transformers.AutoTokenizer`` loads it."""
        self._original.save_pretrained(str(folder))


class ExampleRows:
    """An endless shuffled sequence of rows, whose place can be saved: the `Windows` of labelled examples.

    Args:
        rows: Of `encode_rows`.
        seed: The run's seed.

    Example:
        >>> rows = ExampleRows([torch.tensor([0, 1, 7]), torch.tensor([0, 2, 7, 8])], seed=0)
        >>> rows.next_batch(2).shape, rows.epoch
        (torch.Size([2, 10]), 1)
    """

    def __init__(self, rows: Sequence[Tensor], seed: int) -> None:
        self.num_rows = len(rows)
        self._rows = rows
        self._order = ShuffledOrder(len(rows), seed)

    @property
    def epoch(self) -> int:
        """How many passes are complete."""
        return self._order.epoch

    def next_batch(self, num_windows: int) -> Tensor:
        """The next rows, int64 (num_windows, length of the longest, filled up)."""
        return filled([self._rows[int(i)] for i in self._order.take(num_windows)])

    def state_dict(self) -> dict[str, Any]:
        """The count of rows taken, and the numbers that must be the same at a resume."""
        return {"windows": self._order.taken, **self._same()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            CheckpointError: If it was saved with other examples or another seed.
        """
        check_same(state, self._same())
        self._order.taken = int(state["windows"])

    def _same(self) -> dict[str, int]:
        return {"num_rows": self.num_rows, "seed": self._order.seed}


def encode_rows(examples: Sequence[Example], tokenizer: PairTokenizer, max_length: int) -> list[Tensor]:
    """Each example as a row of its own length.

    Args:
        examples: What was read.
        tokenizer: Adds its special tokens.
        max_length: Ids of a row at most, special ones included; of a pair the longer text is cut first.
    """
    rows: list[Tensor] = []
    for example in examples:
        ids, second = tokenizer.encode(example.texts, max_length)
        bits = torch.tensor([example.target], dtype=torch.float64).view(torch.int64)
        rows.append(torch.cat([bits, torch.tensor([second, *ids], dtype=torch.int64)]))
    return rows


def filled(rows: Sequence[Tensor]) -> Tensor:
    """Rows of several lengths as one tensor, int64 (rows, HEAD + ids), filled with -1."""
    longest = max(len(row) for row in rows) - HEAD
    width = HEAD + -(-longest // _STEP) * _STEP
    batch = torch.full((len(rows), width), FILL, dtype=torch.int64)
    for i, row in enumerate(rows):
        batch[i, : len(row)] = row
    return batch


def targets_of(batch: Tensor) -> Tensor:
    """The targets of rows, float64 (rows,)."""
    return batch[:, 0].contiguous().view(torch.float64)
