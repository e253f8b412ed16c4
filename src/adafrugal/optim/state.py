"""What is saved of an optimizer and how it is taken back: by name, in a compact or a padded layout."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adafrugal.core.errors import CheckpointError
from adafrugal.optim.groups import Group, canonical_name
from adafrugal.optim.placing import Placement, States, state_dtype_of
from adafrugal.optim.rules import rule_of
from adafrugal.optim.settings import FORMAT_VERSION, STRUCTURE
from adafrugal.optim.sharding import Sharding, is_dtensor
from adafrugal.optim.subspaces import LineSubspace

_CALL = "optimizer.load_state_dict(...)"
_NUMBERS = ("step", "cursor", "fit_width", "width")
_OURS = ("params", "param_names", "named", "param_index", "reasons", "stacked", "num_frozen", "num_in_model")


def saved_state(
    param_groups: Sequence[Group], param_states: States, placement: Placement, layout: str
) -> dict[str, Any]:
    """The state as tensors, numbers, strings, lists and dicts, in torch's form.

    Tensors are the live ones in the compact layout, as in torch. State of a tensor that is in no group any more is left
    out, with a warning.

    Args:
        param_groups: The optimizer's groups.
        param_states: Its state.
        placement: Its places.
        layout: ``"compact"``, or ``"padded"``: every moment padded with zeros to the shape that it has at the starting
            density (blocks to the whole tensor), so that shapes never depend on density or frame.
    """
    groups: list[Group] = []
    states: dict[int, dict[str, Any]] = {}
    known: set[Tensor] = set()
    number = 0
    for group in param_groups:
        saved = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        saved["params"] = list(range(number, number + len(group["params"])))
        groups.append(saved)
        for param in group["params"]:
            known.add(param)
            state = param_states.get(param)
            if layout == "padded":
                states[number] = _padded(param, group, state or {}, placement)
            elif state:
                states[number] = _compact(param, state, placement)
            number += 1
    orphans = [param for param in param_states if param not in known]
    if orphans:
        warnings.warn(
            f"state_dict(): {len(orphans)} tensors have state but are in no parameter group any more; it is left out",
            stacklevel=3,
        )
    return {"state": states, "param_groups": groups}


def _compact(param: Tensor, state: Mapping[str, Any], placement: Placement) -> dict[str, Any]:
    """One tensor's state as it is; where lines may differ in age, their steps of entry are there even if all are 0.

    torch.distributed.checkpoint fills what the other side has, and would leave them out without a word.
    """
    place = placement.places[param]
    if "width" not in state or "entered" in state or not isinstance(place.subspace, LineSubspace):
        return dict(state)
    device = torch.device("cpu") if param.is_meta else param.device
    return {**state, "entered": torch.zeros(state["width"], dtype=torch.int32, device=device)}


def _widest(param: Tensor, group: Group, placement: Placement) -> int:
    """The width that a tensor has at the starting density, or that a block has when it is active."""
    place = placement.places[param]
    if group["role"] == "stateless":
        return 0
    if place.subspace.takes_vectors:
        return place.subspace.full_width(place.geometry)
    item = placement.items(group)[place.index]
    return place.subspace.share([item], group["density_start"], 0, lambda _: torch.Generator())[0][0]


def _pad(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    padded = tensor.new_zeros(tuple(shape))
    padded[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return padded


def _padded(param: Tensor, group: Group, state: Mapping[str, Any], placement: Placement) -> dict[str, Any]:
    """One tensor's state with shapes that depend on its settings alone."""
    place = placement.places[param]
    widest = max(_widest(param, group, placement), state.get("width", 0))
    rule = rule_of(group["rule"], group)
    shape = place.subspace.state_shape(place.geometry, widest)
    empty = rule.init(shape, state_dtype_of(param, group), param.device)
    full: dict[str, Any] = {name: _pad(state[name], shape) if name in state else zeros for name, zeros in empty.items()}
    entered = state.get("entered", torch.zeros(0, dtype=torch.int32, device=param.device))
    full["entered"] = _pad(entered, (widest,))
    if place.subspace.reads_gradient:
        side = place.subspace.full_width(place.geometry)
        basis = state.get("basis", torch.zeros(place.geometry.stack, side, 0, device=param.device))
        full["basis"] = _pad(basis, (place.geometry.stack, side, widest))
    if "compensation" in state:
        full["compensation"] = state["compensation"]
    cut = place.sharding
    if cut is not None:
        for key in rule.moment_powers:
            full[key] = cut.wrap(full[key], cut.view_dim, cut.full_size)
        if "compensation" in full:
            full["compensation"] = cut.wrap(full["compensation"], cut.tensor_dim, param.shape[cut.tensor_dim])
    return {**full, **{key: state.get(key, 0) for key in _NUMBERS}}


def loaded_state(saved: Mapping[str, Any], groups: Sequence[Group]) -> tuple[list[Group], dict[Tensor, dict[str, Any]]]:
    """Check a saved state against the groups of an optimizer, and make new groups and states of both.

    Args:
        saved: As `saved_state` made it.
        groups: The optimizer's; nothing in them is changed.

    Returns:
        Groups with the checkpoint's numbers and our parameters, and the state of each parameter; copies throughout.

    Raises:
        CheckpointError: If groups, names, shapes, structure or format do not match.
    """
    saved_groups = saved["param_groups"]
    _check_groups(groups, saved_groups)
    _refuse_emptied(saved)
    new_groups: list[Group] = []
    for group, old in zip(groups, saved_groups, strict=True):
        order = _order(group, old)
        merged = {**group, **{key: copy.deepcopy(value) for key, value in old.items() if key != "params"}}
        merged |= {key: group[key] for key in _OURS}
        merged["widths"] = [old["widths"][i] for i in order] if old["widths"] else old["widths"]
        new_groups.append(merged)
    placement = Placement(new_groups)
    new_states: dict[Tensor, dict[str, Any]] = {}
    for group, old in zip(new_groups, saved_groups, strict=True):
        for param, i in zip(group["params"], _order(group, old), strict=True):
            entry = saved["state"].get(old["params"][i])
            if entry:
                new_states[param] = _taken(param, group, entry, placement)
    return new_groups, new_states


def _refuse_emptied(saved: Mapping[str, Any]) -> None:
    """Refuse a state of which only settings are left: some group has trained, and nobody has a moment.

    A group that freezes what is idle holds none while the next layer waits for its first gradient.
    """
    trained = [g for g in saved["param_groups"] if g["step"] > 0 and any(g["widths"]) and not g["freeze_idle"]]
    if trained and not saved["state"]:
        raise CheckpointError(
            _CALL,
            f"no moments after {trained[0]['step']} steps",
            "the state of every tensor that holds one",
            "torch's get_optimizer_state_dict leaves it out while gradients are there: call optimizer.zero_grad() "
            "before, on both sides.",
        )


def _check_groups(groups: Sequence[Group], saved: Sequence[Group]) -> None:
    """Refuse a checkpoint of another format, other groups, or other structure."""
    if not saved or "format_version" not in saved[0]:
        raise CheckpointError(
            _CALL,
            "a state without format_version, as another optimizer writes it",
            "the state of an adafrugal optimizer",
            "To start from torch's AdamW use optimizer.load_adamw_state_dict(...).",
        )
    version = saved[0]["format_version"]
    if version > FORMAT_VERSION:
        raise CheckpointError(
            _CALL,
            f"format_version {version}",
            f"at most {FORMAT_VERSION}",
            "Upgrade adafrugal to load this checkpoint.",
        )
    sizes, saved_sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in saved]
    if sizes != saved_sizes:
        ours = {name for group in groups for name in group["param_names"]}
        theirs = {name for group in saved for name in group["param_names"]}
        raise CheckpointError(
            _CALL,
            f"groups of {saved_sizes} parameters",
            f"groups of {sizes} parameters, as this optimizer has",
            f"Only in the checkpoint: {_some(theirs - ours)}; only here: {_some(ours - theirs)}. "
            "Add the missing groups with add_param_group before loading.",
        )
    for number, (group, old) in enumerate(zip(groups, saved, strict=True)):
        for key in STRUCTURE:
            if key != "stacked" and old[key] != group[key]:
                raise CheckpointError(
                    _CALL,
                    f"{key}={old[key]!r} in group {number}",
                    f"{key}={group[key]!r}, as this optimizer was built",
                    f"Build the optimizer with {key}={old[key]!r}, or start from the weights alone.",
                )


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"


def _order(group: Group, saved: Group) -> list[int]:
    """Where each of our parameters is in the saved group: by name where both know names, else by place."""
    if not (group["named"] and saved["named"]):
        return list(range(len(group["params"])))
    where = {canonical_name(name): i for i, name in enumerate(saved["param_names"])}
    ours = set(group["param_names"])
    if set(where) != ours:
        raise CheckpointError(
            _CALL,
            f"parameters {_some(set(where) - ours)} that are not here",
            f"the parameters of this optimizer, of which {_some(ours - set(where))} are missing",
            "Load it into an optimizer over the same model.",
        )
    return [where[name] for name in group["param_names"]]


def _local_part(saved: Tensor, cut: Sharding | None) -> Tensor:
    """This rank's part of a saved tensor, which may come from more or fewer ranks than there are now."""
    if cut is not None:
        return cut.unwrap(saved, cut.view_dim)
    return saved.full_tensor() if is_dtensor(saved) else saved


def _taken(param: Tensor, group: Group, entry: Mapping[str, Any], placement: Placement) -> dict[str, Any]:
    """A copy of one tensor's saved state on the parameter's device, narrowed if it is padded, its dtype kept."""
    place = placement.places[param]
    name = place.item.name
    rule = rule_of(group["rule"], group)
    taken: dict[str, Any] = {}
    cut = place.sharding
    if "compensation" in entry:
        buffer = entry["compensation"].detach()
        buffer = buffer if cut is None else cut.unwrap(buffer, cut.tensor_dim)
        taken["compensation"] = buffer.clone().to(param.device)
    width = int(entry.get("width", 0))
    if width == 0:
        return taken
    taken.update({key: int(entry[key]) for key in _NUMBERS})
    shape = place.subspace.state_shape(place.geometry, width)
    wanted: dict[str, tuple[int, ...]] = dict.fromkeys(rule.moment_powers, shape)
    wanted["entered"] = (width,)
    if place.subspace.reads_gradient:
        wanted["basis"] = (place.geometry.stack, place.subspace.full_width(place.geometry), width)
    for key, size in wanted.items():
        tensor = entry.get(key)
        if tensor is not None and (cut is not None or is_dtensor(tensor)):
            tensor = _local_part(tensor, cut if key in rule.moment_powers else None)
        if tensor is None and key == "entered":
            continue
        if tensor is None or tensor.ndim != len(size) or any(a < b for a, b in zip(tensor.shape, size, strict=True)):
            raise CheckpointError(
                _CALL,
                f"{key} of {name} with shape {tuple(tensor.shape) if tensor is not None else 'missing'}",
                f"shape {size} for width {width}",
                "Load it into an optimizer over the same model and settings.",
            )
        narrowed = tensor.detach()[tuple(slice(0, length) for length in size)]
        if key == "entered" and not bool(narrowed.any()):
            continue
        taken[key] = narrowed.clone(memory_format=torch.contiguous_format)
        if key != "entered" or not param.is_meta:  # it is read, so that a tensor without data keeps it on the host
            taken[key] = taken[key].to(param.device)
    return taken
