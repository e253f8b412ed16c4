"""The pages on the Trainer, TRL and PEFT, and their examples: every command and every block runs as it is printed."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

from adafrugal import AdaFRUGAL  # noqa: E402

ROOT = Path(__file__).parents[2]


def loaded(path: str):
    """A file of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sft = loaded("tests/integration/test_trl_and_peft.py")
PAGES = ("hf_trainer.md", "trl_and_peft.md")
pytestmark = [
    # trl 1.16 still says gradient_checkpointing where transformers 5.24 says activation_checkpointing.
    pytest.mark.filterwarnings(
        r"ignore:.*gradient_checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    ),
]


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def commands(page: str) -> list[list[str]]:
    lines = [line.split("#")[0] for block in blocks(page, "bash") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("python ")]


def run_example(path: str, options: list[str]):
    with torch.random.fork_rng():  # a Trainer seeds
        return loaded(path).main(options)


@pytest.mark.parametrize("command", [c for page in PAGES for c in commands(page)], ids=" ".join)
def test_every_command_runs(command: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    _, path, *options = command
    trainer = run_example(path, options)
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, AdaFRUGAL)
    judged = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    assert judged[-1] < judged[0]
    assert (tmp_path / trainer.args.output_dir / "checkpoint-12" / "optimizer.pt").exists()
    printed = capsys.readouterr().out
    assert ("low-rank adapter" in printed) is ("--lora_rank" in options)
    if path == "examples/hf_trainer.py":
        assert str(optimizer.memory()) in printed
        again = run_example(path, [*options, "--resume", "--max_steps", "14", "--optim_args", "update_gap_max=None"])
        assert again.state.global_step == 14


def test_every_block_of_the_trainers_page_runs(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=2, report_to="none", disable_tqdm=True, eval_strategy="steps",
        eval_steps=1, save_strategy="no", dataloader_pin_memory=False, logging_steps=1,
    )  # fmt: skip
    rows = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(1)).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]
    given = {
        "model": sft.tiny_llama(), "args": args, "train_dataset": data, "eval_dataset": data,
        "Trainer": transformers.Trainer,
    }  # fmt: skip
    first, *others = blocks("hf_trainer.md", "python")
    with torch.random.fork_rng():
        exec(first, given)
    assert {"density", "update_gap", "optimizer_bytes"} <= set(given["trainer"].state.log_history[0])
    for block in others:
        exec(block, given)
    group = given["optimizer"].split_groups[0]
    assert (group["density"], group["update_gap"], group["betas"]) == (0.3, 50, (0.9, 0.95))
    assert given["fused"].attached


def test_every_block_of_the_trl_page_runs(tmp_path: Path, capsys) -> None:
    args = trl.SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, max_steps=2, report_to="none", disable_tqdm=True, save_strategy="no",
        dataloader_pin_memory=False, bf16=False, eval_strategy="steps", eval_steps=1, logging_steps=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        adapted = peft.get_peft_model(sft.tiny_llama(), sft.lora())
        given = {
            "model": sft.tiny_llama(), "args": args, "tokenizer": sft.tokenizer(), "SFTTrainer": trl.SFTTrainer,
            "train_dataset": sft.questions(16, 1), "eval_dataset": sft.questions(8, 2), "peft_model": adapted,
        }  # fmt: skip
        first, second = blocks("trl_and_peft.md", "python")
        exec(first, given)
    assert {"density", "update_gap", "optimizer_bytes"} <= set(given["trainer"].state.log_history[0])
    exec(second, given)
    printed = capsys.readouterr().out
    assert printed.count("rule '*.down_proj.lora_*'") == 4
    assert printed.count("low-rank adapter") == 8
