"""`adafrugal plan` as a person uses it, and the plan that `adafrugal train` runs unchanged."""

import json
import time
from pathlib import Path

import pytest

from adafrugal.cli import main
from adafrugal.laws.scaling import LAWS
from adafrugal.plan.shapes import PRESETS
from adafrugal.train.planning import shape_of, shape_of_configuration

transformers = pytest.importorskip("transformers")


def said(capsys, *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def test_a_person_reads_what_fits_and_why(capsys) -> None:
    out = said(capsys, "--model", "llama-130m", "--memory", "8GiB", "--length", "512", "--device", "cpu")
    for words in (
        "134,105,856 parameters",
        "recommended: ",
        "most of it is",
        "each change by itself would save",
        "signsgd",
    ):
        assert words in out


def test_a_large_preset_is_answered_at_once_and_without_a_model(capsys) -> None:
    words = ("--model", "llama-7b", "--memory", "24GiB", "--json", "--device", "cuda")
    said(capsys, "--model", "tiny", "--memory", "1GiB", "--json")  # imports
    started = time.perf_counter()
    found = json.loads(said(capsys, *words))
    assert time.perf_counter() - started < 10.0  # two seconds on an idle machine; a model of 27 GB would take minutes
    assert found["num_parameters"] == 6_738_415_616
    assert found["fits"] is False
    assert found["missing_bytes"] > 0
    assert "--clip false --sequences 1 fits" in found["nearest"]
    alone = json.loads(said(capsys, *words, "--clip", "false", "--sequences", "1"))
    assert alone["recommended"]["fused_backward"] is True


def test_a_saved_plan_trains_unchanged(capsys, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a short text that goes on and on. " * 2000)
    plan = tmp_path / "plan.yaml"
    words = ("--model", "tiny", "--memory", "700MB", "--length", "64", "--sequences", "4", "--device", "cpu")
    assert "saved:" in said(capsys, *words, "--save", str(plan), "--optim", "[adafrugal]")
    run = [
        "train",
        "--config",
        str(plan),
        "--text.source",
        str(text),
        "--out",
        str(tmp_path / "run"),
        "--device",
        "cpu",
    ]
    assert main([*run, "--budget.steps", "3", "--eval.windows", "2", "--sample.tokens", "0"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["optimizer"] == "adafrugal"


def test_a_budget_of_compute_names_size_tokens_law_and_range(capsys) -> None:
    words = ("--model", "llama-130m", "--memory", "8GiB", "--json", "--length", "256")
    advice = json.loads(said(capsys, *words, "--flops", "1e19"))["optimum"]
    assert advice["law"] == "besiroglu"
    assert advice["tokens"] / advice["num_parameters"] == pytest.approx(24, abs=0.5), "D*/N* at 1e19"
    assert 6 * advice["tokens"] * advice["num_parameters"] == pytest.approx(1e19)
    low, high = advice["num_parameters_range"]
    assert low <= advice["num_parameters"] <= high
    timed = json.loads(said(capsys, *words, "--seconds", "1e6", "--flops-per-second", "1e13"))["optimum"]
    assert timed["num_parameters"] == pytest.approx(advice["num_parameters"])
    scarce = json.loads(said(capsys, *words, "--flops", "1e19", "--unique-tokens", "1e8"))["optimum"]
    assert scarce["law"] == "muennighoff"
    expected = LAWS.create("muennighoff").optimum(1e19, unique_tokens=1e8)
    assert (scarce["num_parameters"], scarce["tokens"]) == tuple(expected)
    assert scarce["tokens"] > 1e8, "some text is repeated"


def test_shapes_of_configurations_count_what_models_have() -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    cases = [
        (transformers.LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=True), "LlamaForCausalLM"),
        (transformers.LlamaConfig(**sizes, attention_bias=True, mlp_bias=True), "LlamaForCausalLM"),
        (transformers.MistralConfig(**sizes, num_key_value_heads=2), "MistralForCausalLM"),
        (transformers.Qwen2Config(**sizes, num_key_value_heads=2), "Qwen2ForCausalLM"),
        (transformers.BertConfig(**sizes), "BertForMaskedLM"),
        (transformers.RobertaConfig(**sizes), "RobertaForMaskedLM"),
    ]
    import torch

    for config, kind in cases:
        with torch.device("meta"), torch.random.fork_rng():
            model = getattr(transformers, kind)(config)
        counted = sum({id(p): p.numel() for p in model.parameters()}.values())
        assert shape_of_configuration(config.to_dict(), kind).num_parameters == counted, kind
    assert shape_of("llama-60m") == PRESETS.create("llama-60m")


def test_a_folder_is_planned_from_its_configuration_alone(capsys, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config.save_pretrained(tmp_path)
    out = said(capsys, "--model", str(tmp_path), "--memory", "2GB", "--length", "128")
    assert "recommended" in out


REFUSED = {
    "no memory": (["--model", "tiny"], "no --memory"),
    "no unit": (["--memory", "24"], "24 without a unit"),
    "a preset": (["--memory", "1GiB", "--model", "llama-130"], "Did you mean 'llama-130m'?"),
    "an option": (["--memroy", "1GiB"], "Did you mean 'memory'?"),
    "an optimizer": (["--memory", "1GiB", "--optim", "[galor]"], "Did you mean 'galore'?"),
    "seconds alone": (["--memory", "1GiB", "--seconds", "60"], "seconds with --flops_per_second"),
    "tokens alone": (["--memory", "1GiB", "--unique-tokens", "1e9"], "a budget beside them"),
    "odd processes": (["--memory", "1GiB", "--processes", "3"], "as many windows for each process"),
    "a law": (["--memory", "1GiB", "--flops", "1e18", "--law", "kaplann"], "Did you mean 'kaplan'?"),
    "saving nothing": (["--memory", "601MB", "--model", "llama-1b", "--save", "x.yaml"], "nothing that fits"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_mistakes_are_one_sentence(words, message, capsys) -> None:
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_configuration_without_the_needed_fields_is_named(capsys, tmp_path: Path) -> None:
    transformers.T5Config().save_pretrained(tmp_path)
    assert main(["plan", "--memory", "1GiB", "--model", str(tmp_path)]) == 2
    assert "without" in capsys.readouterr().err
