"""Train a causal language model with Hugging Face's Trainer and AdaFRUGAL; without arguments a tiny model, offline.

python examples/hf_trainer.py
python examples/hf_trainer.py --model my_llama/ --text corpus.txt --max_steps 10000 --length 1024 --bf16
python examples/hf_trainer.py --optim_args "density=0.3,update_gap=100,betas=(0.9,0.95)"
python examples/hf_trainer.py --resume
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Trainer, TrainingArguments, set_seed

from adafrugal.integrations.hf import AdaFrugalCallback, adafrugal_cls_and_kwargs


def parse(command: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub id with its tokenizer; none is a tiny Llama over bytes")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a text file; its last tenth is held out")
    parser.add_argument("--out", type=Path, default=Path("runs/hf_trainer"))
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=64, help="tokens in a window")
    parser.add_argument("--batch", type=int, default=8, help="windows in a batch")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--optim_args", default="", help="settings of AdaFRUGAL, as name=value with commas")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 products; weights stay float32")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--use_cpu", action="store_true")
    return parser.parse_args(command)


def load(given: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model, and the text as one row of token ids."""
    if given.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(given.model)
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
        return model, torch.tensor(tokenizer(given.text.read_text())["input_ids"])
    set_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **shape))
    return model, torch.tensor(list(given.text.read_bytes()))


def windows(tokens: torch.Tensor, length: int) -> list[dict[str, list[int]]]:
    rows = tokens[: len(tokens) // length * length].view(-1, length).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def main(command: list[str] | None = None) -> Trainer:
    given = parse(command)
    model, tokens = load(given)
    held_out = max(given.length, len(tokens) // 10)
    args = TrainingArguments(
        output_dir=str(given.out), max_steps=given.max_steps, learning_rate=given.lr, lr_scheduler_type="cosine",
        warmup_steps=given.max_steps // 20, per_device_train_batch_size=given.batch, bf16=given.bf16,
        optim_args=given.optim_args, use_cpu=given.use_cpu, report_to="none",
        logging_steps=max(1, given.max_steps // 6), eval_strategy="steps", eval_steps=max(1, given.max_steps // 6),
        save_steps=max(1, given.max_steps // 2),
    )  # fmt: skip
    callback = AdaFrugalCallback()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=windows(tokens[:-held_out], given.length),
        eval_dataset=windows(tokens[-held_out:], given.length),
        optimizer_cls_and_kwargs=adafrugal_cls_and_kwargs(args),
        callbacks=[callback],
    )
    callback.go_first(trainer)
    trainer.train(resume_from_checkpoint=given.resume)
    print(callback.memory)
    return trainer


if __name__ == "__main__":
    main()
