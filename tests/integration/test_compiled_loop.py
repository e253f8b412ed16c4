"""Plain loops as people write them: compiled model and optimizer, a GradScaler that skips, no wait for a device."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from adafrugal import AdaFRUGAL, param_groups
from problems import same_parameters, tiny_loss, tiny_model

STEPS = 60
SETTINGS = {"update_gap": 4, "update_gap_max": 9, "plateau_tolerance": 0.5}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Loop:
    """Model and optimizer compiled or not, a cosine schedule, and an observation every ten steps."""

    def __init__(self, compiled: bool, **settings) -> None:
        self.model = tiny_model(num_blocks=2)
        self.forward = torch.compile(self.model) if compiled else self.model
        groups = param_groups(self.forward)  # names are the same, compiled or not
        self.optimizer = AdaFRUGAL(groups, 1e-2, total_steps=STEPS, compile=compiled, **SETTINGS, **settings)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)

    def run(self, first: int = 0, last: int = STEPS) -> None:
        for step in range(first, last):
            tiny_loss(self.forward, step).backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            if (step + 1) % 10 == 0:
                with torch.no_grad():
                    self.optimizer.observe(tiny_loss(self.model, 1000))

    def parts(self) -> dict[str, object]:
        """What a checkpoint holds."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }


@pytest.mark.slow
def test_thirty_compiled_steps_and_thirty_in_a_new_process_equal_sixty(tmp_path: Path) -> None:
    loop = Loop(compiled=True)
    loop.run(last=30)
    torch.save(loop.parts(), tmp_path / "checkpoint.pt")
    loop.run(first=30)
    assert loop.optimizer.split_groups[0]["density"] == pytest.approx(0.05)
    assert loop.optimizer.split_groups[0]["update_gap"] > 4
    # The model's graph, one more where its validation runs without gradients; the update's for a step that all lines
    # share and for a step of each line. Rates, refreshes, shrinks and gaps compile nothing.
    assert counters["stats"]["unique_graphs"] <= 6
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    resumed = torch.load(tmp_path / "resumed.pt", weights_only=True)
    assert all(torch.equal(resumed[key], value) for key, value in loop.model.state_dict().items())


@pytest.mark.slow
def test_compiled_training_agrees_with_plain_training() -> None:
    """Two programs round differently; a sign that falls the other way near zero moves a weight by twice the rate."""
    plain, compiled = Loop(compiled=False), Loop(compiled=True)
    for loop in (plain, compiled):
        loop.run(last=10)
    for a, b in zip(plain.model.parameters(), compiled.model.parameters(), strict=True):
        # 2.4e-7 is a rounding of weights up to 4, once a step; signs of near-zero gradients may differ in 1 of 1000
        far = ((a - b).abs() > 10 * 2.4e-7).double().mean().item()
        assert far < 1e-3


# Dynamo itself reads `.grad` of what it has made, where it compiles a loop with a backward in it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("what", ["step", "everything"])
def test_a_step_inside_somebody_elses_compiled_function_runs_as_it_is(what: str) -> None:
    """`torch.compile(optimizer.step)`, or a whole training step: the same numbers, and no compilation at each step."""
    plain, other = Loop(compiled=False), Loop(compiled=False)

    def one_step(step: int) -> None:
        tiny_loss(other.model, step).backward()
        other.optimizer.step()
        other.optimizer.zero_grad()

    def outside(step: int) -> None:
        tiny_loss(other.model, step).backward()
        compiled_step()
        other.optimizer.zero_grad()

    compiled_step = torch.compile(other.optimizer.step)
    advance = torch.compile(one_step) if what == "everything" else outside
    for step in range(12):
        advance(step)
        tiny_loss(plain.model, step).backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    assert other.optimizer.param_groups[0]["step"] == 12
    if what == "step":
        assert same_parameters(plain.model, other.model)
        assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("path", ["auto", "foreach", "compile"])
def test_a_step_never_asks_for_a_number(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between refreshes nothing turns a tensor into a Python value, which would wait for a GPU."""
    loop = Loop(compiled=False)
    loop.optimizer.path = path
    loop.run(last=2)
    tiny_loss(loop.model, 2).backward()

    def refuse(name: str):
        def refused(tensor: Tensor, *_: object) -> None:
            raise AssertionError(f"{name} of a tensor of shape {tuple(tensor.shape)}")

        return refused

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, refuse(name))
        with pytest.raises(AssertionError, match="item of a tensor"):
            torch.ones(1).item()
        loop.optimizer.step()
    assert loop.optimizer.param_groups[0]["step"] == 3


def scaled(bad: int | None, steps: int = 20) -> tuple[nn.Module, AdaFRUGAL, list[bool]]:
    """A loop with a GradScaler, accumulation and clipping; the loss of one step overflows, and does not count."""
    model = tiny_model(num_blocks=2)
    optimizer = AdaFRUGAL(param_groups(model), 1e-2, total_steps=steps, update_gap=3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    applied: list[bool] = []
    while sum(applied) < steps:
        step = sum(applied)
        overflows = bad == len(applied)
        clocks = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
        for half in range(2):
            loss = tiny_loss(model, 2 * step + half) / 2
            scaler.scale(loss * torch.inf if overflows else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        applied.append(optimizer.last_step_applied)
        if applied[-1]:
            scheduler.step()
        else:
            after = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            assert after == clocks, "steps, refreshes, density and observed losses stand still"
        optimizer.zero_grad()
    return model, optimizer, applied


def test_a_run_with_a_skipped_step_is_the_run_without_it() -> None:
    """Scales are powers of two, so that scaling changes no bit."""
    model, optimizer, applied = scaled(bad=2)
    smooth, reference, never = scaled(bad=None)
    assert applied == [True, True, False, *[True] * 18]
    assert all(never)
    assert same_parameters(model, smooth)
    assert optimizer.param_groups[0]["step"] == reference.param_groups[0]["step"] == 20
    optimizer.verify_finite()


def test_a_scaler_refuses_a_closure_before_it_runs() -> None:
    model = tiny_model(num_blocks=2)
    optimizer = AdaFRUGAL(model, total_steps=4)
    scaler = torch.amp.GradScaler("cpu")
    calls: list[int] = []
    scaler.scale(tiny_loss(model, 0)).backward()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported if GradScaler is enabled"):
        scaler.step(optimizer, closure=lambda: calls.append(1))
    assert calls == []
    assert optimizer.param_groups[0]["step"] == 0


def test_windows_of_unequal_size_give_the_gradient_of_the_whole_batch() -> None:
    """Sums over tokens, divided once by their number: what accumulation needs where lengths differ."""
    whole, parts = tiny_model(num_blocks=2), tiny_model(num_blocks=2)
    optimizers = [AdaFRUGAL(param_groups(m), 1e-2, total_steps=4) for m in (whole, parts)]
    tokens = torch.randint(0, 23, (22, 12), generator=torch.Generator().manual_seed(0))

    def total(model: nn.Module, rows: Tensor) -> Tensor:
        logits = model(rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")

    count = tokens[:, 1:].numel()
    (total(whole, tokens) / count).backward()
    for rows in (tokens[:1], tokens[1:21], tokens[21:]):  # 11, 220 and 11 targets
        (total(parts, rows) / count).backward()
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        # sums of up to 242 float32 terms in another order: well within 1e-6 of gradients below 1
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-6)
    for optimizer in optimizers:
        optimizer.step()
        assert optimizer.param_groups[0]["step"] == 1


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    resumed_loop = Loop(compiled=True)
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    for part in ("model", "optimizer", "scheduler"):
        getattr(resumed_loop, part).load_state_dict(saved[part])
    resumed_loop.run(first=30)
    torch.save(resumed_loop.model.state_dict(), folder / "resumed.pt")
