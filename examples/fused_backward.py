"""The update fused into backward: each gradient is used and freed at once, so that they never lie around together.

The two things that change in a loop: `attach` once, and one backward for each step. No accumulation, no clipping by a
global norm, no GradScaler: `attach` refuses them by name.

python examples/fused_backward.py --hidden 512 --layers 24
"""

import argparse

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from adafrugal import AdaFRUGAL


def build(hidden: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[module for _ in range(layers) for module in (nn.Linear(hidden, hidden), nn.Tanh())])


def one_step(model: nn.Module, optimizer: AdaFRUGAL, batch: torch.Tensor) -> float:
    loss = (model(batch) - batch).square().mean()
    loss.backward()  # attached, the weights have moved when this returns
    optimizer.step()  # attached, this counts the step: schedules and refreshes follow it
    optimizer.zero_grad()
    return loss.item()


def peak_bytes(model: nn.Module, optimizer: AdaFRUGAL, batch: torch.Tensor) -> int:
    """Highest number of bytes that one step holds above what lay there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        one_step(model, optimizer, batch)
    held = highest = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    batch = torch.randn(8, arguments.hidden, generator=torch.Generator().manual_seed(0))
    losses, peaks = {}, {}
    for fused in (False, True):
        model = build(arguments.hidden, arguments.layers)
        optimizer = AdaFRUGAL(model, lr=1e-3, total_steps=arguments.steps + 1)
        if fused:
            optimizer.attach(model)
        losses[fused] = [one_step(model, optimizer, batch) for _ in range(arguments.steps)]
        peaks[fused] = peak_bytes(model, optimizer, batch)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    print(f"losses are {'the same, bit for bit' if losses[False] == losses[True] else 'DIFFERENT'}")
    print(f"gradients: {gradients} bytes; peak of a step: {peaks[False]} plain, {peaks[True]} fused")


if __name__ == "__main__":
    main()
