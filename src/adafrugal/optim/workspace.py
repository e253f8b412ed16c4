"""Buffers that the tensors of one update share, so that a CPU does not fetch fresh pages for every temporary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Workspace:
    """Named buffers, each as large as the largest tensor that needs it; let go when the update is done.

    An allocator may give large temporaries back to the system as soon as they are freed: then each one costs a page
    fault for every 4 kB, which on a CPU takes as long as the update itself.

    Example:
        >>> workspace = Workspace()
        >>> first = workspace.take("update", (2, 3), torch.zeros(0))
        >>> workspace.take("update", (3,), torch.zeros(0)).data_ptr() == first.data_ptr()
        True
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """A contiguous tensor of any content; it is overwritten when the name is taken again.

        Args:
            name: What it is for; two buffers that are used at once need two names.
            shape: Its shape.
            like: Gives dtype and device.
        """
        numel = math.prod(shape)
        key = (name, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[:numel].view(tuple(shape))
