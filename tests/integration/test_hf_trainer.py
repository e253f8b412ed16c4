"""Hugging Face's Trainer: settings arrive, runs resume bit for bit in a new process, the log says what happens.

Run as a script, this file is the new process: it resumes every run that it is told of.
"""

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from adafrugal.core.errors import ConfigError, NotSupportedError  # noqa: E402
from adafrugal.integrations.hf import (  # noqa: E402
    AdaFrugalCallback,
    adafrugal_cls_and_kwargs,
    create_adafrugal_optimizer,
)

FACTORIES = int(transformers.__version__.split(".")[0]) >= 5  # transformers 4 takes optimizer classes alone
VOCABULARY, LENGTH = 64, 16
SETTINGS = {"density": 0.5, "density_end": 0.125, "update_gap": 7, "update_gap_max": 20, "plateau_tolerance": 0.02}
RUNS = {
    "in_epochs": {"max_steps": -1, "num_train_epochs": 2.5},
    "accumulated": {"gradient_accumulation_steps": 2, "bf16": True},
    "fused": {"max_grad_norm": 0.0, "fused": True},
}
STEPS = 60


def tiny_llama(seed: int = 0, **config):
    """A Llama of two layers with dropout, so that resuming has to restore random streams too."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=2, attention_dropout=0.1, **config,
            )
        )  # fmt: skip


def examples(number: int, seed: int) -> list[dict]:
    """Sequences in which every second token follows from the one before."""
    tokens = torch.randint(0, VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(seed))
    tokens[:, 1::2] = (tokens[:, ::2] * 3 + 1) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in tokens.tolist()]


def arguments(folder: Path, **changed):
    """Small, quiet and on the CPU."""
    given = {
        "output_dir": str(folder), "use_cpu": True, "max_steps": STEPS, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "weight_decay": 0.1, "adam_beta2": 0.99, "adam_epsilon": 1e-7, "warmup_steps": 5,
        "lr_scheduler_type": "cosine", "logging_steps": 10, "eval_strategy": "steps", "eval_steps": 10,
        "save_steps": 30, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**given | changed)


def make_trainer(folder: Path, *, fused: bool = False, callback=None, settings=SETTINGS, more=(), **changed):
    """A Trainer by the factory where the library has them, else by a ready optimizer."""
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # transformers 4 leaves it set, and later runs would follow it
    args = arguments(folder, **changed)
    settings = settings | ({"fused_backward": True} if fused else {})
    model = tiny_llama()
    how = (
        {"optimizer_cls_and_kwargs": adafrugal_cls_and_kwargs(args, **settings)}
        if FACTORIES
        else {"optimizers": (create_adafrugal_optimizer(model, args, **settings), None)}
    )
    return transformers.Trainer(
        model=model,
        args=args,
        train_dataset=examples(96, 1),
        eval_dataset=examples(16, 2),
        callbacks=[callback or AdaFrugalCallback(), *more],
        **how,
    )


def quietly(run):
    """Call something that seeds the global stream, and put the stream back."""
    with torch.random.fork_rng():
        return run()


def optimizer_of(trainer):
    return trainer.optimizer.optimizer


def weights(model) -> dict:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def resume(folder: Path, name: str) -> None:
    """In the new process: go on from step 30, and leave weights, log and optimizer state."""
    trainer = make_trainer(folder / name, **RUNS[name])
    trainer.train(resume_from_checkpoint=str(folder / name / "checkpoint-30"))
    torch.save(weights(trainer.model), folder / f"{name}.weights")
    torch.save(optimizer_of(trainer).state_dict(), folder / f"{name}.state")
    (folder / f"{name}.log").write_text(json.dumps(trainer.state.log_history))


def train_on_this_rank(folder: Path) -> None:
    """In each of several processes: a short run, of which every rank leaves its weights and settings."""
    trainer = make_trainer(folder, max_steps=12, eval_steps=3, settings=SETTINGS | {"plateau_tolerance": 0.5})
    trainer.train()
    group = optimizer_of(trainer).split_groups[0]
    found = {"weights": weights(trainer.model), **{name: group[name] for name in ("update_gap", "density", "step")}}
    trainer.args.max_grad_norm = 0.0
    try:
        adafrugal_cls_and_kwargs(trainer.args, fused_backward=True)
    except NotSupportedError as error:
        found["refusal"] = str(error)
    torch.save(found, folder / f"rank{trainer.args.process_index}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2:] == ["ranks"]:
        train_on_this_rank(Path(sys.argv[1]))
    for run in sys.argv[2:]:
        if run in RUNS:
            resume(Path(sys.argv[1]), run)
    sys.exit()


def in_a_new_process(*command: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Every run: to the end in this process, and in a new one from its checkpoint at step 30."""
    folder = tmp_path_factory.mktemp("runs")
    trainers = {}
    for name, settings in RUNS.items():
        trainers[name] = make_trainer(folder / name, **settings)
        quietly(trainers[name].train)
    in_a_new_process(__file__, str(folder), *RUNS)
    return folder, trainers


@pytest.fixture(params=list(RUNS))
def run(request, finished):
    folder, trainers = finished
    return request.param, folder, trainers[request.param]


def equal(first, second) -> bool:
    """Whether two nested states hold the same numbers, bit for bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


def values(history: list[dict]) -> list[dict]:
    """A log without times."""
    timed = ("_runtime", "_per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in history if "train_loss" not in entry]


def test_thirty_steps_saved_and_thirty_more_in_a_new_process_are_sixty(run) -> None:
    name, folder, trainer = run
    assert trainer.state.global_step == STEPS
    assert same(weights(trainer.model), torch.load(folder / f"{name}.weights", weights_only=True))
    assert equal(optimizer_of(trainer).state_dict(), torch.load(folder / f"{name}.state", weights_only=True))
    assert values(json.loads((folder / f"{name}.log").read_text())) == values(trainer.state.log_history)


def test_the_saved_optimizer_is_whole_and_loads_safely(run) -> None:
    name, folder, trainer = run
    saved = torch.load(folder / name / "checkpoint-30" / "optimizer.pt", weights_only=True)
    listed = [one for group in saved["param_groups"] for one in group["param_names"]]
    assert sorted(listed) == sorted(n for n, _ in trainer.model.named_parameters())
    assert len(saved["state"]) == len(listed), "nobody is left out, fused or not"
    held = sum(s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in saved["state"].values())
    at_thirty = next(e for e in trainer.state.log_history if e["step"] == 30 and "loss" in e)
    assert 0 < at_thirty["optimizer_bytes"] - held < 1000, "moments, and the steps at which lines entered"


def test_the_log_shows_density_gap_and_bytes_and_the_state_the_table(run) -> None:
    name, folder, trainer = run
    training = [entry for entry in trainer.state.log_history if "loss" in entry]
    judged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in training] == [entry["step"] for entry in judged] == [10, 20, 30, 40, 50, 60]
    levels = [round(8 * (entry["step"] - 1) / STEPS) for entry in training]
    assert [e["density"] for e in training] == [0.5 - (0.5 - 0.125) * level / 8 for level in levels]

    gap, gaps = SETTINGS["update_gap"], []
    for before, entry in zip([None, *judged], judged, strict=False):
        if before and abs(before["eval_loss"] - entry["eval_loss"]) / before["eval_loss"] < 0.02:
            gap = min(SETTINGS["update_gap_max"], math.floor(gap * 1.5 + 0.5))
        gaps.append(gap)
    assert [entry["update_gap"] for entry in judged] == gaps
    assert gaps[0] == 7 < gaps[-1], "the evaluation has settled, and the gap has grown"
    assert [entry["update_gap"] for entry in training] == [7, *gaps[:-1]]

    sizes = [entry["optimizer_bytes"] for entry in training]
    assert sizes == sorted(sizes, reverse=True)
    table = json.loads((folder / name / "checkpoint-60" / "trainer_state.json").read_text())["stateful_callbacks"]
    memory = table["AdaFrugalCallback"]["attributes"]["memory"]
    assert memory == optimizer_of(trainer).memory()
    assert memory["total_bytes"] == sizes[-1] < memory["adamw_state_bytes"]
    assert ("grad_norm" in training[0]) is (name != "fused"), "unknown, and never 0.0"
    assert all(entry.get("grad_norm", 1.0) > 0.0 for entry in training)


class Seen(transformers.TrainerCallback):
    """Looks at the optimizer where the Trainer is about to step, and at what it logs."""

    def __init__(self) -> None:
        self.rates, self.gradients, self.logs = [], [], []

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **_) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    def on_log(self, args, state, control, logs, **_) -> None:
        self.logs.append(dict(logs))


def short(folder: Path, **changed):
    """A run of a few steps without evaluation or checkpoint, and what was seen of it."""
    seen = Seen()
    given = {"max_steps": 6, "eval_strategy": "no", "save_strategy": "no", "logging_steps": 1, "more": [seen]}
    trainer = make_trainer(folder, **given | changed)
    quietly(trainer.train)
    return trainer, seen


def test_the_update_inside_backward_is_the_same_run_and_its_rate_is_the_one_logged(tmp_path: Path) -> None:
    plain, at_plain = short(tmp_path, max_grad_norm=0.0)
    fused, at_fused = short(tmp_path, max_grad_norm=0.0, fused=True)
    assert same(weights(plain.model), weights(fused.model))
    assert all(at_plain.gradients)
    assert not any(at_fused.gradients), "used and freed before the Trainer looks"
    for trainer, seen in ((plain, at_plain), (fused, at_fused)):
        assert [e["learning_rate"] for e in trainer.state.log_history if "loss" in e] == seen.rates
        assert len(set(seen.rates)) == 6


def test_compiled_it_is_the_same_run(tmp_path: Path) -> None:
    plain, _ = short(tmp_path, max_steps=3)
    compiled, _ = short(tmp_path, max_steps=3, torch_compile=True, torch_compile_backend="eager")
    assert type(compiled.model_wrapped).__name__ == "OptimizedModule"
    assert same(weights(plain.model), weights(compiled.model))


def test_pieces_of_a_batch_give_the_gradient_of_the_whole(tmp_path: Path) -> None:
    """Sequences with 1 to 15 targets, and a last window of two micro-batches in place of four."""
    rows = examples(6, 3)
    for i, row in enumerate(rows):
        row["labels"] = [-100] * (14 - 2 * i) + row["labels"][14 - 2 * i :]
    found = []
    for size, pieces in ((4, 1), (1, 4)):
        seen = Seen()
        trainer = make_trainer(
            tmp_path, max_steps=2, per_device_train_batch_size=size, gradient_accumulation_steps=pieces,
            eval_strategy="no", save_strategy="no", learning_rate=0.0, max_grad_norm=0.0, more=[seen],
        )  # fmt: skip
        trainer.train_dataset, trainer.model.config.attention_dropout = rows, 0.0
        for layer in trainer.model.model.layers:
            layer.self_attn.attention_dropout = 0.0
        quietly(trainer.train)
        found.append(seen.gradients)
    for whole, pieces in zip(*found, strict=True):
        for name, gradient in whole.items():
            error = (gradient - pieces[name]).abs().max() / gradient.abs().max()
            assert error < 1e-5, name  # float32 sums in another order


def test_each_of_several_evaluation_sets_can_be_the_one_observed(tmp_path: Path, caplog) -> None:
    def run(metric: str | None):
        trainer = make_trainer(
            tmp_path, max_steps=6, eval_steps=2, save_strategy="no", callback=AdaFrugalCallback(metric)
        )
        trainer.eval_dataset = {"near": examples(8, 2), "far": examples(8, 4)}
        quietly(trainer.train)
        return trainer

    with pytest.raises(ConfigError, match=r"an evaluation that gives eval_near_loss; allowed is eval_loss"):
        run(None)
    trainer = run("eval_far_loss")
    far = [entry["eval_far_loss"] for entry in trainer.state.log_history if "eval_far_loss" in entry]
    assert optimizer_of(trainer).split_groups[0]["losses"] == far[-1:]
    with caplog.at_level(logging.WARNING, "adafrugal"):
        run("eval_fra_loss")
    assert "no evaluation gave eval_fra_loss, only eval_far_loss, eval_near_loss" in caplog.text


def test_an_evaluation_outside_of_training_is_not_observed_nor_changed(tmp_path: Path) -> None:
    trainer, _ = short(tmp_path, max_steps=2)
    before = list(optimizer_of(trainer).split_groups[0]["losses"])
    metrics = quietly(trainer.evaluate)
    assert optimizer_of(trainer).split_groups[0]["losses"] == before == []
    assert not {"density", "update_gap", "optimizer_bytes"} & set(metrics), "a search may sum metrics up"


def test_it_can_go_before_the_trackers(tmp_path: Path) -> None:
    late, early = Seen(), Seen()
    for seen, first in ((late, False), (early, True)):
        callback = AdaFrugalCallback()
        trainer = make_trainer(tmp_path, max_steps=1, eval_strategy="no", logging_steps=1, callback=callback)
        trainer.callback_handler.callbacks.insert(0, seen)  # where a Trainer puts its trackers
        if first:
            callback.go_first(trainer)
        quietly(trainer.train)
    assert "density" not in late.logs[0]
    assert early.logs[0]["density"] == 0.5


def test_a_run_begun_without_the_callback_goes_on_with_it(tmp_path: Path) -> None:
    kept = make_trainer(tmp_path, max_steps=4, save_steps=2, eval_strategy="no", settings={"density_end": None})
    kept.pop_callback(AdaFrugalCallback)
    quietly(kept.train)
    trainer = make_trainer(tmp_path, max_steps=4, save_steps=2, eval_strategy="no", settings={"density_end": None})
    quietly(lambda: trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2")))
    assert trainer.state.stateful_callbacks["AdaFrugalCallback"]["attributes"]["memory"]["total_bytes"] > 0
    assert same(weights(kept.model), weights(trainer.model))


def test_two_processes_agree(tmp_path: Path) -> None:
    worker = [__file__, str(tmp_path), "ranks"]
    in_a_new_process("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *worker)
    first, second = (torch.load(tmp_path / f"rank{rank}", weights_only=True) for rank in (0, 1))
    assert same(first.pop("weights"), second.pop("weights"))
    assert first == second
    assert first["step"] == 12
    assert "received several processes" in first["refusal"]
    assert first["update_gap"] == 20, "settled by every evaluation: 7, 11, 17, 20"
