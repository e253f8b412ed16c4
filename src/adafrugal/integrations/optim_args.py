"""Settings of a method as keywords or as one string, each checked by name and kind before any optimizer is built."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from adafrugal.core.errors import ConfigError, NotSupportedError, nearest_name
from adafrugal.optim.attach import refuse_unfusable
from adafrugal.optim.methods import METHODS

if TYPE_CHECKING:
    from transformers.training_args import TrainingArguments

ADDED = ("fused_backward", "embedding_lr", "rules")  # no optimizer takes these: the factory does them itself
_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}  # transformers' defaults, and torch's
_WORDS = {"true": True, "false": False, "none": None, "null": None}


def parse_optim_args(text: str) -> dict[str, Any]:
    """Read ``"density=0.3,betas=(0.9,0.99),density_end=None"``: names and values with commas between them.

    Values are numbers (``1e-5`` too), ``None``, ``true``, ``false``, tuples, and words. transformers' own reader cuts
    at every comma, tuples included, which is why ``beta1=0.9,beta2=0.99`` is understood as well.

    Raises:
        ConfigError: For an item that is no ``name=value``, a name that comes twice, or a bracket that stays open.

    Example:
        >>> parse_optim_args("density=0.3, betas=(0.9, 0.99), eps=1e-5, update_gap_max=none, compile=true, rule=lion")
        {'density': 0.3, 'betas': (0.9, 0.99), 'eps': 1e-05, 'update_gap_max': None, 'compile': True, 'rule': 'lion'}
    """
    call, item, depth = f"optim_args={text!r}", "", 0
    found: dict[str, Any] = {}
    for character in text + ",":
        depth += (character in "([{") - (character in ")]}")
        if character != "," or depth:
            item += character
            continue
        name, equals, value = (part.strip() for part in item.partition("="))
        if item.strip() and not (name.isidentifier() and equals and value):
            raise ConfigError(call, item.strip(), "name=value, with commas between", "Write density=0.3,update_gap=50.")
        if name in found:
            raise ConfigError(call, f"{name} twice", "each name once", f"Leave one {name} out.")
        if name:
            found[name] = _value(value)
        item = ""
    if depth:
        raise ConfigError(call, "a bracket without its partner", "tuples such as (0.9,0.99)", "Close the bracket.")
    return found


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def kinds_of(method: str) -> dict[str, str]:
    """The settings that a method takes and those added here, each with its annotation as text.

    Raises:
        ConfigError: For an unknown method.
    """
    settings = inspect.signature(METHODS.factory(method)).parameters
    taken = {name: str(setting.annotation) for name, setting in settings.items()}
    for name in ("params", "extra", "differentiable"):
        taken.pop(name, None)
    if "betas" in taken:
        taken |= {"beta1": "float", "beta2": "float"}
    added = {"fused_backward": "bool", "embedding_lr": "float | None", "rules": "Mapping[str, Role] | None"}
    if method == "badam":  # its groups are layers, not embeddings and matrices
        added = {"fused_backward": "bool"}
    return taken | added


def from_arguments(method: str, args: TrainingArguments) -> dict[str, Any]:
    """The fields of TrainingArguments under the method's own names.

    Raises:
        ConfigError: For a field that was changed and that the method cannot use.
    """
    known = kinds_of(method)
    values = {
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    for name, default in _ADAM.items():
        if name not in known and values[name] != default:
            raise ConfigError(
                f"create_adafrugal_optimizer(model, args, method={method!r})",
                f"TrainingArguments with {name}={values[name]!r}",
                f"a setting of {method}: {', '.join(known)}",
                "Leave adam_beta1, adam_beta2 and adam_epsilon at their defaults.",
            )
    return {name: value for name, value in values.items() if name in known}


def checked(method: str, given: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Check names and kinds of settings, and put them over those from before; ranges are the optimizer's to check.

    Args:
        method: Name of the method.
        given: What the user said; ``beta1`` and ``beta2`` may stand for ``betas``.
        before: What holds where the user said nothing.

    Returns:
        The method's settings; ``betas`` as a pair.

    Raises:
        ConfigError: For an unknown name (lists the known ones and the nearest), a value of the wrong kind, or ``betas``
            beside ``beta1`` or ``beta2``.
    """
    known = kinds_of(method)
    for name, value in given.items():
        call = f"adafrugal_cls_and_kwargs(args, method={method!r}, {name}={value!r})"
        if name not in known:
            listed = f"a setting of {method}: {', '.join(known)}"
            raise ConfigError(call, name, listed, f"Correct the name.{nearest_name(name, known)}")
        _check_kind(call, known[name], value)
    settings = {**before, **given}
    single = {name: settings.pop(name) for name in ("beta1", "beta2") if name in settings}
    if single and "betas" in given:
        raise ConfigError(
            f"adafrugal_cls_and_kwargs(args, method={method!r}, ...)",
            f"betas and {' and '.join(single)}",
            "one of the two ways to say it",
            "Leave betas out.",
        )
    if "betas" in settings or single:
        first, second = settings.get("betas", _ADAM["betas"])
        settings["betas"] = (single.get("beta1", first), single.get("beta2", second))
    return settings


def _check_kind(call: str, kind: str, value: Any) -> None:
    """Refuse a word where a number belongs, and the like."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    words = set(kind.split(" | "))
    holds, allowed, action = True, "", ""
    if kind == "bool":
        holds, allowed, action = isinstance(value, bool), "true or false", "Write true or false."
    elif words & {"int", "float"}:
        holds = is_number or not isinstance(value, (str, bool, tuple, list, dict))
        allowed, action = "a number", "Write a number, such as 1e-4."
    elif kind.startswith("tuple[float"):
        holds = isinstance(value, (tuple, list)) and len(cast(Any, value)) == 2
        allowed, action = "two numbers in [0, 1)", "Write betas=(0.9,0.99), or beta1= and beta2=."
    elif kind.startswith("Sequence"):
        holds, allowed, action = isinstance(value, (tuple, list)), "a tuple of names", "Write ('classifier.*',)."
    elif is_number or isinstance(value, bool):
        holds, allowed, action = kind.startswith("Mapping"), "a word", "Write a name, without quotes."
    if not holds:
        raise ConfigError(call, cast(object, value), allowed, action)


def refuse_unfusable_arguments(args: TrainingArguments, check_finite: str) -> None:
    """Refuse TrainingArguments that a fused backward cannot honour, before anything is built.

    Raises:
        NotSupportedError: For accumulation, clipping, fp16, several processes, DeepSpeed, or a search for the batch
            size.
    """
    call = "fused_backward=True with TrainingArguments"
    try:
        refuse_unfusable(
            accumulation_steps=args.gradient_accumulation_steps,
            max_grad_norm=args.max_grad_norm,
            grad_scaler="fp16" if args.fp16 else None,
            check_finite=check_finite,
        )
    except NotSupportedError as error:
        action = error.action.replace("without attach", "without fused_backward")
        raise NotSupportedError(call, error.value, error.allowed, action) from None
    several = cast(int, args.world_size) > 1 or args.n_gpu > 1
    sharded: object = cast(object, args.deepspeed)
    others: tuple[tuple[bool, str, str], ...] = (
        (several, "several processes", "one, since gradients are averaged after the hooks"),
        (sharded is not None, "deepspeed", "a plain backward, whose gradients nobody else takes"),
        (args.auto_find_batch_size, "auto_find_batch_size=True", "False, since a failed backward has moved weights"),
    )
    for refused, value, allowed in others:
        if refused:
            raise NotSupportedError(call, value, allowed, "Change it, or train without fused_backward.")


def refuse_deepspeed(args: TrainingArguments) -> None:
    """Refuse a DeepSpeed configuration that takes the optimizer's place, or the shapes of its weights.

    Raises:
        NotSupportedError: For an ``optimizer`` block, or a ZeRO stage above 0.
    """
    plugin = args.deepspeed_plugin
    if plugin is None:
        return
    config = cast(dict[str, Any], plugin.deepspeed_config)
    call = "adafrugal_cls_and_kwargs(args) with a DeepSpeed configuration"
    if "optimizer" in config:
        raise NotSupportedError(
            call,
            f"an optimizer block: {config['optimizer'].get('type')}",
            "one optimizer, and it is made here",
            'Remove the block "optimizer" from the configuration.',
        )
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage:
        raise NotSupportedError(
            call,
            f"ZeRO stage {stage}",
            "stage 0, since the others cut weights into flat partitions, in which no matrix can be found",
            "Use FSDP2 (fsdp_version: 2), which keeps matrices, or DDP.",
        )
