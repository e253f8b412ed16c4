"""What several processes must agree on: one number, averaged over all ranks of the default process group."""

from __future__ import annotations

import torch
from torch import distributed


def num_ranks() -> int:
    """How many processes train together; 1 where torch.distributed is not in use."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def mean_over_ranks(value: float) -> float:
    """Average a number over all ranks; with one process, the number itself.

    Args:
        value: This rank's number. Every rank must make the call: it is a collective.

    Returns:
        The same float64 on every rank, bit for bit; NaN or infinite on all where it is so on one.

    Cost:
        One all-reduce of 8 bytes.
    """
    ranks = num_ranks()
    if ranks == 1:
        return value
    on_gpu = distributed.get_backend() == distributed.Backend.NCCL
    total = torch.tensor(value, dtype=torch.float64, device=torch.cuda.current_device() if on_gpu else "cpu")
    distributed.all_reduce(total)
    return float(total) / ranks
