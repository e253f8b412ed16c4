"""Fitting a scaling law to runs: planted constants come back, in their intervals as often as stated."""

import math

import pytest
import torch

from adafrugal.core.errors import ConfigError
from adafrugal.core.rng import named_generator
from adafrugal.laws.ladder import fit_chinchilla
from adafrugal.laws.scaling import ChinchillaLaw

TRUE = ChinchillaLaw(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)
CONSTANTS = ("E", "A", "B", "alpha", "beta")

# A Gauss-Newton step below 1e-9 ends the search; A and B follow their exponents with factors of ln N and ln D, to 22.
RECOVERED = 1e-7

# Of 100 draws, the hits of a 90 % interval are binomial(100, 0.9): 82 to 97 holds 99 % of it. The seeds are fixed, so
# the bound says what is believable, not how often the test fails.
FEWEST_HITS, MOST_HITS = 82, 97

DTYPE = torch.float64


def ladder(noise: float, seed: int) -> tuple[list[float], list[float], list[float]]:
    """Six sizes, six numbers of tokens each, and losses of TRUE with multiplicative normal noise."""
    sizes = [3e6 * 2.5**step for step in range(6)]
    runs = [(n, n * ratio) for n in sizes for ratio in (2, 5, 12, 30, 80, 200)]
    draws = torch.randn(len(runs), generator=named_generator(seed, "planted noise"), dtype=DTYPE)
    losses = [TRUE.loss(*run) * math.exp(noise * float(draw)) for run, draw in zip(runs, draws, strict=True)]
    return [n for n, _ in runs], [d for _, d in runs], losses


@pytest.mark.parametrize("threshold", [None, 5.0])
def test_a_ladder_without_noise_gives_its_law_back(threshold: float | None) -> None:
    fit = fit_chinchilla(*ladder(0, seed=0), outlier_threshold=threshold, num_draws=50)
    for name in CONSTANTS:
        assert getattr(fit.law, name) == pytest.approx(getattr(TRUE, name), rel=RECOVERED)
    assert fit.excluded == ()
    assert fit.noise_fraction < 1e-8


def test_planted_constants_lie_in_their_intervals_as_often_as_stated() -> None:
    hits = dict.fromkeys((*CONSTANTS, "loss at ten times", "best size at ten times"), 0)
    for seed in range(100):
        fit = fit_chinchilla(*ladder(0.003, seed), seed=seed)
        for name in CONSTANTS:
            hits[name] += getattr(TRUE, name) in fit.interval(lambda law, name=name: getattr(law, name))
        flops = 10 * fit.law.fitted_range.flops[1]
        best = TRUE.optimum(flops)
        hits["loss at ten times"] += TRUE.loss(*best) in fit.interval(lambda law, best=best: law.loss(*best))
        hits["best size at ten times"] += best.num_parameters in fit.interval(
            lambda law, flops=flops: law.optimum(flops).num_parameters
        )
    assert all(FEWEST_HITS <= count <= MOST_HITS for count in hits.values()), hits


def test_outliers_are_left_out_by_the_stated_rule_and_named() -> None:
    sizes, texts, losses = ladder(0.003, seed=5)
    clean = fit_chinchilla(sizes, texts, losses)
    for run, factor in ((0, 1.3), (7, 1.08), (20, 0.9)):
        losses[run] *= factor
    fit = fit_chinchilla(sizes, texts, losses)
    assert fit.excluded == (0, 7, 20)
    assert fit.num_runs == 33
    assert "runs 0, 7, 20" in fit.caveats()[0]
    assert abs(fit.law.beta - clean.law.beta) < 0.02
    pulled = fit_chinchilla(sizes, texts, losses, outlier_threshold=None)
    assert pulled.excluded == ()
    assert abs(pulled.law.beta - clean.law.beta) > 0.1


def test_no_constant_is_negative_and_what_is_not_there_is_named() -> None:
    sizes, texts, _ = ladder(0, seed=0)
    fit = fit_chinchilla(sizes, texts, [2 + 50 * n**-0.3 for n in sizes], outlier_threshold=None)
    assert fit.law.B * min(texts) ** -fit.law.beta < 1e-6
    assert fit.law.alpha == pytest.approx(0.3, rel=1e-4)
    rising = fit_chinchilla(sizes, texts, [2 + 0.01 * math.log(d) for d in texts], outlier_threshold=None)
    assert min(rising.law.A, rising.law.B, rising.law.E) >= 0
    assert rising.law.B == 0
    assert "B is 0: the runs show no such term." in rising.caveats()
    assert math.isfinite(rising.interval(lambda law: law.optimum(1e18).num_parameters).high)


def test_the_same_runs_and_seed_give_the_same_answer() -> None:
    runs = ladder(0.003, seed=1)
    first, again, other = (fit_chinchilla(*runs, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.law == other.law
    assert first.draws != other.draws
    order = list(range(36))[::-1]
    mirrored = fit_chinchilla(*([values[i] for i in order] for values in runs))
    assert mirrored.law.beta == pytest.approx(first.law.beta, rel=RECOVERED)


def test_the_fit_knows_how_far_it_reaches() -> None:
    fit = fit_chinchilla(*ladder(0.003, seed=0))
    low, high = fit.law.fitted_range.flops
    assert low == pytest.approx(6 * 3e6 * 6e6, rel=1e-12)
    assert fit.caveats(flops=high) == ()
    assert "outside what the law was fitted on" in fit.caveats(flops=2 * high)[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"loss": [3.0]}, "36, 36 and 1 values"),
        ({"loss": [0.0] * 36}, r"received 0\.0"),
        ({"num_parameters": [1e6] * 36}, "36 runs of 1 sizes"),
        ({"outlier_threshold": 1.0}, "from 3, or None"),
        ({"exponent_bounds": (0.0, 1.0)}, "two rising numbers"),
        ({"num_draws": 5}, "a whole number from 50"),
    ],
)
def test_what_cannot_be_fitted_is_refused(change: dict, text: str) -> None:
    sizes, texts, losses = ladder(0.003, seed=0)
    with pytest.raises(ConfigError, match=text):
        fit_chinchilla(**{"num_parameters": sizes, "tokens": texts, "loss": losses, **change})


def test_runs_at_one_ratio_of_tokens_to_parameters_are_refused() -> None:
    sizes = [3e6 * 1.5**step for step in range(12)]
    texts = [20 * n for n in sizes]
    with pytest.raises(ConfigError, match="in one line"):
        fit_chinchilla(sizes, texts, [TRUE.loss(n, d) for n, d in zip(sizes, texts, strict=True)])
    with pytest.raises(ConfigError, match="at least 9 runs"):
        fit_chinchilla(sizes[:8], texts[:8], [3.0] * 8)
