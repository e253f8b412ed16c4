"""Nouns of the core: budgets, costs, the ledger, catalogues, named generators, errors of four facts."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adafrugal.core.catalog import Catalog
from adafrugal.core.errors import BudgetError, ConfigError, NonFiniteError, NotSupportedError, nearest_name
from adafrugal.core.ledger import Ledger
from adafrugal.core.rng import derive_seed, named_generator
from adafrugal.core.values import Budget, Cost

costs = st.builds(
    Cost,
    flops=st.integers(0, 10**18),
    tokens=st.integers(0, 10**12),
    seconds=st.floats(0, 1e6),
    peak_bytes=st.integers(0, 10**12),
    written_bytes=st.integers(0, 10**12),
)


@given(a=costs, b=costs, c=costs)
def test_costs_add_up_in_any_order_and_peaks_do_not(a, b, c) -> None:
    left, right = (a + b) + c, c + (b + a)
    assert (left.flops, left.tokens, left.written_bytes) == (right.flops, right.tokens, right.written_bytes)
    assert left.peak_bytes == right.peak_bytes == max(a.peak_bytes, b.peak_bytes, c.peak_bytes)
    assert math.isclose(left.seconds, right.seconds, abs_tol=1e-6)
    assert a + Cost() == a


def test_a_budget_spends_itself_by_the_limit_that_binds() -> None:
    budget = Budget(seconds=100.0, steps=10, tokens=1000, flops=1e6)
    cost = Cost(seconds=20.0, tokens=500, flops=100_000)
    assert budget.shares(steps=3, cost=cost) == {"seconds": 0.2, "steps": 0.3, "tokens": 0.5, "flops": 0.1}
    assert budget.share(steps=3, cost=cost) == 0.5
    assert budget.binding(steps=3, cost=cost) == "tokens"
    assert budget.share(steps=30, cost=cost) == 1.0
    assert Budget().share(steps=5, cost=cost) == 0.0
    assert Budget().binding(steps=5, cost=cost) == "none"


@pytest.mark.parametrize("limit", [0, -1, math.nan, math.inf])
def test_a_limit_is_a_positive_number(limit) -> None:
    with pytest.raises(BudgetError, match=r"budget\.tokens=.*a positive number, or nothing for no limit"):
        Budget(tokens=limit)


def test_the_ledger_bills_everything_and_survives_a_restart() -> None:
    ledger = Ledger()
    ledger.bill("training", Cost(flops=100, tokens=10, seconds=1.5, peak_bytes=7))
    ledger.bill("evaluation", Cost(flops=30, seconds=0.5))
    ledger.bill("training", Cost(flops=100, tokens=10, seconds=1.5, peak_bytes=5))
    assert ledger.activities() == ("training", "evaluation")
    assert ledger.account("training") == Cost(flops=200, tokens=20, seconds=3.0, peak_bytes=7)
    assert ledger.account("never") == Cost()
    assert ledger.total() == Cost(flops=230, tokens=20, seconds=3.5, peak_bytes=7)
    again = Ledger()
    again.load_state_dict(ledger.state_dict())
    assert again.total() == ledger.total()
    again.bill("checkpoint", Cost(written_bytes=5))
    assert "checkpoint" not in ledger.activities(), "nothing is shared"


def test_a_catalogue_names_the_nearest_entry() -> None:
    catalog: Catalog[int] = Catalog("number")
    catalog.add("seven", lambda: 7)
    catalog.add("eight", lambda plus=0: 8 + plus)
    assert catalog.names() == ("seven", "eight")
    assert catalog.create("eight", plus=1) == 9
    with pytest.raises(ConfigError, match=r"number='sevn'.*one of seven, eight.*Did you mean 'seven'\?"):
        catalog.create("sevn")
    with pytest.raises(ValueError, match="in the catalogue already"):
        catalog.add("seven", lambda: 0)


@given(st.integers(), st.text(), st.text(), st.integers())
def test_seeds_are_in_range_and_repeatable(seed, purpose, name, counter) -> None:
    first = derive_seed(seed, purpose, name, counter)
    assert 0 <= first < 2**63
    assert first == derive_seed(seed, purpose, name, counter)


def test_what_a_draw_is_for_decides_it() -> None:
    base = (0, "frame", "w", 3)
    others = [(1, "frame", "w", 3), (0, "rounding", "w", 3), (0, "frame", "v", 3), (0, "frame", "w", 4)]
    assert len({derive_seed(*key) for key in [base, *others]}) == 5
    assert derive_seed(0, "a", "bc") != derive_seed(0, "ab", "c"), "no two keys run together"
    draws = [torch.rand(4, generator=named_generator(*key)) for key in (base, base)]
    assert torch.equal(*draws)


def test_seeds_are_the_same_on_every_machine_and_release() -> None:
    assert derive_seed(0, "frame", "model.layers.0.weight", 7) == 1803959829513689820


def test_an_error_holds_four_facts_and_survives_pickling() -> None:
    error = ConfigError("call(x=1)", 1, "two", "Write 2.")
    assert str(error) == "call(x=1): received 1; allowed is two. Write 2."
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ConfigError
    assert str(again) == str(error)
    assert isinstance(error, ValueError)
    assert isinstance(NotSupportedError("a", "b", "c", "d"), RuntimeError)
    assert isinstance(NonFiniteError("a", "b", "c", "d"), ArithmeticError)
    assert nearest_name("qwertyuiop", ["columns"]) == ""
