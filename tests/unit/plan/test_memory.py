"""The closed form of optimizer states against every cell of the published table."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adafrugal.core.errors import ConfigError
from adafrugal.plan.memory import (
    GIB_BYTES,
    TABLE_DENSITIES,
    TABLE_MODELS,
    adamw_state_bytes,
    split_state_bytes,
    state_bytes_table,
)
from adafrugal.plan.shapes import PRESETS

# GiB with float32 moments: AdamW, then densities .25, .15, .05, 0.
PUBLISHED_GIB = {
    "llama-60m": ("0.43", ".291", ".272", ".254", ".244"),
    "llama-130m": ("1.00", ".525", ".461", ".398", ".366"),
    "llama-350m": ("2.74", "1.052", ".827", ".601", ".489"),
    "llama-1b": ("9.98", "3.227", "2.327", "1.427", ".977"),
    "llama-7b": ("50.21", "14.018", "9.193", "4.368", "1.955"),
}

NUM_PARAMETERS = st.integers(0, 10**12)
DENSITY = st.floats(0.0, 1.0)


def test_every_cell_of_the_published_table() -> None:
    rows = state_bytes_table()
    assert tuple(row.model for row in rows) == TABLE_MODELS == tuple(PUBLISHED_GIB)
    for row in rows:
        assert tuple(row.split_bytes) == TABLE_DENSITIES
        cells = [f"{row.adamw_bytes / GIB_BYTES:.2f}"]
        cells += [f"{held / GIB_BYTES:.3f}" for held in row.split_bytes.values()]
        assert [cell.lstrip("0") for cell in cells] == [cell.lstrip("0") for cell in PUBLISHED_GIB[row.model]]
        assert row.num_parameters == PRESETS.create(row.model).num_parameters


def test_what_a_moving_density_saves_at_7b() -> None:
    row = state_bytes_table(["llama-7b"])[0]
    assert f"{(row.split_bytes[0.25] - row.split_bytes[0.05]) / GIB_BYTES:.2f}" == "9.65"
    half = state_bytes_table(["llama-7b"], bytes_per_moment=2)[0]
    assert f"{(half.split_bytes[0.25] - half.split_bytes[0.05]) / GIB_BYTES:.2f}" == "4.83"


@given(NUM_PARAMETERS, NUM_PARAMETERS, DENSITY, DENSITY)
def test_lower_density_never_needs_more(num_stateful: int, num_split: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert split_state_bytes(num_stateful, num_split, low) <= split_state_bytes(num_stateful, num_split, high)


@given(NUM_PARAMETERS, NUM_PARAMETERS)
def test_the_ends_of_density_are_exact(num_stateful: int, num_split: int) -> None:
    assert split_state_bytes(num_stateful, num_split, 1.0) == adamw_state_bytes(num_stateful + num_split)
    assert split_state_bytes(num_stateful, num_split, 0.0) == adamw_state_bytes(num_stateful)


def test_one_moment_of_two_bytes_is_a_quarter() -> None:
    assert adamw_state_bytes(100, bytes_per_moment=2, num_moments=1) == 200
    assert split_state_bytes(100, 40, 0.25, bytes_per_moment=2, num_moments=1) == 220.0


@pytest.mark.parametrize("density", [-0.1, 1.1, math.nan, 25])
def test_a_density_outside_the_unit_interval_is_refused(density: float) -> None:
    with pytest.raises(ConfigError, match=r"allowed is a share in \[0, 1\]. Write 0.25 for a quarter."):
        split_state_bytes(1, 1, density)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_split=-1: received -1; allowed is a count from 0"):
        split_state_bytes(1, -1, 0.5)
    with pytest.raises(ConfigError, match="num_parameters=-1"):
        adamw_state_bytes(-1)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'llama-1b'"):
        state_bytes_table(["llama1b"])
