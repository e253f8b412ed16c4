"""Parameters in shards (DTensor, as FSDP2 makes them): which part is here, and which frames stay within a shard.

A frame is local if no rank needs another's elements to draw, use or move it: the sharded dimension is then not the one
that the frame picks lines of. All arithmetic runs on the local tensors; only what is saved is a DTensor again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

from adafrugal.core.errors import NotSupportedError
from adafrugal.optim.frames import DIM_OF, Geometry
from adafrugal.optim.groups import Group
from adafrugal.optim.subspaces import AnySubspace, BasisSubspace, LineSubspace

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor, Placement

_ROWS, _COLS = DIM_OF["rows"], DIM_OF["cols"]


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor; none can exist where nobody has imported the module, which takes its time."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a parameter is cut over the ranks, and which part is here.

    Args:
        mesh: The device mesh of the parameter.
        mesh_dim: Along which dimension of the mesh it is cut; None if every rank holds all of it.
        tensor_dim: Which dimension of the parameter is cut.
        view_dim: The same, of (stack, rows, cols); moments are cut along it too.
        full_size: Length of ``view_dim`` in the whole tensor.
    """

    mesh: DeviceMesh
    mesh_dim: int | None
    tensor_dim: int = 0
    view_dim: int = 0
    full_size: int = 1

    @property
    def part(self) -> int:
        """The number of the part that is here."""
        return 0 if self.mesh_dim is None else self.mesh.get_local_rank(self.mesh_dim)

    def wrap(self, local: Tensor, dim: int, full_size: int) -> Tensor:
        """Make a DTensor of what all ranks hold, cut along ``dim``: a view of the local tensor, no communication.

        Args:
            local: This rank's part, contiguous.
            dim: The dimension of ``local`` that is cut.
            full_size: The length of ``dim`` in the whole tensor.
        """
        from torch.distributed.tensor import DTensor

        shape = list(local.shape)
        if self.mesh_dim is not None:
            shape[dim] = full_size
        stride = torch.empty(shape, device="meta").stride()
        layout = self._placements(dim)
        return DTensor.from_local(
            local, self.mesh, layout, run_check=False, shape=torch.Size(shape), stride=stride
        )  # fmt: skip

    def unwrap(self, saved: Tensor, dim: int) -> Tensor:
        """Take this rank's part of a saved tensor: a DTensor in any layout, or a whole plain tensor."""
        if is_dtensor(saved):
            return saved.redistribute(self.mesh, self._placements(dim)).to_local()
        if self.mesh_dim is None:
            return saved
        parts = saved.chunk(self.mesh.size(self.mesh_dim), dim)
        return parts[self.part] if self.part < len(parts) else saved.narrow(dim, 0, 0)

    def _placements(self, dim: int) -> list[Placement]:
        from torch.distributed.tensor import Replicate, Shard

        return [Shard(dim) if i == self.mesh_dim else Replicate() for i in range(self.mesh.ndim)]


def local_of(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The local part of a DTensor, any other tensor itself; a gradient laid out unlike its weight ``like`` is moved."""
    if not is_dtensor(tensor):
        return tensor
    if like is not None and is_dtensor(like) and tensor.placements != like.placements:
        tensor = tensor.redistribute(like.device_mesh, like.placements)
    return tensor.to_local()


def place_shard(
    param: Tensor, name: str, group: Group, stacked: bool, geometry: Geometry, subspace: AnySubspace
) -> tuple[Geometry, Sharding | None]:
    """Work out the local geometry of a parameter, and check that its frames are local.

    Args:
        param: The weight, plain or DTensor.
        name: Its canonical name, for errors.
        group: Its group.
        stacked: Whether its dimension 0 counts matrices.
        geometry: That of the whole tensor under the subspace.
        subspace: Of the group.

    Returns:
        The geometry of the local part, and where it lies; the geometry itself and None for a plain tensor.

    Raises:
        NotSupportedError: If a frame would reach over the edge of a shard, or the layout is not that of FSDP2.
    """
    if not is_dtensor(param):
        return geometry, None
    from torch.distributed.tensor import Replicate, Shard

    placements = cast(tuple[Any, ...], param.placements)
    cuts: list[tuple[int, int]] = [(i, p.dim) for i, p in enumerate(placements) if type(p) is Shard]
    if len(cuts) > 1 or any(type(p) not in (Shard, Replicate) for p in placements):
        raise _refused(name, f"placements {placements}", "one Shard, and Replicate", "Use fully_shard alone.")
    if group["freeze_idle"]:
        raise _refused(
            name,
            "a method that freezes what is idle, over sharded weights",
            "plain weights, since FSDP2 settles once which weights need a gradient",
            'Use FRUGAL(subspace="blocks", stateless_rule="none").',
        )
    if isinstance(subspace, BasisSubspace):
        raise _refused(
            name,
            f"subspace={group['subspace']!r} over a sharded weight",
            "subspaces of lines or blocks, whose frames lie within a shard",
            'Use subspace="columns" or "rows_striped"; a basis would gather every matrix on every rank.',
        )
    if not cuts:
        return geometry, Sharding(mesh=param.device_mesh, mesh_dim=None)
    mesh_dim, dim = cuts[0]
    num_parts = param.device_mesh.size(mesh_dim)
    chunk = -(-param.shape[dim] // num_parts)
    view_dim, unit = _view_dim(param, dim, stacked), 1
    if geometry.stack > 1 and not (stacked and param.ndim > 2):  # stripes: the rows are cut into a stack
        view_dim, unit = 0, geometry.rows
    if view_dim is None or (view_dim == _COLS and not isinstance(subspace, LineSubspace)):
        raise _refused(name, f"Shard({dim}) of {tuple(param.shape)}", "Shard(0)", "Leave shard_placement_fn out.")
    picks = DIM_OF[subspace.axis] if isinstance(subspace, LineSubspace) else None
    if picks == view_dim or chunk % unit != 0:
        other = '"rows_striped"' if view_dim == _COLS else '"columns"'
        raise _refused(
            name,
            f"subspace={group['subspace']!r} over {tuple(param.shape)} cut into {num_parts} along dimension {dim}",
            "frames that lie within a shard, with the same share on every rank",
            f"Use subspace={other}, or a number of processes that divides the stripes.",
        )
    size = param.to_local().shape[dim] // unit
    local = Geometry(*(size if i == view_dim else length for i, length in enumerate(geometry.shape)))
    full_size = geometry.shape[view_dim]
    return local, Sharding(
        mesh=param.device_mesh, mesh_dim=mesh_dim, tensor_dim=dim, view_dim=view_dim, full_size=full_size
    )


def _view_dim(param: Tensor, dim: int, stacked: bool) -> int | None:
    """Which of (stack, rows, cols) a dimension of the parameter is; None if it lies inside flattened columns."""
    if stacked and param.ndim > 2:
        return dim if dim < 2 or param.ndim == 3 else None
    if dim == 0:
        return _ROWS
    return _COLS if param.ndim == 2 else None


def _refused(name: str, value: str, allowed: str, action: str) -> NotSupportedError:
    return NotSupportedError(f"optimizer over {name}", value, allowed, action)


def refuse_foreign_shards(param: Tensor, name: str, method: str) -> None:
    """Refuse the shards of FSDP1 and ZeRO-3, which have neither the shape nor the rows of their weights.

    Raises:
        NotSupportedError: Names the parameter and the way out.
    """
    flat = type(param).__name__ == "FlatParameter" or bool(getattr(param, "_fsdp_flattened", False))
    if flat:
        raise NotSupportedError(
            f"{method}(params) at {name}",
            "a flat parameter of FullyShardedDataParallel (FSDP1)",
            "plain weights, or the DTensors of FSDP2",
            "Shard with torch.distributed.fsdp.fully_shard, or fsdp_version: 2 in accelerate.",
        )
    if getattr(param, "ds_tensor", None) is not None:
        raise NotSupportedError(
            f"{method}(params) at {name}",
            "a weight that DeepSpeed ZeRO-3 has taken apart",
            "whole weights, or the DTensors of FSDP2",
            "Use ZeRO stage 0, DDP, or FSDP2.",
        )
