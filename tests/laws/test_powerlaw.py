"""Saturating power laws: planted curves come back, bands cover as often as they say, and odd losses do not break it."""

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adafrugal.core.errors import ConfigError
from adafrugal.core.rng import named_generator
from adafrugal.laws import bootstrap
from adafrugal.laws.powerlaw import SaturatingCurve, fit_saturating
from adafrugal.laws.projection import Points, refine, search

# A Gauss-Newton step below 1e-10 ends the search; floor and scale follow the exponent with slopes under 100 here.
RECOVERED = 1e-7

# Of 100 draws, the hits of a 90 % interval are binomial(100, 0.9): 82 to 97 holds 99 % of it. The seeds are fixed, so
# the bound says what is believable, not how often the test fails.
FEWEST_HITS, MOST_HITS = 82, 97

DTYPE = torch.float64


def compute_points(num_points: int = 40, decades: float = 2.0) -> torch.Tensor:
    return torch.logspace(15, 15 + decades, num_points, dtype=DTYPE)


def planted(num_points: int, noise: float, seed: int, decades: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of TRUE with multiplicative normal noise."""
    compute = compute_points(num_points, decades)
    generator = named_generator(seed, "planted noise")
    factor = torch.exp(noise * torch.randn(num_points, generator=generator, dtype=DTYPE))
    return compute, TRUE.loss_at(compute) * factor


class Planted(SaturatingCurve[float]):
    def loss_at(self, compute: torch.Tensor) -> torch.Tensor:
        return self.floor + self.scale * compute**-self.exponent


TRUE = Planted(floor=2.5, scale=1.0 * (1e16**0.3), exponent=0.3)


@settings(deadline=None, max_examples=40)
@given(
    floor=st.floats(0, 5),
    excess=st.floats(0.1, 10),
    exponent=st.floats(0.1, 1.5),
    decades=st.floats(1, 4),
)
def test_a_curve_without_noise_comes_back(floor: float, excess: float, exponent: float, decades: float) -> None:
    compute = compute_points(20, decades)
    centre = math.exp(float(compute.log().mean()))
    loss = floor + excess * (compute / centre) ** -exponent
    curve = fit_saturating(compute, loss, num_draws=50).curve
    # Where the power falls by less than a tenth of the loss per decade, floor and scale trade against each other.
    assert curve.exponent == pytest.approx(exponent, rel=1e-4)
    assert curve.loss(centre) == pytest.approx(floor + excess, rel=RECOVERED)
    assert curve.loss(100 * float(compute[-1])) == pytest.approx(
        floor + excess * (100 * float(compute[-1]) / centre) ** -exponent, rel=1e-4
    )


def test_the_numbers_of_a_curve() -> None:
    curve = SaturatingCurve(floor=2.0, scale=100.0, exponent=0.25)
    at, nearby = 1e8, 1e8 * 1.0001
    assert curve.loss(at) == pytest.approx(3.0, rel=1e-12)
    difference = (curve.loss(nearby) - curve.loss(at)) / (nearby - at)
    assert curve.slope(at) == pytest.approx(difference, rel=1e-4)  # half a step of 1e-4, times 1 + exponent
    assert curve.log_slope(at) == pytest.approx(curve.slope(at) * at, rel=1e-12)
    assert curve.gain(at, 1e12) == pytest.approx(0.9, rel=1e-12)
    price = 1e-11
    assert -curve.slope(curve.compute_at_price(price)) == pytest.approx(price, rel=1e-12)


def test_planted_constants_lie_in_their_intervals_as_often_as_stated() -> None:
    hits = dict.fromkeys(("floor", "scale", "exponent", "four times on", "slope"), 0)
    for seed in range(100):
        compute, loss = planted(30, noise=0.005, seed=seed)
        fit = fit_saturating(compute, loss, seed=seed)
        end = float(compute[-1])
        hits["floor"] += TRUE.floor in fit.interval(lambda curve: curve.floor)
        hits["scale"] += TRUE.scale in fit.interval(lambda curve: curve.scale)
        hits["exponent"] += TRUE.exponent in fit.interval(lambda curve: curve.exponent)
        hits["four times on"] += TRUE.loss(4 * end) in fit.band(4 * end)
        hits["slope"] += TRUE.slope(end) in fit.interval(lambda curve, end=end: curve.slope(end))
    assert all(FEWEST_HITS <= count <= MOST_HITS for count in hits.values()), hits


def test_blocks_widen_the_band_where_noise_lasts() -> None:
    """Noise that is the same over four neighbours holds a quarter of the information: twice the width, about."""
    compute = compute_points(40)
    widths = {1: [], 8: []}
    for seed in range(10):
        generator = named_generator(seed, "lasting noise")
        noise = torch.randn(10, generator=generator, dtype=DTYPE).repeat_interleave(4)
        loss = TRUE.loss_at(compute) * torch.exp(0.005 * noise)
        for length, found in widths.items():
            found.append(fit_saturating(compute, loss, block_length=length).band(float(compute[-1])).width)
    ratio = sorted(long / short for long, short in zip(widths[8], widths[1], strict=True))[5]
    assert 1.2 < ratio < 2.2


def test_the_draws_reach_the_least_squares_that_a_fine_grid_finds() -> None:
    """All draws start at the fit; a grid with no start must not find a better exponent."""
    compute, loss = planted(30, noise=0.01, seed=1)
    logs = compute.log()
    points = Points(log_inputs=(logs - logs.mean()).unsqueeze(1), weights=1 / loss, bounds=(0.02, 3.0))
    best = search(points, loss)
    pool = bootstrap.noise((loss - best.values(points)[0]) / loss, best.jacobian(points))
    shuffled = bootstrap.resampled(pool, 50, block_length=1, seed=0, name="grid")
    draws = best.values(points) + shuffled * loss
    found = refine(points, draws, best.exponents.expand(50, -1), tolerance=1e-8)
    for draw, cost in zip(draws, found.cost.tolist(), strict=True):
        grid = torch.linspace(0.02, 1.5, 3000, dtype=DTYPE)
        basis = torch.stack(
            [torch.ones(3000, 30, dtype=DTYPE), torch.exp(-grid[:, None] * points.log_inputs[:, 0])], dim=2
        )
        weighted = basis * points.weights[:, None]
        target = (draw * points.weights).expand(3000, -1).unsqueeze(2)
        solved = torch.linalg.lstsq(weighted, target).solution
        residual = (weighted @ solved - target).square().sum((1, 2))
        allowed = (solved >= 0).all(1).squeeze(-1)
        assert cost <= float(residual[allowed].min()) * (1 + 1e-9)


def test_the_same_points_and_seed_give_the_same_fit_and_another_seed_another_band() -> None:
    compute, loss = planted(20, noise=0.01, seed=3)
    first, again, other = (fit_saturating(compute, loss, seed=seed) for seed in (0, 0, 1))
    assert first.curve == again.curve == other.curve
    assert torch.equal(first.draws.exponent, again.draws.exponent)
    assert first.band(1e18) == again.band(1e18) != other.band(1e18)
    renamed = fit_saturating(compute.tolist(), loss.tolist(), name="another")
    assert renamed.curve == first.curve
    assert renamed.band(1e18) != first.band(1e18)


def test_a_loss_that_rises_is_flat_and_says_so() -> None:
    compute = compute_points(12)
    fit = fit_saturating(compute, torch.linspace(3.0, 3.3, 12, dtype=DTYPE))
    assert fit.curve.scale == 0
    assert fit.curve.slope(1e17) == 0
    assert 3.0 < fit.curve.floor < 3.3
    assert "does not fall" in fit.caveats()[0]


def test_constant_losses_and_straight_lines_give_finite_numbers() -> None:
    compute = compute_points(12)
    for loss in (torch.full((12,), 3.0, dtype=DTYPE), 3 - 0.02 * (compute / 1e16).log()):
        fit = fit_saturating(compute, loss)
        interval = fit.band(1e18)
        assert all(map(math.isfinite, (interval.low, interval.high, fit.noise_fraction, fit.curve.exponent)))
    assert any("bound" in note for note in fit.caveats()), "a logarithm is the lowest exponent that is searched"
    assert "15.0 times" in fit.caveats(compute=1.5e18)[-1]


def test_zero_floor_is_the_bound_and_not_crossed() -> None:
    compute = compute_points(20)
    fit = fit_saturating(compute, 2 * (compute / 1e16) ** -0.2 - 0.3)
    assert fit.curve.floor == 0
    assert bool((fit.draws.floor >= 0).all())


def test_student_quantiles_are_those_of_tables() -> None:
    table = {(0.95, 3): 2.353, (0.95, 10): 1.812, (0.95, 30): 1.697, (0.975, 5): 2.571}
    for (share, degrees), value in table.items():
        assert bootstrap._student_quantile(share, degrees) == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"loss": [3.0, 2.9]}, "8 and 2 values"),
        ({"compute": [1.0, 1, 1, 2, 2, 2, 3, 3]}, "8 points at 3 values"),
        ({"loss": [3.0, 2.9, 2.8, math.nan, 2.7, 2.6, 2.5, 2.4]}, "received nan"),
        ({"num_draws": 10}, "a whole number from 50"),
        ({"confidence": 90}, "Write 0.9 for 90 %"),
        ({"block_length": 5}, "from 1 to 4"),
        ({"exponent_bounds": (0.5, 0.1)}, "two rising numbers"),
    ],
)
def test_what_cannot_be_fitted_is_refused(change: dict, text: str) -> None:
    arguments = {"compute": [float(n) for n in range(1, 9)], "loss": [3 + 1 / n for n in range(1, 9)], **change}
    with pytest.raises(ConfigError, match=text):
        fit_saturating(**arguments)


def test_a_fit_of_40_points_takes_milliseconds() -> None:
    """Six were measured on a core with others at work; the bound is over twice that, and the least of many counts."""
    compute, loss = planted(40, noise=0.005, seed=0)
    seconds = []
    for _ in range(30):
        start = time.process_time()
        fit_saturating(compute, loss, num_draws=200)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.015
