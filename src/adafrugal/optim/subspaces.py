"""How the stateful part of a group is chosen: lines, bases, whole and empty, and the catalogue (blocks: blocks.py).

A subspace is pure. `share` sees a whole group and says how wide each tensor's frame is; `fit` draws one frame. Only svd
looks at the values of the tensor that `fit` gets, the others at its dtype and device. Density enters no seed, so a
frame of smaller density is a prefix of the larger one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from adafrugal.core.catalog import Catalog
from adafrugal.optim.bases import leading_basis, random_basis
from adafrugal.optim.blocks import BlockSubspace, Draw, Item
from adafrugal.optim.frames import AnyFrame, Axis, BasisFrame, Geometry, LineFrame, RunFrame

_STRIPES = (8, 4, 2)


def count_lines(density: float, length: int) -> int:
    """How many of ``length`` lines a density asks for: rounded half up, at least one above zero, none at zero.

    Args:
        density: Share in [0, 1].
        length: Number of lines, at least 0.

    Example:
        >>> count_lines(0.25, 10), count_lines(0.01, 10), count_lines(0.0, 10)
        (3, 1, 0)
    """
    if density <= 0.0:
        return 0
    return min(length, max(1, math.floor(density * length + 0.5)))


@dataclass(frozen=True, kw_only=True)
class LineSubspace:
    """The same share of lines of every matrix: a window that wraps around, or scattered lines.

    Args:
        axis: ``"cols"`` runs along dimension 1 (of a Linear weight: its inputs), ``"rows"`` along dimension 0.
        scattered: Draw single lines instead of one window.
        striped: Cut the rows into 8, 4 or 2 equal stripes with the same window in each, so that a shard over rows
            holds its share.

    Source:
        Rows and columns as subspaces: FRUGAL (arXiv 2411.07837). Windows, wrapping and stripes are ours.
    """

    axis: Axis
    scattered: bool = False
    striped: bool = False

    @property
    def on_refresh_choices(self) -> tuple[str, ...]:
        """Line to line by default."""
        return ("keep", "reset", "carry")

    @property
    def takes_vectors(self) -> bool:
        """Lines need a matrix."""
        return False

    @property
    def reads_gradient(self) -> bool:
        """Lines are drawn blindly."""
        return False

    def geometry(self, shape: Sequence[int], stacked: bool, lowest_density: float) -> Geometry:
        """View a tensor; stripes are the most that keep at least one line each at the lowest density of the run."""
        plain = Geometry.of(shape, stacked)
        if not self.striped:
            return plain
        for stripes in _STRIPES:
            rows, left = divmod(plain.rows, stripes)
            if left == 0 and rows * lowest_density >= 1:
                return Geometry(plain.stack * stripes, rows, plain.cols)
        return plain

    def full_width(self, geometry: Geometry) -> int:
        """All lines."""
        return geometry.length(self.axis)

    def check(self, items: Sequence[Item], density: float, density_end: float) -> None:
        """Every density is possible."""

    def share(self, items: Sequence[Item], density: float, cursor: int, draw: Draw) -> tuple[list[int], int]:
        """Give every tensor the same share; the cursor counts refreshes."""
        return [count_lines(density, self.full_width(item.geometry)) for item in items], cursor + 1

    def fit(self, geometry: Geometry, tensor: Tensor, width: int, generator: torch.Generator) -> AnyFrame:
        """Draw an offset, or an order of lines; at full width the natural order, so that keeping moves nothing."""
        length = self.full_width(geometry)
        if width in (0, length):
            return RunFrame(geometry, self.axis, 0, width)
        if self.scattered:
            order = torch.randperm(length, generator=generator)[:width].to(torch.int32)
            return LineFrame(geometry, self.axis, order if tensor.is_meta else order.to(tensor.device))
        offset = int(torch.randint(length, (), generator=generator))
        return RunFrame(geometry, self.axis, offset, width)

    def frame_bytes(self, geometry: Geometry, width: int, dtype: torch.dtype) -> int:
        """Four bytes for each scattered line; a window holds nothing."""
        return 4 * width if self.scattered and width < self.full_width(geometry) else 0

    def state_shape(self, geometry: Geometry, width: int) -> tuple[int, ...]:
        """The shape of each moment."""
        return RunFrame(geometry, self.axis, 0, width).state_shape


@dataclass(frozen=True, kw_only=True)
class BasisSubspace:
    """A low-rank basis on the shorter side of each matrix.

    Args:
        source: ``"random"`` draws a semi-orthogonal basis; ``"svd"`` takes the leading singular vectors of the
            gradient at the refresh.

    Source:
        GaLore (arXiv 2403.03507), algorithm 2; FRUGAL's random projection.
    """

    source: Literal["random", "svd"]

    @property
    def on_refresh_choices(self) -> tuple[str, ...]:
        """Rotate the moments into the new basis by default."""
        return ("project", "reset", "carry")

    @property
    def takes_vectors(self) -> bool:
        """A basis needs a matrix."""
        return False

    @property
    def reads_gradient(self) -> bool:
        """Only svd looks at the gradient."""
        return self.source == "svd"

    def geometry(self, shape: Sequence[int], stacked: bool, lowest_density: float) -> Geometry:
        """The plain view."""
        return Geometry.of(shape, stacked)

    def full_width(self, geometry: Geometry) -> int:
        """Full rank."""
        return min(geometry.rows, geometry.cols)

    def check(self, items: Sequence[Item], density: float, density_end: float) -> None:
        """Every density is possible."""

    def share(self, items: Sequence[Item], density: float, cursor: int, draw: Draw) -> tuple[list[int], int]:
        """The same share of the full rank for every tensor; the cursor counts refreshes."""
        return [count_lines(density, self.full_width(item.geometry)) for item in items], cursor + 1

    def fit(self, geometry: Geometry, tensor: Tensor, width: int, generator: torch.Generator) -> AnyFrame:
        """Draw or compute the basis in float32 or better; a zero gradient falls back to a random one."""
        if width == 0:
            return RunFrame(geometry, "rows" if geometry.rows < geometry.cols else "cols", 0, 0)
        if self.source == "random":
            return BasisFrame(geometry, random_basis(geometry, width, generator, tensor.dtype, tensor.device))
        return BasisFrame(geometry, leading_basis(tensor.reshape(geometry.shape), width, generator))

    def frame_bytes(self, geometry: Geometry, width: int, dtype: torch.dtype) -> int:
        """The basis, in float32 (float64 for float64 weights)."""
        size = 8 if dtype == torch.float64 else 4
        return size * geometry.stack * self.full_width(geometry) * width

    def state_shape(self, geometry: Geometry, width: int) -> tuple[int, ...]:
        """The shape of each moment."""
        if geometry.rows < geometry.cols:
            return (geometry.stack, width, geometry.cols)
        return (geometry.stack, geometry.rows, width)


@dataclass(frozen=True, kw_only=True)
class FixedSubspace:
    """All of every tensor, or none of it; nothing ever moves, and density has no say.

    Args:
        whole: All coordinates are stateful (plain AdamW), or none (plain SignSGD).
    """

    whole: bool

    @property
    def on_refresh_choices(self) -> tuple[str, ...]:
        """There is nothing to refresh."""
        return ("keep",)

    @property
    def takes_vectors(self) -> bool:
        """Any shape will do."""
        return True

    @property
    def reads_gradient(self) -> bool:
        """Nothing is drawn."""
        return False

    def geometry(self, shape: Sequence[int], stacked: bool, lowest_density: float) -> Geometry:
        """Any shape, scalars and empty tensors included."""
        return Geometry.of(shape, stacked)

    def full_width(self, geometry: Geometry) -> int:
        """All columns."""
        return geometry.cols

    def check(self, items: Sequence[Item], density: float, density_end: float) -> None:
        """Density has no say."""

    def share(self, items: Sequence[Item], density: float, cursor: int, draw: Draw) -> tuple[list[int], int]:
        """All or nothing; the cursor stands still, so that no refresh follows."""
        return [item.geometry.cols if self.whole else 0 for item in items], cursor

    def fit(self, geometry: Geometry, tensor: Tensor, width: int, generator: torch.Generator) -> AnyFrame:
        """Whole or empty."""
        return RunFrame(geometry, "cols", 0, width)

    def frame_bytes(self, geometry: Geometry, width: int, dtype: torch.dtype) -> int:
        """No tensor is held."""
        return 0

    def state_shape(self, geometry: Geometry, width: int) -> tuple[int, ...]:
        """The shape of each moment."""
        return RunFrame(geometry, "cols", 0, width).state_shape


AnySubspace = LineSubspace | BlockSubspace | BasisSubspace | FixedSubspace

SUBSPACES: Catalog[AnySubspace] = Catalog("subspace")
SUBSPACES.add("columns", lambda: LineSubspace(axis="cols"))
SUBSPACES.add("rows", lambda: LineSubspace(axis="rows"))
SUBSPACES.add("rows_striped", lambda: LineSubspace(axis="rows", striped=True))
SUBSPACES.add("columns_scattered", lambda: LineSubspace(axis="cols", scattered=True))
SUBSPACES.add("rows_scattered", lambda: LineSubspace(axis="rows", scattered=True))
SUBSPACES.add("blocks", lambda: BlockSubspace())
SUBSPACES.add("blocks_ascending", lambda: BlockSubspace(order="ascending"))
SUBSPACES.add("blocks_descending", lambda: BlockSubspace(order="descending"))
SUBSPACES.add("layers", lambda: BlockSubspace(unit="layer"))
SUBSPACES.add("layers_ascending", lambda: BlockSubspace(unit="layer", order="ascending"))
SUBSPACES.add("layers_descending", lambda: BlockSubspace(unit="layer", order="descending"))
SUBSPACES.add("one_layer", lambda: BlockSubspace(unit="layer", units_per_turn=1))
SUBSPACES.add("one_layer_ascending", lambda: BlockSubspace(unit="layer", order="ascending", units_per_turn=1))
SUBSPACES.add("one_layer_descending", lambda: BlockSubspace(unit="layer", order="descending", units_per_turn=1))
SUBSPACES.add("random", lambda: BasisSubspace(source="random"))
SUBSPACES.add("svd", lambda: BasisSubspace(source="svd"))
SUBSPACES.add("whole", lambda: FixedSubspace(whole=True))
SUBSPACES.add("empty", lambda: FixedSubspace(whole=False))
