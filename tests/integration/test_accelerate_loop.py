"""A loop under accelerate: prepared, accumulated, clipped, in mixed precision, saved and resumed, on two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from adafrugal import AdaFRUGAL, param_groups
from adafrugal.core.errors import NotSupportedError
from problems import same_parameters, tiny_model

SETTINGS = {"update_gap": 4, "update_gap_max": 9, "plateau_tolerance": 0.5}
STEPS = 60


@pytest.fixture(autouse=True)
def one_accelerator():
    """Accelerate keeps its state in the process; each test begins without any. Data loaders draw a seed."""
    with torch.random.fork_rng():
        yield
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()


class Batches(torch.utils.data.Dataset):
    """Rows that depend on their number alone."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        tokens = torch.randint(0, 23, (12,), generator=torch.Generator().manual_seed(self.first + index))
        tokens[1::2] = (tokens[::2] * 3 + 1) % 23  # something to learn
        return tokens


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Loop:
    """A loop as accelerate's users write it; each optimizer step takes ``windows`` batches of four rows."""

    def __init__(self, windows: int = 1, precision: str = "no", clip: float | None = None, **settings) -> None:
        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=windows, rng_types=[], **settings
        )
        self.clip = clip
        data = torch.utils.data.DataLoader(Batches(STEPS * windows * 4), batch_size=4)
        model = tiny_model(num_blocks=2)
        self.optimizer = AdaFRUGAL(param_groups(model), lr=1e-2, total_steps=STEPS, **SETTINGS)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)
        self.model, self.prepared, self.data, self.scheduler = self.accelerator.prepare(
            model, self.optimizer, data, cosine
        )
        self.rates: list[float] = []

    def run(self, first: int = 0, last: int = STEPS) -> None:
        """The optimizer steps from ``first`` to ``last``."""
        windows = self.accelerator.gradient_accumulation_steps
        data = self.accelerator.skip_first_batches(self.data, first * windows) if first else self.data
        for k, tokens in enumerate(data, start=first * windows):
            if k == last * windows:
                break
            with self.accelerator.accumulate(self.model):
                loss = next_token_loss(self.model, tokens)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and self.clip is not None:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.prepared.step()
                self.scheduler.step()
                self.prepared.zero_grad()
            step = self.optimizer.param_groups[0]["step"]
            if self.accelerator.sync_gradients:
                self.rates.append(self.optimizer.param_groups[0]["lr"])
                if step % 10 == 0:
                    self.optimizer.observe(self.validation_loss())

    @torch.no_grad()
    def validation_loss(self) -> float:
        held_out = torch.stack([Batches(8, first=10_000)[i] for i in range(8)])
        return next_token_loss(self.model, held_out).item()


def by_hand(windows: int = 1, clip: float | None = None) -> nn.Module:
    """The same training without accelerate."""
    model = tiny_model(num_blocks=2)
    optimizer = AdaFRUGAL(param_groups(model), lr=1e-2, total_steps=STEPS, **SETTINGS)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    rows = Batches(STEPS * windows * 4)
    held_out = torch.stack([Batches(8, first=10_000)[i] for i in range(8)])
    for step in range(STEPS):
        for k in range(step * windows, (step + 1) * windows):
            tokens = torch.stack([rows[4 * k + i] for i in range(4)])
            (next_token_loss(model, tokens) / windows).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            with torch.no_grad():
                optimizer.observe(next_token_loss(model, held_out))
    assert optimizer.split_groups[0]["density"] == pytest.approx(0.05)
    assert optimizer.split_groups[0]["update_gap"] == 9
    return model


@pytest.mark.parametrize("windows", [1, 2])
def test_a_prepared_loop_equals_one_by_hand(windows: int) -> None:
    loop = Loop(windows=windows, clip=0.5)
    assert loop.prepared.optimizer is loop.optimizer
    loop.run()
    assert same_parameters(loop.model, by_hand(windows, clip=0.5))


def test_the_prepared_optimizer_and_scheduler_share_our_groups() -> None:
    loop = Loop()
    assert loop.prepared.param_groups is loop.optimizer.param_groups
    assert loop.scheduler.scheduler.optimizer is loop.optimizer
    loop.run(last=5)
    assert [group["lr"] for group in loop.optimizer.param_groups] == loop.scheduler.get_last_lr()
    assert loop.optimizer.param_groups[0]["lr"] < 1e-2


def test_compiled_it_is_the_same_run() -> None:
    """`prepare` compiles the model, here with a backend that changes no number."""
    loop = Loop(dynamo_backend="eager")
    assert type(loop.model).__name__ == "OptimizedModule"
    loop.run()
    assert same_parameters(loop.model, by_hand())


def test_a_fused_backward_equals_the_plain_one_and_accumulation_is_refused() -> None:
    loop = Loop()
    loop.optimizer.attach(loop.model)
    loop.run()
    assert same_parameters(loop.model, by_hand())
    fused = Loop(windows=2)
    with pytest.raises(NotSupportedError, match="accumulation_steps=2"):
        fused.optimizer.attach(fused.model, accumulation_steps=fused.accelerator.gradient_accumulation_steps)


VARIANTS = {
    "plain": {},
    "everything": {"windows": 2, "precision": "bf16", "clip": 0.5},
}


def run_whole(name: str, folder: Path) -> Loop:
    """All steps, with a checkpoint at the thirtieth."""
    loop = Loop(**VARIANTS[name])
    loop.run(last=30)
    loop.accelerator.save_state(str(folder / name))
    loop.run(first=30)
    return loop


def test_thirty_steps_and_thirty_in_a_new_process_equal_sixty(tmp_path: Path) -> None:
    for name in VARIANTS:
        whole = run_whole(name, tmp_path)
        in_a_new_process([sys.executable, __file__, "resume", name, str(tmp_path)])
        resumed = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        model = whole.accelerator.unwrap_model(whole.model)
        assert all(torch.equal(resumed[key], value) for key, value in model.state_dict().items()), name
        assert len(whole.optimizer.state) == len(list(model.parameters()))
        for shared in (AcceleratorState, GradientState, PartialState):
            shared._reset_state()


@pytest.mark.slow
def test_on_two_processes_clocks_turn_once_a_step_and_the_scheduler_as_documented(tmp_path: Path) -> None:
    """Accelerate steps a prepared scheduler once for each process, unless batches are split; our clocks do not follow.

    With batches of its own, each process takes half of the data, so that the loop has 30 steps of 60.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    in_a_new_process([*launcher, __file__, "two", "-", str(tmp_path)])
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1], "weights, clocks and rates are the same on both"
    for key, rates_per_step in (("own", 2), ("split", 1)):
        found = ranks[0][key]
        assert found["step"] == found["calls"], "one count for each step of the loop"
        assert found["progress"] == pytest.approx((found["calls"] - 1) / STEPS)
        for step, rate in enumerate(found["rates"], start=1):
            done = step * rates_per_step / STEPS
            cosine = 0.5e-2 * (1 + torch.tensor(done * torch.pi).cos().item())
            assert rate == pytest.approx(cosine, abs=1e-7), f"{key}: rate after step {step}"
        assert found["fused"] == "refused"


def in_a_new_process(command: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def resume(name: str, folder: Path) -> None:
    loop = Loop(**VARIANTS[name])
    loop.accelerator.load_state(str(folder / name))
    loop.run(first=30)
    torch.save(loop.accelerator.unwrap_model(loop.model).state_dict(), folder / f"{name}.pt")


def on_two_processes(_: str, folder: Path) -> None:
    from accelerate.utils import DataLoaderConfiguration

    found: dict[str, object] = {}
    for key in ("own", "split"):
        loop = Loop(dataloader_config=DataLoaderConfiguration(split_batches=key == "split"))
        loop.run()
        weights = torch.cat([p.detach().flatten() for p in loop.model.parameters()])
        group = loop.optimizer.split_groups[0]
        found[key] = {
            "weights": weights.double().sum().item(),
            "bits": weights.view(torch.int32).to(torch.int64).sum().item(),
            "calls": len(loop.rates),
            "rates": loop.rates,
            "fused": "allowed",
            **{name: group[name] for name in ("step", "progress", "update_gap", "density", "losses")},
        }
        try:
            loop.optimizer.attach(loop.model)
        except NotSupportedError:
            found[key]["fused"] = "refused"
        rank = loop.accelerator.process_index
        for shared in (AcceleratorState, GradientState):
            shared._reset_state()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    {"resume": resume, "two": on_two_processes}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
