"""The configuration of a run: one dataclass a subject, each with its defaults; the CLI and YAML come from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from adafrugal.core.errors import ConfigError
from adafrugal.core.values import Budget
from adafrugal.data.corpus import TextConfig
from adafrugal.data.tokenizer import TokenizerConfig
from adafrugal.optim.schedules import LearningRate

DEFAULT_SECONDS = 120.0


def _at_least(section: str, values: Mapping[str, float | None], least: float) -> None:
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ConfigError(f"--{section}{name} {value}", value, f"a number of at least {least:g}", "Raise it.")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Which optimizer, and those of its settings that shall not have their defaults.

    A setting that the chosen optimizer does not take is an error, not ignored.

    Args:
        name: adafrugal, frugal, galore, badam, signsgd, adamw or sgd (the last two are torch's).
        lr: Peak learning rate of the matrices; None takes the default of the optimizer (see docs/training.md).
        embedding_lr: Peak learning rate of embeddings and output head; None: as the optimizer's default says.
        weight_decay: Decoupled weight decay.
        betas: Of AdamW and of the stateful part.
        eps: Of AdamW and of the stateful part.
        momentum: Of sgd.
        density: Starting share of each matrix that has AdamW's moments.
        density_end: The share at the end.
        moving_density: False keeps the density (one of the paper's variants).
        update_gap: Steps between refreshes; of badam, steps for each layer.
        update_gap_max: The gap grows no further.
        moving_gap: False keeps the gap (one of the paper's variants).
        gap_growth: Factor of each growth.
        plateau_tolerance: Relative change of the validation loss per evaluation under which it counts as settled.
        plateau_window: Evaluations between the losses compared.
        subspace: columns, rows, rows_striped, blocks, random, svd, ...
        on_refresh: keep, reset, project or carry.
        stateful_lr_scale: Multiplies the rate inside the frame.
        stateless_lr_scale: Multiplies the rate of the rest.
        rule: Of the stateful part, in place of AdamW: lion, momentum, sgd.
        state_dtype: float32 or bfloat16.
        rounding: Of bfloat16 weights: stochastic, kahan or nearest.
        check_finite: deferred, before or off.
        order: Of badam: random, ascending or descending.
        always_active: Of badam: patterns of parameters outside the layers that are trained throughout.
        compile: Compile the update.
    """

    name: str = "adafrugal"
    lr: float | None = None
    embedding_lr: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    momentum: float | None = None
    density: float | None = None
    density_end: float | None = None
    moving_density: bool = True
    update_gap: int | None = None
    update_gap_max: int | None = None
    moving_gap: bool = True
    gap_growth: float | None = None
    plateau_tolerance: float | None = None
    plateau_window: int | None = None
    subspace: str | None = None
    on_refresh: str | None = None
    stateful_lr_scale: float | None = None
    stateless_lr_scale: float | None = None
    rule: str | None = None
    state_dtype: str | None = None
    rounding: str | None = None
    check_finite: str | None = None
    order: str | None = None
    always_active: tuple[str, ...] | None = None
    compile: bool | None = None


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A labelled task in the place of plain text: one or two texts in, a class or a number out.

    Args:
        name: cola, mrpc, qnli, rte, sst2, stsb, or own for one of your own; None learns to write text.
        train: A .tsv or .jsonl file (.gz too), hub for the task's own data set there, or owner/name of another.
        validation: The same, for the examples that the model is judged on.
        limit: The first so many examples of each; None for all.
        text_fields: Of one's own: fields of the texts, one or two.
        label_field: Of one's own: the field of the label.
        classes: Of one's own: the labels in order; none for a number.
        metrics: Of one's own: accuracy, f1, matthews for classes; pearson, spearman for a number.
    """

    name: str | None = None
    train: str = "hub"
    validation: str = "hub"
    limit: int | None = None
    text_fields: tuple[str, ...] | None = None
    label_field: str | None = None
    classes: tuple[str, ...] | None = None
    metrics: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _at_least("task.", {"limit": self.limit}, 1)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters of peft's in the place of the whole model: a baseline to compare with.

    Args:
        rank: Of the adapters; None trains the model itself.
        alpha: The adapters are scaled by alpha / rank.
        dropout: On what goes into the adapters.
        modules: Names of the layers that get one; None lets peft choose for the model.
    """

    rank: int | None = None
    alpha: float = 16.0
    dropout: float = 0.0
    modules: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _at_least("lora.", {"rank": self.rank}, 1)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How much text one step sees, and in how many pieces.

    Args:
        sequence_length: Tokens of a window.
        sequences: Windows of one optimizer step, on all processes together.
        micro_sequences: Windows of one forward and backward on one process; None takes all of its windows at once.
            Gradients of the pieces add up to that of the whole.
    """

    sequence_length: int = 256
    sequences: int = 8
    micro_sequences: int | None = None

    def __post_init__(self) -> None:
        _at_least("batch.", {"sequence_length": self.sequence_length}, 2)
        _at_least("batch.", {"sequences": self.sequences, "micro_sequences": self.micro_sequences}, 1)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How often, and on how much held-out text, the model is judged.

    Args:
        every_steps: Steps between evaluations; there is one before the first step and one at the end as well.
        windows: Held-out windows, the same at every evaluation.
    """

    every_steps: int = 50
    windows: int = 64

    def __post_init__(self) -> None:
        _at_least("eval.", {"every_steps": self.every_steps, "windows": self.windows}, 1)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often the run is saved.

    Args:
        every_steps: Steps between checkpoints; there is one at the end as well.
        keep: The newest so many are kept.
    """

    every_steps: int = 200
    keep: int = 2

    def __post_init__(self) -> None:
        _at_least("checkpoint.", {"every_steps": self.every_steps, "keep": self.keep}, 1)


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What the model writes at the end.

    Args:
        prompt: The text it goes on from; empty for none.
        tokens: How many tokens it writes; 0 for no sample.
        temperature: Of the draw; 0 always takes the likeliest token.
    """

    prompt: str = "def "
    tokens: int = 200
    temperature: float = 0.8

    def __post_init__(self) -> None:
        _at_least("sample.", {"tokens": self.tokens, "temperature": self.temperature}, 0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a language model on text, inside a budget.

    Args:
        model: A preset (tiny, llama-60m, llama-130m, llama-350m, llama-1b, llama-7b), a folder, or a hub id.
        vocab_size: Rows of a preset's embedding; None takes the tokenizer's size for tiny and 32000 for the others.
        out: The folder of the run; None makes one under runs/ named by date, model and optimizer.
        seed: Of the model, the order of the data, frames, rounding and the sample.
        text: Which text.
        task: Which labelled task, if any; it takes the place of the text.
        lora: Adapters in the place of the whole model.
        tokenizer: Which tokenizer.
        optim: Which optimizer.
        schedule: The learning rate over the share of the budget spent.
        budget: What the run may spend; whichever limit binds first ends it. None of them: 120 seconds.
        batch: What one step sees.
        eval: How the model is judged.
        checkpoint: How the run is saved.
        sample: What the model writes at the end.
        max_grad_norm: Clip the global norm of the gradient to it; 0 for no clipping.
        weights: Precision of the weights; bfloat16 trains with stochastic rounding, float64 is for comparisons.
        autocast: Run matrix products in bfloat16, with weights in float32.
        activation_checkpointing: Compute each block again in backward instead of keeping its activations.
        fused_backward: Update inside backward, one gradient at a time; needs max_grad_norm 0 and no micro-batches.
        device: cpu, cuda, mps, or auto for the best that is here; of several processes each takes the GPU of its own.
        parallel: On several processes (torchrun): ddp holds the model on each, fsdp2 a part of it; auto is ddp there.
        log_every_steps: Steps between lines of the log.
        track: Also send the log to a tracker of accelerate's: tensorboard, trackio or wandb.
    """

    model: str = "tiny"
    vocab_size: int | None = None
    out: str | None = None
    seed: int = 0
    text: TextConfig = field(default_factory=TextConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: LearningRate = field(default_factory=LearningRate)
    budget: Budget = field(default_factory=Budget)
    batch: BatchConfig = field(default_factory=BatchConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    max_grad_norm: float = 1.0
    weights: Literal["float32", "bfloat16", "float64"] = "float32"
    autocast: bool = False
    activation_checkpointing: bool = False
    fused_backward: bool = False
    device: str = "auto"
    parallel: Literal["auto", "none", "ddp", "fsdp2"] = "auto"
    log_every_steps: int = 10
    track: Literal["tensorboard", "trackio", "wandb"] | None = None

    def __post_init__(self) -> None:
        _at_least("", {"max_grad_norm": self.max_grad_norm}, 0)
        _at_least("", {"log_every_steps": self.log_every_steps, "vocab_size": self.vocab_size}, 1)

    def with_default_budget(self) -> TrainConfig:
        """This configuration, with 120 seconds where no limit is set."""
        if self.budget != Budget():
            return self
        return dataclasses.replace(self, budget=Budget(seconds=DEFAULT_SECONDS))


def as_plain(config: object) -> dict[str, Any]:
    """A configuration as nested dictionaries of plain data, with lists for tuples, for YAML and JSON."""
    return _plain(config)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
