"""Situations from other people's training loops that no other test here meets; docs/field_cases.md lists them all."""

import json
from pathlib import Path

import pytest
import torch

from adafrugal import FRUGAL, AdaFRUGAL, param_groups
from adafrugal.cli import main, train_parser
from adafrugal.core.errors import NotSupportedError
from adafrugal.train.models import build_model

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_takes_two_steps(recipe: Path, text: Path, tmp_path: Path) -> None:
    """All of its settings, on a model and a text that fit a test; its own model is built without memory, and splits."""
    given = ["--config", str(recipe), "--model", "tiny", "--text.source", str(text), "--tokenizer.name", "bytes"]
    given += ["--text.hub_config", "null", "--text.hub_split", "train", "--text.hub_validation_split", "null"]
    small = ["--batch.sequence_length", "32", "--batch.sequences", "4", "--batch.micro_sequences", "2"]
    rare = ["--budget.steps", "2", "--eval.windows", "4", "--log_every_steps", "1", "--sample.tokens", "0"]
    assert main(["train", "--out", str(tmp_path / "run"), *given, *small, *rare]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "train_loss" in record] == [1, 2]
    config = train_parser().instantiate(train_parser().parse_args(["--config", str(recipe)]))
    model = build_model(config, 257, torch.device("meta"))
    split = [name for group in param_groups(model) if group["role"] == "split" for name in group["param_names"]]
    assert len(split) == 7 * model.config.num_hidden_layers, "four of attention and three of the MLP in each layer"


def test_a_runs_own_weights_as_the_model_of_its_resume_are_refused(train, capsys) -> None:
    """Weights alone are no resume: their loss would jump, since moments, clocks and the place in the text are gone."""
    run = train("run", "--budget.steps", "4")
    capsys.readouterr()
    weights = run.folder / "model"
    assert main(["train", "--resume", str(run.folder), "--model", str(weights)]) == 2
    assert f"model={weights}; allowed is model=tiny, as the run began" in capsys.readouterr().err
    fresh = train("fresh", "--model", str(weights), "--budget.steps", "2")
    assert fresh.records[0]["step"] == 0, "as the start of another run they are welcome"
    assert fresh.of("val_loss")[0] == pytest.approx(run.of("val_loss")[-1], abs=1e-6)  # one float32 mean, twice


def test_a_translation_model_of_the_nllb_kind_needs_no_names_and_trains() -> None:
    config = transformers.M2M100Config(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=32, pad_token_id=1,
        decoder_start_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.M2M100ForConditionalGeneration(config).eval()  # eval: dropout draws from the global stream
    optimizer = AdaFRUGAL(model, 1e-2, total_steps=30, update_gap=5)
    rows = optimizer.describe().rows
    # Each encoder layer has four projections and two of the MLP; a decoder layer has four more for cross-attention.
    assert sum(row.why == "Linear in a block" for row in rows if row.role == "split") == 2 * 6 + 2 * 10
    assert [row.name for row in rows if row.why == "embedding (tied)"] == ["model.shared.weight"]
    losses = []
    for step in range(30):
        tokens = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(step % 3))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


# peft 0.21 still asks for is_gradient_checkpointing, which transformers 5.24 calls is_activation_checkpointing.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_adapters_over_frozen_weights_are_all_that_a_fused_backward_touches() -> None:
    """As in QLoRA, most weights need no gradient: no hook on them, no state, no place in a group."""
    peft = pytest.importorskip("peft")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **shape))
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = FRUGAL(model, 1e-2)
    optimizer.attach(model)
    hooked = [p for p in model.parameters() if p._post_accumulate_grad_hooks]
    assert {id(p) for p in hooked} == {id(p) for p in trained}
    before = [p.detach().clone() for p in trained]
    for step in range(3):
        tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
    assert set(optimizer.state) == set(trained)
    assert all(not torch.equal(a, b) for a, b in zip(before, trained, strict=True))
    named = dict(model.named_parameters())
    assert all(torch.equal(weight, named[name]) for name, weight in frozen.items())
    assert f"{len(frozen)} frozen parameters are not optimized" in str(optimizer.describe())


@pytest.mark.parametrize(("config", "message"), [
    ({"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 0}},
     r'an optimizer block: AdamW.*Remove the block "optimizer"'),
    ({"zero_optimization": {"stage": 2}}, r"ZeRO stage 2; allowed is stage 0.*Use FSDP2"),
    ({"zero_optimization": {"stage": 3}}, r"ZeRO stage 3; allowed is stage 0.*Use FSDP2"),
    ({"zero_optimization": {"stage": 0}}, None),
])  # fmt: skip
def test_a_deepspeed_configuration_is_refused_where_it_takes_the_optimizers_place(config, message, tmp_path) -> None:
    """accelerate's own reading of the configuration, which needs no DeepSpeed; the arguments' check would."""
    accelerate = pytest.importorskip("accelerate")
    from adafrugal.integrations.hf import adafrugal_cls_and_kwargs

    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    args.deepspeed_plugin = accelerate.DeepSpeedPlugin(hf_ds_config={**config, **sizes})
    if message is None:
        assert adafrugal_cls_and_kwargs(args)[1]["method"] == "adafrugal"
        return
    with pytest.raises(NotSupportedError, match=message):
        adafrugal_cls_and_kwargs(args)
