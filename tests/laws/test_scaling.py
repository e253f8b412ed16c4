"""Scaling laws: published values to the last digit, closed forms against searches, derivatives against differences."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adafrugal.core.errors import ConfigError
from adafrugal.laws.scaling import DEFAULT_LAW, LAWS, Allocation, ChinchillaLaw, KaplanLaw, RepeatedDataLaw

# Four roundings of powers in float64.
FLOAT64 = 1e-12

# A golden-section search sees a valley's floor to the square root of float64's 2e-16; the loss holds a constant beside.
SEARCHED = 1e-6

# Central differences with steps of 1e-5: the error is 1e-10 times the third derivative, and 1e-16 / 1e-5 of rounding.
DIFFERENCED = 1e-6

CHINCHILLAS = ("besiroglu", "chinchilla", "chinchilla-rounded")
flops_values = st.floats(1e15, 1e26)
sizes = st.floats(1e5, 1e12)
texts = st.floats(1e6, 1e14)


def golden_section(loss: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley is least."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(120):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return (low + high) / 2


def difference(function: Callable[[float], float], x: float) -> float:
    """The derivative by ln x, divided by x."""
    step = 1e-5
    return (function(x * math.exp(step)) - function(x * math.exp(-step))) / (2 * step) / x


def test_losses_are_those_of_the_published_constants() -> None:
    repeated = LAWS.create("muennighoff")
    assert repeated.loss(6.34e9, 242e9, 25e9) == pytest.approx(2.2256440889984477, rel=FLOAT64)
    assert repeated.loss(8.67e9, 178e9, 25e9) == pytest.approx(2.2269634075087867, rel=FLOAT64)
    # Each term by itself, at N and D where its power is a round number.
    rounded = LAWS.create("chinchilla-rounded")
    assert rounded.loss(1e50, math.inf) - 1.69 == pytest.approx(406.4e-17, abs=FLOAT64)
    assert rounded.loss(math.inf, 1e25) == pytest.approx(1.69 + 410.7e-7, rel=FLOAT64)
    assert rounded.loss(70e9, 1.4e12) == pytest.approx(1.69 + 406.4 / 70e9**0.34 + 410.7 / 1.4e12**0.28, rel=FLOAT64)
    assert LAWS.create("besiroglu").loss(1e10, 1e10) == pytest.approx(
        1.8172 + 482.01 * 10**-3.478 + 2085.43 * 10**-3.658, rel=FLOAT64
    )
    assert LAWS.create("chinchilla").loss(math.inf, math.inf) == pytest.approx(math.exp(0.5267), rel=FLOAT64)
    kaplan = LAWS.create("kaplan")
    assert kaplan.loss(8.8e10, math.inf) == pytest.approx(1000**0.076, rel=FLOAT64)
    assert kaplan.loss(math.inf, 5.4e10) == pytest.approx(1000**0.095, rel=FLOAT64)
    joint = LAWS.create("kaplan-joint")
    assert joint.loss(6.4e13, 1.8e13) == pytest.approx(2**0.103, rel=FLOAT64)


def test_tokens_per_parameter_are_the_published_ones() -> None:
    expected = {"chinchilla": (23, 34, 59), "chinchilla-rounded": (32, 50, 93), "besiroglu": (24, 22, 18)}
    for name, ratios in expected.items():
        law = LAWS.create(name)
        found = tuple(round(law.optimum(flops).tokens_per_parameter) for flops in (1e19, 1e21, 5.76e23))
        assert found == ratios
    # A PF-day is the unit of Kaplan's table: 1.3e9 parameters, ten times the compute for 5.37 times the model.
    kaplan = LAWS.create("kaplan")
    assert kaplan.optimum(8.64e19).num_parameters == pytest.approx(1.3e9, rel=FLOAT64)
    assert kaplan.optimum(8.64e20).num_parameters == pytest.approx(1.3e9 * 10**0.73, rel=FLOAT64)


def test_epochs_are_worth_what_the_paper_says() -> None:
    law = LAWS.create("muennighoff")
    assert [round(law.effective_epochs(n), 2) for n in (0.5, 1, 4, 16)] == [0.5, 1, 3.73, 10.58]
    assert law.effective_epochs(1e9) == pytest.approx(1 + 15.387756, rel=FLOAT64)
    assert law.effective_tokens(4e9, 1e9) == pytest.approx(law.effective_epochs(4) * 1e9, rel=FLOAT64)
    assert law.effective_tokens(1e9, 4e9) == 1e9


@settings(deadline=None)
@given(flops=flops_values, name=st.sampled_from(CHINCHILLAS))
def test_the_closed_form_is_what_a_search_finds(flops: float, name: str) -> None:
    law = LAWS.create(name)
    best = law.optimum(flops)
    assert best.flops == pytest.approx(flops, rel=FLOAT64)

    def excess(log_size: float) -> float:
        return law.A * math.exp(-law.alpha * log_size) + law.B * (flops / 6 / math.exp(log_size)) ** -law.beta

    found = math.exp(golden_section(excess, math.log(best.num_parameters) - 3, math.log(best.num_parameters) + 4))
    assert best.num_parameters == pytest.approx(found, rel=SEARCHED)
    assert law.flops_for_loss(law.loss(*best)) == pytest.approx(flops, rel=1e-8)  # the loss less E loses digits
    assert law.optimum_for_tokens(best.tokens).num_parameters == pytest.approx(best.num_parameters, rel=1e-10)


@settings(deadline=None)
@given(flops=flops_values, max_parameters=sizes, max_tokens=texts, name=st.sampled_from((*CHINCHILLAS, "kaplan")))
def test_limits_hold_and_the_rest_is_spent(flops: float, max_parameters: float, max_tokens: float, name: str) -> None:
    law = LAWS.create(name)
    split = law.optimum(flops, max_parameters=max_parameters, max_tokens=max_tokens)
    assert split.num_parameters <= max_parameters
    assert split.tokens <= max_tokens * (1 + FLOAT64)
    if 6 * max_parameters * max_tokens >= flops:
        assert split.flops == pytest.approx(flops, rel=FLOAT64)
    else:
        assert split == (max_parameters, max_tokens)
    free = law.optimum(flops)
    if free.num_parameters <= max_parameters and free.tokens <= max_tokens:
        assert split == free


@settings(deadline=None)
@given(size=sizes, text=texts, unique=texts, more=st.floats(1.01, 100), name=st.sampled_from(LAWS.names()))
def test_loss_falls_in_parameters_in_tokens_and_in_unique_ones(
    size: float, text: float, unique: float, more: float, name: str
) -> None:
    law = LAWS.create(name)
    assert law.loss(size * more, text) <= law.loss(size, text)
    assert law.loss(size, text * more) <= law.loss(size, text)
    if isinstance(law, RepeatedDataLaw):
        for bigger in ((size * more, text, unique), (size, text * more, unique), (size, text, unique * more)):
            assert law.loss(*bigger) <= law.loss(size, text, unique) * (1 + FLOAT64)
    else:
        assert law.loss(size * more, text) < law.loss(size, text)
        assert law.loss(size, text * more) < law.loss(size, text)


@settings(deadline=None)
@given(size=st.floats(1e6, 1e11), text=st.floats(1e7, 1e12), name=st.sampled_from(LAWS.names()))
def test_marginals_are_derivatives(size: float, text: float, name: str) -> None:
    law = LAWS.create(name)
    if isinstance(law, RepeatedDataLaw):
        kink = law.fresh.optimum_for_tokens(text).num_parameters
        assume(abs(math.log(size / kink)) > 1e-3)
    marginals = law.marginals(size, text)
    assert marginals.per_parameter == pytest.approx(
        difference(lambda n: law.loss(n, text), size), rel=DIFFERENCED, abs=1e-9 / size
    )
    assert marginals.per_token == pytest.approx(
        difference(lambda d: law.loss(size, d), text), rel=DIFFERENCED, abs=1e-9 / text
    )
    flops = 6 * size * text
    along = difference(lambda c: law.loss(*law.optimum(c)), flops) * flops
    assert marginals.per_log_flops == pytest.approx(along, rel=DIFFERENCED, abs=1e-9)
    assert marginals.flops_per_nat == pytest.approx(-flops / along, rel=1e-4)


@settings(deadline=None, max_examples=60)
@given(
    size=st.floats(1e6, 1e11), unique=st.floats(1e8, 1e11), epochs=st.floats(0.1, 40), excess=st.sampled_from((0.1, 8))
)
def test_marginals_with_repetition_are_derivatives(size: float, unique: float, epochs: float, excess: float) -> None:
    law = LAWS.create("muennighoff")
    text = unique * epochs
    kink = law.fresh.optimum_for_tokens(min(text, unique)).num_parameters
    size = kink * excess  # with fewer, and with more parameters than the text is worth
    assume(abs(epochs - 1) > 1e-3)
    marginals = law.marginals(size, text, unique)
    by_size = difference(lambda n: law.loss(n, text, unique), size)
    by_text = difference(lambda d: law.loss(size, d, unique), text)
    assert marginals.per_parameter == pytest.approx(by_size, rel=DIFFERENCED, abs=1e-9 / size)
    assert marginals.per_token == pytest.approx(by_text, rel=DIFFERENCED, abs=1e-9 / text)


@settings(deadline=None, max_examples=20)
@given(flops=st.floats(1e17, 1e25), scarcity=st.floats(0.3, 300))
def test_the_best_split_of_scarce_text_beats_every_other(flops: float, scarcity: float) -> None:
    law = LAWS.create("muennighoff")
    fresh = law.fresh.optimum(flops)
    unique = fresh.tokens / scarcity
    best = law.optimum(flops, unique_tokens=unique)
    assert best.flops == pytest.approx(flops, rel=FLOAT64)
    least = law.loss(*best, unique)
    for step in range(-100, 101):
        size = best.num_parameters * math.exp(step / 10)
        assert least <= law.loss(size, flops / 6 / size, unique) * (1 + FLOAT64)
    if scarcity <= 1:
        assert best == fresh
    else:
        assert best.tokens > unique
    along = difference(lambda c: law.loss(*law.optimum(c, unique_tokens=unique), unique), flops) * flops
    assume(abs(math.log(scarcity)) > 1e-3)
    assert law.marginals(*best, unique).per_log_flops == pytest.approx(along, rel=1e-4, abs=1e-8)


def test_the_best_split_of_scarce_text_is_that_of_the_paper() -> None:
    """9.3e21 FLOPs and 25e9 unique tokens: the paper trains 6.34e9 parameters for 242e9 tokens, by a coarser rule."""
    best = LAWS.create("muennighoff").optimum(9.3e21, unique_tokens=25e9)
    assert best.num_parameters == pytest.approx(6.34e9, rel=0.1)
    assert best.tokens == pytest.approx(242e9, rel=0.1)


def test_a_small_machine_limits_the_model_of_scarce_text() -> None:
    law = LAWS.create("muennighoff")
    split = law.optimum(1e21, unique_tokens=1e9, max_parameters=5e8)
    assert split.num_parameters == pytest.approx(5e8, rel=FLOAT64)
    assert split.flops == pytest.approx(1e21, rel=FLOAT64)


def test_caveats_name_what_is_outside() -> None:
    law = LAWS.create(DEFAULT_LAW)
    assert law.caveats(num_parameters=1e9, tokens=2e10) == ()
    (small,) = law.caveats(flops=1e15)
    assert small.startswith("1e+15 FLOPs is outside what the law was fitted on (1.4e+18 to 1.3e+22)")
    size, text, flops = law.caveats(num_parameters=1e6, tokens=2e7)
    assert [note.split()[1] for note in (size, text, flops)] == ["parameters", "tokens", "FLOPs"]
    for name in ("chinchilla", "chinchilla-rounded", "muennighoff"):
        assert "from 1e+17" in LAWS.create(name).caveats(flops=9e16)[-1]
    assert "repetition hurts" in LAWS.create("muennighoff").caveats()[0]
    assert "excludes embeddings" in LAWS.create("kaplan").caveats()[0]
    assert ChinchillaLaw(E=1, A=1, B=1, alpha=0.3, beta=0.3).caveats(flops=1) == ()


def test_laws_are_values_with_a_source_and_a_nearest_name() -> None:
    assert DEFAULT_LAW in LAWS.names()
    assert all("arXiv" in LAWS.create(name).source for name in LAWS.names())
    assert all(LAWS.create(name) == LAWS.create(name) for name in LAWS.names())
    assert isinstance(LAWS.create("kaplan"), KaplanLaw)
    with pytest.raises(ConfigError, match="Did you mean 'chinchilla'"):
        LAWS.create("chinchila")


@pytest.mark.parametrize(
    "call",
    [
        lambda law: law.loss(0, 1e9),
        lambda law: law.loss(1e9, -1),
        lambda law: law.optimum(math.nan),
        lambda law: law.marginals(1e9, 0),
    ],
)
def test_counts_must_be_positive(call: Callable) -> None:
    for name in LAWS.names():
        with pytest.raises(ConfigError, match="a number above 0"):
            call(LAWS.create(name))


def test_no_compute_reaches_the_floor() -> None:
    with pytest.raises(ConfigError, match=r"above E = 1\.8172"):
        LAWS.create("besiroglu").flops_for_loss(1.8)


def test_an_allocation_unpacks_and_says_its_cost() -> None:
    num_parameters, tokens = split = Allocation(2.0, 30.0)
    assert (num_parameters, tokens, split.flops, split.tokens_per_parameter) == (2, 30, 360, 15)


def test_the_page_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture) -> None:
    page = (Path(__file__).parents[2] / "docs" / "scaling_laws.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    said = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == len(said) == 4
    scope: dict = {}
    for block, expected in zip(blocks, said, strict=True):
        exec(block, scope)
        assert capsys.readouterr().out == expected
