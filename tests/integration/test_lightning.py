"""Lightning drives the optimizer as a loop written by hand does, bit for bit; what cannot be had is refused early."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning")
pytest.importorskip("torchdata")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision

from adafrugal import FRUGAL, AdaFRUGAL, param_groups
from adafrugal.core.errors import ConfigError, NotSupportedError
from adafrugal.integrations.lightning import AdaFrugalCallback
from integration.lightning_worker import SETTINGS, VARIANTS, Batches, Module, fit, next_token_loss, run_variant
from problems import same_parameters, tiny_model

pytestmark = [
    # Advice of Lightning's that does not concern a test: worker processes, and how often it logs.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    # Lightning 2.6 still makes a LeafSpec, which torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),
]
# torchdata 0.11 still calls what torch 2.13 has deprecated.
STATEFUL = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def by_hand(steps: int, per_epoch: int, windows: int = 1, clip: float | None = None) -> nn.Module:
    """The loop that Lightning is to equal: accumulation, clipping, a validation after each epoch."""
    model = tiny_model(num_blocks=2)
    optimizer = AdaFRUGAL(param_groups(model), lr=1e-2, total_steps=steps, **SETTINGS)
    data, held_out = Batches(per_epoch), Batches(4, first=1000)
    for step in range(steps):
        optimizer.zero_grad()
        for k in range(windows):
            (next_token_loss(model, data[(step * windows + k) % per_epoch]) / windows).backward()
        if clip is not None:
            in_order = [p for group in optimizer.param_groups for p in group["params"]]  # Lightning's
            nn.utils.clip_grad_norm_(in_order, clip)
        optimizer.step()
        if (step + 1) * windows % per_epoch == 0:
            with torch.no_grad():
                optimizer.observe(torch.stack([next_token_loss(model, held_out[i]) for i in range(4)]).mean())
    assert optimizer.param_groups[0]["density"] < 0.25, "density has moved"
    assert optimizer.split_groups[0]["update_gap"] > 4, "so has the gap"
    return model


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_automatic_optimization_equals_a_loop_by_hand(fused: bool) -> None:
    """Closures, progress and observation: `total_steps` by hand, the callback here. Fused, every gradient is freed."""
    module = Module()
    fit(module, [AdaFrugalCallback(fused_backward=fused)], max_steps=60)
    assert same_parameters(module.model, by_hand(60, 15))
    if fused:
        assert all(p.grad is None for p in module.model.parameters())


def test_accumulation_and_clipping_equal_a_loop_by_hand() -> None:
    module = Module()
    fit(module, batches=20, max_epochs=4, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert same_parameters(module.model, by_hand(40, 20, windows=2, clip=0.5))


def test_compiled_it_is_the_same_run() -> None:
    """The model through dynamo with a backend that changes no number; names are those of the plain model."""
    plain, compiled = Module(), Module()
    compiled.model = torch.compile(compiled.model, backend="eager")
    fit(plain, max_steps=10)
    running = fit(compiled, max_steps=10)
    assert not any("_orig_mod" in name for g in running.optimizers[0].param_groups for name in g["param_names"])
    assert same_parameters(plain.model, compiled.model)


@STATEFUL
def test_thirty_steps_and_thirty_in_a_new_process_equal_sixty(tmp_path: Path) -> None:
    whole = {name: run_variant(name, tmp_path) for name in VARIANTS}
    for name in VARIANTS:
        saved = torch.load(tmp_path / name / "step=30.ckpt", weights_only=True)
        assert len(saved["optimizer_states"][0]["state"]) == len(list(whole[name].parameters()))
    in_a_new_process("resume", tmp_path)
    for name, model in whole.items():
        resumed = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert all(torch.equal(resumed[key], value) for key, value in model.state_dict().items()), name


def in_a_new_process(task: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("lightning_worker.py")), task, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_two_processes_equal_one_that_accumulates_two_batches(tmp_path: Path) -> None:
    """DDP averages what accumulation averages, and halves are exact: the same weights, bit for bit, on both ranks."""
    single = Module()
    fit(single, batches=20, max_epochs=4, accumulate_grad_batches=2)
    in_a_new_process("ddp", tmp_path)
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert all(torch.equal(found[key], value) for key, value in single.model.state_dict().items()), rank


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_steps": 24}, 24),
        ({"max_epochs": 3}, 24),
        ({"max_epochs": 3, "accumulate_grad_batches": 3}, 9),  # windows of 3, 3 and 2 batches
        ({"max_epochs": 30, "max_steps": 16}, 16),
    ],
    ids=["max_steps", "max_epochs", "accumulation", "both"],
)
def test_density_falls_as_if_the_number_of_steps_were_known(settings, steps) -> None:
    densities: list[float] = []

    class Noting(AdaFRUGAL):
        def step(self, closure=None):
            loss = super().step(closure)
            densities.append(self.split_groups[0]["density"])
            return loss

    fit(Module(lambda m: Noting(m, 1e-2)), batches=8, **settings)
    callback_densities, densities[:] = list(densities), []
    fit(Module(lambda m: Noting(m, 1e-2, total_steps=steps)), batches=8, **settings)
    assert callback_densities == densities
    assert len(densities) == steps
    assert densities[-1] == pytest.approx(0.25 - 0.025 * round(8 * (steps - 1) / steps))


def test_a_run_bound_by_time_lands_at_the_last_density() -> None:
    """The share of `max_time` counts where it is ahead of the steps; this run would take hours by its steps."""
    module = Module()
    running = fit(module, max_time={"seconds": 2}, max_steps=10**8, max_epochs=-1, limit_val_batches=0)
    assert running.optimizers[0].param_groups[0]["progress"] > 0.9
    assert running.optimizers[0].split_groups[0]["density"] == pytest.approx(0.05, abs=0.03)


@pytest.mark.parametrize("sanity", [0, 2])
def test_each_validation_is_observed_once_and_the_sanity_check_never(sanity: int) -> None:
    observed: list[tuple[int, float]] = []

    class Noting(AdaFRUGAL):
        def observe(self, val_loss, step=None):
            observed.append((step, float(val_loss)))
            return super().observe(val_loss, step)

    module = Module(lambda m: Noting(m, 1e-2))
    running = fit(module, max_epochs=2, val_check_interval=5, num_sanity_val_steps=sanity)
    assert [step for step, _ in observed] == [5, 10, 15, 20, 25, 30]
    assert observed[-1][1] == running.callback_metrics["val_loss"].item()


def test_density_gap_and_bytes_are_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="run", version=0)
    running = fit(Module(), max_steps=45, log_every_n_steps=5, logger=logger)
    with (tmp_path / "run" / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["adafrugal/density"]]
    optimizer = running.optimizers[0]
    assert len(rows) == 9
    assert float(rows[0]["adafrugal/density"]) == pytest.approx(0.225)  # the fifth of 45 steps: one level of eight
    assert float(rows[-1]["adafrugal/density"]) == pytest.approx(optimizer.split_groups[0]["density"])
    assert int(float(rows[-1]["adafrugal/state_bytes"])) == optimizer.memory()["total_bytes"]
    assert {float(row["adafrugal/update_gap"]) for row in rows} == {4.0, 6.0}, "one validation settled"


def test_of_several_optimizers_it_drives_ours() -> None:
    """By hand, with two optimizers: Lightning counts both, and the share of the run is that of its batches."""

    class Two(Module):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(next_token_loss(self.model, batch))
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            ours = [p for n, p in self.model.named_parameters() if n != "head.weight"]
            return AdaFRUGAL(ours, 1e-2), torch.optim.SGD([self.model.head.weight], 1e-2)

    module = Two()
    before = module.model.head.weight.detach().clone()
    running = fit(module, max_epochs=2, batches=12)
    ours = running.optimizers[0].split_groups[0]
    assert running.global_step == 48
    assert ours["step"] == 24
    assert ours["progress"] == pytest.approx(23 / 24)
    assert ours["density"] == pytest.approx(0.05)
    assert not torch.equal(before, module.model.head.weight)


def test_a_step_that_the_scaler_skips_advances_nothing() -> None:
    """The third loss overflows: no weight moves, and clocks stand still."""
    states: list[tuple[int, bool, Tensor]] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, running, module, *_):
            optimizer = running.optimizers[0]
            weight = module.model.blocks[0].up.weight.detach().clone()
            states.append((optimizer.param_groups[0]["step"], optimizer.last_step_applied, weight))

    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    fit(Module(spoil=2), [AdaFrugalCallback(), Look()], max_steps=6, plugins=[plugin], gradient_clip_val=1.0)
    assert [step for step, _, _ in states] == [1, 2, 2, 3, 4, 5]
    assert [applied for _, applied, _ in states] == [True, True, False, True, True, True]
    assert torch.equal(states[1][2], states[2][2])
    assert not torch.equal(states[2][2], states[3][2])


REFUSED = {
    "accumulation": ({"accumulate_grad_batches": 2}, [], "accumulation_steps=2"),
    "a schedule of it": ({}, [GradientAccumulationScheduler({1: 4})], "accumulation_steps=4"),
    "clipping": ({"gradient_clip_val": 1.0}, [], "no clipping by a global norm"),
    "a scaler": ({"plugins": [MixedPrecision("16-mixed", "cpu")]}, [], "no GradScaler"),
}


@pytest.mark.parametrize(("settings", "callbacks", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_fused_is_refused_before_the_first_step(settings, callbacks, message) -> None:
    module = Module()
    with pytest.raises(NotSupportedError, match=message):
        fit(module, [AdaFrugalCallback(fused_backward=True), *callbacks], max_steps=2, **settings)
    assert same_parameters(module.model, tiny_model(num_blocks=2))


def test_an_optimizer_that_was_attached_by_hand_is_checked_too() -> None:
    def attached(model: nn.Module) -> FRUGAL:
        optimizer = FRUGAL(model, 1e-2)
        optimizer.attach(model)
        return optimizer

    with pytest.raises(NotSupportedError, match="no clipping by a global norm"):
        fit(Module(attached), max_steps=2, gradient_clip_val=1.0)


def test_a_second_fit_attaches_anew() -> None:
    module, callback = Module(), AdaFrugalCallback(fused_backward=True)
    for steps in (3, 3):
        running = fit(module, [callback], max_steps=steps)
        assert running.optimizers[0].param_groups[0]["step"] == steps
    assert not any(p._post_accumulate_grad_hooks for p in module.model.parameters())


def test_mistakes_are_named_before_training() -> None:
    with pytest.raises(ConfigError, match=r"received AdamW; allowed is at least one of AdaFRUGAL"):
        fit(Module(lambda m: torch.optim.AdamW(m.parameters())), max_steps=2)
    with pytest.raises(ConfigError, match=r"'val_los', which was not logged.*val_loss.*Did you mean 'val_loss'"):
        fit(Module(), [AdaFrugalCallback("val_los")], max_steps=2, num_sanity_val_steps=1)
    with pytest.raises(ConfigError, match=r"max_steps=-1, max_epochs=-1.*a known length of the run"):
        fit(Module(), max_epochs=-1)
