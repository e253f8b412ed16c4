"""What every subspace of the catalogue promises, over random shapes and densities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adafrugal.core.errors import ConfigError
from adafrugal.core.rng import named_generator
from adafrugal.optim.blocks import BlockSubspace, Item, layer_of
from adafrugal.optim.frames import BasisFrame, Geometry, LineFrame, RunFrame
from adafrugal.optim.subspaces import SUBSPACES, FixedSubspace, LineSubspace, count_lines
from problems import draw

NAMES = SUBSPACES.names()
LINES = [n for n in NAMES if isinstance(SUBSPACES.create(n), LineSubspace)]
BASES = ["random", "svd"]
BLOCKS = [n for n in NAMES if isinstance(SUBSPACES.create(n), BlockSubspace)]
shapes = st.tuples(st.integers(1, 12), st.integers(1, 12))
densities = st.floats(0.0, 1.0)


def fit(subspace, geometry, width, counter=0, seed=0):
    tensor = draw(geometry.shape, 3)
    return subspace.fit(geometry, tensor, width, named_generator(seed, "frame", "w", counter))


def draws(turn: int) -> torch.Generator:
    return named_generator(0, "share", "", turn)


def items(geometries) -> list[Item]:
    return [Item(f"layers.{i}.weight", g) for i, g in enumerate(geometries)]


@pytest.mark.parametrize("name", LINES + BASES)
@given(shape=shapes, density=densities, other=densities)
@settings(max_examples=40, deadline=None)
def test_a_frame_of_smaller_density_is_a_prefix_of_the_larger_one(name, shape, density, other) -> None:
    subspace = SUBSPACES.create(name)
    geometry = subspace.geometry(shape, False, 1.0)
    full = subspace.full_width(geometry)
    wide, narrow = sorted((count_lines(density, full), count_lines(other, full)), reverse=True)
    large, small = fit(subspace, geometry, wide), fit(subspace, geometry, narrow)
    if narrow == 0 or (wide == full and narrow < full and name in LINES):
        return  # full width is in natural order, so that keeping moves nothing
    if isinstance(large, BasisFrame):
        # A QR of more columns differs in the last bits, an eigenvector not at all.
        torch.testing.assert_close(large.prefix(narrow).basis, small.basis, rtol=0, atol=1e-12)
    else:
        assert large.prefix(narrow).lines().tolist() == small.lines().tolist()


@pytest.mark.parametrize("name", LINES + BASES)
@given(shape=shapes, density=densities)
@settings(max_examples=40, deadline=None)
def test_up_after_down_is_an_orthogonal_projection_and_the_rest_is_what_is_left(name, shape, density) -> None:
    subspace = SUBSPACES.create(name)
    geometry = subspace.geometry(shape, False, 1.0)
    frame = fit(subspace, geometry, count_lines(density, subspace.full_width(geometry)))
    full = draw(geometry.shape, 5)
    part = frame.down(full)
    assert tuple(part.shape) == frame.state_shape == subspace.state_shape(geometry, frame.width)
    up = torch.zeros_like(full)
    frame.merge(up, part)
    assert torch.dot((full - up).flatten(), up.flatten()).abs() < 1e-10, "orthogonal"
    torch.testing.assert_close(frame.down(up), part, rtol=0, atol=1e-12)  # float64 products of 12 numbers of order 1
    if frame.width == subspace.full_width(geometry):
        torch.testing.assert_close(up, full, rtol=0, atol=1e-12)
        if isinstance(frame, BasisFrame):
            assert not frame.rest(full, part).any(), "at full rank what is left is noise, and noise is zero"


@pytest.mark.parametrize("name", NAMES)
def test_frame_bytes_are_what_the_frame_holds(name) -> None:
    subspace = SUBSPACES.create(name)
    for shape in ((16, 24), (24, 16), (3, 7)):
        geometry = subspace.geometry(shape, False, 0.25)
        full = subspace.full_width(geometry)
        widths = (0, full) if isinstance(subspace, (BlockSubspace, FixedSubspace)) else (0, 1, full // 2, full)
        for width in widths:
            frame = subspace.fit(geometry, draw(geometry.shape, 1, torch.float32), width, named_generator(0, "f"))
            held = [t for t in vars(frame).values() if isinstance(t, torch.Tensor)]
            expected = sum(t.untyped_storage().nbytes() for t in held)
            assert frame.frame_bytes == expected == subspace.frame_bytes(geometry, width, torch.float32)


@pytest.mark.parametrize("name", BASES)
def test_a_basis_is_orthonormal_and_owns_its_storage(name) -> None:
    for shape in ((40, 60), (60, 40), (50, 50)):
        geometry = Geometry.of(shape)
        frame = SUBSPACES.create(name).fit(geometry, draw(shape, 2, torch.float32), 10, named_generator(0, "f"))
        assert isinstance(frame, BasisFrame)
        gram = torch.bmm(frame.basis.mT, frame.basis)[0]
        torch.testing.assert_close(gram, torch.eye(10), rtol=0, atol=1e-6)  # ten float32 products of 40 numbers
        assert frame.basis.untyped_storage().nbytes() == 40 * 10 * 4 if min(shape) == 40 else True
        assert frame.prefix(4).basis.untyped_storage().nbytes() == min(shape) * 4 * 4


def test_svd_finds_the_leading_singular_subspace() -> None:
    for shape in ((30, 50), (50, 30), (40, 40)):
        grad = draw(shape, 4)
        frame = SUBSPACES.create("svd").fit(Geometry.of(shape), grad, 5, named_generator(0, "f"))
        values = torch.linalg.svdvals(grad)
        captured = frame.down(grad.reshape(1, *shape)).square().sum()
        torch.testing.assert_close(captured, values[:5].square().sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", [*LINES, "random", "svd"])
def test_windows_depend_on_seed_name_and_cursor_and_on_nothing_else(name) -> None:
    subspace = SUBSPACES.create(name)
    geometry = subspace.geometry((64, 96), False, 0.1)

    def key(seed: int, who: str, cursor: int) -> list:
        frame = subspace.fit(geometry, draw(geometry.shape, 9), 5, named_generator(seed, "frame", who, cursor))
        return frame.basis.flatten().tolist() if isinstance(frame, BasisFrame) else frame.lines().tolist()

    assert key(0, "w", 0) == key(0, "w", 0)
    if name != "svd":
        others = [key(0, "w", 1), key(0, "v", 0), key(1, "w", 0)]
        assert all(other != key(0, "w", 0) for other in others)


@pytest.mark.parametrize("name", ["columns", "rows", "columns_scattered", "rows_scattered"])
def test_every_line_is_chosen_equally_often_edges_included(name) -> None:
    """Without wrapping, the first and last columns would almost never be chosen."""
    subspace, geometry = SUBSPACES.create(name), Geometry.of((20, 20))
    counts = torch.zeros(20)
    num_draws = 2000
    for cursor in range(num_draws):
        counts[fit(subspace, geometry, 5, cursor).lines()] += 1
    # Each count is binomial with mean 500 and deviation 19.4; five deviations.
    assert (counts - num_draws / 4).abs().max() < 5 * math.sqrt(num_draws * 0.25 * 0.75)


def test_stripes_hold_the_same_window_each_and_balance_a_shard_over_rows() -> None:
    subspace = SUBSPACES.create("rows_striped")
    assert subspace.geometry((64, 8), False, 0.25) == Geometry(8, 8, 8)
    assert subspace.geometry((12, 8), False, 0.25) == Geometry(2, 6, 8), "4 does not leave a line a stripe"
    assert subspace.geometry((7, 8), False, 0.25) == Geometry(1, 7, 8)
    frame = fit(subspace, Geometry(8, 8, 8), 2)
    chosen = torch.zeros(64, 8)
    frame.merge(chosen.view(8, 8, 8), torch.ones(8, 2, 8))
    assert chosen.view(2, 32, 8).sum(dim=(1, 2)).tolist() == [64.0, 64.0], "either half has its share"


@given(density=densities, length=st.integers(0, 1000))
def test_one_rounding_rule(density, length) -> None:
    count = count_lines(density, length)
    assert 0 <= count <= length
    if density == 0.0:
        assert count == 0
    elif length > 0:
        assert count >= 1
        assert count == max(1, math.floor(density * length + 0.5))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_take_turns_without_replacement(name) -> None:
    subspace = SUBSPACES.create(name)
    members = items([Geometry.of((8, 8))] * 10)
    cursor, taken = 0, []
    for _ in range(10):
        widths, cursor = subspace.share(members, 0.21, cursor, draws)
        chosen = [i for i, w in enumerate(widths) if w]
        assert all(w in (0, 8) for w in widths)
        taken += chosen
    per_turn = 1 if name.startswith("one_layer") else 2
    assert len(taken) == 10 * per_turn
    for turn in range(per_turn):
        assert sorted(taken[10 * turn : 10 * turn + 10]) == list(range(10)), (
            "all have had their turn before any has two"
        )


def test_blocks_count_elements_and_not_tensors() -> None:
    sizes = [(4, 4), (4, 40), (4, 4), (4, 40), (4, 4), (4, 40)]
    members = items([Geometry.of(s) for s in sizes])
    total = sum(g.geometry.numel for g in members)
    for cursor in range(20):
        widths, _ = SUBSPACES.create("blocks").share(members, 0.34, cursor, draws)
        held = sum(m.geometry.numel for m, w in zip(members, widths, strict=True) if w)
        assert 0 < held <= round(0.34 * total)


def test_density_one_makes_every_block_stateful_wherever_the_cursor_stands() -> None:
    members = items([Geometry.of((4, 4))] * 5)
    for cursor in range(10):
        widths, _ = SUBSPACES.create("blocks").share(members, 1.0, cursor, draws)
        assert widths == [4] * 5


def test_blocks_are_the_same_in_whatever_order_parameters_are_listed() -> None:
    members = [Item(f"layers.{i}.weight", Geometry.of((4, 4 + i))) for i in range(12)]
    shuffled = [members[i] for i in torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()]
    for name in ("blocks", "blocks_ascending", "layers"):
        for cursor in range(5):
            first, _ = SUBSPACES.create(name).share(members, 0.3, cursor, draws)
            second, _ = SUBSPACES.create(name).share(shuffled, 0.3, cursor, draws)
            by_name = {m.name: w for m, w in zip(shuffled, second, strict=True)}
            assert [by_name[m.name] for m in members] == first


def test_layers_are_whole_and_in_numeric_order() -> None:
    members = [Item(f"m.layers.{i}.{k}", Geometry.of((4, 4))) for i in (10, 2, 9) for k in ("q", "k")]
    widths, cursor = SUBSPACES.create("layers_ascending").share(members, 0.4, 0, draws)
    assert [m.name for m, w in zip(members, widths, strict=True) if w] == ["m.layers.2.q", "m.layers.2.k"]
    widths, _ = SUBSPACES.create("layers_ascending").share(members, 0.4, cursor, draws)
    assert [m.name for m, w in zip(members, widths, strict=True) if w] == ["m.layers.9.q", "m.layers.9.k"]
    assert layer_of("transformer.h.11.mlp.c_fc.weight") == "transformer.h.11"


def test_a_block_larger_than_the_budget_is_an_error_that_names_the_smallest_density() -> None:
    members = items([Geometry.of((10, 10)), Geometry.of((10, 20))])
    with pytest.raises(ConfigError, match=r"at least 0\.666667 here, since a tensor of 200 elements must fit"):
        SUBSPACES.create("blocks").check(members, 0.5, 0.5)
    SUBSPACES.create("blocks").check(members, 0.67, 0.34)
    with pytest.raises(ConfigError, match="density_end"):
        SUBSPACES.create("blocks").check(members, 0.67, 0.3)


def test_an_expert_stack_is_seen_as_matrices_and_a_convolution_as_one() -> None:
    assert Geometry.of((4, 8, 6), stacked=True) == Geometry(4, 8, 6)
    assert Geometry.of((8, 3, 5, 5)) == Geometry(1, 8, 75)
    assert Geometry.of((1, 3, 5, 5)) == Geometry(1, 1, 75)
    assert Geometry.of((1, 8, 6), stacked=True) == Geometry(1, 8, 6)
    assert Geometry.of(()) == Geometry(1, 1, 1)
    assert Geometry.of((0, 4)) == Geometry(1, 0, 4)


@pytest.mark.parametrize("axis", ["rows", "cols"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_run_and_what_lies_outside_of_it_cover_a_tensor_once(axis, data) -> None:
    geometry = Geometry(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    length = geometry.length(axis)
    width = data.draw(st.integers(0, length))
    offset = 0 if width == length else data.draw(st.integers(0, length - 1))
    frame = RunFrame(geometry, axis, offset, width)
    touched = torch.zeros(geometry.shape)
    frame.merge(touched, torch.ones(frame.state_shape))
    pieces, rest = frame.pieces(), frame.rest_pieces()
    if pieces is None or rest is None:
        assert axis == "cols"
        assert 0 < width < length
        return
    flat = torch.zeros(geometry.numel)
    for start, _, count in pieces:
        flat[start : start + count] += 1
    assert torch.equal(flat.view(geometry.shape), touched)
    state = torch.arange(touched.sum().item())
    full = torch.full((geometry.numel,), -1.0)
    for start, position, count in pieces:
        full[start : start + count] = state[position : position + count]
    if width:
        assert torch.equal(frame.down(full.view(geometry.shape)).flatten(), state)
    for start, _, count in rest:
        flat[start : start + count] += 1
    assert torch.equal(flat, torch.ones(geometry.numel))


def test_scattered_indices_are_int32() -> None:
    frame = fit(SUBSPACES.create("columns_scattered"), Geometry.of((8, 100)), 20)
    assert isinstance(frame, LineFrame)
    assert frame.index.dtype == torch.int32


@pytest.mark.parametrize("name", NAMES)
def test_the_first_choice_at_a_refresh_is_its_default(name) -> None:
    choices = SUBSPACES.create(name).on_refresh_choices
    assert choices[0] == ("project" if name in BASES else "keep")
