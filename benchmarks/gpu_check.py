"""One script for a machine with a GPU: identities, step times, and bytes before and after shrinks. Under five minutes.

python benchmarks/gpu_check.py                 # LLaMA-130M and -1B shapes on the GPU
python benchmarks/gpu_check.py --device cpu    # the same code on small shapes, to see that it runs
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import RESULTS, markdown, save
from optimizer_step import Skeleton
from torch import nn

from adafrugal import FRUGAL, AdaFRUGAL, SignSGD, param_groups
from adafrugal.plan.shapes import PRESETS, ModelShape

FOREVER = 10**9
MINI = ModelShape(
    hidden_size=64, intermediate_size=160, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32, vocab_size=256,
    max_sequence_length=64,
)  # fmt: skip


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def build(shape: ModelShape, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Weights of a Llama on the device, from a seed."""
    with torch.device("meta"):
        model = Skeleton(shape, linear_only=False)
    model = model.to_empty(device=device).to(dtype)
    generator = torch.Generator(device).manual_seed(0)
    for param in model.parameters():
        param.data.normal_(0.0, 0.02, generator=generator)
    return model


def fill_gradients(model: nn.Module, seed: int) -> None:
    """The same noise for the same seed, on the model's device."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.empty_like(param).normal_(0.0, 0.01, generator=generator)


def run_steps(make: Callable[[nn.Module], torch.optim.Optimizer], device: torch.device, steps: int) -> nn.Module:
    """Train the mini model on noise."""
    model = build(MINI, device)
    optimizer = make(model)
    for step in range(steps):
        fill_gradients(model, step)
        optimizer.step()
    return model


def distance(first: nn.Module, second: nn.Module) -> float:
    """Largest absolute difference of two models' weights."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max(float((a.detach().cpu() - b.detach().cpu()).abs().max()) for a, b in pairs)


def check_identities(device: torch.device, compile_too: bool) -> list[dict]:
    """Facts that hold on every device; each with what was found and what is allowed."""
    found = []

    def note(name: str, value: float, allowed: float) -> None:
        found.append({"identity": name, "value": value, "allowed": allowed, "holds": value <= allowed})

    steps = 20
    adamw = run_steps(lambda m: torch.optim.AdamW(m.parameters(), 1e-3, weight_decay=0.0), device, steps)
    for subspace in ("columns", "rows", "blocks", "whole"):
        full = run_steps(
            lambda m, s=subspace: FRUGAL(param_groups(m), 1e-3, density=1.0, update_gap=3, subspace=s), device, steps
        )
        note(f"density 1, {subspace} = AdamW", distance(adamw, full), 1e-6)
    for path in ("eager", "foreach", *(["compile"] if compile_too else [])):
        for subspace in ("columns", "rows"):

            def make(model: nn.Module, path: str = path, subspace: str = subspace) -> FRUGAL:
                optimizer = FRUGAL(param_groups(model), 1e-3, update_gap=4, subspace=subspace)
                optimizer.path = path
                return optimizer

            auto = run_steps(
                lambda m, s=subspace: FRUGAL(param_groups(m), 1e-3, update_gap=4, subspace=s), device, steps
            )
            note(f"{path} = auto, {subspace}", distance(run_steps(make, device, steps), auto), 1e-6)
    cpu_noise = run_steps(lambda m: SignSGD(m, 1e-3), device, steps)
    again = run_steps(lambda m: SignSGD(m, 1e-3), device, steps)
    note("the same seed twice, SignSGD", distance(cpu_noise, again), 0.0)
    optimizer = SignSGD([nn.Parameter(torch.ones(4096, dtype=torch.bfloat16, device=device))], 1e-3)
    weight = optimizer.param_groups[0]["params"][0]
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    note("bf16 weights arrive under stochastic rounding", float(weight.detach().float().mean().abs()), 0.02)
    return found


def step_times(shape: ModelShape, name: str, device: torch.device, rounds: int, compile_too: bool) -> list[dict]:
    """Median milliseconds of a step by optimizer and path."""
    model = build(shape, device)
    fill_gradients(model, 0)
    made: dict[str, torch.optim.Optimizer] = {
        "AdamW, fused": torch.optim.AdamW(model.parameters(), 1e-5, fused=True),
        "AdamW, foreach": torch.optim.AdamW(model.parameters(), 1e-5, foreach=True),
        "SignSGD": SignSGD(model, 1e-5),
    }
    for subspace in ("columns", "rows", "blocks"):
        for path in ("eager", "foreach", *(["compile"] if compile_too else [])):
            optimizer = FRUGAL(param_groups(model), 1e-5, update_gap=FOREVER, subspace=subspace)
            optimizer.path = path
            made[f"FRUGAL {subspace} 0.25, {path}"] = optimizer
    made["FRUGAL columns 0.05, foreach"] = FRUGAL(param_groups(model), 1e-5, update_gap=FOREVER, density=0.05)
    rows = []
    for key, optimizer in made.items():
        for _ in range(3):
            optimizer.step()
        synchronise(device)
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            optimizer.step()
            synchronise(device)
            seconds.append(time.perf_counter() - start)
        rows.append({"model": name, "optimizer": key, "ms": 1e3 * statistics.median(seconds)})
        optimizer.state.clear()
    return rows


def shrinks(shape: ModelShape, name: str, device: torch.device) -> list[dict]:
    """Bytes held before and after the falls of density: promised, and allocated on the device."""
    model = build(shape, device)
    optimizer = AdaFRUGAL(param_groups(model), 1e-5, total_steps=16)
    rows: list[dict] = []
    for step in range(16):
        fill_gradients(model, step)
        optimizer.step()
        for param in model.parameters():
            param.grad = None
        synchronise(device)
        memory, density = optimizer.memory(), optimizer.param_groups[0]["density"]
        allocated = torch.cuda.memory_allocated() if device.type == "cuda" else None
        if not rows or rows[-1]["density"] != density:
            rows.append(
                {"model": name, "density": density, "promised_bytes": memory["planned_state_bytes"],
                 "held_bytes": memory["state_bytes"], "allocated_bytes": allocated}
            )  # fmt: skip
    return rows


def main() -> None:
    """Check, time, count, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", type=lambda word: word != "false", default=True)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the table and its JSON")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    large = device.type == "cuda"
    shapes = (
        {"llama-130m": PRESETS.create("llama-130m"), "llama-1b": PRESETS.create("llama-1b")}
        if large
        else {"mini": MINI}
    )
    identities = check_identities(device, arguments.compile)
    times: list[dict] = []
    falls: list[dict] = []
    for name, shape in shapes.items():
        times += step_times(shape, name, device, 20 if large else 3, arguments.compile)
        falls += shrinks(shape, name, device)
    tables = [
        markdown(
            ["identity", "found", "allowed", "holds"],
            [
                [r["identity"], f"{r['value']:.2e}", f"{r['allowed']:.0e}", "yes" if r["holds"] else "NO"]
                for r in identities
            ],
        ),
        markdown(["model", "optimizer", "ms"], [[r["model"], r["optimizer"], f"{r['ms']:.2f}"] for r in times]),
        markdown(
            ["model", "density", "promised, MB", "held, MB", "allocated on the device, MB"],
            [
                [r["model"], f"{r['density']:.3f}", f"{r['promised_bytes'] / 1e6:.2f}", f"{r['held_bytes'] / 1e6:.2f}",
                 "-" if r["allocated_bytes"] is None else f"{r['allocated_bytes'] / 1e6:.2f}"]
                for r in falls
            ],
        ),
    ]  # fmt: skip
    result = {"device": str(device), "identities": identities, "times": times, "shrinks": falls}
    save(f"gpu_check_{device.type}", result, "\n\n".join(tables), arguments.results)
    broken = [r["identity"] for r in identities if not r["holds"]]
    broken += [f"{r['model']} at density {r['density']}" for r in falls if r["promised_bytes"] != r["held_bytes"]]
    if broken:
        raise SystemExit(f"does not hold: {', '.join(broken)}")


if __name__ == "__main__":
    main()
