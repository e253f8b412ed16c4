"""Blocks as a subspace: whole tensors or whole layers, taken in turn under one budget of elements."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from adafrugal.core.errors import ConfigError
from adafrugal.optim.frames import AnyFrame, Geometry, RunFrame

Draw = Callable[[int], torch.Generator]
_LAYER = re.compile(r"^(.*?\.)?(\d+)(\.|$)")


@dataclass(frozen=True)
class Item:
    """One tensor of a group, as a subspace sees it.

    Args:
        name: Canonical name; decides order, never position in a list.
        geometry: The tensor's (stack, rows, cols) under this subspace.
    """

    name: str
    geometry: Geometry


def has_layer(name: str) -> bool:
    """Whether a canonical name holds a layer number."""
    return _LAYER.match(name) is not None


def layer_of(name: str) -> str:
    """The part of a canonical name up to its first number: what the tensors of one layer share.

    Raises:
        ConfigError: If the name holds no number, so that its layer is unknown.

    Example:
        >>> layer_of("model.layers.3.mlp.up_proj.weight")
        'model.layers.3'
    """
    match = _LAYER.match(name)
    if match is None:
        raise ConfigError(
            'subspace="layers"',
            name,
            "names with a layer number, such as 'model.layers.3.mlp.up_proj.weight'",
            'Build the optimizer from the model, so that names are known, or use subspace="blocks".',
        )
    return (match.group(1) or "") + match.group(2)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key under which layer 10 comes after layer 9."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]


@dataclass(frozen=True, kw_only=True)
class BlockSubspace:
    """Whole tensors, or all tensors of whole layers, under one budget of elements.

    The cursor walks an endless sequence of permutations, so that every unit has its turn before any has two. Units are
    taken until the next one does not fit what is left. A unit larger than the whole budget is passed over, and so is
    one that is held already (where a new round begins within one share).

    Args:
        unit: What is taken at once.
        order: ``"random"`` draws a new permutation for each round.
        units_per_turn: Take exactly so many units, whatever the density; None lets the density decide.

    Source:
        FRUGAL's blockwise projection (arXiv 2411.07837) and BAdam (arXiv 2404.02827).

    Deviations:
        FRUGAL's code counts tensors; we count elements, so that the density is what it says.
    """

    unit: Literal["tensor", "layer"] = "tensor"
    order: Literal["random", "ascending", "descending"] = "random"
    units_per_turn: int | None = None

    @property
    def on_refresh_choices(self) -> tuple[str, ...]:
        """A block that stays keeps its moments by default."""
        return ("keep", "reset")

    @property
    def takes_vectors(self) -> bool:
        """A whole tensor may have any shape."""
        return True

    @property
    def reads_gradient(self) -> bool:
        """Blocks are drawn blindly."""
        return False

    def geometry(self, shape: Sequence[int], stacked: bool, lowest_density: float) -> Geometry:
        """Blocks are whole, so the matrix inside does not matter."""
        return Geometry.of(shape, stacked)

    def full_width(self, geometry: Geometry) -> int:
        """All columns: a block is a run of all of them."""
        return geometry.cols

    def units(self, items: Sequence[Item]) -> list[list[int]]:
        """Positions in ``items`` of each unit, units in ascending natural order of their names."""
        order = sorted(range(len(items)), key=lambda i: _natural(items[i].name))
        if self.unit == "tensor":
            return [[i] for i in order]
        layers: dict[str, list[int]] = {}
        for i in order:
            layers.setdefault(layer_of(items[i].name), []).append(i)
        return list(layers.values())

    def check(self, items: Sequence[Item], density: float, density_end: float) -> None:
        """Refuse a density that can never hold some unit, naming the smallest one that can.

        Raises:
            ConfigError: If a unit exceeds the budget at ``density``, or every unit exceeds it at ``density_end``.
        """
        if self.units_per_turn is not None or not items or density == 0.0:
            return
        sizes = [sum(items[i].geometry.numel for i in unit) for unit in self.units(items)]
        total = sum(sizes)
        for label, value, size in (("density", density, max(sizes)), ("density_end", density_end, min(sizes))):
            if value > 0.0 and size > self._budget(value, total):
                raise ConfigError(
                    f'subspace="blocks", {label}={value}',
                    f"{label}={value}, a budget of {self._budget(value, total):,} of {total:,} elements",
                    f"at least {size / total:.6g} here, since a {self.unit} of {size:,} elements must fit",
                    f'Raise {label} to {math.ceil(1e4 * size / total) / 1e4:g}, or use subspace="columns".',
                )

    @staticmethod
    def _budget(density: float, total: int) -> int:
        return math.floor(density * total + 0.5)

    def share(self, items: Sequence[Item], density: float, cursor: int, draw: Draw) -> tuple[list[int], int]:
        """Fill the budget from the cursor on; the cursor counts units passed."""
        widths = [0] * len(items)
        units = self.units(items)
        sizes = [sum(items[i].geometry.numel for i in unit) for unit in units]
        budget = self._budget(density, sum(sizes))
        left, taken, passed = budget, 0, 0
        while taken < len(units) and passed < 2 * len(units) and density > 0.0:
            unit = self._at(cursor + passed, len(units), draw)
            held = any(widths[i] for i in units[unit])
            if self.units_per_turn is not None:
                fits, never_fits = taken < self.units_per_turn, False
            else:
                fits, never_fits = sizes[unit] <= left, sizes[unit] > budget
            if not (fits or never_fits or held):
                break
            passed += 1
            if held or never_fits:
                continue
            for i in units[unit]:
                widths[i] = items[i].geometry.cols
            left -= sizes[unit]
            taken += 1
            if taken == self.units_per_turn:
                break
        return widths, cursor + passed

    def _at(self, position: int, num_units: int, draw: Draw) -> int:
        """The unit at a position of the endless sequence."""
        turn, place = divmod(position, num_units)
        if self.order == "random":
            return int(torch.randperm(num_units, generator=draw(turn))[place])
        return place if self.order == "ascending" else num_units - 1 - place

    def fit(self, geometry: Geometry, tensor: Tensor, width: int, generator: torch.Generator) -> AnyFrame:
        """Whole or empty."""
        return RunFrame(geometry, "cols", 0, width)

    def frame_bytes(self, geometry: Geometry, width: int, dtype: torch.dtype) -> int:
        """A block holds no tensor."""
        return 0

    def state_shape(self, geometry: Geometry, width: int) -> tuple[int, ...]:
        """The shape of each moment."""
        return RunFrame(geometry, "cols", 0, width).state_shape
