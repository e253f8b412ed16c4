"""AdaFRUGAL in the place of AdamW, in a loop that is otherwise what it was: accumulation, clipping, a schedule.

python examples/drop_in.py                                    # a tiny random Llama on made-up text, offline
python examples/drop_in.py --model path/to/model --text file.txt --steps 2000 --length 512
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from adafrugal import AdaFRUGAL, param_groups


def model_and_tokens(arguments: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model to train and one long vector of tokens; bytes are the tokens of the tiny one."""
    text = Path(arguments.text).read_text() if arguments.text else "All work and no play makes Jack a dull boy. " * 200
    if arguments.model:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model = AutoModelForCausalLM.from_pretrained(arguments.model)
        return model, torch.tensor(tokenizer(text)["input_ids"])
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)), torch.tensor(list(text.encode()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="folder or hub name; a tiny random one if left out")
    parser.add_argument("--text", default=None, help="a text file")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokens = model_and_tokens(arguments)
    model.to(device).train()
    windows = tokens[: len(tokens) // arguments.length * arguments.length].view(-1, arguments.length)
    held_out, windows = windows[: max(1, len(windows) // 20)], windows[max(1, len(windows) // 20) :]

    optimizer = AdaFRUGAL(param_groups(model), lr=arguments.lr, total_steps=arguments.steps, update_gap=10)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    print(optimizer.describe())

    generator = torch.Generator().manual_seed(0)
    for step in range(1, arguments.steps + 1):
        for _ in range(arguments.accumulation):
            rows = torch.randint(len(windows), (arguments.batch_size,), generator=generator)
            batch = windows[rows].to(device)
            (model(input_ids=batch, labels=batch).loss / arguments.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            with torch.no_grad():
                loss = model(input_ids=held_out.to(device), labels=held_out.to(device)).loss
            optimizer.observe(loss)  # lets the gap between refreshes grow
            group = optimizer.split_groups[0]
            print(f"step {step}: held-out loss {loss:.4f}, density {group['density']:.3f}, gap {group['update_gap']}")
    memory = optimizer.memory()
    print(f"state: {memory['total_bytes']} bytes; AdamW would hold {memory['adamw_state_bytes']}")


if __name__ == "__main__":
    main()
