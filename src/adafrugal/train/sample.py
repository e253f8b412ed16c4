"""A sample of what a model writes, drawn from a seed of its own."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from adafrugal.core.rng import own_stream
from adafrugal.data.tokenizer import Tokenizer
from adafrugal.train.config import SampleConfig


@torch.no_grad()
def write_sample(model: nn.Module, tokenizer: Tokenizer, config: SampleConfig, seed: int) -> str:
    """Let the model go on from a prompt.

    Args:
        model: A causal language model of transformers' form.
        tokenizer: Its tokenizer.
        config: Prompt, length, temperature.
        seed: Of the draws.

    Returns:
        Prompt and continuation; it ends early at a separator, and at the model's last position.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    ids = [int(i) for i in tokenizer.encode(config.prompt)] or [tokenizer.separator_id]
    longest = int(getattr(cast(Any, model).config, "max_position_embeddings", len(ids) + config.tokens))
    draws = {"temperature": config.temperature, "top_k": 0, "top_p": 1.0} if config.temperature > 0 else {}
    prompt = torch.tensor([ids], device=device)
    # transformers draws from the global stream: it gets one of its own, and ours is put back.
    with own_stream(seed, "sample", device=device):
        written: Tensor = cast(Any, model).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max(1, min(config.tokens, longest - len(ids))),
            do_sample=config.temperature > 0,
            eos_token_id=tokenizer.separator_id,
            pad_token_id=tokenizer.separator_id,
            **draws,
        )
    model.train(was_training)
    return tokenizer.decode(written[0].cpu().numpy())
