"""The optimizer of a run: a method of ours, or torch's AdamW or SGD, from the same few settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adafrugal.core.errors import ConfigError, nearest_name
from adafrugal.optim.groups import param_groups
from adafrugal.optim.memory import held_bytes
from adafrugal.optim.methods import METHODS
from adafrugal.optim.sharding import local_of
from adafrugal.optim.split import SplitOptimizer
from adafrugal.train.config import OptimConfig

TORCH_METHODS = ("adamw", "sgd")
_SWITCHES = {"moving_density": ("density_end", None), "moving_gap": ("update_gap_max", None)}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Default peak rates of a method for models trained from scratch.

    Args:
        lr: Of the matrices.
        embedding_lr: Of embeddings and output head; None takes ``lr``.
    """

    lr: float
    embedding_lr: float | None = None


# The best of benchmarks/learning_rates.py on the default model and text; docs/training.md has the table.
DEFAULT_RATES: Mapping[str, Rates] = {
    "adafrugal": Rates(lr=4e-3, embedding_lr=1e-2),
    "frugal": Rates(lr=4e-3, embedding_lr=1e-2),
    "galore": Rates(lr=1e-2, embedding_lr=4e-3),
    "badam": Rates(lr=2e-3),
    "signsgd": Rates(lr=1e-3),
    "adamw": Rates(lr=1.5e-3, embedding_lr=1e-2),
    "sgd": Rates(lr=0.3),
}


# For fine-tuning a pretrained encoder: about a tenth of those above; docs/fine_tuning.md has the table.
FINE_TUNING_RATES: Mapping[str, Rates] = {
    "adafrugal": Rates(lr=3e-4),
    "frugal": Rates(lr=3e-4),
    "galore": Rates(lr=1e-3),
    "badam": Rates(lr=1e-4),
    "signsgd": Rates(lr=1e-4),
    "adamw": Rates(lr=1e-4),
    "sgd": Rates(lr=1e-2),
}


def method_names() -> tuple[str, ...]:
    """All optimizers that a run can use."""
    return (*METHODS.names(), *TORCH_METHODS)


def check_optimizer(config: OptimConfig) -> dict[str, Any]:
    """Check the name and that every setting is one that the optimizer takes.

    Returns:
        The settings that are set, under the names that the optimizer gives them.

    Raises:
        ConfigError: If the name is unknown, or a setting is given that the optimizer does not take.
    """
    if config.name not in method_names():
        raise ConfigError(
            f"--optim.name {config.name}",
            config.name,
            f"one of {', '.join(method_names())}",
            f"Choose one of these.{nearest_name(config.name, method_names())}",
        )
    given = _given(config)
    known = inspect.signature(_factory(config.name)).parameters
    own = {"lr"} if config.name == "badam" else {"lr", "embedding_lr"}  # badam freezes the embeddings
    for name, value in list(given.items()):
        if name in known or name in own:
            continue
        if value is None:  # switched off, and this optimizer never moves it
            del given[name]
            continue
        taken = [item.name for item in fields(OptimConfig) if item.name in known or item.name in own]
        raise ConfigError(
            f"--optim.name {config.name} --optim.{name} {value}",
            name,
            f"a setting of {config.name}: {', '.join(taken)}",
            f"Leave --optim.{name} out, or choose another optimizer.",
        )
    return given


def build_optimizer(
    config: OptimConfig, model: nn.Module, seed: int, rates: Mapping[str, Rates] = DEFAULT_RATES
) -> Optimizer:
    """Make the optimizer over a model.

    Args:
        config: Its name, and the settings that shall not have their defaults.
        model: What it trains.
        seed: Of frames and rounding.
        rates: By method, where the configuration gives none.

    Raises:
        ConfigError: As `check_optimizer`, and for values outside their range.
    """
    given = check_optimizer(config)
    default = rates[config.name]
    lr = given.pop("lr", default.lr)
    embedding_lr = given.pop("embedding_lr", default.embedding_lr if config.lr is None else None)
    factory = _factory(config.name)
    if config.name in TORCH_METHODS:
        given.setdefault("weight_decay", 0.0)
        keys = ("params", "param_names", "lr", "label")
        groups = [{k: g[k] for k in keys if k in g} for g in param_groups(model, embedding_lr=embedding_lr)]
        return factory(groups, lr=lr, **given)
    params = model if config.name == "badam" else param_groups(model, embedding_lr=embedding_lr)
    return factory(params, lr, seed=seed, **given)


def _factory(name: str) -> Callable[..., Optimizer]:
    if name == "adamw":
        return torch.optim.AdamW
    return torch.optim.SGD if name == "sgd" else METHODS.factory(name)


def _given(config: OptimConfig) -> dict[str, Any]:
    """The settings that are set, under the names that the methods give them."""
    given: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name == "name" or item.name in _SWITCHES or value is None:
            continue
        given[item.name] = value
    for switch, (setting, off) in _SWITCHES.items():
        if getattr(config, switch):
            continue
        if getattr(config, setting) is not None:
            raise ConfigError(
                f"--optim.{switch} false --optim.{setting} {getattr(config, setting)}",
                f"{setting} for what does not move",
                "one of the two",
                f"Leave --optim.{setting} out.",
            )
        given[setting] = off
    return given


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes that an optimizer holds here: exact for ours, and the storages of all state tensors for torch's."""
    if isinstance(optimizer, SplitOptimizer):
        return optimizer.memory()["total_bytes"]
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return held_bytes(local_of(tensor) for tensor in tensors)


def adamw_bytes(model: nn.Module) -> int:
    """Bytes that AdamW's moments would take for the parameters that are trained or were before they were frozen."""
    return sum(2 * param.numel() * param.element_size() for param in model.parameters())
