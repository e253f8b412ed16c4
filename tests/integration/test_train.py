"""The main job, from its options to the last file that it leaves."""

import json
import math
from pathlib import Path

import pytest
import torch

from adafrugal.cli import main
from adafrugal.train.checkpoint import Checkpoints
from adafrugal.train.optimizers import method_names

transformers = pytest.importorskip("transformers")


def test_a_run_leaves_what_a_person_can_open_and_a_program_can_read(train, capsys) -> None:
    run = train("run", "--budget.steps", "12")
    out = capsys.readouterr().out
    names = {path.name for path in run.folder.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "summary.json", "report.html", "model", "checkpoints"}

    assert {record["step"] for record in run.records} == {0, 2, 4, 5, 6, 8, 10, 12}
    common = {"step", "tokens", "flops", "seconds", "density", "update_gap", "optimizer_state_bytes"}
    assert all(common <= set(record) for record in run.records)
    training = [r for r in run.records if "train_loss" in r]
    judged = [r for r in run.records if "val_loss" in r]
    assert [r["step"] for r in training] == [2, 4, 6, 8, 10, 12]
    assert [r["step"] for r in judged] == [0, 5, 10, 12]
    assert all({"lr", "grad_norm", "tokens_per_second"} <= set(r) for r in training)
    for record in judged:
        assert record["perplexity"] == pytest.approx(math.exp(record["val_loss"]))

    summary = run.summary
    assert summary["steps"] == 12
    assert summary["ended_by"] == "steps"
    assert summary["tokens"] == 12 * 4 * 32
    assert summary["final_val_loss"] == judged[-1]["val_loss"]
    assert summary["best_val_loss"] == min(r["val_loss"] for r in judged) < judged[0]["val_loss"]
    assert summary["final_bits_per_byte"] == judged[-1]["bits_per_byte"]
    peak, mean, final = (summary[f"{k}_optimizer_state_bytes"] for k in ("peak", "mean", "final"))
    assert peak >= mean >= final > 0
    assert peak >= max(run.of("optimizer_state_bytes")), "of all steps, logged or not"
    assert summary["adamw_state_bytes"] == 8 * summary["num_parameters"]
    assert set(summary["ledger"]) == {"training", "evaluation", "checkpoint"}
    assert summary["ledger"]["evaluation"]["flops"] > 0
    assert summary["ledger"]["checkpoint"]["written_bytes"] > 0
    assert len(summary["text_sha256"]) == 64
    assert {"python", "torch", "transformers", "adafrugal"} <= set(summary["versions"])

    page = (run.folder / "report.html").read_text()
    assert page.count("<svg") == 6
    assert "Configuration" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ), "the page needs nothing from elsewhere"
    for words in ("bits per byte", "optimizer state, peak", "AdamW would hold", "a sample of what it writes"):
        assert words in out


def test_transformers_loads_the_model_and_its_tokenizer(train) -> None:
    run = train("run", "--budget.steps", "4")
    model = transformers.AutoModelForCausalLM.from_pretrained(run.folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.folder / "model")
    assert tokenizer("cat é")["input_ids"] == list("cat é".encode())
    checkpoints = Checkpoints(run.folder / "checkpoints", 2)
    newest = checkpoints.newest()
    assert newest is not None
    saved = checkpoints.load(newest)["model"]
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_the_configuration_says_where_every_value_came_from(train, tmp_path: Path) -> None:
    given = tmp_path / "given.yaml"
    given.write_text("optim:\n  lr: 1e-3\n  betas: [0.8, 0.95]\nseed: 3\n")
    run = train("run", "--config", str(given), "--budget.steps", "2", "--optim.density=.5")
    lines = (run.folder / "config.yaml").read_text().splitlines()
    found = {line.strip() for line in lines}
    assert f"lr: 0.001  # file {given}" in found
    assert f"betas: [0.8, 0.95]  # file {given}" in found
    assert f"seed: 3  # file {given}" in found
    assert "density: 0.5  # command line" in found
    assert "steps: 2  # command line" in found
    assert "max_grad_norm: 1.0  # default" in found
    settings = {group["label"]: group for group in run.summary["optimizer_groups"]}
    assert settings["matrices"]["lr"] == 1e-3
    assert settings["matrices"]["betas"] == [0.8, 0.95]
    assert settings["matrices"]["density_start"] == 0.5
    again = tmp_path / "again"
    assert main(["train", "--config", str(run.folder / "config.yaml"), "--out", str(again)]) == 0
    assert (again / "model" / "model.safetensors").read_bytes() == run.weights(), "the file repeats the run"


@pytest.mark.parametrize("name", method_names())
def test_every_optimizer_trains(train, name: str) -> None:
    keeps_gap = name in ("adafrugal",)
    options = ["--optim.name", name, "--budget.steps", "30", "--eval.every_steps", "30"]
    run = train(name, *options) if keeps_gap else _without_gaps(train, name, options)
    losses = run.of("val_loss")
    assert losses[-1] < losses[0] - 0.05
    held, adamw = run.summary["peak_optimizer_state_bytes"], run.summary["adamw_state_bytes"]
    if name in ("signsgd", "sgd"):
        assert held == 0
    elif name == "adamw":
        assert held >= adamw
    else:
        assert 0 < held < adamw


def _without_gaps(train, name: str, options: list[str]):
    """The shared options set a moving gap, which only adafrugal has: null is its default again."""
    cleared = ["--optim.update_gap_max", "null"]
    if name in ("signsgd", "adamw", "sgd"):
        cleared += ["--optim.update_gap", "null"]
    return train(name, *options, *cleared)


def test_density_and_rate_follow_the_budget_and_land(train) -> None:
    run = train("run", "--budget.tokens", str(40 * 4 * 32), "--log_every_steps", "1", "--schedule.floor", "0.1")
    assert run.summary["steps"] == 40
    assert run.summary["ended_by"] == "tokens"
    densities = [r["density"] for r in run.records if "train_loss" in r]
    assert densities[0] == 0.25
    assert densities[-1] == 0.05
    assert len(set(densities)) == 9
    assert densities == sorted(densities, reverse=True)
    rates = run.of("lr")
    assert max(rates) == pytest.approx(4e-3, rel=0.02)
    assert rates[0] < 1e-3
    assert rates[-1] == pytest.approx(4e-4, rel=0.05), "a tenth of the peak, at the last step"


def test_the_gap_grows_on_a_plateau_that_the_run_meets(train) -> None:
    run = train(
        "run", "--budget.steps", "30", "--optim.plateau_tolerance", "0.9", "--eval.every_steps", "5",
        "--optim.moving_density", "false",
    )  # fmt: skip
    gaps = [r["update_gap"] for r in run.records if "val_loss" in r]
    assert gaps[0] == 3
    assert gaps[-1] == 8
    assert set(run.of("density")) == {0.25}


@pytest.mark.parametrize(("limit", "value"), [("flops", 2e10), ("tokens", 1000), ("steps", 7)])
def test_no_budget_is_exceeded(train, limit: str, value: float) -> None:
    run = train("run", f"--budget.{limit}", str(value))
    assert run.summary["ended_by"] == limit
    spent = run.summary[limit]
    assert spent <= value
    one_step = {"flops": run.summary["ledger"]["training"]["flops"] / run.summary["steps"], "tokens": 128, "steps": 1}
    assert spent > value - 2 * one_step[limit], "and it is used"


def test_whichever_limit_binds_first_ends_it(train) -> None:
    run = train("run", "--budget.steps", "50", "--budget.tokens", "640")
    assert (run.summary["steps"], run.summary["ended_by"]) == (5, "tokens")


def test_pieces_of_a_batch_add_up_to_the_whole(train) -> None:
    """Micro-batches of 3 and 1: weighted by their targets, not averaged."""
    whole = train("whole", "--budget.steps", "6", "--weights", "float32")
    pieces = train("pieces", "--budget.steps", "6", "--batch.micro_sequences", "3")
    for a, b in zip(whole.of("train_loss"), pieces.of("train_loss"), strict=True):
        assert a == pytest.approx(b, abs=2e-4)  # float32 sums in another order, magnified by six signed steps
    assert whole.of("grad_norm")[0] == pytest.approx(pieces.of("grad_norm")[0], rel=1e-5)
    assert whole.summary["flops"] == pieces.summary["flops"]


def test_the_update_inside_backward_is_the_same_run(train) -> None:
    plain = train("plain", "--budget.steps", "8", "--max_grad_norm", "0")
    fused = train("fused", "--budget.steps", "8", "--max_grad_norm", "0", "--fused_backward", "true")
    assert plain.weights() == fused.weights()
    assert plain.of("grad_norm"), "measured"
    assert not fused.of("grad_norm"), "unknown, and never 0.0"


@pytest.mark.slow
def test_the_compiled_update_is_the_same_run_to_rounding(train) -> None:
    plain = train("plain", "--budget.steps", "3")
    compiled = train("compiled", "--budget.steps", "3", "--optim.compile", "true")
    for a, b in zip(plain.of("train_loss"), compiled.of("train_loss"), strict=True):
        assert a == pytest.approx(b, abs=2e-4)  # another program's float32, magnified by three signed steps


def test_activation_checkpointing_computes_the_same_and_costs_more(train) -> None:
    plain = train("plain", "--budget.steps", "5")
    spared = train("spared", "--budget.steps", "5", "--activation_checkpointing", "true")
    assert plain.weights() == spared.weights()
    training = [run.summary["ledger"]["training"]["flops"] for run in (plain, spared)]
    assert 1.15 < training[1] / training[0] < 1.35


def test_low_precision_runs(train) -> None:
    for name, options in {
        "autocast": ["--autocast", "true"],
        "bf16": ["--weights", "bfloat16"],
        "state": ["--optim.state_dtype", "bfloat16"],
    }.items():
        run = train(name, "--budget.steps", "30", *options)
        losses = run.of("val_loss")
        assert losses[-1] < losses[0] - 0.1
    halves = train("plain", "--budget.steps", "1").summary["peak_optimizer_state_bytes"]
    assert run.summary["peak_optimizer_state_bytes"] * 2 == halves


def test_a_trained_tokenizer_and_a_saved_model_as_a_start(train, tmp_path: Path) -> None:
    first = train("first", "--tokenizer.train", "300", "--budget.steps", "6")
    assert first.summary["tokenizer"].startswith("bpe")
    assert first.summary["bytes_are_exact"]
    second = train("second", "--model", str(first.folder / "model"), "--budget.steps", "2")
    assert second.summary["tokenizer_sha256"] == first.summary["tokenizer_sha256"], "the model's own tokenizer"
    assert second.of("val_loss")[0] == pytest.approx(first.of("val_loss")[-1], abs=1e-6)
    assert list((tmp_path / "cache").rglob("*.json")), "trained once, kept"


def test_bits_per_byte_of_an_untrained_model_are_those_of_its_loss(train) -> None:
    run = train("run", "--budget.steps", "1")
    first = next(r for r in run.records if "val_loss" in r)
    # Every scored token but separators is one byte; separators stand for none, so there are slightly more bits.
    assert first["bits_per_byte"] >= first["val_loss"] / math.log(2)
    assert first["bits_per_byte"] == pytest.approx(first["val_loss"] / math.log(2), rel=0.02)


def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not(train) -> None:
    a, b, c = (
        train("a", "--budget.steps", "6"),
        train("b", "--budget.steps", "6"),
        train("c", "--budget.steps", "6", "--seed", "1"),
    )
    assert a.weights() == b.weights()
    assert a.weights() != c.weights()
    drop = ("seconds", "tokens_per_second")
    strip = [[{k: v for k, v in r.items() if k not in drop} for r in run.records] for run in (a, b)]
    assert strip[0] == strip[1]


def test_presets_have_frugals_shapes() -> None:
    from adafrugal.data.tokenizer import TokenizerConfig
    from adafrugal.plan.shapes import PRESETS
    from adafrugal.train.config import TrainConfig
    from adafrugal.train.models import build_model, vocabulary_of

    with torch.device("meta"):
        for name in ("tiny", "llama-60m", "llama-130m"):
            model = build_model(TrainConfig(model=name, tokenizer=TokenizerConfig()), 257, torch.device("meta"))
            assert sum(p.numel() for p in model.parameters()) == PRESETS.create(name).num_parameters
        assert vocabulary_of(build_model(TrainConfig(vocab_size=300), 257, torch.device("meta"))) == 300


def test_a_streamed_hub_data_set_trains_and_resumes(train, tmp_path: Path, monkeypatch, text: Path) -> None:
    """The real streaming code on local records: only the name's look-up on the hub is replaced."""
    datasets = pytest.importorskip("datasets")
    records = tmp_path / "records.jsonl"
    lines = [line for path in sorted(text.glob("*.txt")) for line in path.read_text().splitlines()]
    records.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    real = datasets.load_dataset

    def load_dataset(name: str, *args, **kwargs):
        assert name == "somebody/prose"
        kwargs.pop("name", None)
        return real("json", data_files=str(records), split=kwargs["split"], streaming=kwargs["streaming"])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    run = train("run", "--text.source", "somebody/prose", "--budget.steps", "6")
    assert run.summary["text"].startswith("somebody/prose")
    assert run.of("val_loss")[-1] < run.of("val_loss")[0]
