"""To and from torch's AdamW: a run may start from AdamW's moments, and may end in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adafrugal.core.errors import CheckpointError, NotSupportedError
from adafrugal.optim.frames import BasisFrame
from adafrugal.optim.groups import Group, canonical_name
from adafrugal.optim.placing import ParamState, Placement, States
from adafrugal.optim.rules import rule_of

_MOMENTS = {"exp_avg": 1, "exp_avg_sq": 2}


def exported(groups: Sequence[Group], states: States, placement: Placement) -> dict[str, Any]:
    """A state dict for ``torch.optim.AdamW(model.parameters())``.

    Moments that are missing are zeros. AdamW keeps one step for each tensor, so a line that entered later is scaled
    such that its bias-corrected moments are what they were.

    Raises:
        CheckpointError: If a group's rule is not AdamW.
        NotSupportedError: If weights are in shards.
    """
    _refuse_shards(placement, "optimizer.adamw_state_dict()")
    saved: dict[int, dict[str, Any]] = {}
    for group in groups:
        _need_adamw(group, "optimizer.adamw_state_dict()")
        for index, param in zip(group["param_index"], group["params"], strict=True):
            state = states.get(param, {})
            step = float(state.get("step", group["step"]))
            full = {"step": torch.tensor(step)}
            for moment, power in _MOMENTS.items():
                full[moment] = _expanded(param, group, state, placement, moment, power)
            saved[index] = full
    first = groups[0]
    return {
        "state": dict(sorted(saved.items())),
        "param_groups": [
            {
                "lr": first["lr"],
                "betas": first["betas"],
                "eps": first["eps"],
                "weight_decay": first["weight_decay"],
                "amsgrad": False,
                "maximize": False,
                "foreach": None,
                "capturable": False,
                "differentiable": False,
                "fused": None,
                "decoupled_weight_decay": True,
                "params": list(range(max(first["num_in_model"], 1 + max(saved)))),
            }
        ],
    }


def _refuse_shards(placement: Placement, call: str) -> None:
    if placement.sharded:
        raise NotSupportedError(
            call,
            "weights in shards (FSDP2)",
            "whole weights",
            "Save with torch.distributed.checkpoint, load it on one process with state_layout='padded', and exchange "
            "there.",
        )


def _need_adamw(group: Group, call: str) -> None:
    if group["rule"] != "adamw":
        raise CheckpointError(
            call, f"rule={group['rule']!r}", "rule='adamw'", "Only AdamW's moments can be exchanged with torch's AdamW."
        )


def _ages_factor(param: Tensor, group: Group, state: ParamState, placement: Placement, power: int) -> Tensor | float:
    """What lines that entered later are multiplied by, so that one step for all gives the same corrected moments."""
    if "entered" not in state:
        return 1.0
    beta = group["betas"][power - 1]
    ages = (state["step"] - state["entered"]).double()
    factor = (1.0 - beta ** state["step"]) / (1.0 - beta**ages)
    frame = placement.frame(param, group, state)
    return factor.view(1, -1, 1) if frame.state_shape[1] == frame.width else factor.view(1, 1, -1)


def _expanded(param: Tensor, group: Group, state: ParamState, placement: Placement, moment: str, power: int) -> Tensor:
    """One moment in the weight's shape."""
    place = placement.places[param]
    if moment not in state:
        return torch.zeros_like(param, memory_format=torch.preserve_format)
    part: Tensor = state[moment]
    full = part.new_zeros(place.geometry.shape)
    frame = placement.frame(param, group, state)
    if isinstance(frame, BasisFrame) and power == 2:
        squared = BasisFrame(frame.geometry, frame.basis.square())
        full.copy_(squared.up(part.to(frame.basis.dtype)))
    elif isinstance(frame, BasisFrame):
        full.copy_(frame.up(part.to(frame.basis.dtype)))
    else:
        frame.merge(full, (part * _ages_factor(param, group, state, placement, power)).to(part.dtype))
    return full.view(param.shape)


def imported(state_dict: Mapping[str, Any], groups: Sequence[Group], states: States, placement: Placement) -> None:
    """Cut AdamW's moments to the frames in force; a basis that reads gradients is fitted to the first moment.

    Under a basis, the second moment is projected with the squared basis: a heuristic, since squares do not rotate.

    Args:
        state_dict: Of ``torch.optim.AdamW`` over the same parameters, by name where both sides know names, and else in
            the order in which parameters were handed over.
        groups: The optimizer's groups, shared out.
        states: The optimizer's state; entries are replaced.
        placement: Its places.

    Raises:
        CheckpointError: If a moment's shape is not its parameter's, or a group's rule is not AdamW.
        NotSupportedError: If weights are in shards.
    """
    call = "optimizer.load_adamw_state_dict(...)"
    _refuse_shards(placement, call)
    by_index, by_name = _entries(state_dict)
    for group in groups:
        _need_adamw(group, call)
        rule = rule_of(group["rule"], group)
        members = zip(group["param_index"], group["params"], group["param_names"], group["widths"], strict=True)
        for index, param, name, width in members:
            entry = by_name.get(name) if by_name and group["named"] else by_index.get(index)
            if entry is None or width == 0:
                continue
            mean, square = entry["exp_avg"], entry["exp_avg_sq"]
            if mean.shape != param.shape:
                raise CheckpointError(
                    call,
                    f"a moment of shape {tuple(mean.shape)}",
                    f"{tuple(param.shape)} for {name}",
                    "Use the same model.",
                )
            place = placement.places[param]
            mean = mean.to(param.device, torch.promote_types(mean.dtype, torch.float32))
            square = square.to(mean)
            state = placement.enter(param, group, states, mean, width, rule)
            frame = placement.frame(param, group, state)
            wide = frame if not isinstance(frame, BasisFrame) else BasisFrame(frame.geometry, frame.basis.square())
            state["exp_avg"].copy_(frame.down(mean.reshape(place.geometry.shape)))
            state["exp_avg_sq"].copy_(wide.down(square.reshape(place.geometry.shape)))
            state["step"] = int(entry["step"])


def _entries(state_dict: Mapping[str, Any]) -> tuple[dict[int, Any], dict[str, Any]]:
    """AdamW's entries by place in the order of its parameters, and by canonical name where it has names."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    names = [name for group in state_dict["param_groups"] for name in group.get("param_names", ())]
    state = state_dict["state"]
    by_index = {place: state[key] for place, key in enumerate(keys) if key in state}
    named = len(names) == len(keys)
    by_name = {canonical_name(n): state[k] for n, k in zip(names, keys, strict=True) if k in state} if named else {}
    return by_index, by_name
