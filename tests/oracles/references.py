"""Float64 references, written from the papers with loops over lines. The package never imports them."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Line = tuple[slice | int, slice | int]
Gradients = Sequence[Tensor | None]


def adam_line(m: Tensor, v: Tensor, g: Tensor, age: int, betas: tuple[float, float], eps: float) -> Tensor:
    """One line's AdamW direction; the moments advance in place."""
    b1, b2 = betas
    m.copy_(b1 * m + (1 - b1) * g)
    v.copy_(b2 * v + (1 - b2) * g * g)
    return (m / (1 - b1**age)) / (torch.sqrt(v / (1 - b2**age)) + eps)


def split_lines(
    weight: Tensor,
    grads: Gradients,
    *,
    line: Callable[[int], Line],
    order: Callable[[int, int], list[int]],
    width: Callable[[int], int],
    gap: Callable[[int], int],
    how: str,
    lr: float,
    weight_decay: float,
    scales: tuple[float, float],
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Tensor:
    """(Ada)FRUGAL on lines: `order(cursor, width)` lists a frame, `width(step)` and `gap(step)` are in force then."""
    w = weight.double().clone()
    states: dict[int, tuple[Tensor, Tensor, int]] = {}  # line -> m, v, updates so far; insertion order is the frame's
    cursor = held = -1
    last = None
    for k, grad in enumerate(grads):
        states = dict(list(states.items())[: width(k)])  # a shrink is a prefix
        if last is None or k - last >= gap(k):
            cursor, last = cursor + 1, k
        if grad is None:
            continue
        g = grad.double()
        if held != cursor:  # refitted at the first gradient after the refresh
            frame = order(cursor, width(k))
            fresh = {j: (torch.zeros_like(w[line(j)]), torch.zeros_like(w[line(j)]), 0) for j in frame}
            if how == "keep":
                fresh.update({j: states[j] for j in frame if j in states})
            elif how == "carry":
                fresh.update(zip(frame, list(states.values()) + [fresh[j] for j in frame][len(states) :], strict=False))
            states, held = fresh, cursor
        w *= 1 - lr * weight_decay
        step = -lr * scales[1] * torch.sign(g)
        for j, (m, v, age) in list(states.items()):
            step[line(j)] = -lr * scales[0] * adam_line(m, v, g[line(j)], age + 1, betas, eps)
            states[j] = (m, v, age + 1)
        w += step
    return w


def walk_blocks(
    sizes: Sequence[int], rho: float, cursor: int, permutation: Callable[[int], list[int]]
) -> tuple[set[int], int]:
    """Which blocks are stateful from a cursor on, and where the walk stopped."""
    budget = left = math.floor(rho * sum(sizes) + 0.5)
    chosen: set[int] = set()
    while len(chosen) < len(sizes) and rho > 0:
        turn, place = divmod(cursor, len(sizes))
        unit = permutation(turn)[place]
        if unit not in chosen and sizes[unit] <= budget:
            if sizes[unit] > left:
                break
            chosen.add(unit)
            left -= sizes[unit]
        cursor += 1
    return chosen, cursor


def split_blocks(
    weights: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    *,
    permutation: Callable[[int], list[int]],
    rho: float,
    gap: int,
    how: str,
    lr: float,
    weight_decay: float,
    scales: tuple[float, float],
) -> list[Tensor]:
    """FRUGAL on blocks: whole tensors are stateful in turn, under one budget of elements."""
    ws = [w.double().clone() for w in weights]
    sizes = [w.numel() for w in ws]
    states: dict[int, tuple[Tensor, Tensor, int]] = {}
    cursor = 0
    for k, step_grads in enumerate(grads):
        if k % gap == 0:  # the gap never moves here
            chosen, cursor = walk_blocks(sizes, rho, cursor, permutation)
            kept = {i: states[i] for i in chosen if i in states and how == "keep"}
            states = {i: kept.get(i, (torch.zeros_like(ws[i]), torch.zeros_like(ws[i]), 0)) for i in chosen}
        for i, (w, grad) in enumerate(zip(ws, step_grads, strict=True)):
            w *= 1 - lr * weight_decay
            if i in states:
                m, v, age = states[i]
                w -= lr * scales[0] * adam_line(m, v, grad.double(), age + 1, (0.9, 0.999), 1e-8)
                states[i] = (m, v, age + 1)
            else:
                w -= lr * scales[1] * torch.sign(grad.double())
    return ws


def split_basis(
    weight: Tensor,
    grads: Sequence[Tensor],
    *,
    basis_of: Callable[[Tensor, int, int], Tensor],
    width: Callable[[int], int],
    gap: int,
    how: str,
    lr: float,
    weight_decay: float,
    scales: tuple[float, float],
) -> Tensor:
    """FRUGAL and GaLore on a basis: `basis_of(gradient, cursor, width)` has orthonormal columns on the shorter side."""
    w = weight.double().clone()
    left = w.shape[0] < w.shape[1]
    basis, m, v, age = None, None, None, 0
    for k, grad in enumerate(grads):
        g = grad.double() if left else grad.double().T  # the basis multiplies from the left
        if basis is not None and width(k) < basis.shape[1]:
            basis, m, v = basis[:, : width(k)], m[: width(k)], v[: width(k)]
        if k % gap == 0:
            new = basis_of(grad.double(), k // gap, width(k))
            if basis is None or how == "reset":
                m = v = torch.zeros(new.shape[1], g.shape[1], dtype=torch.float64)
                age = 0
            elif how == "project":
                rotation = new.T @ basis
                m, v = rotation @ m, (rotation**2) @ v
            basis = new
        age += 1
        part = basis.T @ g
        m, v = 0.9 * m + 0.1 * part, 0.999 * v + 0.001 * part**2
        direction = (m / (1 - 0.9**age)) / (torch.sqrt(v / (1 - 0.999**age)) + 1e-8)
        rest = g - basis @ part
        noise = max(8, math.sqrt(g.shape[0])) * torch.finfo(torch.float64).eps * g.abs().max()
        rest[rest.abs() <= noise] = 0
        step = scales[0] * basis @ direction + scales[1] * torch.sign(rest)
        w = w * (1 - lr * weight_decay) - lr * (step if left else step.T)
    return w


def badam(
    layers: Sequence[Sequence[Tensor]],
    grads: Sequence[Sequence[Sequence[Tensor]]],
    order: Sequence[int],
    *,
    gap: int,
    lr: float,
) -> list[list[Tensor]]:
    """BAdam: one layer at a time gets `gap` steps of AdamW from fresh moments; the others stay."""
    ws = [[w.double().clone() for w in layer] for layer in layers]
    for k, step_grads in enumerate(grads):
        active, age = order[(k // gap) % len(order)], k % gap + 1
        if age == 1:
            states = [(torch.zeros_like(w), torch.zeros_like(w)) for w in ws[active]]
        for w, (m, v), grad in zip(ws[active], states, step_grads[active], strict=True):
            w -= lr * adam_line(m, v, grad.double(), age, (0.9, 0.999), 1e-8)
    return ws


def signsgd(weight: Tensor, grads: Sequence[Tensor], *, lr: float, weight_decay: float) -> Tensor:
    """SignSGD with decoupled decay, in the weight's own precision, so that it can be compared bit by bit."""
    w = weight.clone()
    for grad in grads:
        w.mul_(1 - lr * weight_decay).add_(torch.sign(grad), alpha=-lr)
    return w
