"""Bytes of optimizer state, counted exactly: the closed formula, our promise on meta tensors, and what is really held.

python benchmarks/optimizer_memory.py
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

import torch
from measuring import markdown, save
from optimizer_step import SMALL, Skeleton, with_gradients
from torch import nn

from adafrugal import FRUGAL, AdaFRUGAL, BAdam, GaLore, SignSGD, param_groups
from adafrugal.optim.memory import held_bytes
from adafrugal.plan.memory import GIB_BYTES, TABLE_DENSITIES, state_bytes_table
from adafrugal.plan.shapes import PRESETS, ModelShape


def promise_table() -> tuple[list[dict], str]:
    """The closed formula and the integer promise of columns, for five sizes and four densities, and AdamW."""
    rows, cells = [], []
    for formula in state_bytes_table():
        with torch.device("meta"):
            model = Skeleton(PRESETS.create(formula.model), linear_only=False)
        line = [formula.model, f"{formula.num_parameters / 1e6:.1f}M", f"{formula.adamw_bytes / GIB_BYTES:.2f}"]
        for density in TABLE_DENSITIES:
            promised = FRUGAL(param_groups(model), density=density).memory()["planned_state_bytes"]
            closed = formula.split_bytes[density]
            rows.append(
                {"model": formula.model, "density": density, "closed_bytes": closed, "promised_bytes": promised}
            )
            line.append(f"{closed / GIB_BYTES:.3f} ({promised / closed - 1:+.2%})")
        cells.append(line)
    head = ["LLaMA", "parameters", "AdamW, GiB", *(f"{d} (columns promise)" for d in TABLE_DENSITIES)]
    return rows, markdown(head, cells)


def held_by(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 2) -> tuple[int, int]:
    """Bytes of tensors in the state, and of the storages behind them, after some steps."""
    with_gradients(model)
    for _ in range(steps):
        for param in model.parameters():
            if not param.requires_grad:
                param.grad = None
        optimizer.step()
    tensors: list[torch.Tensor] = []

    def collect(value: object) -> None:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                collect(item)
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):  # a projector object of a peer
            collect(vars(value))

    for state in optimizer.state.values():
        collect(state)
    return sum(t.nbytes for t in tensors), held_bytes(tensors)


def measured_table(shape: ModelShape = SMALL) -> tuple[list[dict], str]:
    """What each optimizer holds for a small LLaMA, promised and measured."""

    def fresh() -> nn.Module:
        return Skeleton(shape, linear_only=False)

    rows = []
    makers = {
        "AdamW": lambda m: torch.optim.AdamW(m.parameters()),
        **{
            f"FRUGAL {s} {d}": lambda m, s=s, d=d: FRUGAL(param_groups(m), subspace=s, density=d)
            for s in ("columns", "rows", "rows_striped", "columns_scattered", "blocks", "random", "svd")
            for d in (0.25, 0.05)
        },
        "FRUGAL 0": lambda m: FRUGAL(param_groups(m), density=0.0),
        "FRUGAL columns 0.25, bfloat16 state": lambda m: FRUGAL(param_groups(m), state_dtype="bfloat16"),
        "GaLore 0.25": lambda m: GaLore(param_groups(m)),
        "BAdam, one layer": lambda m: BAdam(m),
        "SignSGD": lambda m: SignSGD(m),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in makers.items():
            model = fresh()
            optimizer = make(model)
            tensors, storages = held_by(optimizer, model)
            memory = getattr(optimizer, "memory", None)
            promised = memory()["total_bytes"] if memory else None
            rows.append(
                {"optimizer": name, "tensor_bytes": tensors, "held_bytes": storages, "reported_bytes": promised}
            )
        rows += peers(fresh, shape)
    cells = [
        [r["optimizer"], f"{r['tensor_bytes'] / 1e6:.3f}", f"{r['held_bytes'] / 1e6:.3f}",
         "-" if r["reported_bytes"] is None else f"{r['reported_bytes'] / 1e6:.3f}"]
        for r in rows
    ]  # fmt: skip
    head = [f"LLaMA, hidden {shape.hidden_size}", "state tensors, MB", "storages held, MB", "reported by memory(), MB"]
    return rows, markdown(head, cells)


def peers(fresh: Callable[[], nn.Module], shape: ModelShape) -> list[dict]:
    """Published packages, where they are installed."""
    rows = []
    low_rank = {"rank": shape.hidden_size // 4, "update_proj_gap": 1000, "scale": 0.25, "proj_type": "std"}

    def groups(model: nn.Module, **settings: object) -> list[dict]:
        split = [p for g in param_groups(model) if g["role"] == "split" for p in g["params"]]
        rest = [p for g in param_groups(model) if g["role"] != "split" for p in g["params"]]
        return [{"params": rest}, {"params": split, **settings}]

    if importlib.util.find_spec("galore_torch"):
        from galore_torch import GaLoreAdamW

        model = fresh()
        tensors, storages = held_by(GaLoreAdamW(groups(model, **low_rank)), model)
        rows.append(
            {"optimizer": "galore-torch 0.25", "tensor_bytes": tensors, "held_bytes": storages, "reported_bytes": None}
        )
    if importlib.util.find_spec("apollo_torch"):
        from apollo_torch import APOLLOAdamW

        model = fresh()
        settings = {**low_rank, "proj": "random", "scale_type": "channel", "scale": 1.0}
        tensors, storages = held_by(APOLLOAdamW(groups(model, **settings)), model)
        rows.append(
            {"optimizer": "apollo-torch 0.25", "tensor_bytes": tensors, "held_bytes": storages, "reported_bytes": None}
        )
    if importlib.util.find_spec("bitsandbytes"):
        from bitsandbytes.optim import AdamW8bit

        model = fresh()
        tensors, storages = held_by(AdamW8bit(model.parameters()), model)
        rows.append(
            {
                "optimizer": "bitsandbytes AdamW8bit",
                "tensor_bytes": tensors,
                "held_bytes": storages,
                "reported_bytes": None,
            }
        )
    return rows


def shrink_table() -> tuple[list[dict], str]:
    """AdaFRUGAL on LLaMA-130M, on meta tensors: bytes before and after each fall of the density."""
    with torch.device("meta"):
        model = Skeleton(PRESETS.create("llama-130m"), linear_only=False)
    optimizer = AdaFRUGAL(param_groups(model), total_steps=16)
    rows: list[dict] = []
    for step in range(16):
        for param in model.parameters():
            param.grad = torch.empty_like(param)
        optimizer.step()
        held, density = optimizer.memory()["state_bytes"], optimizer.param_groups[0]["density"]
        if not rows or rows[-1]["density"] != density:
            rows.append({"step": step, "density": density, "held_bytes": held})
    cells = [[f"{r['density']:.3f}", f"{r['held_bytes'] / GIB_BYTES:.3f}"] for r in rows]
    return rows, markdown(["LLaMA-130M, density", "state, GiB"], cells)


def main() -> None:
    """Count and write."""
    torch.set_num_threads(1)  # bytes do not depend on it, and LAPACK waits badly on a busy machine
    promised, first = promise_table()
    measured, second = measured_table()
    shrinks, third = shrink_table()
    save(
        "optimizer_memory",
        {"promised": promised, "measured": measured, "shrinks": shrinks},
        "\n\n".join((first, second, third)),
    )


if __name__ == "__main__":
    main()
