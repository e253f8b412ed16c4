"""From a configuration to the parts of a run: text, tokenizer, model, optimizer, gradient source, judge."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from adafrugal.core.errors import ConfigError
from adafrugal.core.protocols import GradientSource, GradSink, Task
from adafrugal.data.corpus import Corpus, open_corpus
from adafrugal.data.loader import open_windows, pack, scored_bytes, validation_windows
from adafrugal.data.rows import PairTokenizer
from adafrugal.data.tasks import Answer, NextToken
from adafrugal.data.tokenizer import Tokenizer, TokenizerConfig, check_vocabulary, open_tokenizer
from adafrugal.data.windows import Windows
from adafrugal.gradients.backprop import Backprop, FusedBackprop, keep_gradient
from adafrugal.laws.flops import FlopMeter
from adafrugal.optim.attach import refuse_unfusable
from adafrugal.optim.split import SplitOptimizer
from adafrugal.train.config import TrainConfig
from adafrugal.train.distributed import Ranks, refuse_unparallel
from adafrugal.train.evaluate import Evaluator, Judge
from adafrugal.train.evaluate_answers import AnswerEvaluator
from adafrugal.train.labelled_parts import LabelledText, read_labelled_text
from adafrugal.train.models import (
    build_classifier,
    build_model,
    check_model_name,
    choose_device,
    is_preset,
    vocabulary_of,
)
from adafrugal.train.optimizers import FINE_TUNING_RATES, build_optimizer, check_optimizer
from adafrugal.train.parallel_gradients import ParallelBackprop


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of.

    Args:
        device: Where the model lives.
        corpus: The text, or the labelled examples.
        tokenizer: Its tokenizer.
        model: The model, in training mode.
        windows: Training windows or rows, resumable.
        optimizer: Over the model's parameters.
        task: The loss.
        source: Where gradients come from.
        sink: Where they go.
        evaluator: The judge, on held-out text.
        micro_sequences: Windows of one forward and backward.
        ranks: The processes that train together; all else here is this one's.
    """

    device: torch.device
    corpus: Corpus | LabelledText
    tokenizer: Tokenizer | PairTokenizer
    model: nn.Module
    windows: Windows
    optimizer: Optimizer
    task: Task
    source: GradientSource
    sink: GradSink
    evaluator: Judge
    micro_sequences: int
    ranks: Ranks


def cache_folder() -> Path:
    """Where trained tokenizers are kept between runs: ``$ADAFRUGAL_CACHE``, or the user's cache folder."""
    root = os.environ.get("ADAFRUGAL_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(root) if root else base / "adafrugal"


def assemble(config: TrainConfig, say: Callable[[str], None], ranks: Ranks | None = None) -> Parts:
    """Make all parts, and refuse what cannot work before any of it is slow.

    Args:
        config: What to make.
        say: Told what is going on.
        ranks: The processes that train together; None for this one alone.

    Raises:
        ConfigError: For settings that do not fit each other or the model.
        DataError: For text or a tokenizer that cannot be used.
    """
    ranks = ranks or Ranks()
    device = choose_device(ranks.device_name(config.device))
    check_model_name(config.model)
    check_optimizer(config.optim)
    micro = _micro_sequences(config, ranks)
    refuse_unparallel(ranks, config.optim.name, config.fused_backward)
    meter = FlopMeter(device)
    side = _answering if config.task.name is not None else _writing
    known = side(config, say, ranks, device, micro, meter)
    sink: GradSink = keep_gradient
    source: GradientSource = Backprop(meter, config.max_grad_norm)
    if not ranks.alone:
        source = ParallelBackprop(ranks, lambda: ranks.replicate(known.model, device), meter, config.max_grad_norm)
    if config.fused_backward:
        source, sink = _fused(config, known.optimizer, meter, micro)
    return Parts(**vars(known), device=device, source=source, sink=sink, micro_sequences=micro, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """What depends on whether a run writes text or answers examples; fields as in `Parts`."""

    corpus: Corpus | LabelledText
    tokenizer: Tokenizer | PairTokenizer
    model: nn.Module
    windows: Windows
    optimizer: Optimizer
    task: Task
    evaluator: Judge


def _writing(
    config: TrainConfig, say: Callable[[str], None], ranks: Ranks, device: torch.device, micro: int, meter: FlopMeter
) -> _Side:
    """Learn the next token of text."""
    corpus = open_corpus(config.text)
    size = "a stream" if corpus.num_bytes is None else f"{corpus.num_bytes / 1e6:.1f} MB"
    say(f"text: {corpus.name}, {size}" + "".join(f"; {note}" for note in corpus.notes))
    tokenizer = ranks.first_goes_first(lambda: open_tokenizer(_tokenizer_config(config), corpus, cache_folder()))
    model = build_model(config, tokenizer.vocab_size, device)
    check_vocabulary(tokenizer, vocabulary_of(model))
    model = ranks.shard(model, device)
    optimizer = build_optimizer(config.optim, model, config.seed)
    say(_model_line(config, model, ranks, device, tokenizer.name))
    length = config.batch.sequence_length
    windows = open_windows(corpus, tokenizer, length, config.seed)
    held_out = validation_windows(pack(corpus.validation(), tokenizer), length, config.eval.windows)
    task = NextToken(autocast=config.autocast)
    num_bytes = scored_bytes(held_out, tokenizer.token_bytes)
    return _Side(
        corpus=corpus,
        tokenizer=tokenizer,
        model=model,
        windows=windows,
        optimizer=optimizer,
        task=task,
        evaluator=Evaluator(held_out, num_bytes, task, micro, meter, ranks),
    )


def _answering(
    config: TrainConfig, say: Callable[[str], None], ranks: Ranks, device: torch.device, micro: int, meter: FlopMeter
) -> _Side:
    """Learn to answer labelled examples."""
    text = read_labelled_text(config, say)
    tokenizer, labelled = text.tokenizer, text.labelled
    model = build_classifier(config, labelled.num_outputs, tokenizer.padding_id, device)
    check_vocabulary(tokenizer, vocabulary_of(model))
    model = ranks.shard(model, device)
    optimizer = build_optimizer(config.optim, model, config.seed, FINE_TUNING_RATES)
    say(_model_line(config, model, ranks, device, tokenizer.name))
    task = Answer(
        is_regression=labelled.is_regression,
        padding_id=tokenizer.padding_id,
        has_segments=tokenizer.has_segments,
        autocast=config.autocast,
    )
    return _Side(
        corpus=text,
        tokenizer=tokenizer,
        model=model,
        windows=text.windows(config.seed),
        optimizer=optimizer,
        task=task,
        evaluator=AnswerEvaluator(text.validation, labelled, task, micro, meter, ranks.size),
    )


def _model_line(config: TrainConfig, model: nn.Module, ranks: Ranks, device: torch.device, tokenizer: str) -> str:
    num_parameters = sum(param.numel() for param in model.parameters())
    where = str(device) if ranks.alone else f"{ranks.size} processes with {ranks.layout.kind} ({device.type})"
    return f"model: {config.model}, {num_parameters / 1e6:.2f}M parameters, on {where}; tokenizer: {tokenizer}"


def _micro_sequences(config: TrainConfig, ranks: Ranks) -> int:
    """Windows of one forward and backward; more than a step has is an error, not a smaller step."""
    share, left = divmod(config.batch.sequences, ranks.size)
    if left:
        raise ConfigError(
            f"--batch.sequences {config.batch.sequences} on {ranks.size} processes",
            config.batch.sequences,
            f"a multiple of {ranks.size}, so that each process has as many windows of a step",
            f"Set --batch.sequences {(share + 1) * ranks.size}.",
        )
    micro = config.batch.micro_sequences or share
    if micro > share:
        each = "" if ranks.alone else f" on each of {ranks.size} processes"
        raise ConfigError(
            f"--batch.sequences {config.batch.sequences} --batch.micro_sequences {micro}",
            micro,
            f"at most the {share} windows of a step{each}",
            "Lower batch.micro_sequences.",
        )
    return micro


def _tokenizer_config(config: TrainConfig) -> TokenizerConfig:
    """The tokenizer that is asked for, or else the one that a loaded model came with."""
    if config.tokenizer == TokenizerConfig() and not is_preset(config.model):
        return TokenizerConfig(name=config.model)
    return config.tokenizer


def _fused(config: TrainConfig, optimizer: Optimizer, meter: FlopMeter, micro: int) -> tuple[GradientSource, GradSink]:
    """The source and sink of an update inside backward."""
    if not isinstance(optimizer, SplitOptimizer):
        raise ConfigError(
            f"--optim.name {config.optim.name} --fused_backward true",
            config.optim.name,
            "one of the package's own optimizers",
            "Choose another optimizer, or leave fused_backward off.",
        )
    pieces = -(-config.batch.sequences // micro)
    refuse_unfusable(
        accumulation_steps=pieces,
        max_grad_norm=config.max_grad_norm,
        grad_scaler=None,
        check_finite=optimizer.check_finite,
    )

    def update(param: nn.Parameter, grad: torch.Tensor) -> None:
        optimizer.update_parameter(param)

    return FusedBackprop(meter), update
