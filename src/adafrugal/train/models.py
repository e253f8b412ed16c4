"""The model of a run: a preset built from its shape, a folder, or a hub id."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from adafrugal.core.errors import ConfigError, NotSupportedError, nearest_name
from adafrugal.core.rng import derive_seed
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
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(config.seed, "model"))
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
        model = _load(transformers, config.model, dtype)
    _check_length(model, config)
    if config.activation_checkpointing:
        _checkpoint_activations(model)
    return model.to(device).train()


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
    """Hide transformers' progress bars while it loads or saves: they would run through ours."""
    bars: Any = load_library("transformers.utils.logging", "loading and saving a model")
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _load(transformers: Any, name: str, dtype: torch.dtype) -> nn.Module:
    """A model from a folder or the hub."""
    try:
        with without_bars():
            return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--model {name}",
            name,
            f"a preset ({', '.join(PRESETS.names())}), a folder with a causal language model, or a hub id",
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
