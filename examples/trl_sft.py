"""Fine-tune on prompts and completions with TRL's SFTTrainer and AdaFRUGAL; without arguments a tiny model, offline.

python examples/trl_sft.py
python examples/trl_sft.py --model my_llama/ --data pairs.jsonl --max_steps 2000 --lr 2e-5
python examples/trl_sft.py --model my_llama/ --data pairs.jsonl --lora_rank 16 --lr 2e-4
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from adafrugal.integrations.hf import AdaFrugalCallback, adafrugal_cls_and_kwargs

DIGITS = "0123456789+="


def parse(command: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub id with its tokenizer; none is a tiny Llama over digits")
    parser.add_argument("--data", type=Path, help="JSON lines with prompt and completion; none is sums of two digits")
    parser.add_argument("--out", type=Path, default=Path("runs/trl_sft"))
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument(
        "--lora_rank", type=int, default=0, help="train adapters of this rank; 0 trains the whole model"
    )
    parser.add_argument("--optim_args", default="", help="settings of AdaFRUGAL, as name=value with commas")
    parser.add_argument("--use_cpu", action="store_true")
    return parser.parse_args(command)


def load(given: argparse.Namespace):
    """The model and its tokenizer."""
    if given.model is not None:
        return AutoModelForCausalLM.from_pretrained(given.model), AutoTokenizer.from_pretrained(given.model)
    ids = {one: i for i, one in enumerate(["<pad>", "<eos>", *DIGITS])}
    tokenizer = Tokenizer(models.WordLevel(ids, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    set_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(ids), pad_token_id=0, bos_token_id=None, eos_token_id=1, **shape)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    return AutoModelForCausalLM.from_config(config), wrapped


def main(command: list[str] | None = None) -> SFTTrainer:
    given = parse(command)
    model, tokenizer = load(given)
    if given.data is None:
        pairs = [(a, b) for a in range(10) for b in range(10)]
        columns = {"prompt": [f"{a}+{b}=" for a, b in pairs], "completion": [str(a + b) for a, b in pairs]}
        data = Dataset.from_dict(columns)
    else:
        data = load_dataset("json", data_files=str(given.data), split="train")
    parts = data.train_test_split(test_size=0.1, seed=0)
    args = SFTConfig(
        output_dir=str(given.out), max_steps=given.max_steps, learning_rate=given.lr, optim_args=given.optim_args,
        per_device_train_batch_size=8, use_cpu=given.use_cpu, bf16=torch.cuda.is_available() and not given.use_cpu,
        report_to="none", save_steps=max(1, given.max_steps // 2),
        logging_steps=max(1, given.max_steps // 6), eval_strategy="steps", eval_steps=max(1, given.max_steps // 6),
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=parts["train"], eval_dataset=parts["test"], processing_class=tokenizer,
        peft_config=LoraConfig(r=given.lora_rank, task_type="CAUSAL_LM") if given.lora_rank else None,
        optimizer_cls_and_kwargs=adafrugal_cls_and_kwargs(args), callbacks=[AdaFrugalCallback()],
    )  # fmt: skip
    trainer.train()
    print(trainer.optimizer.optimizer.describe())
    return trainer


if __name__ == "__main__":
    main()
