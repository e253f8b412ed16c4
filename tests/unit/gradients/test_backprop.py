"""Gradient sources: sums over targets, clipping, counting, and the update inside backward."""

import pytest
import torch
from torch import nn

from adafrugal import FRUGAL, SignSGD
from adafrugal.core.errors import NotSupportedError
from adafrugal.gradients.backprop import Backprop, FusedBackprop, keep_gradient
from adafrugal.laws.flops import FlopMeter
from problems import draw, tiny_model


class Masked:
    """Next token of the tiny model, with targets that may be masked by a negative id."""

    def num_targets(self, batch: torch.Tensor) -> int:
        return int((batch[:, 1:] >= 0).sum())

    def num_tokens(self, batch: torch.Tensor) -> int:
        return batch.numel()

    def loss_sum(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch[:, :-1].clamp_min(0))
        targets = batch[:, 1:].flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-1, reduction="sum")


def tokens(rows: int, length: int, seed: int, targets: int | None = None) -> torch.Tensor:
    batch = torch.randint(0, 23, (rows, length), generator=torch.Generator().manual_seed(seed))
    if targets is not None:
        batch[:, 1 + targets :] = -1
    return batch


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def test_micro_batches_of_ten_and_a_thousand_targets_weigh_by_their_targets() -> None:
    """Averaging the micro-batches' means would give the ten targets as much weight as the thousand."""
    long, short = tokens(10, 101, 0), tokens(1, 101, 1, targets=10)
    whole, pieces = tiny_model(), tiny_model()
    one = Backprop().run(whole, [torch.cat([long, short])], Masked(), keep_gradient)
    two = Backprop().run(pieces, [long, short], Masked(), keep_gradient)
    assert one.num_targets == two.num_targets == 1010
    assert one.loss == pytest.approx(two.loss, rel=1e-6)
    for a, b in zip(grads(whole), grads(pieces), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_short_last_window_gives_the_gradient_of_its_own_mean() -> None:
    batches = [tokens(2, 13, k) for k in range(2)]
    whole, pieces = tiny_model(), tiny_model()
    Backprop().run(whole, [torch.cat(batches)], Masked(), keep_gradient)
    Backprop().run(pieces, batches, Masked(), keep_gradient)
    for a, b in zip(grads(whole), grads(pieces), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_clipping_and_its_norm_are_torchs() -> None:
    ours, theirs = tiny_model(), tiny_model()
    report = Backprop(max_grad_norm=0.01).run(ours, [tokens(4, 13, 0)], Masked(), keep_gradient)
    (Masked().loss_sum(theirs, tokens(4, 13, 0)) / (4 * 12)).backward()
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-6)
    for a, b in zip(grads(ours), grads(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


class Scaled(Masked):
    """The same task with a loss, and so a gradient, of any size."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def loss_sum(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return super().loss_sum(model, batch).float() * self.factor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_norm_whose_square_overflows_float16_is_finite_and_clips(dtype) -> None:
    """5000 squared is 25 million, and float16 ends at 65504."""
    exact, low = tiny_model(), tiny_model().to(dtype)
    expected = Backprop().run(exact, [tokens(4, 13, 0)], Scaled(1.0), keep_gradient).grad_norm
    factor = 5000 / expected
    report = Backprop(max_grad_norm=1.0).run(low, [tokens(4, 13, 0)], Scaled(factor), keep_gradient)
    # Forward and backward in 8 bits of mantissa: a per cent.
    assert report.grad_norm == pytest.approx(5000, rel=0.02)
    clipped = torch.stack([grad.double().norm() for grad in grads(low)]).norm()
    assert clipped.item() == pytest.approx(1.0, rel=0.01)


def test_every_trainable_parameter_is_handed_over_exactly_once() -> None:
    model = tiny_model(tied=True)
    model.blocks[0].norm.weight.requires_grad_(False)
    for source in (Backprop(), FusedBackprop()):
        seen: list[nn.Parameter] = []
        source.run(model, [tokens(2, 9, 0)], Masked(), lambda param, grad, seen=seen: seen.append(param))
        assert len(seen) == len({id(p) for p in seen})
        assert {id(p) for p in seen} == {id(p) for p in model.parameters() if p.requires_grad}


def test_a_fused_source_updates_as_a_plain_one_and_leaves_no_gradient_and_no_hook() -> None:
    plain, fused = tiny_model(), tiny_model()
    opts = [FRUGAL(m, 1e-2, update_gap=2) for m in (plain, fused)]
    for step in range(6):
        a = Backprop().run(plain, [tokens(2, 9, step)], Masked(), keep_gradient)
        opts[0].step()
        b = FusedBackprop().run(fused, [tokens(2, 9, step)], Masked(), lambda p, g: opts[1].update_parameter(p))
        assert all(p.grad is None for p in fused.parameters())
        opts[1].step()
        assert a.loss == b.loss
        assert b.grad_norm is None, "nobody saw all of it at once, and 0.0 would be a lie"
        assert all(torch.equal(x, y) for x, y in zip(plain.parameters(), fused.parameters(), strict=True))
    assert not any(p._post_accumulate_grad_hooks for p in fused.parameters())


def test_a_fused_source_refuses_what_it_cannot_do_before_any_weight_moves() -> None:
    with pytest.raises(NotSupportedError, match="max_grad_norm=1"):
        FusedBackprop(max_grad_norm=1.0)
    model = tiny_model()
    opt = SignSGD(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NotSupportedError, match="accumulation_steps=2"):
        FusedBackprop().run(model, [tokens(2, 9, 0)] * 2, Masked(), lambda p, g: opt.update_parameter(p))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_batch_without_targets_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="Leave out examples whose labels are all masked"):
        Backprop().run(tiny_model(), [tokens(2, 9, 0, targets=0)], Masked(), keep_gradient)


def test_flops_are_counted_once_for_each_kind_and_billed_every_time() -> None:
    meter = FlopMeter()
    model = tiny_model()
    source = Backprop(meter)
    first = source.run(model, [tokens(2, 9, 0)], Masked(), keep_gradient).cost
    again = source.run(model, [tokens(2, 9, 1)] * 3, Masked(), keep_gradient).cost
    assert again.flops == 3 * first.flops > 0
    assert (first.tokens, again.tokens) == (18, 54)
    for param in model.blocks[0].parameters():
        param.requires_grad_(False)
    frozen = source.run(model, [tokens(2, 9, 0)], Masked(), keep_gradient).cost
    assert 0 < frozen.flops < first.flops, "another trained set is another kind"


def test_counting_changes_no_gradient() -> None:
    counted, plain = tiny_model(), tiny_model()
    Backprop(FlopMeter()).run(counted, [tokens(2, 9, 0)], Masked(), keep_gradient)
    Backprop().run(plain, [tokens(2, 9, 0)], Masked(), keep_gradient)
    assert all(torch.equal(a, b) for a, b in zip(grads(counted), grads(plain), strict=True))


def test_draws_of_the_tests_are_their_own() -> None:
    assert torch.equal(draw((3,), 1), draw((3,), 1))
