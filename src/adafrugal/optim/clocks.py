"""When a group shrinks and when it refreshes: numbers in a group, turned once a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from adafrugal.core.rng import named_generator
from adafrugal.optim.blocks import Item
from adafrugal.optim.groups import Group
from adafrugal.optim.subspaces import SUBSPACES, FixedSubspace


def refresh_is_due(group: Group) -> bool:
    """Whether `update_gap` steps have passed since the last refresh; steps since it, not k mod T, which would jump.

    A group that has never been shared out is due; one whose subspace is fixed is never due again.
    """
    if group["refreshed_at"] is None:
        return True
    if isinstance(SUBSPACES.create(group["subspace"]), FixedSubspace):
        return False
    return group["step"] - group["refreshed_at"] >= group["update_gap"]


def _draw(group: Group, counter: int) -> torch.Generator:
    return named_generator(group["seed"], "share", "", counter)


def shrink(group: Group, items: Sequence[Item]) -> bool:
    """Take the fallen density into the widths: prefixes of the present frames, nothing restarts.

    Returns:
        Whether the density had fallen since the last share or shrink.
    """
    if group["refreshed_at"] is None or group["density"] >= group["held_density"]:
        return False
    subspace = SUBSPACES.create(group["subspace"])
    widths, _ = subspace.share(items, group["density"], group["frame_cursor"], partial(_draw, group))
    group["widths"] = [min(now, then) for now, then in zip(widths, group["widths"], strict=True)]
    group["held_density"] = group["density"]
    return True


def _next_share(group: Group, items: Sequence[Item]) -> tuple[list[int], int]:
    subspace = SUBSPACES.create(group["subspace"])
    return subspace.share(items, group["density"], group["cursor"], partial(_draw, group))


def upcoming_widths(group: Group, items: Sequence[Item]) -> list[int]:
    """The widths that the next refresh would share out at the present density."""
    return _next_share(group, items)[0]


def refresh(group: Group, items: Sequence[Item]) -> None:
    """Share the group out anew from the cursor on; frames follow at the next gradients."""
    widths, following = _next_share(group, items)
    group["frame_cursor"], group["cursor"] = group["cursor"], following
    group["refreshed_at"] = group["step"]
    group["widths"] = widths
    group["held_density"] = group["density"]
