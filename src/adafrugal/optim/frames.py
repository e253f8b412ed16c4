"""Which part of a tensor is stateful: its geometry, and frames over it.

A weight is seen as (stack, rows, cols). A frame is a run of columns or rows of that view (it may wrap around), a list
of lines, or a basis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Axis = Literal["rows", "cols"]
Piece = tuple[int, int, int]
DIM_OF = {"rows": 1, "cols": 2}


@dataclass(frozen=True)
class Geometry:
    """A tensor as a stack of matrices.

    Args:
        stack: Experts of an expert tensor, or stripes of a row-striped subspace; 1 for a plain matrix.
        rows: Lines along dimension 0 of each matrix.
        cols: Lines along dimension 1 of each matrix.

    Example:
        >>> Geometry.of((8, 4)), Geometry.of((3, 8, 4), stacked=True)
        (Geometry(stack=1, rows=8, cols=4), Geometry(stack=3, rows=8, cols=4))
    """

    stack: int
    rows: int
    cols: int

    @classmethod
    def of(cls, shape: Sequence[int], stacked: bool = False) -> Geometry:
        """View a shape as matrices.

        Args:
            shape: The tensor's shape. A vector is one column, so that dimension 0 is the rows throughout.
            stacked: Dimension 0 counts matrices (experts). Otherwise it is the rows, and all that follows is
                flattened into columns, as for convolutions.
        """
        if len(shape) < 2:
            return cls(1, math.prod(shape), 1)
        if stacked and len(shape) > 2:
            return cls(shape[0], shape[1], math.prod(shape[2:]))
        return cls(1, shape[0], math.prod(shape[1:]))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stack * self.rows * self.cols

    @property
    def shape(self) -> tuple[int, int, int]:
        """The three sizes, as a shape to view a tensor with."""
        return (self.stack, self.rows, self.cols)

    def length(self, axis: Axis) -> int:
        """How many lines there are along an axis of each matrix."""
        return self.rows if axis == "rows" else self.cols


def _runs(start: int, width: int, length: int) -> list[tuple[int, int, int]]:
    """Split a run that may wrap into (line, position, count) pieces that do not."""
    if width == 0:
        return []
    start %= length
    first = min(width, length - start)
    pieces = [(start, 0, first)]
    if first < width:
        pieces.append((0, first, width - first))
    return pieces


@dataclass(frozen=True)
class RunFrame:
    """Adjacent lines along one axis, the same in every matrix of the stack; they may wrap around the edge.

    Whole and empty frames are runs of all columns and of none. A frame of full width has offset 0.

    Args:
        geometry: The tensor's (stack, rows, cols).
        axis: Which lines.
        offset: The first line, in [0, length).
        width: How many lines, in [0, length].
    """

    geometry: Geometry
    axis: Axis
    offset: int
    width: int

    @classmethod
    def whole(cls, geometry: Geometry) -> RunFrame:
        """Every coordinate is stateful."""
        return cls(geometry, "cols", 0, geometry.cols)

    @classmethod
    def empty(cls, geometry: Geometry) -> RunFrame:
        """No coordinate is stateful."""
        return cls(geometry, "cols", 0, 0)

    @property
    def is_whole(self) -> bool:
        """Whether every coordinate is stateful, in natural order."""
        return self.width == self.geometry.length(self.axis)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """(stack, width, cols) or (stack, rows, width)."""
        return _line_shape(self.geometry, self.axis, self.width)

    @property
    def frame_bytes(self) -> int:
        """A run holds no tensor."""
        return 0

    def lines(self) -> Tensor:
        """The line behind each position of the state, int64, shape (width,)."""
        length = max(1, self.geometry.length(self.axis))
        return (torch.arange(self.width) + self.offset) % length

    def prefix(self, width: int) -> RunFrame:
        """The first lines; from full width these are the tensor's first lines."""
        return RunFrame(self.geometry, self.axis, self.offset, width)

    def slices(self) -> list[tuple[int, int, int]]:
        """(line, position in the state, count) of each part that does not wrap; at most two."""
        return _runs(self.offset, self.width, self.geometry.length(self.axis))

    def down(self, full: Tensor, out: Tensor | None = None) -> Tensor:
        """The lines of ``full``: a view where they do not wrap and no ``out`` is given."""
        dim = DIM_OF[self.axis]
        views = [full.narrow(dim, line, count) for line, _, count in self.slices()]
        if out is None:
            return views[0] if len(views) == 1 else torch.cat(views or [full.narrow(dim, 0, 0)], dim)
        for view, (_, position, count) in zip(views, self.slices(), strict=True):
            out.narrow(dim, position, count).copy_(view)
        return out

    def rest(self, full: Tensor, part: Tensor) -> Tensor:
        """The tensor itself: the lines that are stateful are overwritten by `merge`."""
        return full

    def merge(self, full: Tensor, part: Tensor, scale: float = 1.0) -> None:
        """Overwrite the stateful lines of ``full`` with ``scale * part``."""
        dim = DIM_OF[self.axis]
        for line, position, count in self.slices():
            target, source = full.narrow(dim, line, count), part.narrow(dim, position, count)
            if scale == 1.0:
                target.copy_(source)
            else:
                torch.mul(source, scale, out=target)

    def pieces(self) -> list[Piece] | None:
        """(start in the tensor, start in the state, length) of each contiguous run of elements.

        Returns:
            The pieces, in elements of the flattened tensors; None for a strided column window, which has none.
        """
        return self._flat_pieces(self.offset, self.width)

    def rest_pieces(self) -> list[Piece] | None:
        """The contiguous runs outside the frame, which are a run themselves; the middle number has no meaning."""
        length = max(1, self.geometry.length(self.axis))
        return self._flat_pieces((self.offset + self.width) % length, length - self.width)

    def _flat_pieces(self, offset: int, width: int) -> list[Piece] | None:
        stack, rows, cols = self.geometry.shape
        if width == 0 or self.geometry.numel == 0:
            return []
        if width == self.geometry.length(self.axis):
            return [(0, 0, self.geometry.numel)]
        if self.axis == "cols":
            return None
        return [
            ((matrix * rows + line) * cols, (matrix * width + position) * cols, count * cols)
            for matrix in range(stack)
            for line, position, count in _runs(offset, width, rows)
        ]


@dataclass(frozen=True, eq=False)
class LineFrame:
    """Scattered lines along one axis, the same in every matrix of the stack.

    Args:
        geometry: The tensor's (stack, rows, cols).
        axis: Which lines.
        index: The line behind each position of the state, int32, shape (width,), on the tensor's device (for a meta
            tensor, on the CPU).
    """

    geometry: Geometry
    axis: Axis
    index: Tensor

    @property
    def width(self) -> int:
        """How many lines."""
        return self.index.numel()

    @property
    def state_shape(self) -> tuple[int, ...]:
        """(stack, width, cols) or (stack, rows, width)."""
        return _line_shape(self.geometry, self.axis, self.width)

    @property
    def frame_bytes(self) -> int:
        """Four bytes a line."""
        return self.index.nbytes

    def lines(self) -> Tensor:
        """The line behind each position of the state, int64, shape (width,), on the CPU."""
        return self.index.to("cpu", torch.int64)

    def prefix(self, width: int) -> LineFrame:
        """The first lines in this frame's own order, in storage of their own."""
        return LineFrame(self.geometry, self.axis, self.index[:width].clone())

    def down(self, full: Tensor, out: Tensor | None = None) -> Tensor:
        """A copy of the lines of ``full``."""
        return torch.index_select(full, DIM_OF[self.axis], self.index.to(full.device), out=out)

    def rest(self, full: Tensor, part: Tensor) -> Tensor:
        """The tensor itself: the lines that are stateful are overwritten by `merge`."""
        return full

    def merge(self, full: Tensor, part: Tensor, scale: float = 1.0) -> None:
        """Overwrite the stateful lines of ``full`` with ``scale * part``, which ``part`` holds afterwards."""
        if scale != 1.0:
            part.mul_(scale)
        full.index_copy_(DIM_OF[self.axis], self.index.to(full.device, torch.int64), part)


@dataclass(frozen=True, eq=False)
class BasisFrame:
    """The span of a semi-orthogonal basis on the shorter side of each matrix.

    Args:
        geometry: The tensor's (stack, rows, cols).
        basis: Orthonormal columns, shape (stack, min(rows, cols), width), float32 or float64.
    """

    geometry: Geometry
    basis: Tensor

    @property
    def width(self) -> int:
        """The rank."""
        return self.basis.shape[2]

    @property
    def left(self) -> bool:
        """Whether the basis multiplies from the left (more columns than rows)."""
        return self.geometry.rows < self.geometry.cols

    @property
    def state_shape(self) -> tuple[int, ...]:
        """(stack, rank, cols) from the left, (stack, rows, rank) from the right."""
        return _basis_shape(self.geometry, self.width)

    @property
    def frame_bytes(self) -> int:
        """The basis."""
        return self.basis.nbytes

    def prefix(self, width: int) -> BasisFrame:
        """The first directions, in storage of their own: a slice would keep the whole basis alive."""
        return BasisFrame(self.geometry, self.basis[:, :, :width].clone())

    def down(self, full: Tensor, out: Tensor | None = None) -> Tensor:
        """Coordinates in the basis: B^T G from the left, G B from the right."""
        return torch.bmm(self.basis.mT, full, out=out) if self.left else torch.bmm(full, self.basis, out=out)

    def up(self, part: Tensor) -> Tensor:
        """The way back; ``up(down(G))`` is the orthogonal projection of G."""
        return torch.bmm(self.basis, part) if self.left else torch.bmm(part, self.basis.mT)

    def rest(self, full: Tensor, part: Tensor) -> Tensor:
        """The residual G - up(part), with rounding noise set to zero: its sign would be a full step.

        Noise is what is no larger than eps max|G| max(8, sqrt(side)): the error of the two products grows with the
        root of the side. With 8 eps max|G| alone, a full-rank basis left noise above the bound at 16 x 24 already.
        """
        residual = full - self.up(part)
        if self.width > 0 and residual.numel() > 0:
            factor = max(8.0, math.sqrt(self.basis.shape[1]))
            noise = factor * torch.finfo(full.dtype).eps * full.abs().amax()
            residual.masked_fill_(residual.abs() <= noise, 0.0)
        return residual

    def merge(self, full: Tensor, part: Tensor, scale: float = 1.0) -> None:
        """Add ``scale * part``, brought back to the full space."""
        full.add_(self.up(part), alpha=scale)


AnyFrame = RunFrame | LineFrame | BasisFrame


def _line_shape(geometry: Geometry, axis: Axis, width: int) -> tuple[int, int, int]:
    if axis == "rows":
        return (geometry.stack, width, geometry.cols)
    return (geometry.stack, geometry.rows, width)


def _basis_shape(geometry: Geometry, width: int) -> tuple[int, int, int]:
    return _line_shape(geometry, "rows" if geometry.rows < geometry.cols else "cols", width)
