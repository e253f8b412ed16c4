"""The model of a run: a preset built from its shape, a folder, or a hub id."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from adafrugal.core.errors import ConfigError, NotSupportedError, nearest_name
from adafrugal.core.rng import own_stream
from adafrugal.data.libraries import load_library
from adafrugal.plan.shapes import PRESETS, ModelShape
from adafrugal.train.config import TrainConfig


def choose_device(name: str) -> torch.device:
    """The device that a run uses.

    Args:
        name: ``"auto"`` takes CUDA, then MPS, then the CPU; any other name is torch's.

    Raises:
        ConfigError: If the device is not here.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {name}", name, "auto, cpu, or a device of this machine", f"Torch says: {error}"
        ) from error
    return device


def is_preset(name: str) -> bool:
    """Whether a model's name is that of a preset."""
    return name in PRESETS.names()


def check_model_name(name: str) -> None:
    """Refuse what looks like a misspelt preset, before anything goes to look for it on the hub.

    Raises:
        ConfigError: Names the nearest preset.
    """
    if is_preset(name) or Path(name).exists():
        return
    if name.startswith((".", "/", "~")):
        raise ConfigError(
            f"--model {name}",
            f"{name}, which does not exist",
            "a preset, a folder that exists, or a hub id",
            "Check it.",
        )
    if "/" not in name and get_close_matches(name.lower(), PRESETS.names(), n=1, cutoff=0.8):
        raise ConfigError(
            f"--model {name}",
            name,
            f"a preset ({', '.join(PRESETS.names())}), a folder, or a hub id",
            f"Correct the name.{nearest_name(name, PRESETS.names())}",
        )


def build_model(config: TrainConfig, tokenizer_size: int, device: torch.device) -> nn.Module:
    """Make or load a causal language model of transformers' form, ready to train.

    Args:
        config: Which model, in which precision, from which seed.
        tokenizer_size: Ids of the tokenizer; the vocabulary of ``tiny`` unless one is given.
        device: Where it shall live.

    Raises:
        ConfigError: If no such preset, folder or hub model can be found, or a setting does not fit it.
    """
    transformers = load_library("transformers", "building a model")
    dtype: torch.dtype = getattr(torch, config.weights)
    if is_preset(config.model):
        # transformers draws the first weights from the global stream: it gets one of its own, and ours is put back.
        with own_stream(config.seed, "model"):
            model = transformers.LlamaForCausalLM(_preset_config(transformers, config, tokenizer_size))
        model = model.to(dtype)
    else:
        if config.vocab_size is not None:
            raise ConfigError(
                f"--model {config.model} --vocab_size {config.vocab_size}",
                f"vocab_size={config.vocab_size}",
                "no vocab_size for a model that is loaded, which brings its own",
                "Leave --vocab_size out.",
            )
        model = _load(transformers.AutoModelForCausalLM, config.model, "a causal language model", dtype=dtype)
    return _finished(model, config, device)


def build_classifier(config: TrainConfig, num_outputs: int, padding_id: int, device: torch.device) -> nn.Module:
    """Load a pretrained model with a new head that answers, ready to be fine-tuned.

    Args:
        config: Which model, in which precision; the head is drawn from its seed.
        num_outputs: Of the head: classes, or 1 for a number.
        padding_id: What stands where a row has no id.
        device: Where it shall live.

    Raises:
        ConfigError: If no such folder or hub model can be found, or a setting does not fit it.
    """
    transformers = load_library("transformers", "building a model")
    dtype: torch.dtype = getattr(torch, config.weights)
    with own_stream(config.seed, "model"):  # transformers draws the head from the global stream
        model, report = _load(
            transformers.AutoModelForSequenceClassification,
            config.model,
            "a model that transformers can put a classifier on",
            dtype=dtype,
            num_labels=num_outputs,
            output_loading_info=True,
        )
    drawn = [name for name in report["missing_keys"] if name.startswith(f"{model.base_model_prefix}.")]
    if drawn:  # the head is always drawn anew
        warnings.warn(f"{config.model} lacks {', '.join(sorted(drawn))}: drawn anew", stacklevel=2)
    model.config.pad_token_id = padding_id  # decoders look for the last token that is not this
    return _finished(model, config, device)


def _finished(model: Any, config: TrainConfig, device: torch.device) -> nn.Module:
    """Checked, with adapters and checkpointing if asked for, on its device and in training mode."""
    _check_length(model, config)
    if config.activation_checkpointing:
        _checkpoint_activations(model)
    if config.lora.rank is not None:
        model = _with_adapters(model, config)
    return model.to(device).train()


def _with_adapters(model: Any, config: TrainConfig) -> Any:
    """A model whose weights rest under low-rank adapters of peft's; a new head stays whole, and is trained."""
    peft = load_library("peft", "low-rank adapters", "tasks")
    kind = "CAUSAL_LM" if config.task.name is None else "SEQ_CLS"
    lora = config.lora
    settings = peft.LoraConfig(
        task_type=kind,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.modules) if lora.modules else None,
    )
    with own_stream(config.seed, "adapters"):
        try:
            return peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(
                f"--lora.rank {lora.rank} over {config.model}",
                f"modules={lora.modules}",
                "names of linear layers of the model",
                f"peft says: {str(error).splitlines()[0]}",
            ) from error


def _preset_config(transformers: Any, config: TrainConfig, tokenizer_size: int) -> Any:
    shape: ModelShape = PRESETS.create(config.model)
    default = tokenizer_size if config.model == "tiny" else shape.vocab_size
    return transformers.LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=config.vocab_size or default,
        max_position_embeddings=max(shape.max_sequence_length, config.batch.sequence_length),
        tie_word_embeddings=shape.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


@contextmanager
def without_bars() -> Generator[None]:
    """Hide transformers' progress bars and reports while it loads or saves: they would run through ours."""
    logging: Any = load_library("transformers.utils.logging", "loading and saving a model")
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def _load(kind: Any, name: str, what: str, **settings: Any) -> Any:
    """A model of a kind from a folder or the hub."""
    try:
        with without_bars():
            return kind.from_pretrained(name, **settings)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--model {name}",
            name,
            f"a preset ({', '.join(PRESETS.names())}), a folder with {what}, or a hub id",
            f"transformers says: {first_line}{nearest_name(name, PRESETS.names()) if not Path(name).exists() else ''}",
        ) from error


def _check_length(model: nn.Module, config: TrainConfig) -> None:
    """Refuse windows longer than the model's positions."""
    longest = getattr(model.config, "max_position_embeddings", None)
    if isinstance(longest, int) and config.batch.sequence_length > longest:
        raise ConfigError(
            f"--batch.sequence_length {config.batch.sequence_length}",
            config.batch.sequence_length,
            f"at most the {longest} positions of {config.model}",
            f"Set --batch.sequence_length {longest}.",
        )


def _checkpoint_activations(model: nn.Module) -> None:
    """Non-reentrant checkpointing of every block; transformers renamed the switch in version 5."""
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        enable = getattr(model, name, None)
        if enable is not None:
            enable({"use_reentrant": False})
            return
    raise NotSupportedError(
        "--activation_checkpointing true",
        f"a {type(model).__name__}, which has no such switch",
        "a model that transformers can checkpoint",
        "Leave it off.",
    )


def vocabulary_of(model: nn.Module) -> int:
    """Rows of the input embedding."""
    return int(cast(Any, model).get_input_embeddings().num_embeddings)
