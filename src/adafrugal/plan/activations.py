"""Bytes that forward and backward of a training step hold beside weights and optimizer state, by moment.

Nothing is built: a model's step is a walk over counts of bytes (plan/tape.py, plan/operations.py). Blocks are alike, so
two at the bottom and the last are walked and those between are added as one lump: what they save falls and what
they complete rises in equal steps, so that no peak lies between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

from adafrugal.core.errors import ConfigError
from adafrugal.plan.operations import FLOAT32_BYTES, Operations, Parameter
from adafrugal.plan.shapes import ModelShape
from adafrugal.plan.tape import Buffer, Node, Tape, Value

PrecisionName = Literal["float32", "bfloat16", "autocast"]
_SEED_BYTES = 5056  # the state of torch's generator on a CPU, which checkpointing keeps for each block
PRECISIONS: tuple[PrecisionName, ...] = ("float32", "bfloat16", "autocast")


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """What decides the memory of a step besides the model.

    Args:
        micro_batch: Sequences of one forward and backward.
        sequence_length: Tokens in each.
        precision: ``"float32"``; ``"bfloat16"`` weights and activations; ``"autocast"``, float32 weights whose matrix
            products run in bfloat16.
        checkpointing: Whether the activations of each block are computed again in backward.
        fused_backward: Whether each gradient is used and freed as soon as it is complete.
        accumulation: Micro-batches of one step; from 2 on, all gradients are there in later forwards.
        fused_attention: Whether attention keeps no matrix of (length, length).

    Raises:
        ConfigError: For sizes below 1, an unknown precision, or a fused backward with accumulation.

    Example:
        >>> StepSetting(micro_batch=4, sequence_length=256).tokens
        1024
    """

    micro_batch: int
    sequence_length: int
    precision: PrecisionName = "float32"
    checkpointing: bool = False
    fused_backward: bool = False
    accumulation: int = 1
    fused_attention: bool = True

    def __post_init__(self) -> None:
        for name in ("micro_batch", "sequence_length", "accumulation"):
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise ConfigError(f"StepSetting({name}={value})", value, "a whole number from 1", "Try 1.")
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"StepSetting(precision={self.precision!r})",
                self.precision,
                f"one of {', '.join(PRECISIONS)}",
                "Choose one of these.",
            )
        if self.fused_backward and self.accumulation > 1:
            raise ConfigError(
                f"StepSetting(fused_backward=True, accumulation={self.accumulation})",
                f"accumulation={self.accumulation}",
                "1 with a fused backward, whose gradients are gone before they could add up",
                "Leave one of the two out.",
            )

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch, padding included."""
        return self.micro_batch * self.sequence_length

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight, and of one element of its gradient."""
        return 2 if self.precision == "bfloat16" else FLOAT32_BYTES

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element that a matrix product takes and gives."""
        return FLOAT32_BYTES if self.precision == "float32" else 2


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Most bytes beyond weights and optimizer state at each moment of forward and backward.

    Args:
        moments: By ``forward``, ``head``, ``norm``, ``blocks`` and ``embedding``: all bytes, and those of gradients.
        saved: What autograd keeps for backward when forward ends.
        gradients: All that are held when backward ends; with a fused backward none.
        arrivals: By the elements of a parameter, the most that is held when a gradient of that size is complete: where
            an update that is fused into backward comes on top.
    """

    moments: Mapping[str, tuple[int, int]]
    saved: int
    gradients: int
    arrivals: Mapping[int, int]

    @property
    def peak(self) -> int:
        """The most of all moments."""
        return max(total for total, _ in self.moments.values())


@lru_cache(maxsize=4096)
def step_bytes(shape: ModelShape, setting: StepSetting) -> StepBytes:
    """Walk one step of a causal language model whose loss is taken in float32 over all positions but the last.

    Args:
        shape: The model.
        setting: Batch, precision and what is traded for memory.

    Returns:
        Bytes by moment.

    Cost:
        About a millisecond, whatever the sizes.

    Source:
        The operations of transformers 5.24's LlamaModel, and of LayerNorm models without dropout, in torch 2.13.

    Deviations:
        Dropout's masks are not counted.

    Example:
        >>> from adafrugal.plan.shapes import PRESETS
        >>> setting = StepSetting(micro_batch=1, sequence_length=2048, precision="bfloat16")
        >>> step_bytes(PRESETS.create("llama-7b"), setting).saved > 2**30
        True
    """
    return _Walk(shape, setting).bytes()


class _Walk:
    """One walk; T tokens, h hidden, f MLP width, V vocabulary."""

    def __init__(self, shape: ModelShape, setting: StepSetting) -> None:
        self.shape, self.setting = shape, setting
        self.tape = Tape(keeps_gradients=not setting.fused_backward and setting.accumulation == 1)
        self.ops = Operations(tape=self.tape, weight_size=setting.weight_bytes, product_size=setting.compute_bytes)
        self.h = setting.tokens * shape.hidden_size
        self.rotary: Buffer | None = None
        self.mask: Buffer | None = None

    def bytes(self) -> StepBytes:
        """Forward, then backward."""
        shape, setting, tape = self.shape, self.setting, self.tape
        gradients = 0 if setting.fused_backward else shape.num_parameters * setting.weight_bytes
        if setting.accumulation > 1:
            tape.hold_gradients(gradients)
        before = tape.now
        ids = tape.hold(8 * setting.tokens)
        root = cast(Node, self.forward().node)
        saved = tape.now - before
        tape.moment = "head"
        root.pending = tape.hold(FLOAT32_BYTES)
        tape.backward(root)
        del ids, root
        return StepBytes(moments=dict(tape.peaks), saved=saved, gradients=gradients, arrivals=dict(tape.arrivals))

    # --- the model --------------------------------------------------------------------------------------------------

    def forward(self) -> Value:
        """From token ids to the loss."""
        tape, ops, shape = self.tape, self.ops, self.shape
        tape.section = "embedding"
        table = self.weight(shape.vocab_size * shape.hidden_size)
        inputs = hidden = ops.embedding(table, self.h)
        if shape.num_position_embeddings:
            positions = self.weight(shape.num_position_embeddings * shape.hidden_size)
            hidden = ops.add(hidden, ops.embedding(positions, self.h))
        else:
            self.rotary = tape.hold(2 * self.setting.sequence_length * shape.head_dim * hidden.size)
        if not self.setting.fused_attention:  # blocks share one mask of their scores
            self.mask = tape.hold(self.setting.tokens * self.setting.sequence_length * hidden.size)
        hidden = self.blocks(hidden)
        self.mask = None
        if shape.num_outer_norms:
            tape.section = "norm"
            hidden = self.norm(hidden, self.norm_weights("norm"))
        self.rotary = None
        del inputs
        tape.section = "head"
        head = table if shape.tied_embeddings else self.weight(shape.vocab_size * shape.hidden_size)
        logits = ops.linear(hidden, head, self.setting.tokens * shape.vocab_size)
        del hidden
        ops.casts.clear()
        return self.loss(logits)

    def blocks(self, hidden: Value) -> Value:
        """The first two blocks, a lump for more that are like the second, and the last."""
        tape, ops, num_layers = self.tape, self.ops, self.shape.num_layers
        hidden = self.block(hidden)
        if num_layers > 2:
            held, cast_before = tape.now, _total(ops.casts)
            hidden = self.block(hidden)
            between, cast_bytes = num_layers - 3, _total(ops.casts) - cast_before
            kept = tape.now - held - (cast_bytes if self.setting.checkpointing else 0)
            if self.setting.checkpointing:
                ops.casts.append(tape.hold(between * cast_bytes))
            hidden = self.lump(hidden, between * kept, between * self.block_parameters * self.setting.weight_bytes)
        return self.block(hidden) if num_layers > 1 else hidden

    def lump(self, hidden: Value, kept: int, gradient_bytes: int) -> Value:
        """Blocks that are not walked: what they save goes first, and then their gradients come, at once."""
        tape, saved = self.tape, [self.tape.hold(kept)]

        def backward(gradient: Buffer) -> tuple[Buffer]:
            saved.clear()
            if tape.keeps_gradients:
                tape.hold_gradients(gradient_bytes)
            return (gradient,)

        return tape.make(hidden.numel, hidden.size, (hidden,), backward, hidden.buffer)

    # --- a block ----------------------------------------------------------------------------------------------------

    def block(self, hidden: Value) -> Value:
        """One block, whose activations are kept, or computed again when backward comes to it."""
        tape, ops = self.tape, self.ops
        tape.section = "blocks"
        weights = {name: self.weight(numel) for name, numel in block_weights(self.shape).items()}
        if not self.setting.checkpointing:
            return self.inner(hidden, weights)
        rotary, seed = self.rotary, tape.hold(_SEED_BYTES)

        def keep_input(gradient: Buffer, saved: object = (hidden.buffer, seed, self.mask)) -> tuple[Buffer]:
            return (gradient,)

        del seed

        def unfold() -> Node:
            self.rotary, tape.section = rotary, "blocks"
            ops.again = True
            entry = tape.make(hidden.numel, hidden.size, (hidden,), keep_input, hidden.buffer)
            result = self.inner(entry, weights)
            ops.again, self.rotary = False, None
            ops.casts.clear()
            return cast(Node, result.node)

        ops.saves = False
        result = self.inner(hidden, weights)
        ops.saves = True
        result.node = tape.node((hidden.node,), None)
        result.node.unfold = unfold
        return result

    def inner(self, hidden: Value, weights: Mapping[str, Parameter]) -> Value:
        """Attention and MLP, each behind a norm and beside the residual stream."""
        ops, shape = self.ops, self.shape
        residual = hidden
        normed = self.norm(hidden, self.pick(weights, "first_norm"))
        hidden = ops.add(residual, self.attention(normed, weights))
        del normed
        residual = hidden
        normed = self.norm(hidden, self.pick(weights, "second_norm"))
        wide = self.setting.tokens * shape.intermediate_size
        if shape.gated_mlp:
            gate = ops.activation(self.linear(normed, weights, "gate", wide))
            product = ops.multiply(gate, self.linear(normed, weights, "up", wide))
            del gate
        else:
            product = ops.activation(self.linear(normed, weights, "up", wide))
        output = self.linear(product, weights, "down", self.h)
        del normed, product
        return ops.add(residual, output, last=True)

    def attention(self, x: Value, weights: Mapping[str, Parameter]) -> Value:
        """Queries, keys and values, rotated where positions are; then what attention gives, mixed."""
        ops, shape, tokens = self.ops, self.shape, self.setting.tokens
        query = self.linear(x, weights, "query", tokens * shape.query_size)
        key = self.linear(x, weights, "key", tokens * shape.kv_size)
        value = self.linear(x, weights, "value", tokens * shape.kv_size)
        if self.rotary is not None:
            table_size = FLOAT32_BYTES if self.setting.precision == "autocast" else self.ops.product_size
            query, key = ops.laid_out(query), ops.laid_out(key)
            turned = ops.rotate(query, self.rotary, table_size), ops.rotate(key, self.rotary, table_size)
            query, key = turned
            del turned
        if self.setting.fused_attention:
            mixed = ops.fused_attention(query, key, value, tokens * shape.num_heads)
        else:
            num_scores = tokens * self.setting.sequence_length * shape.num_heads
            mixed = ops.eager_attention(query, key, value, num_scores)
        return self.linear(mixed, weights, "output", self.h)

    def linear(self, x: Value, weights: Mapping[str, Parameter], name: str, numel: int) -> Value:
        """A product with a weight of the block, and its bias where it has one."""
        return self.ops.linear(x, weights[name], numel, weights.get(f"{name}_bias"), last=name == "down")

    def norm(self, x: Value, weights: Sequence[Parameter]) -> Value:
        """RMSNorm, or LayerNorm where there is a bias."""
        if len(weights) == 1:
            return self.ops.rms_norm(x, weights[0], self.setting.tokens)
        return self.ops.layer_norm(x, weights[0], weights[1], self.setting.tokens)

    def loss(self, logits: Value) -> Value:
        """Cross-entropy in float32 over all positions but the last."""
        tape, setting, vocab_size = self.tape, self.setting, self.shape.vocab_size
        scored = (setting.tokens - setting.micro_batch) * vocab_size
        whole, size = logits.numel * logits.size, logits.size
        part = tape.make(scored, size, (logits,), lambda gradient: (tape.hold(whole),), logits.buffer)
        targets = tape.hold(8 * (setting.tokens - setting.micro_batch))
        flat = self.ops.cast(part, FLOAT32_BYTES)
        if size == FLOAT32_BYTES and setting.micro_batch > 1:  # what is cut off is no view that could be flattened
            flat = tape.make(scored, FLOAT32_BYTES, (part,), lambda gradient: (gradient,))
        num_bytes = scored * FLOAT32_BYTES
        log_probabilities = tape.hold(num_bytes)

        def unnormalise(gradient: Buffer, saved: object = log_probabilities) -> tuple[Buffer]:
            return (tape.hold(num_bytes),)

        node = tape.node((flat.node,), unnormalise)

        def pick(gradient: Buffer, saved: object = (log_probabilities, targets)) -> tuple[Buffer]:
            return (tape.hold(num_bytes),)

        return Value(tape.hold(FLOAT32_BYTES), 1, FLOAT32_BYTES, tape.node((node,), pick))

    # --- weights ----------------------------------------------------------------------------------------------------

    def weight(self, numel: int) -> Parameter:
        """A parameter of the model."""
        return Parameter(node=self.tape.parameter(numel), numel=numel)

    def norm_weights(self, name: str) -> list[Parameter]:
        """A norm's weight, and its bias where it has one."""
        return [self.weight(numel) for numel in _norm_weights(self.shape, name).values()]

    def pick(self, weights: Mapping[str, Parameter], name: str) -> list[Parameter]:
        """The weights of a block's norm."""
        return [weights[part] for part in _norm_weights(self.shape, name)]

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        return sum(block_weights(self.shape).values())


def block_weights(shape: ModelShape) -> dict[str, int]:
    """The elements of each parameter of a block, by what it does.

    Args:
        shape: The model.
    """
    h, f, query, kv = shape.hidden_size, shape.intermediate_size, shape.query_size, shape.kv_size
    matrices = {"query": (h, query), "key": (h, kv), "value": (h, kv), "output": (query, h)}
    matrices |= {"gate": (h, f), "up": (h, f), "down": (f, h)} if shape.gated_mlp else {"up": (h, f), "down": (f, h)}
    biased = {"query": shape.qkv_bias, "key": shape.qkv_bias, "value": shape.qkv_bias}
    biased |= {"output": shape.attention_output_bias} | dict.fromkeys(("gate", "up", "down"), shape.mlp_bias)
    weights = {name: rows * cols for name, (rows, cols) in matrices.items()}
    weights |= {f"{name}_bias": cols for name, (_, cols) in matrices.items() if biased[name]}
    return weights | _norm_weights(shape, "first_norm") | _norm_weights(shape, "second_norm")


def _norm_weights(shape: ModelShape, name: str) -> dict[str, int]:
    names = (name, f"{name}_bias") if shape.norm_bias else (name,)
    return dict.fromkeys(names, shape.hidden_size)


def _total(buffers: Sequence[Buffer]) -> int:
    return sum(buffer.num_bytes for buffer in buffers)
