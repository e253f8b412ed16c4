"""From the names that people use to what the planner takes: shapes of models, optimizers, and a configuration back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from adafrugal.core.errors import ConfigError, nearest_name
from adafrugal.data.libraries import load_library
from adafrugal.plan.planner import Candidate, Method
from adafrugal.plan.shapes import PRESETS, ModelShape
from adafrugal.train.config import OptimConfig
from adafrugal.train.models import check_model_name, is_preset
from adafrugal.train.optimizers import build_optimizer, check_optimizer, method_names

# In the order of preference where speed is alike: those with more state learn more from a step. Others only if named.
PLANNED_METHODS = ("adamw", "adafrugal", "frugal", "galore", "signsgd")
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_BERT_LIKE = ("bert", "roberta", "xlm-roberta", "electra", "camembert")


def shape_of(name: str, length: int | None = None) -> ModelShape:
    """The sizes of a preset, of a folder with a config.json, or of a model of the hub; no model is built.

    Args:
        name: As ``train --model`` takes it.
        length: Windows that a preset shall have positions for.

    Raises:
        ConfigError: For an unknown name, or a configuration that lacks what is needed.
    """
    check_model_name(name)
    if is_preset(name):
        shape = PRESETS.create(name)
        return replace(shape, max_sequence_length=max(shape.max_sequence_length, length or 1))
    transformers = load_library("transformers", f"--model {name}")
    try:
        config = transformers.AutoConfig.from_pretrained(str(Path(name).expanduser()) if Path(name).exists() else name)
    except Exception as error:  # transformers raises its own, the hub's and the parser's errors here
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"--model {name}",
            f"{name}, of which no configuration loads ({reason})",
            f"a preset ({', '.join(PRESETS.names())}), a folder with a config.json, or a hub id",
            f"Check the name.{nearest_name(name, PRESETS.names())}",
        ) from error
    return shape_of_configuration(cast(Mapping[str, Any], config.to_dict()), name)


def shape_of_configuration(config: Mapping[str, Any], name: str) -> ModelShape:
    """The sizes that a configuration of transformers' form holds: of a decoder like Llama, or an encoder like BERT.

    Args:
        config: Of ``config.json``.
        name: The model's, for errors.

    Raises:
        ConfigError: If a size is missing.
    """
    missing = [field for field in _NEEDED if not isinstance(config.get(field), int)]
    if not isinstance(config.get("intermediate_size"), int):
        missing.append("intermediate_size")
    if missing:
        raise ConfigError(
            f"--model {name}",
            f"a configuration of type {config.get('model_type')} without {', '.join(missing)}",
            "one with the fields of Llama or BERT",
            "Plan with a preset of its size.",
        )
    heads: int = config["num_attention_heads"]
    vocabulary: int = config["vocab_size"]
    bert = str(config.get("model_type")) in _BERT_LIKE
    hidden: int = config["hidden_size"]
    attention_bias = bert or bool(config.get("attention_bias"))
    return ModelShape(
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=vocabulary,
        max_sequence_length=config.get("max_position_embeddings") or 2**31,
        tied_embeddings=bool(config.get("tie_word_embeddings", bert)),
        gated_mlp=not bert,
        norm_bias=bert,
        qkv_bias=attention_bias or str(config.get("model_type")).startswith("qwen2"),
        attention_output_bias=attention_bias,
        mlp_bias=bert or bool(config.get("mlp_bias")),
        num_position_embeddings=config.get("max_position_embeddings", 0) if bert else 0,
        # An encoder's token types, and the dense layer, norm and bias of its language-model head.
        num_other_parameters=config.get("type_vocab_size", 0) * hidden
        + hidden * hidden
        + 3 * hidden
        + config["vocab_size"]
        if bert
        else 0,
    )


def methods_of(names: Sequence[str], settings: OptimConfig = OptimConfig()) -> list[Method]:  # noqa: B008 frozen
    """Optimizers to plan with, each made as `train` makes it.

    Args:
        names: Of ``--optim.name``.
        settings: All else that ``--optim`` may say.

    Raises:
        ConfigError: For an unknown name.
    """
    for name in names:
        if name not in method_names():
            raise ConfigError(
                f"--optim {name}",
                name,
                f"one of {', '.join(method_names())}",
                f"Correct the name.{nearest_name(name, method_names())}",
            )
    methods: list[Method] = []
    for name in names:
        config = replace(settings, name=name)
        check_optimizer(config)
        methods.append(Method(name=name, make=partial(_built, config)))
    return methods


def _built(config: OptimConfig, model: nn.Module) -> Optimizer:
    return build_optimizer(config, model, seed=0)


def train_options(
    model: str, candidate: Candidate, *, sequences: int, clips: bool, budget: Mapping[str, float]
) -> dict[str, Any]:
    """The options of ``adafrugal train`` that run a candidate as it was planned.

    Args:
        model: Of ``--model``.
        candidate: What to run.
        sequences: Windows of an optimizer step on all processes together.
        clips: Whether gradients are clipped.
        budget: Limits by name, such as ``{"flops": 1e18}``.
    """
    setting = candidate.setting
    return {
        "model": model,
        "optim": {"name": candidate.method},
        "batch": {
            "sequence_length": setting.sequence_length,
            "sequences": sequences,
            "micro_sequences": setting.micro_batch,
        },
        "weights": "bfloat16" if setting.precision == "bfloat16" else "float32",
        "autocast": setting.precision == "autocast",
        "activation_checkpointing": setting.checkpointing,
        "fused_backward": setting.fused_backward,
        **({} if clips else {"max_grad_norm": 0.0}),
        **({"budget": dict(budget)} if budget else {}),
    }
