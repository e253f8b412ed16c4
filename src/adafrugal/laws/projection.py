"""Sums of falling powers, fitted by variable projection: search the exponents, solve for everything else.

The model is y = c_0 + sum_j c_j * x_j^(-e_j), with every c at least 0. Given the exponents it is linear in c, so only
one or two numbers are searched, and the rest is non-negative least squares, solved exactly. Many curves over the same x
are fitted at once: that is what a bootstrap needs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

_NUM_STARTS = 4
_GRID_POINTS = {1: 32, 2: 18}  # for each exponent: neighbours are at most a third apart
_ROUGH = 1e-3  # of an exponent: enough to see which start leads to the best fit
_ROUNDING = 1e-14  # of the sum of squares of y: what float64 leaves of a cost


@dataclass(frozen=True, kw_only=True)
class Points:
    """Where y was measured.

    Args:
        log_inputs: (points, powers) natural logarithms of x, each column with mean 0.
        weights: (points,) residuals are multiplied by these before they are squared.
        bounds: Lowest and highest exponent that is searched.
    """

    log_inputs: Tensor
    weights: Tensor
    bounds: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Powers:
    """Fitted sums of powers, one per row; x is in units of its geometric mean.

    Args:
        coefficients: (curves, 1 + powers) c: the floor, then the share of each power at the centre of its x.
        exponents: (curves, powers) e.
        cost: (curves,) sum of squared weighted residuals.
    """

    coefficients: Tensor
    exponents: Tensor
    cost: Tensor

    def values(self, points: Points) -> Tensor:
        """The model's y, (curves, points)."""
        powers = torch.exp(-self.exponents.unsqueeze(2) * points.log_inputs.T)
        return self.coefficients[:, :1] + (self.coefficients[:, 1:].unsqueeze(2) * powers).sum(1)

    def jacobian(self, points: Points) -> Tensor:
        """Weighted derivatives of the first curve, (points, 1 + 2 * powers), by floor, scales and exponents.

        What is held at a bound does not move, and has a column of 0.
        """
        low, high = points.bounds
        coefficients, exponents = self.coefficients[0], self.exponents[0]
        powers = torch.exp(-exponents * points.log_inputs)
        free = ((exponents > low) & (exponents < high)).to(powers.dtype)
        slopes = -points.log_inputs * powers * coefficients[1:] * free
        levels = torch.cat([torch.ones_like(powers[:, :1]), powers], dim=1) * (coefficients > 0)
        return torch.cat([levels, slopes], dim=1) * points.weights.unsqueeze(1)


@dataclass(frozen=True, kw_only=True)
class _State:
    """The best floor and scales at given exponents, and all that a step needs."""

    exponents: Tensor  # (curves, powers)
    gram: Tensor  # (curves, 2 + 2 * powers, ..): products of the rows floor, powers, their derivatives, y
    solution: Tensor  # (curves, 1 + powers, powers + 1): derivatives, then y, projected on floor and powers
    cost: Tensor  # (curves,)


def search(points: Points, y: Tensor) -> Powers:
    """Fit one curve with no guess at hand: a grid over the exponents, then the best cells refined.

    Args:
        points: Where y was measured.
        y: (points,) float64, what was measured.

    Returns:
        One curve, its exponents right to about 1e-4: `refine` it.
    """
    num_powers = points.log_inputs.shape[1]
    low, high = points.bounds
    ladder = (
        torch.linspace(0, 1, _GRID_POINTS[num_powers], dtype=y.dtype).mul(torch.tensor(high / low).log()).exp() * low
    )
    grid = torch.cartesian_prod(*[ladder] * num_powers).view(-1, num_powers).clamp(low, high)
    cost = _evaluate(points, (y * points.weights).expand(len(grid), -1), grid).cost
    starts = grid[cost.topk(_NUM_STARTS, largest=False).indices]
    found = refine(points, y.expand(len(starts), -1), starts, tolerance=_ROUGH)
    best = int(found.cost.argmin())
    return Powers(**{name: value[best : best + 1] for name, value in vars(found).items()})


def refine(points: Points, y: Tensor, exponents: Tensor, *, tolerance: float = 1e-9, max_rounds: int = 60) -> Powers:
    """Fit many curves from a guess: damped Gauss-Newton steps in the exponents, c solved anew at each.

    Args:
        points: Where y was measured.
        y: (curves, points) float64.
        exponents: (curves, powers) where to start.
        tolerance: A curve is done once a step of its exponents is shorter than this.
        max_rounds: Steps at most.

    Returns:
        One curve per row of y; none is worse than its start.

    Source:
        Golub and Pereyra, variable projection (1973), with Kaufman's simpler derivative (1975), damped.
    """
    low, high = points.bounds
    target = y * points.weights
    state = _evaluate(points, target, exponents)
    damping = torch.full_like(state.cost, 1e-5)
    done = vars(state).copy()
    rows = torch.arange(len(y))  # of the curves that still move
    for _ in range(max_rounds):
        moved = (state.exponents + _step(state, points, damping)).clamp_(low, high)
        going = (moved - state.exponents).abs_().amax(1) >= tolerance
        tried = _evaluate(points, target, moved)
        worse = tried.cost > state.cost + _ROUNDING * state.gram[:, -1, -1]
        damping = damping * 0.1
        if bool(worse.any()):
            tried = _State(**{name: _pick(worse, getattr(state, name), value) for name, value in vars(tried).items()})
            damping = torch.where(worse, damping * 100, damping)
        state = tried
        for name, value in vars(state).items():
            done[name] = value if len(rows) == len(y) else done[name].index_copy(0, rows, value)
        num_going = int(going.sum())
        if num_going == 0:
            break
        if num_going < len(rows):
            rows, target, damping = rows[going], target[going], damping[going]
            state = _State(**{name: value[going] for name, value in vars(state).items()})
    return Powers(coefficients=done["solution"][:, :, -1], exponents=done["exponents"], cost=done["cost"])


def _pick(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Rows of one or the other."""
    return torch.where(condition.view(-1, *[1] * (first.dim() - 1)), first, second)


def _evaluate(points: Points, target: Tensor, exponents: Tensor) -> _State:
    """Solve for floor and scales at given exponents; all products of rows are taken at once."""
    width = 1 + exponents.shape[1]
    falling = -points.log_inputs.T
    powers = torch.exp(exponents.unsqueeze(2) * falling) * points.weights
    level_row = points.weights.expand(len(exponents), 1, -1)
    rows = torch.cat([level_row, powers, powers * falling, target.unsqueeze(1)], dim=1)
    gram = torch.bmm(rows, rows.mT)
    inner, right = gram[:, :width, :width], gram[:, :width, width:]
    solution = _non_negative(inner, right)
    level = solution[:, :, -1:]
    cost = gram[:, -1, -1] + torch.bmm(level.mT, torch.baddbmm(right[:, :, -1:], inner, level, beta=-2)).flatten()
    return _State(exponents=exponents, gram=gram, solution=solution, cost=cost)


def _step(state: _State, points: Points, damping: Tensor) -> Tensor:
    """The damped step of the exponents; one that would leave the bounds is held, and the others move without it."""
    width = state.solution.shape[1]
    level, projected = state.solution[:, :, -1:], state.solution[:, :, :-1]
    scales = level[:, 1:]
    slopes = state.gram[:, width:-1]  # products of the derivatives with floor, powers, derivatives and y
    cross, products = slopes[:, :, :width], slopes[:, :, width:-1]
    gradient = torch.baddbmm(slopes[:, :, -1:], cross, level, alpha=-1) * scales
    pairs = scales * scales.mT
    matrix = torch.baddbmm(products, cross, projected, alpha=-1) * pairs
    size = (products * pairs).diagonal(dim1=1, dim2=2)
    low, high = points.bounds
    at_bound = (state.exponents <= low) | (state.exponents >= high) | (size == 0)
    if bool(at_bound.any()):
        downhill = gradient.squeeze(-1)
        inward = ((downhill > 0) & (state.exponents < high)) | ((downhill < 0) & (state.exponents > low))
        free = (inward & (size > 0)).to(size.dtype).unsqueeze(2)
        matrix, gradient = matrix * free * free.mT, gradient * free
        matrix.diagonal(dim1=1, dim2=2).add_(1 - free.squeeze(2))
    matrix.diagonal(dim1=1, dim2=2).add_(damping.unsqueeze(1) * size)
    step = _solve(matrix, gradient).squeeze(-1)
    return step.nan_to_num_(0, 0, 0).clamp_(-0.5, 0.5)


def _solve(systems: Tensor, right: Tensor) -> Tensor:
    """Solve many small systems; one that is singular gives what is not finite, and no error."""
    solved: Tensor = cast("Any", torch.linalg.solve_ex(systems, right)).result
    return solved


def _non_negative(system: Tensor, right: Tensor) -> Tensor:
    """Least squares with no negative coefficient; exact, as there are at most three.

    Where the free solution has a negative coefficient, all subsets of rows are tried, and the best one that has none is
    taken. What is projected beside y, the last column, is projected on the same subset.
    """
    solution = _solve(system, right)
    level = solution[:, :, -1]
    low, high = level.aminmax()
    if not (float(low) >= 0 and float(high) < torch.inf):
        wrong = ~((level >= 0) & (level < torch.inf)).all(1)
        solution[wrong] = _best_subset(system[wrong], right[wrong])
    return solution


def _best_subset(system: Tensor, right: Tensor) -> Tensor:
    """The best non-negative solution over all proper, non-empty subsets of rows."""
    width = system.shape[1]
    bits = [row for row in itertools.product((0.0, 1.0), repeat=width) if 0 < sum(row) < width]
    masks = torch.tensor(bits, dtype=system.dtype)
    systems = system.unsqueeze(1) * (masks.unsqueeze(1) * masks.unsqueeze(2)) + torch.diag_embed(1 - masks)
    wanted = right.unsqueeze(1) * masks.unsqueeze(-1)
    solutions = _solve(systems, wanted)
    level = solutions[..., -1]
    explained = (level * wanted[..., -1]).sum(2)  # what a least-squares solution takes off the cost
    allowed = ((level >= 0) & (level < torch.inf)).all(2)
    best = explained.where(allowed, -torch.inf).argmax(1)
    return solutions[torch.arange(len(system)), best]
