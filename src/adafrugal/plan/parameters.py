"""A model's parameters without storage, under transformers' names, for optimizers to be built over."""

from __future__ import annotations

import torch
from torch import nn

from adafrugal.plan.shapes import ModelShape


def meta_parameters(shape: ModelShape, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The parameters of a model as a module on the meta device: real shapes and names, no storage.

    What `adafrugal.param_groups` and ``train.build_optimizer`` take. Tied weights are there once.

    Args:
        shape: The model.
        dtype: Of the weights.

    Returns:
        A module that cannot run.

    Example:
        >>> from adafrugal.plan.shapes import PRESETS
        >>> tiny = PRESETS.create("tiny")
        >>> sum(p.numel() for p in meta_parameters(tiny).parameters()) == tiny.num_parameters
        True
    """
    with torch.device("meta"):
        return _Skeleton(shape).to(dtype)


class _Linear(nn.Linear):
    """A Linear whose weights are not drawn: without storage that takes a second and does nothing."""

    def reset_parameters(self) -> None:
        """Nothing."""


class _Embedding(nn.Embedding):
    """An Embedding whose weights are not drawn."""

    def reset_parameters(self) -> None:
        """Nothing."""


class _Mlp(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width, inner, bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
        if shape.gated_mlp:
            self.gate_proj = _Linear(width, inner, bias=bias)
        self.up_proj = _Linear(width, inner, bias=bias)
        self.down_proj = _Linear(inner, width, bias=bias)


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.q_proj = _Linear(width, shape.query_size, bias=shape.qkv_bias)
        self.k_proj = _Linear(width, shape.kv_size, bias=shape.qkv_bias)
        self.v_proj = _Linear(width, shape.kv_size, bias=shape.qkv_bias)
        self.o_proj = _Linear(shape.query_size, width, bias=shape.attention_output_bias)


class _Norm(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.hidden_size))
        if shape.norm_bias:
            self.bias = nn.Parameter(torch.empty(shape.hidden_size))


class _Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        names = ("input_layernorm", "post_attention_layernorm")
        for number in range(shape.num_block_norms):
            self.add_module(names[number] if number < len(names) else f"norm_{number}", _Norm(shape))


class _Trunk(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = _Embedding(shape.vocab_size, shape.hidden_size)
        if shape.num_position_embeddings:
            self.embed_positions = _Embedding(shape.num_position_embeddings, shape.hidden_size)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.num_layers))
        for number in range(shape.num_outer_norms):
            self.add_module("norm" if number == 0 else f"norm_{number}", _Norm(shape))


class _Skeleton(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.model = _Trunk(shape)
        if not shape.tied_embeddings:
            self.lm_head = _Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.num_other_parameters:
            self.other = nn.Parameter(torch.empty(shape.num_other_parameters))
