"""Bases of matrices: when they are worked out, at what size, and where, also on a device that cannot factorise."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from adafrugal import FRUGAL, AdaFRUGAL, GaLore, param_groups
from adafrugal.core.rng import named_generator
from adafrugal.optim import bases
from problems import draw, split_group, tiny_model, train_tiny


class Watch(TorchDispatchMode):
    """Notes the shorter side of every matrix that is factorised."""

    def __init__(self) -> None:
        super().__init__()
        self.sides: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "linalg" in str(func):
            self.sides.append(min(args[0].shape[-2:]))
        return func(*args, **(kwargs or {}))


def test_the_defaults_factorise_nothing() -> None:
    """Refreshes included; with a basis on the shorter side, GaLore does, and is seen."""
    sides = {}
    for method in (FRUGAL, AdaFRUGAL, GaLore):
        model = tiny_model()
        opt = method(model, update_gap=2, **({"total_steps": 6} if method is AdaFRUGAL else {}))
        with Watch() as watch:
            train_tiny(model, opt, range(6))
        assert opt.split_groups[0]["refreshed_at"] == 4
        sides[method] = set(watch.sides)
    assert sides == {FRUGAL: set(), AdaFRUGAL: set(), GaLore: {32}}


def test_a_vocabulary_of_256_000_costs_a_factorisation_of_64() -> None:
    """A basis lies on the shorter side, so that no limit on the longer one is needed."""
    table = nn.Parameter(torch.zeros(256_000, 64))
    opt = GaLore(split_group([table], ["table"]), 1e-2, density=0.25)
    table.grad = torch.zeros_like(table)
    table.grad[:500] = draw((500, 64), 0, torch.float32)
    with Watch() as watch:
        opt.step()
    assert set(watch.sides) == {64}
    assert opt.state[table]["basis"].shape == (1, 64, 16)
    captured = (table.grad[:500] @ opt.state[table]["basis"][0]).square().sum()
    best = torch.linalg.svdvals(table.grad[:500].double())[:16].square().sum()
    assert captured.item() == pytest.approx(best.item(), rel=1e-5)  # a float32 product against a float64 one
    groups = param_groups(nn.Sequential(nn.Embedding(256_000, 64, device="meta"), nn.Linear(64, 64, device="meta")))
    assert [g["role"] for g in groups if g["label"] == "embeddings"] == ["stateful"], "by rule it has no basis at all"


def test_beyond_the_exact_side_a_range_finder_finds_what_matters_with_small_factorisations() -> None:
    side, rank, width = 4200, 6, 8
    assert side > bases._EXACT_SIDE
    left, right = draw((side, rank), 0, torch.float32), draw((side, rank), 1, torch.float32)
    gradient = (left @ right.T)[None]
    with Watch() as watch:
        basis = bases.leading_basis(gradient, width, named_generator(0, "frame", "w", 0))
    assert basis.shape == (1, side, width)
    assert max(watch.sides) <= width + 16, "of the width and sixteen more"
    lost = gradient[0] - (gradient[0] @ basis[0]) @ basis[0].T
    # Of rank six there is nothing left but the roundings of sums of 4200 float32 numbers.
    assert lost.norm() < 1e-4 * gradient.norm()
    gram = basis[0].T @ basis[0]
    torch.testing.assert_close(gram, torch.eye(width), rtol=0, atol=1e-5)  # sums of 4200 float32 numbers below 1


class FarAway(Tensor):
    """A tensor on a device of torch's that no machine has, with its numbers on the host."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "FarAway":
        return Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=held.dtype, device="lazy")

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("only inside of Device")


class Device(TorchDispatchMode):
    """What that device does: everything, but for factorisations, which it lacks or gets wrong."""

    def __init__(self, lacks: bool) -> None:
        super().__init__()
        self.lacks = lacks

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = dict(kwargs or {})
        far = FarAway in types
        if given.get("device") is not None:
            far = torch.device(given["device"]).type == "lazy"
            given["device"] = "cpu"
        factorises = far and "linalg" in str(func)
        if factorises and self.lacks:
            raise NotImplementedError(f"{func} is not implemented for this device")
        on_host, named = tree_map_only(FarAway, lambda tensor: tensor.held, (args, given))
        out = func(*on_host, **named)
        if factorises:
            out = tree_map_only(Tensor, lambda tensor: tensor + 0.1, out)
        return tree_map_only(Tensor, FarAway, out) if far else out


@pytest.mark.parametrize(("lacks", "said"), [(True, "is not implemented"), (False, "that are not orthogonal")])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "range finder"])
def test_a_device_that_cannot_factorise_is_helped_by_the_host_and_warned_of_once(lacks, said, exact, monkeypatch):
    """As Apple's GPUs: missing, or vectors that are not orthogonal. No such device is here, so one is made up."""
    monkeypatch.setattr(bases, "_warned", set())
    monkeypatch.setattr(bases, "_EXACT_SIDE", 4096 if exact else 16)
    left, right = draw((40, 5), 0, torch.float32), draw((60, 5), 1, torch.float32)
    gradient = (left @ right.T)[None]

    def three_refreshes() -> None:
        for k in range(3):
            far = bases.leading_basis(gradient.to("lazy"), 5, named_generator(0, "frame", "w", k))
            basis = far.cpu()[0]
            assert type(far) is FarAway
            torch.testing.assert_close(basis.T @ basis, torch.eye(5), rtol=0, atol=1e-5)  # sums of 40 float32 numbers
            lost = gradient[0] - basis @ (basis.T @ gradient[0])
            assert lost.norm() < 1e-4 * gradient.norm(), "of rank five, five directions hold all"

    with Device(lacks), pytest.warns(UserWarning, match=f"on lazy .*{said}.*using the CPU for it") as seen:
        three_refreshes()
    assert len(seen) == 1
