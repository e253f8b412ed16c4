"""Stores float32 results in weights of lower precision: nearest, stochastic rounding, Kahan compensation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic", "kahan"]
ROUNDINGS: tuple[Rounding, ...] = ("stochastic", "kahan", "nearest")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64 weights, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(param: Tensor, compensation: Tensor | None) -> Tensor:
    """A weight in its compute dtype (a copy, where it is of low precision), with Kahan's buffer added."""
    wide = param.to(compute_dtype(param.dtype))
    return wide if compensation is None else wide.add_(compensation)


def round_into(
    param: Tensor,
    wide: Tensor,
    rounding: Rounding,
    generator: torch.Generator | None,
    compensation: Tensor | None,
) -> None:
    """Store a float32 result in a weight of lower precision.

    Args:
        param: The weight, any shape and strides.
        wide: The result, float32, in the weight's shape; overwritten.
        rounding: How a bfloat16 weight takes it. float16 weights are rounded to nearest unless Kahan's buffer is there.
        generator: Draws the noise of stochastic rounding; on the weight's device.
        compensation: Kahan's buffer, in the weight's shape and dtype; takes what the rounding lost. Or None.
    """
    if compensation is not None:
        param.copy_(wide)
        compensation.copy_(wide.sub_(param))
    elif rounding == "stochastic" and param.dtype == torch.bfloat16 and not param.is_meta:
        assert generator is not None
        param.copy_(stochastic_bfloat16(wide, generator))
    else:
        param.copy_(wide)


def stochastic_bfloat16(wide: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to one of the two neighbours in bfloat16, up with the probability that makes the mean exact.

    Args:
        wide: float32, any shape; overwritten where it is contiguous.
        generator: On the same device.

    Returns:
        float32 values that bfloat16 holds exactly. Infinity and NaN stay what they are.

    Cost:
        16 random bits an element.
    """
    wide = wide.contiguous()
    nan = wide != wide  # its payload may be all ones, and noise would carry it into the sign
    bits = wide.view(torch.int32)
    num_words = -(-bits.numel() // 4)
    words = torch.empty(num_words, dtype=torch.int64, device=wide.device)
    words.random_(-(2**63), None, generator=generator)
    noise = words.view(torch.int16)[: bits.numel()].view(bits.shape).to(torch.int32)
    bits.add_(noise.bitwise_and_(0xFFFF)).bitwise_and_(-0x10000)
    return wide.masked_fill_(nan, torch.nan)
