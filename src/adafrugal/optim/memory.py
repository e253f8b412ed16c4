"""Bytes of an optimizer's state, counted exactly: held, promised by the widths in force, and AdamW's for comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from adafrugal.optim import clocks
from adafrugal.optim.frames import RunFrame
from adafrugal.optim.groups import Group
from adafrugal.optim.kernels import CACHED_ELEMENTS, in_row_pieces
from adafrugal.optim.placing import Place, Placement, States, state_dtype_of
from adafrugal.optim.rounding import compute_dtype
from adafrugal.optim.rules import rule_of
from adafrugal.optim.subspaces import BasisSubspace


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each storage once, whole even where a tensor views a part.

    On the meta device, where storages hold nothing, the tensors' own sizes are added.
    """
    seen: dict[int, int] = {}
    total = 0
    for tensor in tensors:
        if tensor.is_meta:
            total += tensor.nbytes
            continue
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return total + sum(seen.values())


def _step_bytes(param: Tensor, place: Place, width: int) -> int:
    """Temporaries of one tensor's update on a CPU: a direction, and the frame's gradient and direction.

    Large matrices under windows and blocks are updated in pieces. Weights of low precision need the weight, the
    gradient and the noise in full precision besides.
    """
    dtype, numel = compute_dtype(param.dtype), place.geometry.numel
    shape = place.subspace.state_shape(place.geometry, width)
    whole = width == place.subspace.full_width(place.geometry)
    part = 0 if whole else 2 * math.prod(shape)
    if param.dtype != dtype:
        return dtype.itemsize * (3 * numel + part) + 7 * numel
    frame = RunFrame(place.geometry, "cols", 0, 0)
    bound_to_pieces = not isinstance(place.subspace, BasisSubspace) and not getattr(place.subspace, "scattered", False)
    cut = bound_to_pieces and in_row_pieces(frame, param.dtype, torch.device("cpu"))
    num_pieces = max(1, -(-numel // CACHED_ELEMENTS)) if cut else 1
    return dtype.itemsize * -(-(numel + part) // num_pieces)


def measure(groups: Sequence[Group], states: States, placement: Placement) -> dict[str, int]:
    """See `SplitOptimizer.memory`."""
    moments: list[Tensor] = []
    indices: list[Tensor] = []
    compensations: list[Tensor] = []
    planned = adamw = step = drawn = 0
    for group in groups:
        rule = rule_of(group["rule"], group)
        widths = group["widths"] or clocks.upcoming_widths(group, placement.items(group))
        for param, width in zip(group["params"], widths, strict=True):
            place = placement.places[param]
            dtype = state_dtype_of(param, group)
            adamw += 2 * place.geometry.numel * param.element_size()
            shape = place.subspace.state_shape(place.geometry, width)
            if width > 0:
                planned += rule.state_bytes(shape, dtype)
            step = max(step, _step_bytes(param, place, width))
            state = states.get(param, {})
            moments += [state[name] for name in rule.moment_powers if name in state]
            indices += [state[name] for name in ("entered", "basis") if name in state]
            compensations += [state[name] for name in ("compensation",) if name in state]
            if "cursor" in state and not place.subspace.reads_gradient:
                drawn += placement.frame(param, group, state).frame_bytes
    index = held_bytes(indices) + drawn
    held, compensation = held_bytes(moments), held_bytes(compensations)
    return {
        "state_bytes": held,
        "index_bytes": index,
        "compensation_bytes": compensation,
        "total_bytes": held + index + compensation,
        "step_bytes": step,
        "planned_state_bytes": planned,
        "adamw_state_bytes": adamw,
    }
