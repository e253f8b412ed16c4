"""FLOPs of a training step: predicted from sizes, and counted on the step itself.

Both sides count one thing: the products of matrices, a multiply-add as two FLOPs, causal attention in full. Norms,
activations, softmax and the optimizer's own arithmetic are left out.

A fused attention kernel saves memory by computing its scores a second time in backward. That is the kernel's affair and
is not counted, so that one step has one count on every device and with every kernel. What activation checkpointing
computes again is the user's choice, and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from adafrugal.core.errors import ConfigError, NotSupportedError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MatrixShapes:
    """The sizes that decide the matrix products of a decoder like Llama.

    Args:
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP.
        num_layers: Blocks.
        query_size: Query heads times the width of a head.
        kv_size: Key-value heads times the width of a head.
        vocab_size: Columns of the output head.
        gated_mlp: Whether the MLP has three matrices (gate, up, down) or two.

    Example:
        >>> tiny = MatrixShapes(hidden_size=128, intermediate_size=352, num_layers=4, query_size=128, kv_size=128,
        ...                     vocab_size=257)
        >>> training_step_flops(tiny, batch_size=1, sequence_length=64)
        346079232
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    query_size: int
    kv_size: int
    vocab_size: int
    gated_mlp: bool = True


@dataclass(frozen=True, kw_only=True)
class TrainedParts:
    """Which weights receive a gradient. Everything, unless said otherwise.

    Args:
        layers: Blocks whose matrices are trained, counted from 0; None is all.
        layer_norms: Blocks whose norms are trained; None is all. A trained norm needs the gradient of its output.
        embedding: Whether the input embedding is trained: then gradients flow through every block.
        final_norm: Whether the norm before the head is trained.
        head: Whether the output head is trained. Tied weights: the same value as ``embedding``.
    """

    layers: frozenset[int] | None = None
    layer_norms: frozenset[int] | None = None
    embedding: bool = True
    final_norm: bool = True
    head: bool = True

    @classmethod
    def only_layers(cls, *layers: int, norms: bool = False) -> TrainedParts:
        """Some blocks and nothing else, as in BAdam; ``norms`` adds the norms of these blocks."""
        chosen = frozenset(layers)
        nothing: frozenset[int] = frozenset()
        return cls(
            layers=chosen,
            layer_norms=chosen if norms else nothing,
            embedding=False,
            final_norm=False,
            head=False,
        )


@dataclass(frozen=True, kw_only=True)
class _Forward:
    """Forward FLOPs of one block, by what backward does with each product, and of the head."""

    inputs: int  # query, key and value projections: their input is the block's first norm
    attention: int
    output: int
    mlp: int
    down: int  # the share of ``mlp`` that is the last product of the block
    head: int

    @property
    def linear(self) -> int:
        return self.inputs + self.output + self.mlp

    @property
    def block(self) -> int:
        return self.linear + self.attention


def _forward(shapes: MatrixShapes, batch_size: int, sequence_length: int) -> _Forward:
    """Two FLOPs per weight and token; attention is two products of (length, length, query size)."""
    for name, value in (("batch_size", batch_size), ("sequence_length", sequence_length)):
        if value < 1:
            raise ConfigError(f"training_step_flops({name}={value})", value, "a whole number above 0", "Try 1.")
    per_weight = 2 * batch_size * sequence_length
    down = per_weight * shapes.hidden_size * shapes.intermediate_size
    return _Forward(
        inputs=per_weight * shapes.hidden_size * (shapes.query_size + 2 * shapes.kv_size),
        attention=2 * per_weight * sequence_length * shapes.query_size,
        output=per_weight * shapes.hidden_size * shapes.query_size,
        mlp=(3 if shapes.gated_mlp else 2) * down,
        down=down,
        head=per_weight * shapes.hidden_size * shapes.vocab_size,
    )


def forward_flops(shapes: MatrixShapes, *, batch_size: int, sequence_length: int) -> int:
    """FLOPs of one forward pass with logits at every position, such as an evaluation.

    2 * tokens * weights + 4 * tokens * length * query size * layers.

    Args:
        shapes: The model's sizes.
        batch_size: Sequences, padding included: it is computed like text.
        sequence_length: Tokens in each.

    Returns:
        The exact count, in FLOPs.

    Raises:
        ConfigError: If a size is below 1.
    """
    part = _forward(shapes, batch_size, sequence_length)
    return shapes.num_layers * part.block + part.head


def training_step_flops(
    shapes: MatrixShapes,
    *,
    batch_size: int,
    sequence_length: int,
    trained: TrainedParts | None = None,
    checkpointing: bool = False,
) -> int:
    """FLOPs of forward and backward, as `FlopMeter` counts them.

    Backward costs, for each product of forward, the same again for every operand that needs a gradient: a frozen
    weight saves one of two, and below the lowest trained weight nothing is left. All trained: 3 * forward.

    Args:
        shapes: The model's sizes.
        batch_size: Sequences in all micro-batches together, padding included.
        sequence_length: Tokens in each.
        trained: Which weights receive a gradient; None is all of them.
        checkpointing: Whether each block is computed again in backward (non-reentrant ``torch.utils.checkpoint``).
            Torch stops once all that backward needs is there, so the last product of a block is not repeated; blocks
            through which no gradient flows are not repeated at all.

    Returns:
        The exact count, in FLOPs.

    Raises:
        ConfigError: If a size is below 1, or a layer does not exist.

    Source:
        torch.utils.flop_counter for the convention.

    Deviations:
        Reentrant checkpointing repeats whole blocks, and a fused attention kernel computes all its gradients although
        some of its operands are frozen; where that matters, count with `FlopMeter`.
    """
    trained = trained or TrainedParts()
    part = _forward(shapes, batch_size, sequence_length)
    everywhere = frozenset(range(shapes.num_layers))
    layers = everywhere if trained.layers is None else trained.layers
    norms = everywhere if trained.layer_norms is None else trained.layer_norms
    if unknown := sorted((layers | norms) - everywhere):
        raise ConfigError(
            f"TrainedParts(layers={sorted(layers)}, layer_norms={sorted(norms)})",
            unknown,
            f"layers from 0 to {shapes.num_layers - 1}",
            f"The model has {shapes.num_layers} layers, counted from 0.",
        )
    flops = shapes.num_layers * part.block + part.head
    flows = trained.embedding  # whether the residual stream needs a gradient
    for layer in range(shapes.num_layers):
        if layer in layers:
            flops += part.linear
        if flows or layer in norms:
            flops += part.inputs
        flows = flows or layer in norms or layer in layers
        if flows:
            flops += 2 * part.attention + part.output + part.mlp
            flops += part.block - part.down if checkpointing else 0
    flows = flows or trained.final_norm
    return flops + (part.head if flows else 0) + (part.head if trained.head else 0)


def six_nd_flops(
    *,
    num_parameters: int,
    num_embedding_parameters: int,
    tied_embeddings: bool,
    num_layers: int,
    hidden_size: int,
    sequence_length: int,
    tokens: int,
) -> int:
    """The usual estimate of a full training step, to check an exact count against.

    6 * (N - input embedding, where it is not tied) * D + 12 * L * h * s * D.

    Args:
        num_parameters: N, every parameter once.
        num_embedding_parameters: Of these, the input embedding: a table that is read, not multiplied.
        tied_embeddings: Whether that table is the output head as well, and so multiplied after all.
        num_layers: L.
        hidden_size: h; query heads times head width, where that is another number.
        sequence_length: s, in tokens.
        tokens: D, padding included.

    Returns:
        FLOPs; above the exact count by the norms and biases, about one in a thousand for a tiny model.

    Source:
        Kaplan et al. (arXiv 2001.08361), section 2.1; the attention term counts causal attention in full.

    Example:
        >>> six_nd_flops(num_parameters=870_000, num_embedding_parameters=32_896, tied_embeddings=False,
        ...              num_layers=4, hidden_size=128, sequence_length=64, tokens=64)
        346613760
    """
    multiplied = num_parameters - (0 if tied_embeddings else num_embedding_parameters)
    return 6 * multiplied * tokens + 12 * num_layers * hidden_size * sequence_length * tokens


def _attention_product(query: Sequence[int], key: Sequence[int]) -> int:
    """FLOPs of one product of (length, width) by (width, length) for every query head."""
    batch_size, num_heads, length, width = query
    return 2 * batch_size * num_heads * length * key[2] * width


def _attention_forward(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *rest: Any, out_shape: Any = None, **options: Any
) -> int:
    """Scores, and their product with the values."""
    return 2 * _attention_product(query, key)


def _attention_backward(
    grad: Sequence[int], query: Sequence[int], key: Sequence[int], *rest: Any, out_shape: Any = None, **options: Any
) -> int:
    """Gradients of scores, values, queries and keys; the scores computed again are the kernel's affair."""
    return 4 * _attention_product(query, key)


_aten = torch.ops.aten
ATTENTION_FORMULAS: Mapping[Any, Callable[..., int]] = {
    # Torch 2.13 counts both CPU operators as 0: https://github.com/pytorch/pytorch/issues/195460. The forward line may
    # go once the oldest torch that we support counts it; the others stay, as torch counts five products in backward.
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
}


class FlopMeter:
    """Counts the FLOPs of a call exactly, once for each kind of call, and remembers.

    Counting watches every operator and makes a small step several times slower, so each distinct kind is counted on
    the first one of its kind, a real step whose results are the same as without counting, and then only looked up.

    Args:
        device: Where the model runs; its kernels are checked as well as the CPU's.

    Raises:
        NotSupportedError: If a matrix product, or fused attention with its backward, does not count what it must, or
            if counting alters a gradient.

    Cost:
        At construction a few milliseconds; no random numbers are drawn.

    Deviations:
        Kernels that are no torch operators (a flash-attention package) are not seen. While a compiled model is
        counted, torch runs it uncompiled.

    Example:
        >>> meter = FlopMeter()
        >>> result, flops = meter.measure(("product", 2), lambda: torch.ones(2, 3) @ torch.ones(3, 4))
        >>> result.shape, flops, meter.known(("product", 2))
        (torch.Size([2, 4]), 48, 48)
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._known: dict[Hashable, int] = {}
        for place in dict.fromkeys((torch.device("cpu"), self._device)):
            _check_counter(place)

    def known(self, key: Hashable) -> int | None:
        """The FLOPs of a kind of call that was counted already, or None."""
        return self._known.get(key)

    def measure(self, key: Hashable, call: Callable[[], T]) -> tuple[T, int]:
        """Make a call, once in any case, and say what it cost.

        Args:
            key: All that its FLOPs depend on: the shapes of the batch, which weights are trained, whether activations
                are checkpointed, whether it trains or evaluates.
            call: The step; counted only if no call with this key was counted before.

        Returns:
            What the call returned, and its FLOPs.
        """
        flops = self._known.get(key)
        if flops is not None:
            return call(), flops
        result, flops = _count(call, self._device)
        self._known[key] = flops
        return result, flops


def _no_products(*args: Any, out_shape: Any = None, **options: Any) -> int:
    return 0


def _whole_operators(device: torch.device) -> dict[Any, Callable[..., int]]:
    """Operators that torch's counter would take apart although the device has a kernel for them.

    The parts may round otherwise than the kernel: silu's backward on a CPU differs in its last bit (seen in torch
    2.13). An operator that has a formula of its own is left whole, and none of these holds a matrix product.
    """
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    divisible = set(registered("CompositeImplicitAutograd"))
    whole: dict[Any, Callable[..., int]] = {}
    for qualified in divisible & {*registered("CPU"), *registered(device.type.upper())}:
        namespace, _, name = qualified.partition("::")
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        whole[operator] = _no_products
    return whole


def _count(call: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """Make a call under torch's counter."""
    counter = FlopCounterMode(display=False, custom_mapping={**_whole_operators(device), **ATTENTION_FORMULAS})
    with counter:
        result = call()
    return result, counter.get_total_flops()


def _leaf(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers from -4 to 4 that draw nothing from a random stream."""
    return torch.linspace(-4, 4, math.prod(shape), device=device, dtype=dtype).view(shape).requires_grad_()


def _layer_grads(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Six FLOPs for each weight and row: 6 * 16 * 8 * 8."""
    operands = _leaf((16, 8), device, dtype), _leaf((8, 8), device, dtype)
    return torch.autograd.grad(F.silu(operands[0] @ operands[1]).sum(), operands)


def _attention_grads(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Six products of 2 * 16 * 16 * 8 FLOPs for each of two sequences and three heads."""
    query, key, value = (_leaf((2, 3, 16, 8), device, dtype) for _ in range(3))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return torch.autograd.grad(attended.sum(), (query, key, value))


def _check_counter(device: torch.device) -> None:
    """Count one layer and one attention, forward and backward, and refuse if a count or a gradient is wrong."""
    expected = (6 * 16 * 8 * 8, 6 * 2 * 16 * 16 * 8 * 2 * 3)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.inference_mode(False), torch.enable_grad():
            grads, layer_flops = _count(partial(_layer_grads, device, dtype), device)
            _, attention_flops = _count(partial(_attention_grads, device, dtype), device)
            same = all(torch.equal(*pair) for pair in zip(grads, _layer_grads(device, dtype), strict=True))
        if not same or (layer_flops, attention_flops) != expected:
            raise NotSupportedError(
                f"FlopMeter(device={str(device)!r})",
                f"{layer_flops} and {attention_flops} FLOPs for a linear layer and an attention in {dtype}, gradients "
                f"{'equal' if same else 'altered by counting'}, with torch {torch.__version__}",
                f"{expected[0]} and {expected[1]}, gradients equal",
                "FLOPs cannot be counted with this torch and device: take another torch release, or the analytic "
                "count of training_step_flops.",
            )
