"""An endless shuffled order over numbered items, which depends on the seed alone and goes on from any saved place."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from adafrugal.core.errors import ConfigError
from adafrugal.core.rng import named_generator


def check_count(count: int) -> None:
    """Refuse an empty batch.

    Raises:
        ConfigError: If fewer than one window is asked for.
    """
    if count < 1:
        raise ConfigError(f"next_batch({count})", count, "a whole number from 1 on", "Ask for one.")


class ShuffledOrder:
    """Every item once in each epoch, in an order of the epoch's own.

    The place is one number, the items taken since the start: item k is entry (k mod n) of the permutation that epoch
    k div n draws from (seed, "data order", epoch).

    Args:
        num_items: n, 1 or more.
        seed: The run's seed.

    Cost:
        8 bytes an item for the permutation.

    Example:
        >>> order = ShuffledOrder(3, seed=0)
        >>> sorted(order.take(2).tolist() + order.take(1).tolist()), order.epoch
        ([0, 1, 2], 1)
    """

    def __init__(self, num_items: int, seed: int) -> None:
        self.num_items = num_items
        self.seed = seed
        self.taken = 0
        self._drawn: tuple[int, NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> int:
        """How many epochs are complete."""
        return self.taken // self.num_items

    def take(self, count: int) -> NDArray[np.int64]:
        """The next items; they may cross from one epoch into the next.

        Raises:
            ConfigError: If fewer than one is asked for.
        """
        check_count(count)
        parts: list[NDArray[np.int64]] = []
        while count:
            epoch, position = divmod(self.taken, self.num_items)
            part = self._permutation(epoch)[position : position + count]
            parts.append(part)
            self.taken += len(part)
            count -= len(part)
        return np.concatenate(parts)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if self._drawn is None or self._drawn[0] != epoch:
            generator = named_generator(self.seed, "data order", "", epoch)
            self._drawn = (epoch, torch.randperm(self.num_items, generator=generator).numpy())
        return self._drawn[1]
