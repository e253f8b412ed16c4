"""Semi-orthogonal bases: random ones, and the leading singular vectors of a gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from adafrugal.optim.frames import Geometry

_EXACT_SIDE = 4096
_OVERSAMPLING = 16
_ORTHOGONALITY = 1e-3


def random_basis(
    geometry: Geometry, width: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Orthonormal columns of a random Gaussian matrix, on the shorter side of each matrix.

    The matrix is drawn whole and cut, so that a narrower basis is a prefix of a wider one (up to rounding).

    Args:
        geometry: The tensor's (stack, rows, cols).
        width: The rank.
        generator: A CPU generator, so that every device gets the same basis.
        dtype: float64 gives float64; all else gives float32.
        device: Where the basis shall live.

    Returns:
        Shape (stack, min(rows, cols), width).

    Cost:
        4 * min(rows, cols) * width**2 FLOPs for each matrix.
    """
    side = min(geometry.rows, geometry.cols)
    gaussian = torch.randn(geometry.stack, side, side, generator=generator, dtype=torch.float64)
    factor, _ = _qr(gaussian[:, :, :width])
    return factor.to(device, torch.float64 if dtype == torch.float64 else torch.float32).contiguous()


def leading_basis(matrices: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """The leading singular vectors on the shorter side, in storage of their own.

    Up to a side of 4096 they are the exact eigenvectors of the Gram matrix, formed in float64 on a CPU; beyond that, a
    randomised range finder with 16 extra directions and two power iterations.

    Args:
        matrices: The gradient, shape (stack, rows, cols), any floating dtype.
        width: The rank.
        generator: For the fall-back and the range finder.

    Returns:
        Orthonormal columns, shape (stack, min(rows, cols), width), float64 for float64 input and else float32. A
        matrix of zeros, or one that is not finite, gets a random basis instead.

    Cost:
        2 * rows * cols * side + 9 * side**3 FLOPs for each matrix.

    Source:
        GaLore (arXiv 2403.03507), algorithm 2. Range finder: Halko, Martinsson, Tropp (arXiv 0909.4061), 4.3 to 4.5.
    """
    stack, rows, cols = matrices.shape
    dtype = torch.float64 if matrices.dtype == torch.float64 else torch.float32
    if matrices.is_meta:
        return matrices.new_empty(stack, min(rows, cols), width, dtype=dtype)
    exact = min(rows, cols) <= _EXACT_SIDE
    work = matrices.to(torch.float64 if exact and matrices.device.type == "cpu" else dtype)
    if rows >= cols:
        work = work.mT
    compute = _eigenvectors if exact else _range_finder
    peaks = work.abs().amax(dim=(1, 2))
    usable = torch.isfinite(peaks) & (peaks > 0)
    if bool(usable.all()):
        return compute(work, width, generator).to(dtype).contiguous()
    basis = random_basis(Geometry(stack, rows, cols), width, generator, dtype, matrices.device)
    good = cast(list[int], usable.nonzero().flatten().tolist())
    for index in good:
        basis[index] = compute(work[index : index + 1], width, generator)[0].to(dtype)
    return basis


def _eigenvectors(work: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Eigenvectors of the Gram matrix, largest first; nothing is drawn."""
    scale = work.abs().amax(dim=(1, 2), keepdim=True)
    work = work / scale
    vectors = _on_host_if_missing(_eigh, torch.bmm(work, work.mT))
    return _polished(vectors.flip(-1)[:, :, :width])


def _range_finder(work: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Randomised range finder with power iterations."""
    stack, side, other = work.shape
    probes = torch.randn(stack, other, min(width + _OVERSAMPLING, side), generator=generator)
    basis = work / work.abs().amax(dim=(1, 2), keepdim=True)
    sample = torch.bmm(basis, probes.to(work.device, work.dtype))
    for _ in range(2):
        q = _on_host_if_missing(_qr, sample)
        sample = torch.bmm(basis, torch.bmm(basis.mT, q))
    q = _on_host_if_missing(_qr, sample)
    inner = torch.bmm(q.mT, basis)
    vectors = _on_host_if_missing(_eigh, torch.bmm(inner, inner.mT))
    return _polished(torch.bmm(q, vectors.flip(-1)[:, :, :width]))


def _polished(basis: Tensor) -> Tensor:
    """One Newton step towards orthonormal columns, in storage of its own: B (3 I - B^T B) / 2."""
    unit = torch.eye(basis.shape[2], dtype=basis.dtype, device=basis.device)
    return torch.bmm(basis, 1.5 * unit - 0.5 * torch.bmm(basis.mT, basis))


def _qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Q and R, reduced."""
    return cast(tuple[Tensor, Tensor], torch.linalg.qr(matrix))


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors and eigenvalues, ascending: vectors first, as for Q and R."""
    values, vectors = cast(tuple[Tensor, Tensor], torch.linalg.eigh(matrix))
    return vectors, values


_warned: set[str] = set()


def _on_host_if_missing(factorise: Callable[[Tensor], tuple[Tensor, Tensor]], matrix: Tensor) -> Tensor:
    """The orthogonal factor, on the matrix's device; where that fails or is wrong, once warned, from the CPU."""
    device = matrix.device.type
    if device == "cpu":
        return factorise(matrix)[0]
    try:
        vectors = factorise(matrix)[0]
        unit = torch.eye(vectors.shape[-1], device=vectors.device, dtype=vectors.dtype)
        if bool((torch.bmm(vectors.mT, vectors) - unit).abs().amax() < _ORTHOGONALITY):
            return vectors
        reason = "returned vectors that are not orthogonal"
    except (NotImplementedError, RuntimeError) as error:
        reason = f"failed ({error})"
    if device not in _warned:
        _warned.add(device)
        warnings.warn(f"matrix factorisation on {device} {reason}; using the CPU for it from now on", stacklevel=2)
    return factorise(matrix.cpu())[0].to(matrix.device)
