"""Where the moments of each tensor live: fit a frame, move to the next one, shrink, let go.

A tensor is refitted lazily, at its first gradient after a refresh, and lets go eagerly, with or without a gradient. So
missing gradients, idle experts and an update fused into backward are one rule.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from adafrugal.core.errors import NotSupportedError
from adafrugal.core.protocols import Rule, State
from adafrugal.core.rng import named_generator
from adafrugal.optim.blocks import Item
from adafrugal.optim.frames import AnyFrame, BasisFrame, Geometry, RunFrame
from adafrugal.optim.groups import Group
from adafrugal.optim.kernels import Job
from adafrugal.optim.moving import OnRefresh, move
from adafrugal.optim.rounding import compute_dtype
from adafrugal.optim.rules import rule_of
from adafrugal.optim.settings import STATE_DTYPES, lowest_density
from adafrugal.optim.sharding import Sharding, local_of, place_shard
from adafrugal.optim.subspaces import SUBSPACES, AnySubspace

ParamState = dict[str, Any]
States = MutableMapping[Tensor, ParamState]
Ages = tuple[tuple[int, int, int], ...]


@dataclass
class Place:
    """What is known of one tensor without its state: cheap to work out again, never saved.

    Args:
        slot: Its number over all groups.
        group: The number of its group.
        index: Its number within the group.
        item: Its name and geometry, whole.
        subspace: Its group's.
        geometry: Of the part that is here; the item's, but for the shards of FSDP2.
        sharding: How it is cut; None for a plain tensor.
        frame: The frame of the state that it has now, once asked for.
        frame_key: (cursor, width when fitted, width now) of that frame.
        ages: (position, count, step of entry) of each run of lines that entered together; empty if all did.
    """

    slot: int
    group: int
    index: int
    item: Item
    subspace: AnySubspace
    geometry: Geometry
    sharding: Sharding | None = None
    frame: AnyFrame | None = None
    frame_key: tuple[int, int, int] | None = None
    ages: Ages = ()


def state_dtype_of(param: Tensor, group: Group) -> torch.dtype:
    """The dtype of a tensor's moments: the group's, or else float32 (float64 for float64 weights)."""
    name = group["state_dtype"]
    return compute_dtype(param.dtype) if name is None else STATE_DTYPES[name]


def moments_of(state: ParamState, rule: Rule) -> State:
    """The moments in a parameter's state."""
    return {name: state[name] for name in rule.moment_powers}


def _ages(entered: Tensor | None) -> Ages:
    """Runs of lines that entered together."""
    if entered is None:
        return ()
    runs: list[tuple[int, int, int]] = []
    position = 0
    for step, members in groupby(cast(list[int], entered.tolist())):
        count = len(list(members))
        runs.append((position, count, step))
        position += count
    return tuple(runs)


def _refuse_replaced(group: Group, takes_vectors: bool) -> None:
    """Refuse flat tensors that somebody has put in the place of a group's own: matrices cannot be found in them."""
    params = cast(list[Tensor], group["params"])
    num_flat = 0 if takes_vectors else sum(param.ndim < 2 for param in params)
    if len(params) != len(group["param_names"]) or num_flat:
        raise NotSupportedError(
            f"optimizer.param_groups with {group['param_names'][0]}",
            f"{len(params)} tensors, {num_flat} of them flat, in the place of {len(group['param_names'])} parameters",
            "the parameters that the group was built with",
            "DeepSpeed's ZeRO puts flat partitions there: use ZeRO stage 0, DDP, or FSDP2.",
        )


class Placement:
    """The places of all tensors of an optimizer, in the order of its groups.

    Args:
        groups: The optimizer's groups, complete with settings.

    Raises:
        NotSupportedError: If flat tensors are in the place of the groups' own.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.places: dict[Tensor, Place] = {}
        self.names: list[str] = []
        self._lists = [group["params"] for group in groups]
        for number, group in enumerate(groups):
            subspace = SUBSPACES.create(group["subspace"])
            _refuse_replaced(group, subspace.takes_vectors)
            lowest = lowest_density(group)
            members = zip(group["params"], group["param_names"], group["stacked"], strict=True)
            for index, (param, name, stacked) in enumerate(members):
                item = Item(name, subspace.geometry(tuple(param.shape), stacked, lowest))
                local, sharding = place_shard(param, name, group, stacked, item.geometry, subspace)
                self.places[param] = Place(len(self.names), number, index, item, subspace, local, sharding)
                self.names.append(name)

    def is_of(self, groups: Sequence[Group]) -> bool:
        """Whether the groups still hold the tensors placed here; FSDP2 under accelerate puts others in their place."""
        return len(groups) == len(self._lists) and all(
            group["params"] is kept and (not kept or kept[0] in self.places)
            for group, kept in zip(groups, self._lists, strict=True)
        )

    @property
    def sharded(self) -> bool:
        """Whether any tensor is a part of a larger one."""
        return any(place.sharding is not None for place in self.places.values())

    def items(self, group: Group) -> list[Item]:
        """The tensors of a group as a subspace sees them."""
        return [self.places[param].item for param in group["params"]]

    def refuse_sparse(self, params: Sequence[Tensor], call: str) -> None:
        """Refuse sparse gradients before any weight moves.

        Raises:
            NotSupportedError: Names the parameter.
        """
        for param in params:
            if param.grad is not None and param.grad.is_sparse:
                raise NotSupportedError(
                    f"{call} at {self.places[param].item.name}",
                    "a sparse gradient",
                    "dense gradients",
                    "Build the embedding with sparse=False, or give it to torch.optim.SparseAdam.",
                )

    def frame(self, param: Tensor, group: Group, state: ParamState) -> AnyFrame:
        """The frame of a tensor's state, drawn again if need be."""
        place = self.places[param]
        key = (state["cursor"], state["fit_width"], state["width"])
        if place.frame is None or place.frame_key != key:
            if place.subspace.reads_gradient:
                frame: AnyFrame = BasisFrame(place.geometry, state["basis"])
            else:
                frame = self._fit(param, param, group, state["cursor"], state["fit_width"])
                if state["width"] < state["fit_width"]:
                    frame = frame.prefix(state["width"])
            place.frame, place.frame_key, place.ages = frame, key, _ages(state.get("entered"))
        return place.frame

    def _fit(self, param: Tensor, tensor: Tensor, group: Group, cursor: int, width: int) -> AnyFrame:
        place = self.places[param]
        generator = named_generator(group["seed"], "frame", place.item.name, cursor)
        return place.subspace.fit(place.geometry, tensor, width, generator)

    def job(self, param: Tensor, index: int, group: Group, states: States, grad: Tensor) -> Job:
        """Give a tensor the frame that it is due, count its update, and say what there is to do.

        Args:
            param: The weight.
            index: Its place in the group.
            group: Its group, whose clocks have been turned.
            states: The optimizer's state; the tensor's entry is made, moved or left.
            grad: Its gradient, dense.
        """
        place = self.places[param]
        width = group["widths"][index]
        rule = rule_of(group["rule"], group)
        moments: State = {}
        entered: Tensor | None = None
        step, ages = group["step"] + 1, ()
        frame: AnyFrame = RunFrame.empty(place.geometry)
        if width > 0:
            state = states.get(param)
            if state is None or "cursor" not in state:
                state = self.enter(param, group, states, grad, width, rule)
            elif state["cursor"] != group["frame_cursor"]:
                self._refit(param, group, state, grad, width, rule)
            state["step"] += 1
            frame = self.frame(param, group, state)
            moments, entered, ages = moments_of(state, rule), state.get("entered"), place.ages
            step = state["step"]
        low = param.dtype in (torch.bfloat16, torch.float16)
        compensation: Tensor | None = None
        if low and group["rounding"] == "kahan" and not (width == 0 and group["stateless_rule"] == "none"):
            compensation = states[param].setdefault("compensation", torch.zeros_like(local_of(param)))
        part = place.item.name if place.sharding is None else f"{place.item.name} part {place.sharding.part}"
        noise = partial(named_generator, group["seed"], "rounding", part, group["step"], param.device)
        return Job(
            slot=place.slot,
            param=local_of(param.detach()),
            grad=local_of(grad, param),
            moments=moments,
            frame=frame,
            step=step,
            entered=entered,
            ages=ages,
            compensation=compensation,
            noise=noise,
        )

    def enter(self, param: Tensor, group: Group, states: States, grad: Tensor, width: int, rule: Rule) -> ParamState:
        """Give a tensor the frame that it is due, with moments at zero, whatever it had.

        Args:
            param: The weight.
            group: Its group, shared out.
            states: The optimizer's state; the tensor's entry is filled.
            grad: What a subspace that reads gradients is fitted to.
            width: The frame's width, above 0.
            rule: The group's rule.
        """
        place = self.places[param]
        frame = self._fit(param, grad, group, group["frame_cursor"], width)
        state: ParamState = states[param]
        state.pop("entered", None)
        state.update(step=0, cursor=group["frame_cursor"], fit_width=width, width=width)
        state.update(rule.init(frame.state_shape, state_dtype_of(param, group), param.device))
        if isinstance(frame, BasisFrame) and place.subspace.reads_gradient:
            state["basis"] = frame.basis
        place.frame, place.frame_key, place.ages = frame, (state["cursor"], width, width), ()
        return state

    def _refit(self, param: Tensor, group: Group, state: ParamState, grad: Tensor, width: int, rule: Rule) -> None:
        """Move a tensor's moments to the frame of the newest refresh."""
        place = self.places[param]
        how = cast(OnRefresh, group["on_refresh"] or place.subspace.on_refresh_choices[0])
        old = self.frame(param, group, state)
        new = self._fit(param, grad, group, group["frame_cursor"], width)
        self._move(param, state, old, new, how, rule)
        state.update(cursor=group["frame_cursor"], fit_width=width, width=width)
        place.frame, place.frame_key = new, (state["cursor"], width, width)

    def _move(self, param: Tensor, state: ParamState, old: AnyFrame, new: AnyFrame, how: OnRefresh, rule: Rule) -> None:
        """Move the moments and the lines' steps of entry; where all lines are equally old, one number is enough."""
        place = self.places[param]
        kept = state.pop("entered", None)
        kept = kept.cpu() if kept is not None else None
        moments = moments_of(state, rule)
        for name in moments:
            del state[name]
        entered = move(moments, old, new, how, rule.moment_powers, kept, state["step"])
        state.update(moments)
        if how == "reset":
            state["step"] = 0
        if entered is not None and entered.numel() > 0:
            youngest = int(entered.min())
            state["step"] -= youngest
            entered = entered - youngest
            if bool(entered.any()):
                state["entered"] = entered if param.is_meta else entered.to(param.device)
        if "basis" in state and isinstance(new, BasisFrame):
            state["basis"] = new.basis
        place.ages = _ages(state.get("entered"))

    def let_go(self, group: Group, states: States) -> None:
        """Cut every tensor of a group to its present width, freeing what it no longer holds, gradient or none."""
        rule = rule_of(group["rule"], group)
        for param, width in zip(group["params"], group["widths"], strict=True):
            state = states.get(param)
            if state is None or "cursor" not in state or state["width"] <= width:
                continue
            if width == 0:
                self._drop(param, states, rule)
                continue
            old = self.frame(param, group, state)
            new = old.prefix(width)
            self._move(param, state, old, new, "carry" if isinstance(old, BasisFrame) else "keep", rule)
            state["width"] = width
            place = self.places[param]
            place.frame, place.frame_key = new, (state["cursor"], state["fit_width"], width)

    def _drop(self, param: Tensor, states: States, rule: Rule) -> None:
        """Forget the moments of a tensor; what belongs to its weight (Kahan's buffer) stays."""
        state = states[param]
        for name in (*rule.moment_powers, "step", "cursor", "fit_width", "width", "entered", "basis"):
            state.pop(name, None)
        if not state:
            del states[param]
        place = self.places[param]
        place.frame, place.frame_key, place.ages = None, None, ()
