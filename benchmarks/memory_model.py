"""Predicted against measured peak memory of a training step: methods, precisions, and what is traded for memory.

python benchmarks/memory_model.py [--shapes wide,deep,vocabulary,fourth] [--fast]

Each run builds transformers' Llama, takes one step so that states exist, and measures the second and the third, of
which the third refreshes the subspace: the bytes that torch's CPU allocator handed out, on top of the weights and the
states that were there. Nothing is fitted to what is measured.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, markdown, save
from torch import nn

from adafrugal import FRUGAL, AdaFRUGAL, GaLore, SignSGD, param_groups
from adafrugal.core.rng import named_generator
from adafrugal.data.tasks import NextToken
from adafrugal.optim.memory import held_bytes
from adafrugal.plan.activations import StepSetting
from adafrugal.plan.parameters import meta_parameters
from adafrugal.plan.peak import StepPeak, step_peak
from adafrugal.plan.shapes import ModelShape
from adafrugal.plan.tracing import measured_peak


def llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool = False
) -> ModelShape:
    return ModelShape(
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_sequence_length=4096,
        tied_embeddings=tied,
    )


# (shape, sequences, tokens in each). The fourth was measured once, when the formula was done, and stands as it came.
SHAPES: dict[str, tuple[ModelShape, int, int]] = {
    "wide": (llama(512, 1376, 2, 8, 8, 2000), 2, 512),
    "deep": (llama(256, 688, 6, 8, 4, 1000), 4, 256),
    "vocabulary": (llama(256, 704, 2, 4, 4, 8000), 1, 1024),
    "fourth": (llama(320, 864, 3, 10, 2, 4000, tied=True), 1, 2048),
}
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TRADES = ("plain", "checkpointed", "fused backward")
Factory = Callable[[nn.Module], torch.optim.Optimizer]
METHODS: dict[str, Factory] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "AdaFRUGAL .25": lambda model: AdaFRUGAL(param_groups(model), total_steps=1000, update_gap=2, update_gap_max=None),
    "SignSGD": lambda model: SignSGD(model),
    "GaLore": lambda model: GaLore(param_groups(model), update_gap=2),
}


def method(name: str, trade: str) -> tuple[str, Factory]:
    """The optimizer; AdamW with a fused backward is ours at density 1, since torch's has none."""
    if name == "AdamW" and trade == "fused backward":
        return "FRUGAL 1 (for AdamW)", lambda model: FRUGAL(param_groups(model), density=1.0, update_gap=1000)
    return name, METHODS[name]


def build(shape: ModelShape, dtype: torch.dtype, checkpointing: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_sequence_length,
        tie_word_embeddings=shape.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def measure(model: nn.Module, optimizer: Any, batch: tuple[int, int], vocab_size: int, fused: bool) -> dict[str, int]:
    """Bytes of the states, and the peak of the second and third step."""
    task, generator = NextToken(), named_generator(0, "benchmark", "tokens")
    if fused:
        optimizer.attach(model)

    def step() -> None:
        ids = torch.randint(vocab_size, batch, generator=generator)
        task.loss_sum(model, ids).div(ids.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    measured_peak(step)  # a profiler sees the end only of what it has seen made: states, which a refresh replaces
    gc.collect()
    held = _held(model, optimizer)  # as numbers: a reference to an old moment would keep it over the refresh
    before = measured_peak(step)
    gc.collect()
    refreshing = measured_peak(step)
    return {"state_bytes": held["state"], "peak_bytes": held["all"] + max(before, refreshing)}


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of the storages of moments, and of all that lies there between steps."""
    moments = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
    named = [item for state in optimizer.state.values() for item in state.items() if isinstance(item[1], torch.Tensor)]
    everything = [*model.parameters(), *model.buffers(), *(tensor for _, tensor in named)]
    return {"state": held_bytes(t for name, t in named if name in moments), "all": held_bytes(everything)}


def run(name: str, shape_name: str, precision: str, trade: str) -> dict[str, Any]:
    """One cell of the table."""
    shape, num_sequences, length = SHAPES[shape_name]
    dtype = PRECISIONS[precision]
    setting = StepSetting(
        micro_batch=num_sequences,
        sequence_length=length,
        precision=precision,  # pyright: ignore[reportArgumentType]
        checkpointing=trade == "checkpointed",
        fused_backward=trade == "fused backward",
    )
    shown, factory = method(name, trade)
    predicted: StepPeak = step_peak(shape, setting, factory(meta_parameters(shape, dtype)))
    model = build(shape, dtype, setting.checkpointing)
    measured = measure(model, factory(model), (num_sequences, length), shape.vocab_size, setting.fused_backward)
    return {
        "shape": shape_name,
        "method": shown,
        "precision": precision,
        "trade": trade,
        "predicted_bytes": predicted.peak_bytes,
        "measured_bytes": measured["peak_bytes"],
        "error": predicted.peak_bytes / measured["peak_bytes"] - 1,
        "peak_phase": predicted.peak_phase,
        "predicted_state_bytes": predicted.state_bytes,
        "measured_state_bytes": measured["state_bytes"],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    errors = [abs(row["error"]) for row in rows]
    return {"runs": len(rows), "mean_error": statistics.fmean(errors), "worst_error": max(errors)}


def main(folder: Path = RESULTS) -> None:
    """Run and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--fast", action="store_true", help="only the first shape's AdaFRUGAL, and nothing is written")
    given = parser.parse_args()
    torch.set_num_threads(1)  # bytes do not depend on it but for a kernel's own scratch, which is a thread's
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    names = given.shapes.split(",")[: 1 if given.fast else None]
    methods = ["AdaFRUGAL .25"] if given.fast else list(METHODS)
    rows = [
        run(name, shape_name, precision, trade)
        for shape_name in names
        for name in methods
        for precision in PRECISIONS
        for trade in TRADES
    ]
    three = [row for row in rows if row["shape"] != "fourth"]
    totals = {"three shapes": summary(three)} if three else {}
    if len(three) < len(rows):
        totals["fourth shape"] = summary([row for row in rows if row["shape"] == "fourth"])
    cells = [
        [
            f"{row['shape']}, {row['method']}, {row['precision']}, {row['trade']}",
            f"{row['predicted_bytes'] / 1e6:.2f}",
            f"{row['measured_bytes'] / 1e6:.2f}",
            f"{row['error']:+.2%}",
            row["peak_phase"],
            "yes" if row["predicted_state_bytes"] == row["measured_state_bytes"] else "NO",
        ]
        for row in rows
    ]
    head = ["run", "predicted, MB", "measured, MB", "error", "peak in", "state bytes equal"]
    lines = [
        f"{name}: {total['runs']} runs, mean error {total['mean_error']:.2%}, worst {total['worst_error']:.2%}"
        for name, total in totals.items()
    ]
    table = "\n\n".join([*lines, markdown(head, cells)])
    if given.fast:
        print(table)
        return
    result = {"totals": totals, "rows": rows, "seconds": time.perf_counter() - start}
    save("memory_model", result, table, folder)


if __name__ == "__main__":
    main()
