"""What is learnt: the next token of a window, or the label of an example."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adafrugal.data.rows import FILL, HEAD, targets_of


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

    def num_tokens(self, batch: Tensor) -> int:
        """All of them: windows are full."""
        return batch.numel()

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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Say of each example its class, or its number.

    Args:
        is_regression: Whether a number is asked for; then the loss is the squared error.
        padding_id: What stands where a row has no id.
        has_segments: Whether the model is told which of two texts a token belongs to.
        autocast: Run the model's matrix products in bfloat16 under ``torch.autocast``; the loss stays float32.
    """

    is_regression: bool
    padding_id: int
    has_segments: bool
    autocast: bool = False

    def num_targets(self, batch: Tensor) -> int:
        """One for each example.

        Args:
            batch: Rows, int64 (examples, HEAD + ids), as `data.rows` lays them out.
        """
        return batch.shape[0]

    def num_tokens(self, batch: Tensor) -> int:
        """Ids, without what fills up."""
        return int((batch[:, HEAD:] != FILL).sum())

    def outputs(self, model: nn.Module, batch: Tensor) -> Tensor:
        """What the model's head gives, float32 (examples, outputs).

        Args:
            model: A sequence classifier of transformers' form.
            batch: Rows, on the model's device.
        """
        ids = batch[:, HEAD:]
        there = ids != FILL
        given = {"input_ids": ids.masked_fill(~there, self.padding_id), "attention_mask": there.long()}
        if self.has_segments:
            places = torch.arange(ids.shape[1], device=ids.device)
            given["token_type_ids"] = ((places >= batch[:, 1:2]) & there).long()
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=self.autocast):
            return model(**given).logits.float()

    def loss_sum(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Cross-entropy in nats, or the squared error, summed over the examples; a float32 scalar."""
        return self.loss_of(self.outputs(model, batch), targets_of(batch))

    def loss_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of given outputs.

        Args:
            outputs: Float32 (examples, outputs).
            targets: Float64 (examples,): indices of classes, or numbers.
        """
        if self.is_regression:
            return (outputs.squeeze(-1) - targets.float()).square().sum()
        return F.cross_entropy(outputs, targets.long(), reduction="sum")
