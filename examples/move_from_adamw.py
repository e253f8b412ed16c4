"""Change from AdamW in the middle of a run: its moments are taken over, and can be given back.

python examples/move_from_adamw.py                                    # makes an AdamW run of its own, offline
python examples/move_from_adamw.py --checkpoint adamw.pt --lr 1e-3    # {"model": ..., "optimizer": ...}, same model
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adafrugal import AdaFRUGAL, param_groups


def build(hidden: int, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=layers, **sizes))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> float:
    for step in range(first, last):
        tokens = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(step))
        tokens[:, 1::2] = (tokens[:, ::2] * 3 + 1) % 64
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=None)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01, help="AdamW's default; ours is 0")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="after the change")
    arguments = parser.parse_args()

    model = build(arguments.hidden, arguments.layers)
    adamw = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=arguments.weight_decay)
    if arguments.checkpoint:
        saved = torch.load(arguments.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        adamw.load_state_dict(saved["optimizer"])
    else:
        print(f"AdamW: loss {train(model, adamw, 0, 40):.4f}")

    settings = {"lr": arguments.lr, "weight_decay": arguments.weight_decay, "total_steps": arguments.steps}
    optimizer = AdaFRUGAL(param_groups(model), update_gap=10, **settings)
    optimizer.load_adamw_state_dict(adamw.state_dict())  # what lies inside the frames is kept
    del adamw
    memory = optimizer.memory()
    print(f"AdaFRUGAL: loss {train(model, optimizer, 40, 40 + arguments.steps):.4f}")
    print(f"state after the change: {memory['total_bytes']} bytes; AdamW held {memory['adamw_state_bytes']}")
    print(f"state at the end: {optimizer.memory()['total_bytes']} bytes")

    back = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=arguments.weight_decay)
    back.load_state_dict(optimizer.adamw_state_dict())  # missing moments are zeros
    print(f"AdamW again: loss {train(model, back, 40 + arguments.steps, 60 + arguments.steps):.4f}")


if __name__ == "__main__":
    main()
