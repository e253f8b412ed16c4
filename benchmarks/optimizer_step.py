"""How long an optimizer step takes beside torch's AdamW and the peers, and how long a refresh does.

All optimizers step in turn on the same weights and gradients, in one process; a figure is the ratio of its median to
the median of fused AdamW in the same run.

    python benchmarks/optimizer_step.py                       # 84.9M linear weights of LLaMA-130M, and a 16.8M LLaMA
    python benchmarks/optimizer_step.py --rounds 10 --peers false --sets small
    pip install galore-torch apollo-torch badam bitsandbytes  # for the peers; each is left out where it is missing
"""

from __future__ import annotations

import argparse
import importlib.util
import time
import warnings
from collections.abc import Callable

import torch
from measuring import interleaved, markdown, median_ms, save, spread_ms
from torch import nn

from adafrugal import FRUGAL, AdaFRUGAL, BAdam, GaLore, SignSGD, param_groups
from adafrugal.plan.shapes import PRESETS, ModelShape

SMALL = ModelShape(
    hidden_size=384, intermediate_size=1024, num_layers=6, num_heads=6, num_kv_heads=6, head_dim=64,
    vocab_size=8000, max_sequence_length=256,
)  # fmt: skip
FOREVER = 10**9
BASE = "AdamW, fused"


class Skeleton(nn.Module):
    """The weights of a Llama without its arithmetic: names and shapes are all that an optimizer sees."""

    def __init__(self, shape: ModelShape, linear_only: bool) -> None:
        super().__init__()
        h, f = shape.hidden_size, shape.intermediate_size

        def layer() -> nn.Module:
            sizes = {"q": (h, h), "k": (h, h), "v": (h, h), "o": (h, h), "gate": (h, f), "up": (h, f), "down": (f, h)}
            block = nn.ModuleDict({n: nn.Linear(i, o, bias=False) for n, (i, o) in sizes.items()})
            if not linear_only:
                block["norms"] = nn.ModuleList([nn.RMSNorm(h), nn.RMSNorm(h)])
            return block

        if not linear_only:
            self.embed = nn.Embedding(shape.vocab_size, h)
        self.layers = nn.ModuleList(layer() for _ in range(shape.num_layers))
        if not linear_only:
            self.norm = nn.RMSNorm(h)
            self.lm_head = nn.Linear(h, shape.vocab_size, bias=False)


def with_gradients(model: nn.Module) -> nn.Module:
    """Fill every gradient with small noise."""
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator) * 1e-2
    return model


def ours(model: nn.Module, compile_too: bool) -> dict[str, torch.optim.Optimizer]:
    """Our methods, with refreshes far away: they are timed apart."""
    made: dict[str, torch.optim.Optimizer] = {}
    for subspace in ("columns", "rows", "rows_striped", "blocks", "columns_scattered"):
        for density in (0.25, 0.05):
            for check in ("off", "deferred"):
                made[f"FRUGAL {subspace} {density}, check {check}"] = FRUGAL(
                    param_groups(model),
                    1e-5,
                    density=density,
                    update_gap=FOREVER,
                    subspace=subspace,
                    check_finite=check,
                )
    made["AdaFRUGAL columns (defaults)"] = AdaFRUGAL(
        param_groups(model), 1e-5, total_steps=FOREVER, update_gap=FOREVER, update_gap_max=None
    )
    made["FRUGAL random 0.25"] = FRUGAL(param_groups(model), 1e-5, update_gap=FOREVER, subspace="random")
    made["GaLore 0.25"] = GaLore(param_groups(model), 1e-5, update_gap=FOREVER)
    made["SignSGD"] = SignSGD(model, 1e-5)
    if compile_too:
        made["FRUGAL columns 0.25, compiled"] = FRUGAL(param_groups(model), 1e-5, update_gap=FOREVER, compile=True)
    return made


def torchs(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Torch's own."""
    params = list(model.parameters())
    return {
        "AdamW, fused": torch.optim.AdamW(params, 1e-5, fused=True),
        "AdamW, foreach": torch.optim.AdamW(params, 1e-5, foreach=True),
        "AdamW, for-loop": torch.optim.AdamW(params, 1e-5, foreach=False),
        "SGD, fused": torch.optim.SGD(params, 1e-5, fused=True),
    }


def peers(model: nn.Module, shape: ModelShape, linear_only: bool) -> dict[str, torch.optim.Optimizer]:
    """Published packages, where they are installed."""
    split = [p for g in param_groups(model) if g["role"] == "split" for p in g["params"]]
    rest = [p for g in param_groups(model) if g["role"] != "split" for p in g["params"]]
    rank = shape.hidden_size // 4
    low_rank = {"rank": rank, "update_proj_gap": FOREVER, "scale": 0.25, "proj_type": "std"}
    made: dict[str, torch.optim.Optimizer] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if importlib.util.find_spec("galore_torch"):
            from galore_torch import GaLoreAdamW

            made["galore-torch 0.25"] = GaLoreAdamW(
                [{"params": rest}, {"params": split, **low_rank}][not rest :], lr=1e-5
            )
        if importlib.util.find_spec("apollo_torch"):
            from apollo_torch import APOLLOAdamW

            apollo = {**low_rank, "proj": "random", "scale_type": "channel", "scale": 1.0}
            made["apollo-torch 0.25"] = APOLLOAdamW(
                [{"params": rest}, {"params": split, **apollo}][not rest :], lr=1e-5
            )
        if importlib.util.find_spec("bitsandbytes"):
            from bitsandbytes.optim import AdamW8bit

            made["bitsandbytes AdamW8bit"] = AdamW8bit(list(model.parameters()), lr=1e-5)
    return made


def badams(shape: ModelShape, linear_only: bool) -> dict[str, Callable[[], object]]:
    """Block methods freeze parameters, so they get weights of their own and only the active layer's gradients."""
    mine = with_gradients(Skeleton(shape, linear_only))
    optimizer = BAdam(mine, 1e-5, update_gap=FOREVER)
    for param in mine.parameters():
        if not param.requires_grad:
            param.grad = None
    calls: dict[str, Callable[[], object]] = {"BAdam, one layer": optimizer.step}
    if importlib.util.find_spec("badam") and not linear_only:
        from badam import BlockOptimizer

        theirs = Skeleton(shape, linear_only)
        prefixes = [[f"layers.{i}."] for i in range(shape.num_layers)]
        block = BlockOptimizer(
            torch.optim.AdamW(theirs.parameters(), 1e-5),
            list(theirs.named_parameters()),
            block_prefix_list=prefixes,
            switch_block_every=FOREVER,
            verbose=0,
        )
        grads = {p: torch.full_like(p, 1e-2) for p in theirs.parameters() if p.requires_grad}

        def step() -> None:
            for param, grad in grads.items():
                param.grad = grad.clone()
            block.step()

        calls["badam, one layer"] = step
    return calls


def refresh_times(model: nn.Module, repeats: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of a plain step and of a step with a refresh, by subspace, medians in turn."""
    found = {}
    for subspace in ("columns", "rows", "rows_striped", "blocks", "columns_scattered", "random", "svd"):
        costly = subspace in ("random", "svd")
        optimizer = FRUGAL(param_groups(model), 1e-5, update_gap=2, subspace=subspace)
        times: dict[bool, list[float]] = {True: [], False: []}
        for step in range(2 * (2 if costly else repeats) + 2):
            start = time.perf_counter()
            optimizer.step()
            if step >= 2:  # the first refresh enters, and moves nothing
                times[step % 2 == 0].append(time.perf_counter() - start)
        found[subspace] = (median_ms(times[False]), median_ms(times[True]))
    return found


def one_set(name: str, shape: ModelShape, linear_only: bool, arguments: argparse.Namespace) -> tuple[list[dict], str]:
    """Time everything on one set of weights with one and two threads."""
    model = with_gradients(Skeleton(shape, linear_only))
    num = sum(p.numel() for p in model.parameters())
    own = {**torchs(model), **ours(model, arguments.compile)}
    parts: list[dict[str, Callable[[], object]]] = [{key: opt.step for key, opt in own.items()}]
    if arguments.peers:  # apart, beside a base of their own: some of them disturb what runs after them
        published = {key: opt.step for key, opt in peers(model, shape, linear_only).items()}
        parts.append({BASE: torchs(model)[BASE].step, **published, **badams(shape, linear_only)})
    rows: list[dict] = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        for part, calls in enumerate(parts):
            times = interleaved(calls, arguments.rounds)
            base = median_ms(times[BASE])
            for key, seconds in times.items():
                if part and key == BASE:
                    continue
                low, high = spread_ms(seconds)
                ms = median_ms(seconds)
                row = {"set": name, "threads": threads, "optimizer": key, "ms": ms, "quartiles_ms": [low, high]}
                rows.append({**row, "base_ms": base, "ratio": ms / base})
    torch.set_num_threads(2)
    refreshes = refresh_times(model, 7)
    by_key = {(row["optimizer"], row["threads"]): row for row in rows}
    table = markdown(
        [f"{name}, {num / 1e6:.1f}M weights", "ms, 2 threads", "ratio to fused AdamW", "ms, 1 thread", "ratio"],
        [
            [key, f"{by_key[key, 2]['ms']:.1f}", f"{by_key[key, 2]['ratio']:.2f}", f"{by_key[key, 1]['ms']:.1f}",
             f"{by_key[key, 1]['ratio']:.2f}"]
            for key in dict.fromkeys(row["optimizer"] for row in rows)
        ],
    )  # fmt: skip
    table += "\n\n" + markdown(
        ["refresh (2 threads)", "plain step, ms", "with refresh, ms", "in steps"],
        [[key, f"{plain:.1f}", f"{fresh:.1f}", f"{fresh / plain:.1f}"] for key, (plain, fresh) in refreshes.items()],
    )
    rows += [{"set": name, "refresh": key, "plain_ms": a, "refresh_ms": b} for key, (a, b) in refreshes.items()]
    return rows, table


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sets", choices=["both", "large", "small"], default="both")
    parser.add_argument("--peers", type=lambda word: word != "false", default=True)
    parser.add_argument("--compile", type=lambda word: word != "false", default=True)
    arguments = parser.parse_args()
    sets = {
        "large": ("linear weights of LLaMA-130M", PRESETS.create("llama-130m"), True),
        "small": ("LLaMA, hidden 384, 6 layers, vocabulary 8000", SMALL, False),
    }
    rows, tables = [], []
    for key, (name, shape, linear_only) in sets.items():
        if arguments.sets in ("both", key):
            found, table = one_set(name, shape, linear_only, arguments)
            rows += found
            tables.append(table)
    save("optimizer_step", {"rounds": arguments.rounds, "rows": rows}, "\n\n".join(tables))


if __name__ == "__main__":
    main()
