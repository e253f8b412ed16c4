"""A batch cut into micro-batches: where memory runs out, the step is taken again in pieces of half the size."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from adafrugal.core.errors import MemoryLimitError
from adafrugal.core.values import Backward

_CPU_SIGNS = ("can't allocate memory", "not enough memory")


class Pieces:
    """The size of micro-batches, and what happens when one is too large.

    A step's gradient is the same in pieces of any size, so the global batch is kept and no step is lost: gradients of
    the failed try are dropped, its draws (dropout) are drawn again, and no weight has moved.

    Args:
        size: Examples of one forward and backward.
        can_retry: Whether a failed try leaves weights as they were: not where updates are inside backward, nor on
            several processes, of which one alone has run out.
        told: Is told each new size.
    """

    def __init__(self, size: int, *, can_retry: bool, told: Callable[[int], None]) -> None:
        self.size = size
        self._can_retry = can_retry
        self._told = told

    def run(self, step: int, batch: Tensor, backward: Callable[[tuple[Tensor, ...]], Backward]) -> Backward:
        """Take a step's gradient.

        Args:
            step: Its number, for the error.
            batch: Examples in the first dimension.
            backward: Runs over the pieces; called again after a failure.

        Raises:
            MemoryLimitError: If memory runs out in pieces of one.
        """
        while True:
            try:
                return backward(cast(tuple[Tensor, ...], batch.split(self.size)))
            except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU's allocator raises it plain
                if not is_out_of_memory(error) or not self._can_retry:
                    raise
                if self.size == 1:
                    raise MemoryLimitError(
                        f"training step {step}",
                        "out of memory in pieces of one example",
                        "a step that fits",
                        "Set --activation_checkpointing true, a shorter --batch.sequence_length, or a smaller model; "
                        "adafrugal plan says what fits.",
                    ) from error
            # Outside of the handler, so that the failed try's tensors, which the error holds, are gone.
            self.size = (self.size + 1) // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._told(self.size)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocator has failed, on a GPU or a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error).lower() for sign in _CPU_SIGNS)
