"""The settings of a parameter group: their names, their ranges, and the clocks that are kept beside them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from adafrugal.core.errors import ConfigError, NotSupportedError
from adafrugal.optim.blocks import Item
from adafrugal.optim.groups import ROLES, Group
from adafrugal.optim.rounding import ROUNDINGS
from adafrugal.optim.rules import RULES, STATELESS_RULES
from adafrugal.optim.sharding import place_shard, refuse_foreign_shards
from adafrugal.optim.subspaces import SUBSPACES

FORMAT_VERSION = 1
STATE_DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
CLOCKS: Mapping[str, Any] = {
    "step": 0,
    "progress": None,
    "refreshed_at": None,
    "cursor": 0,
    "frame_cursor": 0,
    "held_density": 0.0,
    "widths": (),
    "format_version": FORMAT_VERSION,
}
STRUCTURE = ("role", "subspace", "rule", "stateless_rule", "stacked")
_RECORD = {
    "params",
    "param_names",
    "named",
    "label",
    "role",
    "stacked",
    "reasons",
    "param_index",
    "num_frozen",
    "num_in_model",
    "name",
}


def dtype_name(dtype: torch.dtype | str | None) -> str | None:
    """The plain name of a state dtype, as groups hold it: checkpoints carry no dtype objects."""
    return str(dtype).removeprefix("torch.") if dtype is not None else None


def as_number(value: float | Tensor) -> float:
    """A learning rate as a float; a tensor on a device is read back once."""
    return float(value)


def lowest_density(group: Mapping[str, Any]) -> float:
    """The lowest density above zero that a group will have, from which the number of stripes follows."""
    start, end = group["density_start"], group.get("density_end")
    return start if end is None else end if end > 0 else start / 8


def _share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value <= 1.0


def _above(low: float, *, strict: bool) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.numel() == 1
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return number and (value > low if strict else value >= low)

    return holds


def _whole_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _betas(value: Any) -> bool:
    return len(value) == 2 and all(isinstance(b, (int, float)) and 0.0 <= b < 1.0 for b in value)


def _optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "lr": (_above(0.0, strict=False), "a number of at least 0", "Try 1e-3."),
    "betas": (_betas, "two numbers in [0, 1)", "Try (0.9, 0.999)."),
    "eps": (_above(0.0, strict=True), "a number above 0", "Try 1e-8."),
    "weight_decay": (_above(0.0, strict=False), "a number of at least 0", "Use 0 for none."),
    "density": (_share, "a share in [0, 1]", "Write 0.25 for a quarter."),
    "density_start": (_share, "a share in [0, 1]", "Write 0.25 for a quarter."),
    "density_end": (_optional(_share), "a share in [0, 1]", "Write 0.05 for a twentieth."),
    "update_gap": (lambda v: _whole_number(v) and v >= 1, "a whole number of steps, at least 1", "Try 200."),
    "stateful_lr_scale": (_above(0.0, strict=True), "a number above 0", "Use 1.0 for none."),
    "stateless_lr_scale": (
        _above(0.0, strict=False),
        "a number of at least 0",
        "Use stateless_rule='none' to freeze the rest.",
    ),
    "seed": (_whole_number, "a whole number", "Use 0."),
}


def check_choice(call: str, value: object, names: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the names.

    Raises:
        ConfigError: Lists the names, and the nearest one.
    """
    if value not in names:
        close = get_close_matches(str(value), names, n=1, cutoff=0.5)
        raise ConfigError(
            call,
            value,
            f"one of {', '.join(names)}",
            f"Did you mean {close[0]!r}?" if close else "Choose one of these.",
        )


def check_group(group: Group, known: Mapping[str, Any], method: str) -> None:
    """Check every setting of a completed group.

    Args:
        group: With all defaults filled in.
        known: The settings that the method knows, for the nearest-name error.
        method: The class as the user wrote it, for error texts.

    Raises:
        ConfigError: With the call, the value, what is allowed and what to do.
    """
    names = {*known, *CLOCKS, *_RECORD}
    for key in group:
        close = get_close_matches(key, names, n=1, cutoff=0.8)
        if key not in names and close:
            raise ConfigError(
                f"{method}(params) with a group that holds {key!r}",
                key,
                f"one of {', '.join(sorted(known))}",
                f"Did you mean {close[0]!r}?",
            )
    for key, (holds, allowed, action) in _CHECKS.items():
        if key in group and not holds(group[key]):
            raise ConfigError(f"{method}({key}={group[key]!r})", group[key], allowed, action)
    check_choice(f"{method}(params) with a group of role={group['role']!r}", group["role"], ROLES)
    RULES.factory(group["rule"])
    subspace = SUBSPACES.create(group["subspace"])
    check_choice(f"{method}(stateless_rule={group['stateless_rule']!r})", group["stateless_rule"], STATELESS_RULES)
    check_choice(f"{method}(rounding={group['rounding']!r})", group["rounding"], ROUNDINGS)
    if group["state_dtype"] is not None:
        check_choice(f"{method}(state_dtype={group['state_dtype']!r})", group["state_dtype"], tuple(STATE_DTYPES))
    if group["on_refresh"] is not None and group["role"] == "split":
        choices = subspace.on_refresh_choices
        if group["on_refresh"] not in choices:
            raise ConfigError(
                f"{method}(subspace={group['subspace']!r}, on_refresh={group['on_refresh']!r})",
                group["on_refresh"],
                f"one of {', '.join(choices)} for this subspace",
                f"Leave on_refresh=None for {choices[0]!r}.",
            )
    _check_start_and_end(group, method)


def _check_start_and_end(group: Group, method: str) -> None:
    """A density may fall, never rise."""
    end = group.get("density_end")
    if end is not None and end > group["density_start"]:
        raise ConfigError(
            f"{method}(density={group['density_start']}, density_end={end})",
            f"density_end={end}",
            f"at most the starting density {group['density_start']}",
            "Swap the two, or leave density_end equal to density.",
        )


def complete_group(part: Group, defaults: Mapping[str, Any], before: Sequence[Group], method: str) -> Group:
    """Fill in what a group does not say, and check all of it.

    Args:
        part: With parameters, names (or none), role and reasons.
        defaults: The method's settings.
        before: The groups that the optimizer has already; a later group joins their clock.
        method: The class as the user wrote it, for error texts.

    Raises:
        ConfigError: For a value outside its range, an unknown name, or a tensor that the subspace cannot hold.
        NotSupportedError: For complex tensors, and shards that no frame of the subspace lies within.
    """
    joined = {key: before[0][key] for key in ("step", "progress")} if before else {}
    group: Group = {**CLOCKS, **joined, **defaults, **part}
    group["state_dtype"] = dtype_name(group["state_dtype"])
    if not group["param_names"]:
        group["param_names"] = [f"group{len(before)}.{i}" for i in range(len(group["params"]))]
    if group["role"] == "split":
        group["density_start"] = group["density"]
    else:
        whole = group["role"] == "stateful"
        group.update(subspace="whole" if whole else "empty", density=1.0 if whole else 0.0)
        group.update(density_start=group["density"], density_end=None, on_refresh=None)
        group["stateful_lr_scale"] = part.get("stateful_lr_scale", 1.0)
    check_group(group, defaults, method)
    subspace = SUBSPACES.create(group["subspace"])
    items: list[Item] = []
    for param, name, stacked in zip(group["params"], group["param_names"], group["stacked"], strict=True):
        _check_tensor(param, name, group, subspace.takes_vectors, method)
        items.append(Item(name, subspace.geometry(tuple(param.shape), stacked, lowest_density(group))))
        place_shard(param, name, group, stacked, items[-1].geometry, subspace)  # refuses now, not at the first step
    end = group.get("density_end")
    subspace.check(items, group["density_start"], group["density"] if end is None else end)
    _warn_of_lost_updates(group, method)
    return group


def _warn_of_lost_updates(group: Group, method: str) -> None:
    """Say that weights of low precision without compensation lose small updates."""
    dtypes = {param.dtype for param in group["params"]}
    if torch.bfloat16 in dtypes and group["rounding"] == "nearest":
        warnings.warn(
            f"{method}: bfloat16 weights with rounding='nearest' lose every update below half a spacing; "
            "use rounding='stochastic' or 'kahan'",
            stacklevel=5,
        )
    if torch.float16 in dtypes and group["rounding"] != "kahan":
        warnings.warn(
            f"{method}: float16 weights are rounded to nearest and lose every update below half a spacing; "
            "use rounding='kahan', bfloat16 weights, or float32 weights under autocast",
            stacklevel=5,
        )


def _check_tensor(param: Tensor, name: str, group: Group, takes_vectors: bool, method: str) -> None:
    """Refuse a tensor that the group's subspace cannot hold."""
    refuse_foreign_shards(param, name, method)
    if param.is_complex():
        raise NotSupportedError(
            f"{method}(params) at {name}", str(param.dtype), "real weights", "Train torch.view_as_real(weight) instead."
        )
    if param.ndim < 2 and not takes_vectors:
        raise ConfigError(
            f"{method}(params) at {name}",
            f"a {param.ndim}-D tensor of {param.numel()} elements",
            f"matrices under subspace={group['subspace']!r}",
            "Flat parameters come from FSDP1: use FSDP2. Else give role='stateful'.",
        )
