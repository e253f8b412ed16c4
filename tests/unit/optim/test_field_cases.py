"""Situations that stopped training elsewhere and that no other room holds; docs/field_cases.md lists them all."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from adafrugal import FRUGAL, AdaFRUGAL
from adafrugal.core.errors import CheckpointError, NotSupportedError
from adafrugal.optim.subspaces import SUBSPACES
from problems import (
    draw,
    follow,
    gradient_sequence,
    parameters,
    same_parameters,
    split_group,
    tiny_loss,
    tiny_model,
    train_tiny,
)
from tolerances import AS_ADAMW, FLOAT32

PATHS = ["auto", "eager", "foreach"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def through_a_file(state: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class Watch(TorchDispatchMode):
    """Counts the calls that reach a kernel, and those of them that a DTensor's own dispatch has to take apart."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = self.num_distributed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += 1
        self.num_distributed += DTensor in types
        return func(*args, **(kwargs or {}))


# --- saving and loading -------------------------------------------------------------------------------------------


def test_a_load_puts_every_tensor_where_its_parameter_is() -> None:
    """On the meta device, which tells a tensor left behind from one that moved; all else is numbers and names.

    Steps of entry are read, so that they alone stay on the host there.
    """
    settings = {"total_steps": 10, "density": 0.7, "update_gap": 2, "rounding": "kahan"}
    model = tiny_model().bfloat16()
    opt = AdaFRUGAL(model, **settings)
    train_tiny(model, opt, range(7), lambda s, loss: opt.observe(loss))
    there = tiny_model().bfloat16().to("meta")
    second = AdaFRUGAL(there, **settings)
    second.load_state_dict(through_a_file(opt.state_dict()))
    loaded = [(p, k, v) for p, state in second.state.items() for k, v in state.items()]
    assert {p.device.type for p, _, _ in loaded} == {"meta"}, "keyed by parameters that are there"
    assert {k for _, k, v in loaded if isinstance(v, Tensor)} == {
        "exp_avg", "exp_avg_sq", "entered", "compensation",
    }  # fmt: skip
    assert {v.device.type for _, k, v in loaded if isinstance(v, Tensor) and k != "entered"} == {"meta"}
    assert not any(isinstance(v, Tensor) for group in second.param_groups for k, v in group.items() if k != "params")
    assert second.param_groups[0]["losses"] == opt.param_groups[0]["losses"] != []


@pytest.mark.parametrize(("first", "then"), [("auto", "foreach"), ("foreach", "auto"), ("eager", "auto")])
def test_a_state_saved_on_one_path_goes_on_on_another(first, then) -> None:
    """The step is a number on both, so that it never sits on the wrong device."""
    shapes = [(24, 20), (16, 40), (32,)]
    grads = gradient_sequence(shapes, 14, torch.float32)

    def make(path: str) -> tuple[list[nn.Parameter], FRUGAL]:
        params = parameters(shapes, torch.float32)
        groups = [{"params": params[:2], "role": "split"}, {"params": params[2:], "role": "stateful"}]
        opt = FRUGAL(groups, 1e-2, density=0.4, update_gap=3)
        opt.path = path
        return params, opt

    straight, opt = make(first)
    follow(opt, straight, grads[:7])
    others, second = make(then)
    for param, source in zip(others, straight, strict=True):
        param.data.copy_(source)
    second.load_state_dict(through_a_file(opt.state_dict()))
    follow(opt, straight, grads[7:])
    follow(second, others, grads[7:])
    assert {type(state["step"]) for state in second.state.values()} == {int}
    assert [s["step"] for s in second.state.values()] == [s["step"] for s in opt.state.values()]
    for a, b in zip(straight, others, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=FLOAT32)


def through_a_distributed_checkpoint(model: nn.Module, opt: FRUGAL, other: nn.Module, second: FRUGAL, folder) -> None:
    """Saved and loaded as torch's own guide does it; the other side is filled in place."""
    saved = get_optimizer_state_dict(model, opt)
    dcp.save({"optimizer": saved}, checkpoint_id=folder, no_dist=True)
    given = get_optimizer_state_dict(other, second)
    dcp.load({"optimizer": given}, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(other, second, given)


# torch 2.13 warns that one process saves and loads alone, which is what no_dist=True asks for.
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_gradients_left_behind_never_empty_a_distributed_checkpoint(tmp_path) -> None:
    """Where gradients are still there, torch gathers what state there is, and makes none."""
    model, other = tiny_model(), tiny_model()
    opt, second = FRUGAL(model), FRUGAL(other)
    train_tiny(model, opt, range(3))
    tiny_loss(model, 3).backward()
    assert len(get_optimizer_state_dict(model, opt)["state"]) == len(list(model.parameters()))
    tiny_loss(other, 3).backward()
    with pytest.raises(CheckpointError, match=r"no moments after 3 steps.*optimizer\.zero_grad\(\) before"):
        through_a_distributed_checkpoint(model, opt, other, second, tmp_path / "with_gradients")
    assert second.param_groups[0]["step"] == 0, "a refused load changes nothing"
    second.zero_grad()
    through_a_distributed_checkpoint(model, opt, other, second, tmp_path / "without")
    assert len(second.state) == len(list(model.parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_state_of_weights_that_were_frozen_later_comes_back_and_what_is_missing_is_named(tmp_path) -> None:
    """Freeze after the load: torch leaves out what is frozen when it loads, whoever's optimizer it is."""

    def freeze(model: nn.Module) -> None:
        model.blocks[0].requires_grad_(False)

    def thaw(model: nn.Module) -> None:
        model.requires_grad_(True)

    straight, other = tiny_model(), tiny_model()
    opt, second = (FRUGAL(m, density=0.7, update_gap=4) for m in (straight, other))
    train_tiny(straight, opt, range(3))
    opt.zero_grad()
    freeze(straight)
    train_tiny(straight, opt, range(3, 6))
    opt.zero_grad()
    assert any("entered" in state for state in opt.state.values()), "lines of several ages have to come back too"
    other.load_state_dict(straight.state_dict())
    through_a_distributed_checkpoint(straight, opt, other, second, tmp_path)
    assert [second.state[p]["step"] for p in other.blocks[0].parameters()] == [3] * 5, "frozen after three steps"
    freeze(other)
    for model, one in ((straight, opt), (other, second)):
        train_tiny(model, one, range(6, 8))
        thaw(model)
        train_tiny(model, one, range(8, 12))
    assert same_parameters(straight, other)
    saved = get_optimizer_state_dict(straight, opt)
    del saved["state"]["blocks.1.up.weight"]
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter 'blocks\.1\.up\.weight'"):
        set_optimizer_state_dict(other, second, saved)


# --- precision ----------------------------------------------------------------------------------------------------


def in_a_mix(dtype: torch.dtype, grad_dtype: torch.dtype, state_dtype: torch.dtype, path: str, widened: bool) -> Tensor:
    """Weights after five steps with gradients of low precision, or with float32 copies of these."""
    param = nn.Parameter(draw((32, 48), 0, dtype))
    param.grad_dtype = None  # torch 2.13 lets a gradient have a dtype of its own
    opt = FRUGAL(
        [{"params": [("w", param)], "role": "split"}], 1e-2, density=0.3, state_dtype=state_dtype, update_gap=2,
        rounding="kahan" if dtype == torch.float16 else "stochastic",
    )  # fmt: skip
    opt.path = path
    for k in range(5):
        grad = draw((32, 48), 1 + k, grad_dtype)
        param.grad = grad.float() if widened else grad
        opt.step()
    return param.detach().float()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_of_low_precision_counts_as_its_float32_copy(dtype, grad_dtype, state_dtype, path) -> None:
    """The arithmetic is float32: no product, moment or direction is rounded to the gradient's precision."""
    found, expected = (in_a_mix(dtype, grad_dtype, state_dtype, path, widened) for widened in (False, True))
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=0, atol=AS_ADAMW)  # fused for one, not for the other
    else:
        assert torch.equal(found, expected), "the same program, on the same numbers, with the same noise"
    assert not torch.equal(found, draw((32, 48), 0, dtype).float())


@pytest.mark.slow
@pytest.mark.parametrize("mix", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_compiled_a_mix_of_precisions_gives_what_it_gives_plain(mix) -> None:
    dtype, grad_dtype = mix
    torch._dynamo.reset()
    plain, compiled = (in_a_mix(dtype, grad_dtype, torch.bfloat16, path, False) for path in ("eager", "compile"))
    torch._dynamo.reset()
    # Two programs: a bfloat16 moment that is rounded the other way (2**-9) moves a weight by that share of lr, five
    # times; a bfloat16 weight of up to 4 may be rounded to its other neighbour.
    atol = 5 * 1e-2 * 2.0**-8 if dtype == torch.float32 else 2.0**-6
    torch.testing.assert_close(compiled, plain, rtol=0, atol=atol)
    assert ((compiled - plain).abs() > 1e-6).double().mean() < 0.02


def test_a_hundred_refreshes_in_bfloat16_stay_where_they_came_to() -> None:
    """Moments start anew for lines that enter, so that no step is larger than AdamW's largest, however long it runs."""
    lr, gap, steps = 1e-3, 50, 5000
    target = draw((32, 48), 1, torch.float32)
    param = nn.Parameter(target.bfloat16())
    opt = FRUGAL(
        split_group([param], ["w"]), lr, density=0.25, update_gap=gap, state_dtype=torch.bfloat16, rounding="kahan"
    )
    noise = draw((32, 32, 48), 2, torch.float32)
    noise = torch.cat([noise, -noise])  # neither a mean nor a median of its own to be drawn to
    largest, errors = 0.0, []
    weight = param.detach().float()
    for k in range(steps):
        before = weight
        param.grad = (before - target + noise[k % 64]).bfloat16()
        opt.step()
        weight = param.detach().float() + opt.state[param]["compensation"].float()
        if k % gap < 10:
            largest = max(largest, float((weight - before).abs().max()))
        errors.append(float((weight - target).square().mean().sqrt()))
    assert opt.param_groups[0]["refreshed_at"] == steps - gap
    # AdamW's largest direction is (1 - beta1) / sqrt(1 - beta2) = 3.16, after a long rest; a fresh line's first is 1.
    assert lr <= largest < 3.2 * lr
    # A weight that wanders by lr and comes back stays within some tens of them; one that comes loose does not.
    assert max(errors) < 20 * lr


# --- parameters and groups ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_group_without_gradients_waits_and_one_that_has_some_now_and_then_is_adamw(path) -> None:
    """A list of no tensors is no list for a foreach kernel; a step without a gradient is no step of the tensor's."""
    shapes = [(24, 20), (32,), (16, 40), (8,)]
    never, often = slice(0, 2), slice(2, 4)
    grads = [[None, None, *g[2:]] if k % 2 else [None] * 4 for k, g in enumerate(gradient_sequence(shapes, 12))]
    ours, theirs = parameters(shapes), parameters(shapes)
    groups = [{"params": ours[part], "role": "stateful"} for part in (never, often)]
    opt = FRUGAL([*groups, {"params": [nn.Parameter(draw((20, 20), 9))], "role": "split"}], 1e-2)
    opt.path = path
    follow(opt, [*ours, opt.param_groups[2]["params"][0]], [[*g, None] for g in grads])
    follow(torch.optim.AdamW(theirs, 1e-2, weight_decay=0.0), theirs, grads)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)  # float64, the order of operations
    assert set(opt.state) == set(ours[often]), "no state for what never had a gradient"
    assert {opt.state[p]["step"] for p in ours[often]} == {6}


@pytest.mark.parametrize("subspace", SUBSPACES.names())
def test_every_part_is_dense_under_every_subspace(subspace) -> None:
    """A subspace is numbers or index tensors over dense storage: bfloat16 weights need no sparse kernels."""
    model = tiny_model().bfloat16()
    opt = FRUGAL(model, 1e-2, density=0.7, update_gap=2, subspace=subspace)
    train_tiny(model, opt, range(5))
    frames = [
        opt._places().frame(p, group, opt.state[p])
        for group in opt.split_groups
        for p in group["params"]
        if "cursor" in opt.state.get(p, {})
    ]
    tensors = [v for frame in frames for v in vars(frame).values() if isinstance(v, Tensor)]
    tensors += [v for state in opt.state.values() for v in state.values() if isinstance(v, Tensor)]
    tensors += [p.detach() for p in model.parameters()]
    assert {t.layout for t in tensors} == {torch.strided}
    assert all(t.untyped_storage().nbytes() > 0 for t in tensors)
    assert frames or subspace == "empty"


def test_weights_that_zero_3_took_apart_are_refused_by_name() -> None:
    """DeepSpeed leaves an empty weight, and its part in an attribute of this name."""
    weight = nn.Parameter(torch.zeros(0))
    weight.ds_tensor = torch.zeros(512)
    with pytest.raises(NotSupportedError, match=r"at layers\.0\.w.*ZeRO-3 has taken apart.*Use ZeRO stage 0, DDP"):
        FRUGAL([("layers.0.w", weight)])


@pytest.mark.parametrize(("role", "num_layers"), [("split", 1), ("split", 2), ("stateful", 2)])
def test_flat_partitions_in_the_place_of_weights_are_refused_before_any_moves(role, num_layers) -> None:
    """ZeRO 1 to 3 write one flat tensor into each group, once the optimizer is built."""
    weights = [nn.Parameter(draw((32, 32), i)) for i in range(num_layers)]
    opt = FRUGAL([{"params": [(f"layers.{i}.w", w) for i, w in enumerate(weights)], "role": role}])
    flat = nn.Parameter(torch.cat([w.detach().flatten() for w in weights]))
    before = flat.detach().clone()
    opt.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones_like(flat)
    with pytest.raises(NotSupportedError, match=r"1 tensors, [01] of them flat, in the place of .*use ZeRO stage 0"):
        opt.step()
    assert torch.equal(flat, before)


# --- shards -------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_step_over_two_hundred_shards_works_on_their_local_tensors(one_rank) -> None:
    """What a DTensor's own dispatch costs is paid a fixed number of times a tensor, whatever the update is made of."""
    plain = nn.Sequential(*[nn.Linear(32, 32, bias=False, device="meta") for _ in range(200)])
    plain.to_empty(device="cpu")
    for i, param in enumerate(plain.parameters()):
        param.data.copy_(draw((32, 32), i, torch.float32))
    sharded = fully_shard(copy.deepcopy(plain))
    opts = [FRUGAL(m, 1e-2, update_gap=2) for m in (plain, sharded)]
    for k in range(6):
        for i, (a, b) in enumerate(zip(plain.parameters(), sharded.parameters(), strict=True)):
            grad = draw((32, 32), 1000 * k + i, torch.float32)
            a.grad, b.grad = grad.clone(), DTensor.from_local(grad, b.device_mesh, b.placements)
        opts[0].step()
        with Watch() as watch:
            opts[1].step()
        assert watch.num_distributed <= 200 < watch.num_calls / 10
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(a, b.to_local())
