"""What fits, in which order, and that more room or less appetite never fits less."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adafrugal import FRUGAL, SignSGD, param_groups
from adafrugal.core.errors import ConfigError
from adafrugal.plan.parallel import Layout
from adafrugal.plan.planner import FRAMES, Candidate, Method, Request, _Search, longest_that_fits, plan
from adafrugal.plan.shapes import PRESETS
from adafrugal.plan.units import UNITS

MIB, GIB = UNITS["MiB"], UNITS["GiB"]
METHODS = [
    Method(name="adamw", make=lambda model: torch.optim.AdamW(model.parameters())),
    Method(name="frugal", make=lambda model: FRUGAL(param_groups(model), density=0.25)),
    Method(name="signsgd", make=lambda model: SignSGD(param_groups(model))),
]


def request(**changed) -> Request:
    shape = replace(PRESETS.create("llama-60m"), num_layers=2)
    given = {"shape": shape, "memory_bytes": 4 * GIB, "sequence_length": 256, "sequences": 8, "methods": METHODS}
    return Request(**given | changed)


def test_all_that_is_said_to_fit_does_and_the_fastest_comes_first() -> None:
    found = plan(request())
    assert found.fitting
    assert all(one.needed_bytes <= found.usable_bytes for one in found.fitting)
    costs = [one.relative_cost for one in found.fitting]
    assert costs == sorted(costs)
    assert found.usable_bytes == int(4 * GIB * 0.98) - FRAMES["cpu"].fixed_bytes
    for one in found.fitting:
        assert one.setting.micro_batch * one.setting.accumulation == 8, "the global batch is kept"
        terms = (one.peak.weight_bytes, one.peak.gradient_bytes, one.peak.state_bytes, one.peak.index_bytes,
                 one.peak.activation_bytes, one.peak.temporary_bytes)  # fmt: skip
        assert sum(terms) == one.needed_bytes


def test_the_micro_batch_is_the_largest_that_fits() -> None:
    """One by one, the larger divisors of the batch do not fit."""
    asked = request(memory_bytes=1200 * MIB)
    search, found = _Search(asked), plan(asked)
    assert {one.setting.micro_batch for one in found.fitting} - {8}, "some are cut"
    for one in found.fitting:
        setting = one.setting
        for micro in (2, 4, 8):
            if micro > setting.micro_batch:
                larger = search.setting(micro, setting.precision, setting.checkpointing, False)
                assert search.candidate(one.method, larger).needed_bytes > found.usable_bytes


def test_of_those_as_fast_the_first_named_optimizer_is_recommended() -> None:
    assert plan(request()).recommended.method == "adamw"
    assert plan(request(methods=METHODS[::-1])).recommended.method == "signsgd"


def test_a_fused_backward_is_planned_only_where_it_can_be() -> None:
    def fused(found) -> set[str]:
        return {one.method for one in found.fitting if one.setting.fused_backward}

    assert fused(plan(request())) == set(), "gradients are clipped"
    assert fused(plan(request(clips=False))) == {"frugal", "signsgd"}, "torch's AdamW cannot"
    assert fused(plan(request(clips=False, layout=Layout(kind="ddp", num_processes=2)))) == set()
    for one in plan(request(clips=False)).fitting:
        assert not one.setting.fused_backward or one.setting.accumulation == 1


def test_each_change_says_what_it_saves() -> None:
    found = plan(request())
    best = found.recommended
    changes = {change.what: change for change in found.changes}
    assert {"checkpointing", "bfloat16", "frugal", "signsgd"} - {best.setting.precision} <= changes.keys() | {"float32"}
    for change in found.changes:
        assert change.saved_bytes == best.needed_bytes - change.candidate.needed_bytes
    assert [c.saved_bytes for c in found.changes] == sorted((c.saved_bytes for c in found.changes), reverse=True)


def test_when_nothing_fits_the_missing_bytes_are_those_of_the_smallest() -> None:
    found = plan(request(memory_bytes=700 * MIB, sequence_length=1024))
    assert found.fitting == ()
    assert found.recommended is None
    assert found.missing_bytes == found.smallest.needed_bytes - found.usable_bytes > 0
    enough = FRAMES["cpu"].fixed_bytes + found.smallest.needed_bytes
    assert plan(request(memory_bytes=int(enough / 0.98) + 2, sequence_length=1024)).fitting
    shorter = longest_that_fits(request(memory_bytes=700 * MIB, sequence_length=1024))
    if shorter is not None:
        assert plan(request(memory_bytes=700 * MIB, sequence_length=shorter)).fitting
        assert not plan(request(memory_bytes=700 * MIB, sequence_length=shorter + 64)).fitting


def test_requests_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--length 4096.*at most the 1024 positions"):
        request(sequence_length=4096)
    with pytest.raises(ConfigError, match=r"sequences=0"):
        request(sequences=0)
    with pytest.raises(ConfigError, match="at least one of each"):
        request(methods=[])


def keys(fitting: tuple[Candidate, ...]) -> dict:
    return {(c.method, c.setting.precision, c.setting.checkpointing): c.setting.micro_batch for c in fitting}


@given(memory=st.integers(700, 6000), more=st.integers(0, 2000))
@settings(max_examples=15, deadline=None)
def test_more_memory_never_fits_less(memory: int, more: int) -> None:
    less, greater = (keys(plan(request(memory_bytes=size * MIB)).fitting) for size in (memory, memory + more))
    assert less.keys() <= greater.keys()
    assert all(micro <= greater[key] for key, micro in less.items())


@given(low=st.sampled_from([0.0, 0.05, 0.25, 0.5]), more=st.sampled_from([0.05, 0.25, 0.5]))
@settings(max_examples=12, deadline=None)
def test_a_lower_density_never_needs_more(low: float, more: float) -> None:
    def needed(density: float) -> list[int]:
        method = Method(name="frugal", make=lambda model: FRUGAL(param_groups(model), density=density))
        found = plan(request(methods=[method], memory_bytes=64 * GIB))
        return [c.needed_bytes for c in sorted(found.fitting, key=lambda c: c.words())]

    assert all(a <= b for a, b in zip(needed(low), needed(low + more), strict=True))


@given(length=st.integers(2, 15), more=st.integers(0, 6))
@settings(max_examples=15, deadline=None)
def test_a_longer_sequence_never_needs_less(length: int, more: int) -> None:
    def needed(length: int) -> list[int]:
        found = plan(request(sequence_length=length * 48, memory_bytes=64 * GIB))
        return [c.needed_bytes for c in sorted(found.fitting, key=lambda c: c.words())]

    assert all(a <= b for a, b in zip(needed(length), needed(length + more), strict=True))
