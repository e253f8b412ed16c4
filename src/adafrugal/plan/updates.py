"""What an optimizer holds, and what its update needs for itself, read off its groups before it has taken a step.

Moments and bases are what the rules and subspaces promise. Temporaries follow the paths of optim/kernels
(and of torch's loop over tensors) on a CPU, and their lists on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from adafrugal.core.errors import NotSupportedError
from adafrugal.core.protocols import FusedRule
from adafrugal.optim import clocks
from adafrugal.optim.frames import RunFrame
from adafrugal.optim.groups import Group
from adafrugal.optim.kernels import CACHED_ELEMENTS, in_row_pieces
from adafrugal.optim.placing import Place, Placement, state_dtype_of
from adafrugal.optim.rounding import compute_dtype
from adafrugal.optim.rules import rule_of
from adafrugal.optim.split import SplitOptimizer
from adafrugal.optim.subspaces import BasisSubspace, FixedSubspace, LineSubspace
from adafrugal.plan.parallel import Layout

DeviceKind = Literal["cpu", "cuda"]
FLOAT32_BYTES = 4
FLOAT64_BYTES = 8
_EXACT_SIDE = 4096  # up to here a basis is found exactly, in float64
_LIST_BYTES = 256 * 2**20  # gradients in one list on a GPU


@dataclass(frozen=True, kw_only=True)
class OptimizerBytes:
    """Bytes of an optimizer on one process.

    Args:
        state_bytes: Moments.
        index_bytes: Bases, index vectors, steps of entry at most, step counts, and Kahan's buffers.
        update_bytes: Temporaries of a step after backward.
        refresh_bytes: The same at a step that refreshes the subspace; None where none ever does.
        fused: By the elements of a parameter, the temporaries of its update alone, refreshes included: inside backward.
        can_fuse: Whether the optimizer can update inside backward.
    """

    state_bytes: int
    index_bytes: int
    update_bytes: int
    refresh_bytes: int | None
    fused: Mapping[int, int]
    can_fuse: bool = True


def optimizer_bytes(
    optimizer: Optimizer, layout: Layout | None = None, *, device: DeviceKind = "cpu"
) -> OptimizerBytes:
    """Read off an optimizer's groups what it will hold and need.

    Args:
        optimizer: Ours, or torch's AdamW, Adam or SGD, over parameters of any device, meta as well; it is not touched.
        layout: How the parameters will lie over processes; None for one process. The parameters given are whole.
        device: Decides which implementation of the update is taken.

    Raises:
        NotSupportedError: For another optimizer.

    Cost:
        Some microseconds a parameter.

    Example:
        >>> weight = torch.nn.Parameter(torch.empty(64, 64, device="meta"))
        >>> optimizer_bytes(torch.optim.AdamW([weight])).state_bytes
        32768
    """
    layout = layout or Layout()
    if isinstance(optimizer, SplitOptimizer):
        return _of_split(optimizer, layout, device)
    if type(optimizer) in (AdamW, Adam, SGD):
        return _of_torch(optimizer, layout, device)
    raise NotSupportedError(
        f"optimizer_bytes({type(optimizer).__name__})",
        type(optimizer).__name__,
        "an optimizer of this package, or torch's AdamW, Adam or SGD",
        "Measure a step instead: plan.tracing.measured_peak.",
    )


# --- torch's own ------------------------------------------------------------------------------------------------------


def _of_torch(optimizer: Optimizer, layout: Layout, device: DeviceKind) -> OptimizerBytes:
    """One tensor after the other on a CPU; on a GPU in one list, unless it is fused."""
    adam = not isinstance(optimizer, SGD)
    state = index = listed = largest = before = 0
    for group in optimizer.param_groups:
        fused = bool(group.get("fused"))
        in_list = group["foreach"] if group.get("foreach") is not None else device == "cuda"
        moments = (3 if group.get("amsgrad") else 2) if adam else int(group["momentum"] != 0)
        for param in cast(list[Tensor], group["params"]):
            num_bytes = layout.share_of(param) * param.element_size()
            state += moments * num_bytes
            index += FLOAT32_BYTES if adam else 0
            if fused:
                continue
            decayed = group["weight_decay"] != 0 and not (adam and group.get("decoupled_weight_decay"))
            copies = 2 if adam else int(decayed)
            largest = max(largest, copies * num_bytes + before)
            listed += num_bytes if in_list and (adam or decayed) else 0
            before = num_bytes if adam else 0  # the last denominator goes when the next one is there
    return OptimizerBytes(
        state_bytes=state,
        index_bytes=index,
        update_bytes=max(listed, 0 if listed else largest),
        refresh_bytes=None,
        fused={},
        can_fuse=False,
    )


# --- ours -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Needs:
    """One tensor's update: the buffers that a group shares, and what only this tensor needs beside them.

    Args:
        full: The direction of the whole tensor, or of a piece of it.
        parts: The frame's gradient and direction.
        own: All else at the worst moment.
        refresh: What fitting a new frame and moving the moments takes, before any update.
        listed: The gradient, where a GPU updates in lists.
    """

    full: int = 0
    parts: int = 0
    own: int = 0
    refresh: int = 0
    listed: int = 0

    @property
    def alone(self) -> int:
        """Of the tensor by itself."""
        return max(self.full + self.parts + self.own + 2 * self.listed, self.refresh)


def _of_split(optimizer: SplitOptimizer, layout: Layout, device: DeviceKind) -> OptimizerBytes:
    groups = optimizer.param_groups
    placement = Placement(groups)
    state = index = update = refresh = 0
    fused: dict[int, int] = {}
    refreshes = False
    for group in groups:
        rule = rule_of(group["rule"], group)
        widths = group["widths"] or clocks.upcoming_widths(group, placement.items(group))
        needs: list[_Needs] = []
        for param, width in zip(cast(list[Tensor], group["params"]), widths, strict=True):
            place = placement.places[param]
            share = layout.share_of(param) / max(1, param.numel())
            moments, frame = promised(place, param, group, width)
            state += math.ceil(moments * share)
            index += math.ceil(frame * (1.0 if isinstance(place.subspace, BasisSubspace) else share))
            if param.dtype in (torch.bfloat16, torch.float16) and group["rounding"] == "kahan":
                index += math.ceil(param.numel() * param.element_size() * share)
            moving = width > 0 and not isinstance(place.subspace, FixedSubspace)
            refreshes = refreshes or moving
            moment = math.ceil(moments * share) // max(1, len(rule.moment_powers))
            one = _needs(place, param, group, width, share, moment, device)
            needs.append(one)
            fused[param.numel()] = max(fused.get(param.numel(), 0), one.alone)
        if not needs:
            continue
        update = max(update, _together(needs))
        refresh = max(refresh, *(one.refresh for one in needs))
    return OptimizerBytes(
        state_bytes=state,
        index_bytes=index,
        update_bytes=update,
        refresh_bytes=max(update, refresh) if refreshes else None,
        fused=fused,
    )


def promised(place: Place, param: Tensor, group: Group, width: int) -> tuple[int, int]:
    """Bytes of moments and of the frame of one whole tensor at a width.

    Args:
        place: Where the optimizer sees it.
        param: The tensor.
        group: Its group.
        width: Of its frame, in lines or directions.
    """
    if width == 0:
        return 0, 0
    rule = rule_of(group["rule"], group)
    shape = place.subspace.state_shape(place.geometry, width)
    frame = place.subspace.frame_bytes(place.geometry, width, param.dtype)
    keeps = (group["on_refresh"] or place.subspace.on_refresh_choices[0]) == "keep"
    if keeps and not _is_whole(place, width) and not isinstance(place.subspace, BasisSubspace):
        frame += 4 * width  # the steps at which lines entered, once some have stayed over a refresh
    return rule.state_bytes(shape, state_dtype_of(param, group)), frame


def _is_whole(place: Place, width: int) -> bool:
    return width == place.subspace.full_width(place.geometry)


def _together(needs: Sequence[_Needs]) -> int:
    """A group's update: buffers are as large as the largest tensor needs; a list ends at a size of its own."""
    one_by_one = max(one.full for one in needs) + max(one.parts for one in needs) + max(one.own for one in needs)
    listed = [one.listed for one in needs]
    return max(one_by_one, 2 * min(sum(listed), max(_LIST_BYTES, *listed)))


def _needs(
    place: Place, param: Tensor, group: Group, width: int, share: float, moment: int, device: DeviceKind
) -> _Needs:
    """What one tensor's update holds; the terms are those of optim/kernels, in its order."""
    geometry, subspace = place.geometry, place.subspace
    dtype = compute_dtype(param.dtype)
    low = param.dtype != dtype
    rule, rest_acts = rule_of(group["rule"], group), group["stateless_rule"] != "none"
    whole, basis = _is_whole(place, width), isinstance(subspace, BasisSubspace)
    if width == 0 and not rest_acts:
        return _Needs()
    full = math.ceil(geometry.numel * share) * dtype.itemsize
    part = 0 if whole else math.ceil(math.prod(subspace.state_shape(geometry, width)) * share) * dtype.itemsize
    moves = width > 0 and not isinstance(subspace, FixedSubspace)
    refresh = moment + (_fitting(place, width) if basis else 0) if moves else 0
    fusable = isinstance(rule, FusedRule) and not low and not basis and state_dtype_of(param, group) == dtype
    along_rows = not whole and width > 0 and _in_rows(place)
    if fusable and (whole or width == 0 or along_rows) and (device == "cpu" or whole):
        cached = CACHED_ELEMENTS * dtype.itemsize
        return _Needs(full=0 if whole else min(full - part, cached), refresh=refresh)
    if device == "cuda" and not low and not basis:
        return _Needs(listed=full + part, refresh=refresh)
    wide_states = 0
    if width > 0 and state_dtype_of(param, group) != dtype:
        wide_states = len(rule.moment_powers) * (full if whole else part)
    elif width > 0 and not isinstance(rule, FusedRule):
        wide_states = full if whole else part
    back = 0  # from the basis to the full space
    if basis and width > 0 and not whole:
        back = 2 * full + full // dtype.itemsize if rest_acts else full
    direction = (full if low else 0) + wide_states + back
    rounding = 0
    if low and group["rounding"] == "kahan":
        rounding = full  # what was lost is computed in float32
    elif group["rounding"] == "stochastic" and param.dtype == torch.bfloat16:
        rounding = 7 * full // dtype.itemsize  # random bits, drawn and spread, and a mask of what is not a number
    own = max(direction, full + rounding if low else 0)
    window = RunFrame(geometry, "cols", 0, width)
    pieces = 1
    if not low and not basis and _in_columns(place) and in_row_pieces(window, param.dtype, torch.device(device)):
        pieces = max(1, -(-geometry.numel // CACHED_ELEMENTS))
    return _Needs(full=-(-full // pieces), parts=-(-2 * part // pieces), own=-(-own // pieces), refresh=refresh)


def _in_columns(place: Place) -> bool:
    """Whether frames are one window of columns: neither rows, nor scattered lines, nor a basis."""
    subspace = place.subspace
    return isinstance(subspace, LineSubspace) and subspace.axis == "cols" and not subspace.scattered


def _in_rows(place: Place) -> bool:
    """Whether frames are runs of whole rows, whose elements lie side by side."""
    subspace = place.subspace
    by_rows = isinstance(subspace, LineSubspace) and subspace.axis == "rows" and not subspace.scattered
    return by_rows and place.geometry.stack == 1


def _fitting(place: Place, width: int) -> int:
    """Finding a basis: matrix and scaled matrix in float64, Gram matrix, its vectors, and LAPACK's workspace."""
    geometry = place.geometry
    side, other = sorted((geometry.rows, geometry.cols))
    if not place.subspace.reads_gradient:
        return FLOAT64_BYTES * geometry.stack * (side * side + 3 * side * width)
    if side > _EXACT_SIDE:
        probes = width + 16
        return FLOAT32_BYTES * geometry.stack * (2 * side * other + (2 * side + 2 * other) * probes)
    return FLOAT64_BYTES * geometry.stack * (2 * side * other + 4 * side * side)
