"""Every path of the engine against the float64 references, on the same gradients."""

import math
from functools import partial

import pytest
import torch

from adafrugal import FRUGAL, AdaFRUGAL, BAdam, GaLore, SignSGD
from adafrugal.core.rng import named_generator
from oracles import references
from problems import draw, follow, gradient_sequence, parameters, split_group
from tolerances import FLOAT32, FLOAT64

STEPS = 24
LINES = ("columns", "rows", "rows_striped", "columns_scattered", "rows_scattered")
TOLERANCE = {torch.float64: FLOAT64, torch.float32: FLOAT32}


def line_of(subspace: str, shape: tuple[int, int], stripes: int):
    if subspace.startswith("columns"):
        return lambda j: (slice(None), j)
    height = shape[0] // stripes
    return lambda j: (slice(j, None, height), slice(None))


def order_of(subspace: str, length: int, name: str, seed: int = 0):
    """A frame's lines in order: drawn from (seed, name, cursor), natural at full width."""

    def order(cursor: int, width: int) -> list[int]:
        if width == length:
            return list(range(length))
        generator = named_generator(seed, "frame", name, cursor)
        if subspace.endswith("scattered"):
            return torch.randperm(length, generator=generator)[:width].tolist()
        start = int(torch.randint(length, (), generator=generator))
        return [(start + i) % length for i in range(width)]

    return order


def lines_expected(subspace, weight, grads, name, *, density, gap, how, stripes=1, **numbers):
    length = weight.shape[1] if subspace.startswith("columns") else weight.shape[0] // stripes

    def width(k: int) -> int:
        rho = density(k)
        return 0 if rho == 0 else min(length, max(1, math.floor(rho * length + 0.5)))

    return references.split_lines(
        weight,
        grads,
        line=line_of(subspace, tuple(weight.shape), stripes),
        order=order_of(subspace, length, name),
        width=width,
        gap=gap,
        how=how,
        **numbers,
    )


@pytest.mark.parametrize("path", ["auto", "eager", "foreach"])
@pytest.mark.parametrize("how", ["keep", "reset", "carry"])
@pytest.mark.parametrize("subspace", LINES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_frugal_on_lines(subspace, how, path, dtype) -> None:
    shapes = [(24, 20), (16, 40), (40, 16)]
    names = ["a", "b", "c"]
    grads = gradient_sequence(shapes, STEPS, dtype)
    params = parameters(shapes, dtype)
    start = [p.detach().clone() for p in params]
    numbers = {"lr": 1e-2, "weight_decay": 0.1}
    opt = FRUGAL(
        split_group(params, names), density=0.3, update_gap=5, subspace=subspace, on_refresh=how,
        stateful_lr_scale=0.7, stateless_lr_scale=0.2, **numbers,
    )  # fmt: skip
    opt.path = path
    follow(opt, params, grads)
    for i, (param, name) in enumerate(zip(params, names, strict=True)):
        stripes = {24: 4, 16: 4, 40: 8}[shapes[i][0]] if subspace == "rows_striped" else 1
        expected = lines_expected(
            subspace, start[i], [g[i] for g in grads], name, density=lambda k: 0.3, gap=lambda k: 5,
            how=how, stripes=stripes, scales=(0.7, 0.2), **numbers,
        )  # fmt: skip
        torch.testing.assert_close(param.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("path", ["auto", "eager", "foreach"])
@pytest.mark.parametrize("subspace", LINES)
def test_adafrugal_on_lines_with_moving_density_moving_gap_and_missing_gradients(subspace, path) -> None:
    """Levels, shrinks in mid-gap, growths of the gap, and a tensor that misses its refresh."""
    shapes, names, steps = [(24, 20), (16, 40)], ["a", "b"], 40
    grads = gradient_sequence(shapes, steps)
    for k in (5, 6, 14, 15, 16):
        grads[k][1] = None  # at and around refreshes
    params = parameters(shapes)
    start = [p.detach().clone() for p in params]
    opt = AdaFRUGAL(
        split_group(params, names), 1e-2, total_steps=steps, density=0.8, density_end=0.1, update_gap=5,
        update_gap_max=12, plateau_tolerance=0.01, subspace=subspace, stateless_lr_scale=0.2,
    )  # fmt: skip
    opt.path = path
    losses = {4: 2.0, 9: 1.999, 14: 1.998, 19: 1.5, 24: 1.499}  # settled at 9, 14 and 24
    gaps = []

    def before(k: int) -> None:
        if k - 1 in losses:
            opt.observe(losses[k - 1])
        gaps.append(opt.param_groups[0]["update_gap"])

    follow(opt, params, grads, before)
    assert sorted(set(gaps)) == [5, 8, 12]

    def density(k: int) -> float:
        return 0.1 if k / steps >= 15 / 16 else 0.8 - 0.7 * math.floor(8 * k / steps + 0.5) / 8

    for i, (param, name) in enumerate(zip(params, names, strict=True)):
        stripes = 2 if subspace == "rows_striped" and shapes[i][0] == 24 else 1  # 12 rows hold a line at .1, 8 do not
        expected = lines_expected(
            subspace, start[i], [g[i] for g in grads], name, density=density, gap=lambda k: gaps[k],
            how="keep", stripes=stripes, lr=1e-2, weight_decay=0.0, scales=(1.0, 0.2),
        )  # fmt: skip
        torch.testing.assert_close(param.double(), expected, rtol=0, atol=FLOAT64)


@pytest.mark.parametrize("path", ["auto", "eager", "foreach"])
@pytest.mark.parametrize("how", ["keep", "reset"])
@pytest.mark.parametrize("subspace", ["blocks", "blocks_ascending", "blocks_descending"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_frugal_on_blocks(subspace, how, path, dtype) -> None:
    shapes = [(16, 16), (16, 32), (32, 16), (16, 16), (20, 20), (8, 40)]
    names = [f"layers.{i}.weight" for i in range(6)]
    grads = gradient_sequence(shapes, STEPS, dtype)
    params = parameters(shapes, dtype)
    start = [p.detach().clone() for p in params]
    opt = FRUGAL(
        split_group(params, names), 1e-2, density=0.4, update_gap=4, subspace=subspace, on_refresh=how,
        weight_decay=0.1, stateful_lr_scale=0.7, stateless_lr_scale=0.2,
    )  # fmt: skip
    opt.path = path
    follow(opt, params, grads)

    def permutation(turn: int) -> list[int]:
        if subspace == "blocks":
            return torch.randperm(6, generator=named_generator(0, "share", "", turn)).tolist()
        return list(range(6)) if subspace == "blocks_ascending" else list(range(5, -1, -1))

    expected = references.split_blocks(
        start, grads, permutation=permutation, rho=0.4, gap=4, how=how, lr=1e-2, weight_decay=0.1, scales=(0.7, 0.2)
    )
    for param, reference in zip(params, expected, strict=True):
        torch.testing.assert_close(param.double(), reference, rtol=0, atol=TOLERANCE[dtype])


def svd_basis(grad, cursor, width):
    """LAPACK's vectors are orthogonal to a few eps only; at full rank the residual would show it, so QR polishes."""
    u, _, vh = torch.linalg.svd(grad, full_matrices=False)
    return torch.linalg.qr(u[:, :width] if grad.shape[0] < grad.shape[1] else vh[:width].T)[0]


def random_basis(grad, cursor, width, name):
    generator = named_generator(0, "frame", name, cursor)
    gaussian = torch.randn(1, min(grad.shape), min(grad.shape), generator=generator, dtype=torch.float64)
    return torch.linalg.qr(gaussian[0, :, :width])[0]


@pytest.mark.parametrize(
    ("subspace", "density", "dtype", "how"),
    [
        ("random", 0.3, torch.float64, "carry"),
        ("random", 0.3, torch.float64, "project"),
        ("random", 0.3, torch.float64, "reset"),
        ("random", 0.3, torch.float32, "project"),
        ("svd", 0.3, torch.float64, "project"),
        ("svd", 0.3, torch.float64, "reset"),
        ("svd", 1.0, torch.float64, "project"),
        ("svd", 1.0, torch.float32, "reset"),
    ],
)
@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (16, 16)])
def test_frugal_on_bases(subspace, density, dtype, shape, how) -> None:
    """Not for a low-rank svd in float32, whose basis turns with the last bit, nor for its carry: signs are free."""
    grads = gradient_sequence([shape], STEPS, dtype)
    params = parameters([shape], dtype)
    start = params[0].detach().clone()
    opt = FRUGAL(
        split_group(params, ["w"]), 1e-2, density=density, update_gap=6, subspace=subspace, on_refresh=how,
        weight_decay=0.1, stateful_lr_scale=0.7, stateless_lr_scale=0.2,
    )  # fmt: skip
    follow(opt, params, grads)
    basis_of = svd_basis if subspace == "svd" else partial(random_basis, name="w")
    width = max(1, math.floor(density * min(shape) + 0.5))
    expected = references.split_basis(
        start, [g[0] for g in grads], basis_of=basis_of, width=lambda k: width, gap=6, how=how, lr=1e-2,
        weight_decay=0.1, scales=(0.7, 0.2),
    )  # fmt: skip
    torch.testing.assert_close(params[0].double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_adafrugal_on_a_random_basis_shrinks_to_its_first_directions() -> None:
    shape, steps = (16, 24), 32
    grads = gradient_sequence([shape], steps)
    params = parameters([shape])
    start = params[0].detach().clone()
    opt = AdaFRUGAL(
        split_group(params, ["w"]), 1e-2, total_steps=steps, density=0.75, density_end=0.125, update_gap=16,
        update_gap_max=None, subspace="random", stateless_lr_scale=0.2,
    )  # fmt: skip
    follow(opt, params, grads)

    def width(k: int) -> int:
        rho = 0.125 if k / steps >= 15 / 16 else 0.75 - 0.625 * math.floor(8 * k / steps + 0.5) / 8
        return max(1, math.floor(rho * 16 + 0.5))

    expected = references.split_basis(
        start, [g[0] for g in grads], basis_of=partial(random_basis, name="w"), width=width, gap=16, how="project",
        lr=1e-2, weight_decay=0.0, scales=(1.0, 0.2),
    )  # fmt: skip
    torch.testing.assert_close(params[0].double(), expected, rtol=0, atol=FLOAT64)


@pytest.mark.parametrize("shape", [(16, 24), (24, 16)])
def test_galore_with_projection(shape) -> None:
    grads = gradient_sequence([shape], STEPS)
    params = parameters([shape])
    start = params[0].detach().clone()
    opt = GaLore(split_group(params, ["w"]), 1e-2, density=0.25, update_gap=6, on_refresh="project", weight_decay=0.1)
    follow(opt, params, grads)
    expected = references.split_basis(
        start, [g[0] for g in grads], basis_of=svd_basis, width=lambda k: 4, gap=6, how="project", lr=1e-2,
        weight_decay=0.1, scales=(0.25, 0.0),
    )  # fmt: skip
    torch.testing.assert_close(params[0].double(), expected, rtol=0, atol=FLOAT64)


@pytest.mark.parametrize("shape", [(16, 24), (24, 16)])
def test_galore_as_published_carries_the_moments(shape) -> None:
    """Singular vectors have no sign, so carrying follows the optimizer's own bases; each spans what the svd's does."""
    gap = 6
    grads = gradient_sequence([shape], STEPS)
    params = parameters([shape])
    start = params[0].detach().clone()
    opt = GaLore(split_group(params, ["w"]), 1e-2, density=0.25, update_gap=gap, weight_decay=0.1)
    assert opt.param_groups[0]["on_refresh"] == "carry", "the published behaviour is the default"
    bases = []
    for k, given in enumerate(grads):
        params[0].grad = given[0].clone()
        opt.step()
        if k % gap == 0:
            bases.append(opt.state[params[0]]["basis"][0].clone())
            judge = svd_basis(given[0], k // gap, 4)
            torch.testing.assert_close(bases[-1] @ bases[-1].T, judge @ judge.T, rtol=0, atol=FLOAT64)
    assert len(bases) == STEPS // gap
    expected = references.split_basis(
        start, [g[0] for g in grads], basis_of=lambda grad, cursor, width: bases[cursor], width=lambda k: 4, gap=gap,
        how="carry", lr=1e-2, weight_decay=0.1, scales=(0.25, 0.0),
    )  # fmt: skip
    torch.testing.assert_close(params[0].double(), expected, rtol=0, atol=FLOAT64)


@pytest.mark.parametrize("order", ["random", "ascending", "descending"])
def test_badam(order) -> None:
    shapes = [(16, 16), (16,), (16, 16), (16,), (16, 16), (16,)]
    names = [f"layers.{i // 2}.{'weight' if i % 2 == 0 else 'bias'}" for i in range(6)]
    grads = gradient_sequence(shapes, STEPS)
    params = parameters(shapes)
    start = [p.detach().clone() for p in params]
    opt = BAdam(list(zip(names, params, strict=True)), 1e-2, update_gap=4, order=order)
    follow(opt, params, grads)
    turns = [torch.randperm(3, generator=named_generator(0, "share", "", t)).tolist() for t in range(2)]
    walk = {"random": turns[0] + turns[1], "ascending": [0, 1, 2] * 2, "descending": [2, 1, 0] * 2}[order]
    layers = [start[2 * i : 2 * i + 2] for i in range(3)]
    expected = references.badam(layers, [[g[2 * i : 2 * i + 2] for i in range(3)] for g in grads], walk, gap=4, lr=1e-2)
    for i, param in enumerate(params):
        torch.testing.assert_close(param.double(), expected[i // 2][i % 2], rtol=0, atol=FLOAT64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_signsgd_and_density_zero_are_bitwise_signsgd(dtype) -> None:
    shape = (16, 24)
    grads = gradient_sequence([shape], STEPS, dtype)
    expected = references.signsgd(draw(shape, 500, dtype), [g[0] for g in grads], lr=1e-2, weight_decay=0.1)
    for make in (
        lambda p: SignSGD(p, 1e-2, weight_decay=0.1),
        lambda p: FRUGAL(split_group(p), 1e-2, density=0.0, weight_decay=0.1, stateless_lr_scale=1.0),
        lambda p: FRUGAL(split_group(p), 1e-2, density=0.0, subspace="rows", weight_decay=0.1, stateless_lr_scale=1.0),
        lambda p: FRUGAL(
            split_group(p), 1e-2, density=0.0, subspace="blocks", weight_decay=0.1, stateless_lr_scale=1.0
        ),
        lambda p: FRUGAL(split_group(p), 1e-2, density=0.0, subspace="svd", weight_decay=0.1, stateless_lr_scale=1.0),
        lambda p: FRUGAL(
            split_group(p), 1e-2, density=0.0, subspace="random", weight_decay=0.1, stateless_lr_scale=1.0
        ),
    ):
        for path in ("auto", "eager", "foreach"):
            params = parameters([shape], dtype)
            opt = make(params)
            opt.path = path
            follow(opt, params, grads)
            assert torch.equal(params[0].detach(), expected)
