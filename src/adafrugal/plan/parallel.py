"""What several processes add to a step's memory and take from it: buckets of DDP, shards and gathered blocks of FSDP2.

Each process is counted by itself: what it holds, at its worst moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from adafrugal.core.errors import ConfigError
from adafrugal.plan.activations import StepSetting, block_weights, step_bytes
from adafrugal.plan.operations import FLOAT32_BYTES
from adafrugal.plan.shapes import ModelShape

ParallelKind = Literal["none", "ddp", "fsdp2"]
PARALLEL_KINDS: tuple[ParallelKind, ...] = ("none", "ddp", "fsdp2")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model lies over processes.

    Args:
        kind: ``"none"``, ``"ddp"`` (a replica on each) or ``"fsdp2"`` (a part on each).
        num_processes: How many there are.
        gradients_in_buckets: Under DDP, whether gradients are views of the buckets that are averaged
            (``gradient_as_bucket_view=True``), as they are here; else every gradient is held twice.

    Raises:
        ConfigError: For an unknown kind, fewer than one process, or several processes without a kind.

    Example:
        >>> Layout(kind="fsdp2", num_processes=4).share(10)
        3
    """

    kind: ParallelKind = "none"
    num_processes: int = 1
    gradients_in_buckets: bool = True

    def __post_init__(self) -> None:
        if self.kind not in PARALLEL_KINDS:
            raise ConfigError(
                f"Layout(kind={self.kind!r})", self.kind, f"one of {', '.join(PARALLEL_KINDS)}", "Choose."
            )
        if self.num_processes < 1 or (self.kind == "none" and self.num_processes > 1):
            raise ConfigError(
                f"Layout(kind={self.kind!r}, num_processes={self.num_processes})",
                self.num_processes,
                "1 for none, and a whole number from 1 for ddp and fsdp2",
                "Name ddp or fsdp2 for several processes.",
            )

    def share(self, length: int) -> int:
        """The most rows of a tensor that one process holds: all of them, or under FSDP2 an equal part, rounded up."""
        return -(-length // self.num_processes) if self.kind == "fsdp2" else length

    def share_of(self, tensor: Tensor) -> int:
        """Elements of a tensor that the process with most of it holds; shards are cut along the first dimension."""
        rows = tensor.shape[0] if tensor.ndim else 1
        return tensor.numel() // max(1, rows) * self.share(rows)


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """A step of one process: what `step_bytes` says, with what the layout adds and takes.

    Args:
        weight_bytes: Weights that lie here.
        moments: By name, bytes besides weights and optimizer state, and those of them that are gradients.
        gradients: Gradients that are there when backward ends.
        after_backward: What else is still there then.
        arrivals: See `StepBytes`.
    """

    weight_bytes: int
    moments: Mapping[str, tuple[int, int]]
    gradients: int
    after_backward: int
    arrivals: Mapping[int, int]


def laid_out(shape: ModelShape, setting: StepSetting, layout: Layout) -> LaidOut:
    """Forward and backward of one process of several.

    DDP keeps its buckets from the first step on, so that gradients are there in forward as well, and a new one is
    copied into its bucket; where gradients are no views of the buckets, both are held.

    FSDP2 holds 1/R of weights and gradients. Weights outside of the blocks are gathered from the start of forward to
    the end of backward. Of the blocks, forward leaves one in the buffer that it was gathered into, and backward has two
    whole at once, the one at work and the one that is fetched ahead, beside the gradients of the one at work and the
    float32 buffer from which those of the one before are scattered. Gradients outside of the blocks are whole until the
    end, and then lie in such a buffer as well. How far transfers overlap is a matter of time, so that measured peaks
    differ from run to run.

    Args:
        shape: The model.
        setting: Of one process: its own micro-batch.
        layout: How the model lies.

    Source:
        torch.nn.parallel.DistributedDataParallel; torch.distributed.fsdp.fully_shard, one call a block and one for the
        model, blocks resharded after forward, as train/distributed.py wraps them.
    """
    weights = shape.num_parameters * setting.weight_bytes
    if layout.kind == "none":
        step = step_bytes(shape, setting)
        return LaidOut(
            weight_bytes=weights,
            moments=step.moments,
            gradients=step.gradients,
            after_backward=8 * setting.tokens,
            arrivals=step.arrivals,
        )
    if layout.kind == "ddp":
        step = step_bytes(shape, replace(setting, accumulation=max(2, setting.accumulation)))
        twice = 0 if layout.gradients_in_buckets else weights
        moments = {name: (total + twice, gradients + twice) for name, (total, gradients) in step.moments.items()}
        return LaidOut(
            weight_bytes=weights,
            moments=moments,
            gradients=step.gradients + twice,
            after_backward=8 * setting.tokens,
            arrivals={},
        )
    block = sum(block_weights(shape).values())
    outside = shape.num_parameters - shape.num_layers * block
    alone = replace(setting, fused_backward=True, accumulation=1)  # without gradients, which are shared
    step, growing = step_bytes(shape, alone), step_bytes(shape, replace(alone, fused_backward=False))
    shards = layout.share(shape.num_parameters) * setting.weight_bytes
    # Whole weights and whole gradients at each moment, in parameters; what is scattered at the end is float32 besides.
    gathered = {"forward": outside + block, "head": outside, "norm": outside, "embedding": outside}
    gathered["blocks"] = outside + min(2, shape.num_layers) * block
    in_whole = {"blocks": block * setting.weight_bytes, "embedding": outside * (setting.weight_bytes + FLOAT32_BYTES)}
    scattering = block * FLOAT32_BYTES
    first = shards if setting.accumulation > 1 else 0
    moments: dict[str, tuple[int, int]] = {}
    for name, (without, _) in step.moments.items():
        grown, gradients = growing.moments[name]
        last = max(first, layout.share(gradients))
        at_first_block = grown - gradients > without - scattering  # then nothing is scattered yet
        beside = scattering if name == "blocks" and not at_first_block else 0
        levels = [(without + first, first), (grown - gradients + last + beside, last)]
        if name == "blocks" and shape.num_layers > 1:  # the second of backward, beside what the first scatters
            second = step_bytes(replace(shape, num_layers=shape.num_layers - 1), alone).moments[name][0]
            levels.append((second + first + scattering, first))
        total, there = max(levels)
        whole = in_whole.get(name, 0)
        moments[name] = (total + gathered[name] * setting.weight_bytes + whole, there + whole)
    return LaidOut(
        weight_bytes=shards,
        moments=moments,
        gradients=shards,
        after_backward=8 * setting.tokens + outside * setting.weight_bytes,
        arrivals={},
    )
