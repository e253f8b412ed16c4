"""Save and resume: after a restart a run goes on as if it had never stopped, bit for bit on a CPU.

python examples/resume.py --out run --stop_at 30      # trains 30 of 60 steps and saves
python examples/resume.py --out run                   # goes on from there; prints a checksum of the weights
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from adafrugal import AdaFRUGAL, param_groups


class Net(nn.Module):
    """Embedding, two blocks and a head."""

    def __init__(self, hidden: int = 32, vocab_size: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


def batch(step: int) -> torch.Tensor:
    """The batch of a step, drawn from its number, so that a resumed run sees the same data."""
    tokens = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(step))
    tokens[:, 1::2] = (tokens[:, ::2] * 3 + 1) % 64
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("resume_run"))
    parser.add_argument("--steps", type=int, default=60, help="of the whole run: schedules need it")
    parser.add_argument("--stop_at", type=int, default=None)
    arguments = parser.parse_args()
    checkpoint = arguments.out / "checkpoint.pt"

    torch.manual_seed(0)
    model = Net()
    optimizer = AdaFRUGAL(param_groups(model), lr=3e-3, total_steps=arguments.steps, update_gap=7)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)  # tensors and numbers only: nothing to allow
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])  # moments, density, gap, frames, observed losses
        scheduler.load_state_dict(saved["scheduler"])
        first = saved["step"]
        print(f"resumed at step {first}, density {optimizer.split_groups[0]['density']:.3f}")

    last = min(arguments.stop_at or arguments.steps, arguments.steps)
    for step in range(first, last):
        tokens = batch(step)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            optimizer.observe(loss)
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.save({**parts, "step": last}, checkpoint)
    checksum = sum(p.detach().view(torch.int32).to(torch.int64).sum().item() for p in model.parameters())
    print(f"step {last}, loss {loss.item():.6f}, checksum {checksum}")


if __name__ == "__main__":
    main()
