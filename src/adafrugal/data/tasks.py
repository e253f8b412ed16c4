"""What is learnt and how it is scored: next-token prediction on windows of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class NextToken:
    """Predict each token of a window from the ones before it; the first one has no target.

    Args:
        autocast: Run the model's matrix products in bfloat16 under ``torch.autocast``; the loss stays float32.
    """

    autocast: bool = False

    def num_targets(self, batch: Tensor) -> int:
        """All but the first token of each window.

        Args:
            batch: Ids, int64 (num_windows, sequence_length).
        """
        return batch.shape[0] * (batch.shape[1] - 1)

    def loss_sum(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Cross-entropy in nats, summed over the targets.

        Args:
            model: A causal language model of transformers' form: takes ``input_ids``, returns ``logits``.
            batch: Ids, int64 (num_windows, sequence_length), on the model's device.

        Returns:
            A float32 scalar.

        Cost:
            Logits in float32: 4 bytes * targets * vocabulary, and their gradient.
        """
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=self.autocast):
            logits: Tensor = model(input_ids=batch, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
