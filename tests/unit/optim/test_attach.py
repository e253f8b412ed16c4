"""The update fused into backward: the same numbers, one real optimizer, and clear refusals."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adafrugal import FRUGAL, AdaFRUGAL, BAdam, GaLore, SignSGD
from adafrugal.core.errors import NonFiniteError, NotSupportedError
from problems import peak_bytes, same_parameters, tiny_loss, tiny_model, train_tiny

METHODS = {
    "adafrugal": lambda m: AdaFRUGAL(m, 1e-2, total_steps=20, update_gap=3, update_gap_max=7, plateau_tolerance=0.5),
    "rows": lambda m: FRUGAL(m, 1e-2, update_gap=3, subspace="rows"),
    "blocks": lambda m: FRUGAL(m, 1e-2, update_gap=3, subspace="blocks", density=0.4),
    "galore": lambda m: GaLore(m, 1e-2, update_gap=3),
    "signsgd": lambda m: SignSGD(m, 1e-3),
    "badam": lambda m: BAdam(m, 1e-2, update_gap=3),
}


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
def test_attached_equals_plain_bit_for_bit_and_frees_every_gradient(make) -> None:
    plain, fused = tiny_model(), tiny_model()
    opt, attached = make(plain), make(fused)
    attached.attach(fused)
    assert attached.attached
    for step in range(15):
        opt.zero_grad()
        attached.zero_grad()
        tiny_loss(plain, step).backward()
        opt.step()
        tiny_loss(fused, step).backward()
        assert all(p.grad is None for p in fused.parameters())
        attached.step()
        if isinstance(opt, AdaFRUGAL) and step % 4 == 3:
            assert opt.observe(1.0) == attached.observe(1.0)
        assert same_parameters(plain, fused), f"step {step}"
    ours, theirs = attached.state_dict(), opt.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys(), "the state is whole"


def test_detach_and_attach_again_in_mid_run() -> None:
    plain, fused = tiny_model(), tiny_model()
    opts = [METHODS["adafrugal"](m) for m in (plain, fused)]
    train_tiny(plain, opts[0], range(12))
    train_tiny(fused, opts[1], range(4))
    opts[1].attach(fused)
    train_tiny(fused, opts[1], range(4, 8))
    opts[1].detach()
    opts[1].detach()
    assert not opts[1].attached
    train_tiny(fused, opts[1], range(8, 12))
    assert same_parameters(plain, fused)
    assert all(
        not p._post_accumulate_grad_hooks for p in fused.parameters() if p._post_accumulate_grad_hooks is not None
    )


def test_an_attached_optimizer_saves_loads_and_goes_on() -> None:
    straight, resumed = tiny_model(), tiny_model()
    opt = METHODS["adafrugal"](straight)
    opt.attach(straight)
    train_tiny(straight, opt, range(7))
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(straight.state_dict())
    train_tiny(straight, opt, range(7, 15))
    resumed.load_state_dict(weights)
    second = METHODS["adafrugal"](resumed)
    second.attach(resumed)
    second.load_state_dict(saved)
    assert second.attached, "loading does not take the hooks off"
    train_tiny(resumed, second, range(7, 15))
    assert same_parameters(straight, resumed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accumulation_steps": 4}, r"accumulation_steps=4.*one backward for each step.*larger micro-batch"),
        ({"max_grad_norm": 1.0}, r"max_grad_norm=1\.0.*known only after the last gradient.*Set max_grad_norm=0"),
        ({"grad_scaler": object()}, r"no GradScaler, since weights have moved.*Train in bfloat16"),
    ],
)
def test_what_cannot_be_fused_is_refused_with_the_reason(arguments, message) -> None:
    model = tiny_model()
    opt = FRUGAL(model)
    with pytest.raises(NotSupportedError, match=message):
        opt.attach(model, **arguments)
    assert not opt.attached
    opt.attach(model, accumulation_steps=1, max_grad_norm=0, grad_scaler=None)


def test_a_check_before_any_weight_moves_cannot_be_fused() -> None:
    model = tiny_model()
    with pytest.raises(NotSupportedError, match="check_finite='before'"):
        FRUGAL(model, check_finite="before").attach(model)


def test_a_second_backward_before_the_step_is_refused_and_updates_nothing() -> None:
    model = tiny_model()
    opt = FRUGAL(model, 1e-2)
    opt.attach(model)
    tiny_loss(model, 0).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NotSupportedError, match=r"a second gradient for .* before optimizer\.step"):
        tiny_loss(model, 1).backward()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    opt.step()
    opt.zero_grad()
    tiny_loss(model, 1).backward()
    opt.step()
    assert opt.param_groups[0]["step"] == 2


def test_a_grad_scaler_is_refused_at_its_first_step() -> None:
    model = tiny_model()
    opt = FRUGAL(model, 1e-2)
    opt.attach(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(tiny_loss(model, 0)).backward()
    with pytest.raises(NotSupportedError, match="no GradScaler"):
        scaler.step(opt)


def test_tied_weights_under_reentrant_checkpointing_are_refused_and_under_the_other_kind_updated_once() -> None:
    """The hook of a shared parameter fires twice when a re-entrant backward runs inside the outer one."""

    def loss(model: nn.Module, reentrant: bool) -> torch.Tensor:
        x = torch.ones(2, 32, requires_grad=True)
        shared = model.blocks[0]
        x = checkpoint(shared, x, use_reentrant=reentrant)
        return checkpoint(shared, x, use_reentrant=reentrant).square().mean()

    fused, plain = tiny_model(), tiny_model()
    attached, opt = FRUGAL(fused, 1e-2), FRUGAL(plain, 1e-2)
    attached.attach(fused)
    loss(fused, reentrant=False).backward()
    attached.step()
    loss(plain, reentrant=False).backward()
    opt.step()
    assert same_parameters(fused, plain), "exactly one update for the shared block"
    with pytest.raises(NotSupportedError, match="with tied weights use non-reentrant checkpointing"):
        loss(fused, reentrant=True).backward()


def test_a_foreign_hook_is_detected_and_nothing_is_left_behind() -> None:
    model = tiny_model()
    opt = FRUGAL(model)
    last = list(model.parameters())[-1]
    handle = last.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(NotSupportedError, match=r"a foreign post-accumulate hook on .*Remove the other library's hook"):
        opt.attach(model)
    assert not opt.attached
    handle.remove()
    opt.attach(model)
    train_tiny(model, opt, [0])
    assert opt.param_groups[0]["step"] == 1


def test_a_second_attach_is_refused() -> None:
    model = tiny_model()
    opt = FRUGAL(model)
    opt.attach(model)
    with pytest.raises(NotSupportedError, match=r"Call detach\(\) first"):
        opt.attach(model)


def test_a_copy_of_an_attached_model_does_not_step() -> None:
    model = tiny_model()
    opt = FRUGAL(model, 1e-2)
    opt.attach(model)
    twin, twin_opt = copy.deepcopy((model, opt))
    assert not twin_opt.attached
    before = copy.deepcopy(twin.state_dict())
    tiny_loss(twin, 0).backward()
    assert all(torch.equal(before[k], v) for k, v in twin.state_dict().items())
    assert all(p.grad is not None for p in twin.parameters())


def test_frozen_parameters_are_skipped() -> None:
    model = tiny_model()
    opt = FRUGAL(model, 1e-2)
    model.embed.weight.requires_grad_(False)
    opt.attach(model)
    train_tiny(model, opt, range(3))
    assert opt.param_groups[0]["step"] == 3


def test_the_scheduled_rate_is_the_one_used() -> None:
    model, plain = tiny_model(), tiny_model()
    attached, opt = SignSGD(model, 1e-2), SignSGD(plain, 1e-2)
    attached.attach(model)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5) for o in (attached, opt)]
    for step in range(5):
        for m, o, s in ((model, attached, schedulers[0]), (plain, opt, schedulers[1])):
            before = m.head.weight.detach().clone()
            rate = s.get_last_lr()[0]
            train_tiny(m, o, [step])
            moved = (m.head.weight.detach() - before).abs().max().item()
            assert moved == pytest.approx(rate, rel=1e-4)  # float32 weights of order 1 round a step of 1e-2
            s.step()


def test_gradients_that_came_by_another_road_are_updated_at_the_step() -> None:
    """Set by hand, say, without a backward."""
    model = tiny_model()
    opt = SignSGD(model, 1e-2)
    opt.attach(model)
    before = model.head.weight.detach().clone()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    opt.step()
    torch.testing.assert_close(model.head.weight.detach(), before - 1e-2)
    assert opt.param_groups[0]["step"] == 1


def test_a_nan_in_backward_is_found_and_points_to_the_last_checkpoint() -> None:
    model = tiny_model()
    opt = FRUGAL(model, 1e-2)
    opt.attach(model)
    (tiny_loss(model, 0) * torch.nan).backward()
    opt.step()
    with pytest.raises(NonFiniteError, match="Go back to the last good checkpoint"):
        opt.state_dict()


def test_ddp_is_refused_with_the_alternative() -> None:
    import torch.distributed as dist

    model = tiny_model()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(NotSupportedError, match=r"by DistributedDataParallel.*DDP and FSDP2 average it later"):
            FRUGAL(wrapped).attach(wrapped)
    finally:
        dist.destroy_process_group()


def test_the_peak_falls_by_most_of_the_gradients() -> None:
    """On a deep MLP the gradients of all layers never live together."""

    def peak(fused: bool) -> int:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(128, 128, bias=False), nn.Tanh())])
        opt = SignSGD(model, 1e-3)
        if fused:
            opt.attach(model)
        x = torch.ones(4, 128)

        def one_step() -> None:
            opt.zero_grad()
            model(x).mean().backward()
            opt.step()

        def clear() -> None:
            one_step()
            opt.zero_grad()

        return peak_bytes(one_step, before=clear)

    gradient_bytes = 12 * 128 * 128 * 4
    assert peak(fused=True) <= peak(fused=False) - 0.8 * gradient_bytes
