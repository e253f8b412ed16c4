"""The methods in Hugging Face's Trainer and in what is built on it: an optimizer from TrainingArguments, a callback.

Three recipes, from the one that needs least to the one that does most by hand:

1. ``Trainer(optimizer_cls_and_kwargs=adafrugal_cls_and_kwargs(args))``: the Trainer makes the optimizer from its model.
2. ``Trainer(optimizers=(create_adafrugal_optimizer(model, args), None))``: made before the Trainer.
3. ``Trainer(optimizer_cls_and_kwargs=(AdaFRUGAL, {"lr": 1e-3}))``: the class alone, with the Trainer's groups and no
   names, so that tensors are sorted by shape.

Add `AdaFrugalCallback` to each: it tells the optimizer how far the run is and what the evaluation gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from adafrugal.core.errors import NotSupportedError
from adafrugal.integrations.optim_args import (
    ADDED,
    checked,
    from_arguments,
    parse_optim_args,
    refuse_deepspeed,
    refuse_unfusable_arguments,
)
from adafrugal.optim.blocks import has_layer, layer_of
from adafrugal.optim.groups import Group, Role, as_groups, param_groups
from adafrugal.optim.methods import METHODS
from adafrugal.optim.split import SplitOptimizer

try:
    from transformers.trainer import Trainer
    from transformers.training_args import TrainingArguments

    from adafrugal.integrations.hf_callback import AdaFrugalCallback
except ImportError as error:
    raise ImportError(
        f"import adafrugal.integrations.hf: received {error}; allowed is an environment with transformers 4.48 or "
        'later and accelerate 1.2 or later. Run: pip install "adafrugal[hf]".'
    ) from error

__all__ = [
    "AdaFrugalCallback",
    "AdaFrugalFactory",
    "adafrugal_cls_and_kwargs",
    "create_adafrugal_optimizer",
    "parse_optim_args",
]
_PER_PARAMETER = ("params", "param_names", "param_index", "stacked", "reasons")


def create_adafrugal_optimizer(
    model: nn.Module,
    args: TrainingArguments,
    *,
    method: str = "adafrugal",
    optim_args: str | None = None,
    **settings: Any,
) -> SplitOptimizer:
    """An optimizer for ``Trainer(optimizers=(optimizer, None))``.

    From ``args`` come ``learning_rate``, ``weight_decay``, ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon``, and
    ``optim_args``, a string of settings. What is said twice: a keyword here beats ``optim_args`` here, which beats
    ``args.optim_args``, which beats the other fields of ``args``. Weights decay that Trainer's AdamW would decay:
    neither norms nor biases.

    Args:
        model: The model that will be trained, adapters and all; anything put into it later is not trained.
        args: The Trainer's arguments.
        method: ``"adafrugal"``, ``"frugal"``, ``"galore"``, ``"badam"`` or ``"signsgd"``.
        optim_args: Settings as a string; see `parse_optim_args`.
        settings: The method's settings by name, such as ``density=0.3``, each checked; ``beta1`` and ``beta2``;
            ``embedding_lr`` and ``rules`` of `param_groups`; ``fused_backward=True``, which attaches the optimizer to
            backward. AdaFRUGAL's ``total_steps`` stays None, so that `AdaFrugalCallback` sets the progress.

    Raises:
        ConfigError: For an unknown method or setting (lists the known ones and the nearest), or a value out of range.
        NotSupportedError: For a fused backward with clipping, accumulation, fp16 or several processes; for DeepSpeed
            with an optimizer of its own, or with ZeRO.
    """
    _, resolved = adafrugal_cls_and_kwargs(args, method=method, optim_args=optim_args, **settings)
    return AdaFrugalFactory()(model, **resolved)


def adafrugal_cls_and_kwargs(
    args: TrainingArguments, *, method: str = "adafrugal", optim_args: str | None = None, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """What ``Trainer(optimizer_cls_and_kwargs=...)`` takes: the Trainer hands over its model, so that names are known.

    For models that the Trainer changes first (TRL's ``peft_config``, FSDP), and where settings have to stay plain data:
    the second value is JSON as long as the settings are.

    Args:
        args: As in `create_adafrugal_optimizer`, and so are the others.
        method: Name of the method.
        optim_args: Settings as a string.
        settings: Settings by name.

    Returns:
        `AdaFrugalFactory`, and its settings as plain numbers and strings.

    Raises:
        ConfigError: As `create_adafrugal_optimizer`.
        NotSupportedError: As `create_adafrugal_optimizer`.
    """
    given = {**parse_optim_args(args.optim_args or ""), **parse_optim_args(optim_args or ""), **settings}
    resolved = {"method": method, **checked(method, given, from_arguments(method, args))}
    refuse_deepspeed(args)
    if resolved.get("fused_backward"):
        refuse_unfusable_arguments(args, str(resolved.get("check_finite", "deferred")))
    return AdaFrugalFactory, resolved


class AdaFrugalFactory:
    """What the Trainer of transformers 5 calls with its model, in the place of an optimizer class.

    ``Trainer(optimizer_cls_and_kwargs=(AdaFrugalFactory, {"lr": 1e-3, "density": 0.3}))``: here nothing is taken from
    TrainingArguments; `adafrugal_cls_and_kwargs` takes it.

    Raises:
        NotSupportedError: If it is called as an optimizer class, which transformers 4 does.
    """

    def __init__(self, *params: object, **settings: object) -> None:
        if params or settings:
            raise NotSupportedError(
                "Trainer(optimizer_cls_and_kwargs=(AdaFrugalFactory, {...}))",
                "parameter groups, as the Trainer of transformers 4 hands them to an optimizer class",
                "a Trainer that calls factories with its model (transformers 5)",
                "Use Trainer(optimizers=(create_adafrugal_optimizer(model, args), None)).",
            )

    def __call__(self, model: nn.Module, *, method: str = "adafrugal", **settings: Any) -> SplitOptimizer:
        """Make the optimizer over a model.

        Args:
            model: The model that is trained.
            method: Name of the method.
            settings: As in `create_adafrugal_optimizer`; what is left out has the method's own default.

        Raises:
            ConfigError: As `create_adafrugal_optimizer`.
        """
        taken = checked(method, settings, {})
        fused, embedding_lr, rules = (taken.pop(name, None) for name in ADDED)
        groups = _decay_split(model, method, taken.get("weight_decay", 0.0), embedding_lr, rules)
        optimizer = METHODS.create(method, groups, **taken)
        if fused:
            optimizer.attach(model)
        return optimizer


def _decay_split(
    model: nn.Module, method: str, weight_decay: float, embedding_lr: float | None, rules: Mapping[str, Role] | None
) -> list[Group]:
    """The model's groups, each cut into what the Trainer's AdamW would decay and what it would not."""
    if method == "badam":
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        groups = as_groups([{"params": named, "role": "split", "subspace": "whole"}])
        if weight_decay == 0.0:
            return groups
    else:
        groups = param_groups(model, embedding_lr=embedding_lr, rules=rules)
    decaying = set(Trainer.get_decay_parameter_names(cast(Any, None), model))  # a method that does not look at itself
    decayed = {id(param) for name, param in model.named_parameters() if name in decaying}
    parts: list[Group] = []
    for group in groups:
        for decays in (True, False):
            members = [i for i, param in enumerate(group["params"]) if (id(param) in decayed) is decays]
            if members:
                part = {**group, "weight_decay": weight_decay if decays else 0.0}
                part |= {key: [group[key][i] for i in members] for key in _PER_PARAMETER if group.get(key)}
                parts.append(part)
    if method == "badam":
        _refuse_uneven_layers(parts)
    return parts


def _refuse_uneven_layers(groups: list[Group]) -> None:
    """BAdam's groups take turns side by side, so that one layer trains at a time only if all have the same layers."""
    layers = [{layer_of(name) for name in group["param_names"] if has_layer(name)} for group in groups]
    if any(found != layers[0] for found in layers):
        raise NotSupportedError(
            'create_adafrugal_optimizer(model, args, method="badam")',
            "weight decay for a model in which some layer has no norm or bias, or nothing else",
            "layers that each hold both what decays and what does not",
            "Set weight_decay=0.",
        )
