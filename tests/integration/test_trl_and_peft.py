"""TRL's SFTTrainer, and PEFT's adapters: the factory sees the model as it is trained, and runs resume bit for bit.

Run as a script, this file is the new process: it resumes every run that it is told of.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

from datasets import Dataset, disable_progress_bars  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from adafrugal.core.errors import NotSupportedError  # noqa: E402
from adafrugal.integrations.hf import (  # noqa: E402
    AdaFrugalCallback,
    adafrugal_cls_and_kwargs,
    create_adafrugal_optimizer,
)

# trl 1.16 still says gradient_checkpointing where transformers 5.24 says activation_checkpointing.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*gradient_checkpointing.* is deprecated and will be removed in v6:FutureWarning"
)
disable_progress_bars()
WORDS = [f"w{i}" for i in range(29)]
SETTINGS = {"density": 0.5, "density_end": 0.125, "update_gap": 7, "update_gap_max": 20, "plateau_tolerance": 0.05}
RUNS = {
    "whole": {},
    "adapters": {"lora": {}},
    "adapters_and_head": {"lora": {"modules_to_save": ["lm_head"]}, "gradient_accumulation_steps": 2, "bf16": True},
}


def tokenizer():
    """One id for each word, and two that mean something to a trainer."""
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def tiny_llama():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1,
            )
        )  # fmt: skip


def questions(number: int, seed: int) -> Dataset:
    """A word, and as its answer the two words that follow from it."""
    first = torch.randint(0, 29, (number,), generator=torch.Generator().manual_seed(seed)).tolist()
    answers = [f" {WORDS[(3 * i + 1) % 29]} {WORDS[(5 * i + 2) % 29]}" for i in first]
    return Dataset.from_dict({"prompt": [WORDS[i] for i in first], "completion": answers})


def lora(**changed):
    return peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM",
        **changed,
    )  # fmt: skip


def make_trainer(folder: Path, *, lora: dict | None = None, settings=SETTINGS, how=None, model=None, **changed):
    given = {
        "output_dir": str(folder), "use_cpu": True, "max_steps": 60, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "weight_decay": 0.1, "logging_steps": 10, "eval_strategy": "steps", "eval_steps": 10,
        "save_steps": 30, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "bf16": False,
    }  # fmt: skip
    args = trl.SFTConfig(**given | changed)
    return trl.SFTTrainer(
        model=model or tiny_llama(),
        args=args,
        train_dataset=questions(96, 1),
        eval_dataset=questions(16, 2),
        processing_class=tokenizer(),
        peft_config=None if lora is None else globals()["lora"](**lora),
        callbacks=[AdaFrugalCallback()],
        **(how or {"optimizer_cls_and_kwargs": adafrugal_cls_and_kwargs(args, **settings)}),
    )


def trained(*given, **settings):
    """A trainer after its run; it seeds the global stream, which is put back."""
    with torch.random.fork_rng():
        trainer = make_trainer(*given, **settings)
        trainer.train()
    return trainer


def optimizer_of(trainer):
    return trainer.optimizer.optimizer


def weights(model) -> dict:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


if __name__ == "__main__":
    torch.set_num_threads(1)
    top = Path(sys.argv[1])
    for run in sys.argv[2:]:
        resumed = make_trainer(top / run, **RUNS[run])
        resumed.train(resume_from_checkpoint=str(top / run / "checkpoint-30"))
        found = {"weights": weights(resumed.model), "state": optimizer_of(resumed).state_dict()["state"]}
        torch.save(found, top / f"{run}.found")
    sys.exit()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Every run: to the end in this process, and in a new one from its checkpoint at step 30."""
    folder = tmp_path_factory.mktemp("runs")
    trainers = {name: trained(folder / name, **settings) for name, settings in RUNS.items()}
    command = [sys.executable, __file__, str(folder), *RUNS]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, trainers


@pytest.mark.parametrize("name", RUNS)
def test_thirty_steps_saved_and_thirty_more_in_a_new_process_are_sixty(finished, name: str) -> None:
    folder, trainers = finished
    found = torch.load(folder / f"{name}.found", weights_only=True)
    assert same(weights(trainers[name].model), found["weights"]), "adapters and all"
    state = optimizer_of(trainers[name]).state_dict()["state"]
    assert state.keys() == found["state"].keys()
    for index, tensors in state.items():
        assert tensors.keys() == found["state"][index].keys()
        for key, value in tensors.items():
            there = found["state"][index][key]
            assert torch.equal(value, there) if isinstance(value, torch.Tensor) else value == there


def test_a_whole_model_splits_learns_and_logs(finished) -> None:
    trainer = finished[1]["whole"]
    rows = optimizer_of(trainer).describe().rows
    assert {row.role for row in rows if "_proj" in row.name} == {"split"}
    assert len([row for row in rows if row.role == "split"]) == 14
    training = [entry for entry in trainer.state.log_history if "loss" in entry]
    judged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert judged[-1]["eval_loss"] < judged[0]["eval_loss"] - 0.1
    assert training[-1]["density"] == 0.125 < training[0]["density"]
    assert training[-1]["optimizer_bytes"] < training[0]["optimizer_bytes"]
    assert judged[-1]["update_gap"] > judged[0]["update_gap"] == 7


@pytest.mark.parametrize("name", ["adapters", "adapters_and_head"])
def test_adapters_are_small_so_adamw_trains_them_and_nothing_else_moves(finished, name: str) -> None:
    folder, trainers = finished
    trainer, start = trainers[name], weights(tiny_llama())
    optimizer = optimizer_of(trainer)
    rows = optimizer.describe().rows
    reasons = {row.why for row in rows}
    assert reasons == ({"low-rank adapter"} if name == "adapters" else {"low-rank adapter", "output head"})
    assert {row.role for row in rows} == {"stateful"}
    assert optimizer.memory()["state_bytes"] == optimizer.memory()["adamw_state_bytes"]
    assert sum(row.why == "low-rank adapter" for row in rows) == 2 * 2 * 3

    ended = weights(trainer.model)
    frozen = [n for n in ended if n.endswith((".base_layer.weight", "_layernorm.weight"))]
    assert len(frozen) == 2 * (3 + 2)
    for full in frozen:
        assert torch.equal(ended[full], start[full.removeprefix("base_model.model.").replace(".base_layer", "")])
    assert all(ended[n].abs().sum() > 0 for n in ended if "lora_B" in n), "they start at zero"
    saved = json.loads((folder / name / "checkpoint-60" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["eval_loss"] for entry in saved if "eval_loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    logged = next(entry for entry in saved if "loss" in entry)
    assert logged["optimizer_bytes"] == optimizer.memory()["total_bytes"]
    assert "density" not in logged, "nothing splits, so there is none"


def test_adapters_train_as_torchs_adamw_trains_them(tmp_path: Path) -> None:
    ours = trained(tmp_path, lora={}, max_steps=8, save_strategy="no")
    torchs = make_with_adamw(tmp_path)
    for name, weight in weights(ours.model).items():
        torch.testing.assert_close(weight, torchs[name], rtol=1e-5, atol=1e-6)  # float32, another order of operations


def make_with_adamw(folder: Path) -> dict:
    with torch.random.fork_rng():
        trainer = make_trainer(folder, lora={}, max_steps=8, save_strategy="no", how={"optimizers": (None, None)})
        trainer.remove_callback(AdaFrugalCallback)
        trainer.train()
    assert type(trainer.optimizer.optimizer) is torch.optim.AdamW
    return weights(trainer.model)


def test_a_rule_splits_adapters_that_are_large_enough(tmp_path: Path) -> None:
    settings = SETTINGS | {"rules": {"*down_proj.lora_*": "split"}, "density_end": None}
    trainer = trained(tmp_path, lora={}, max_steps=3, save_strategy="no", settings=settings)
    rows = [row for row in optimizer_of(trainer).describe().rows if row.role == "split"]
    assert sorted(row.name.split(".", 5)[-1] for row in rows) == sorted(
        ["mlp.down_proj.lora_A.default.weight", "mlp.down_proj.lora_B.default.weight"] * 2
    )
    assert all(row.stateful_elements * 2 == torch.Size(row.shape).numel() for row in rows)


def test_a_peft_model_made_before_takes_a_ready_optimizer(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(42)  # as SFTTrainer does before it adds adapters
        model = peft.get_peft_model(tiny_llama(), lora())
    args = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", learning_rate=1e-2, weight_decay=0.1)
    ready = create_adafrugal_optimizer(model, args, **SETTINGS)
    how = {"optimizers": (ready, None)}
    before = trained(tmp_path, model=model, how=how, max_steps=6, save_strategy="no")
    after = trained(tmp_path, lora={}, max_steps=6, save_strategy="no")
    assert same(weights(before.model), weights(after.model))


def test_the_update_inside_backward_is_the_same_run(tmp_path: Path) -> None:
    """TRL checkpoints activations unless told otherwise: each gradient is still handed over once."""
    given = {"max_steps": 6, "save_strategy": "no", "max_grad_norm": 0.0}
    plain = trained(tmp_path, **given)
    fused = trained(tmp_path, settings=SETTINGS | {"fused_backward": True}, **given)
    assert plain.args.gradient_checkpointing
    assert optimizer_of(fused).attached
    assert same(weights(plain.model), weights(fused.model))
    with pytest.raises(NotSupportedError, match=r"Set max_grad_norm=0"):
        trained(tmp_path, settings=SETTINGS | {"fused_backward": True}, max_steps=6)
