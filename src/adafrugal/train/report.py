"""The page of a run: its table, its pictures and its configuration in one file that needs nothing else."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adafrugal.data.labelled import METRICS
from adafrugal.data.libraries import load_library
from adafrugal.train.checkpoint import write_atomically

Record = Mapping[str, Any]
Curve = tuple[str, list[float], list[float]]
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: left; }
pre { background: #f6f6f4; padding: 1rem; overflow-x: auto; white-space: pre-wrap; }
svg { max-width: 100%; height: auto; }
"""


def _curve(records: Sequence[Record], label: str, x: str, y: str, scale: float = 1.0) -> Curve:
    points = [(r[x], r[y] * scale) for r in records if r.get(x) is not None and r.get(y) is not None]
    return label, [float(px) for px, _ in points], [float(py) for _, py in points]


def _picture(title: str, x_label: str, y_label: str, curves: Sequence[Curve], steps: bool = False) -> str:
    """One picture as SVG text."""
    figure_module: Any = load_library("matplotlib.figure", "the pictures of the report")
    figure = figure_module.Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for label, xs, ys in curves:
        if xs:
            axes.plot(xs, ys, label=label, drawstyle="steps-post" if steps else "default", linewidth=1.4)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    if any(xs for _, xs, _ in curves):
        axes.legend(frameon=False)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def pictures(records: Sequence[Record], adamw_state_bytes: int) -> list[str]:
    """Loss, bits per byte or scores, density, gap, optimizer bytes and learning rate, as SVG.

    Args:
        records: Of ``metrics.jsonl``.
        adamw_state_bytes: The line to compare optimizer bytes with.
    """
    drawn = [
        _picture(
            "Loss",
            "training tokens",
            "nats per token",
            [_curve(records, "training", "tokens", "train_loss"), _curve(records, "held out", "tokens", "val_loss")],
        ),
    ]
    if any(record.get("bits_per_byte") is not None for record in records):
        bits = _curve(records, "held out", "tokens", "bits_per_byte")
        drawn.append(_picture("Bits per byte, held out", "training tokens", "bits", [bits]))
    answered = sorted({f"val_{name}" for name in METRICS} & {name for record in records for name in record})
    if answered:
        curves = [_curve(records, name.removeprefix("val_"), "tokens", name) for name in answered]
        drawn.append(_picture("Answers, held out", "training tokens", "score", curves))
    if any(record.get("density") is not None for record in records):
        drawn.append(
            _picture("Density", "step", "share of elements", [_curve(records, "density", "step", "density")], True)
        )
        gap = _curve(records, "gap", "step", "update_gap")
        drawn.append(_picture("Steps between refreshes", "step", "steps", [gap], True))
    held = _curve(records, "held", "step", "optimizer_state_bytes", 1e-6)
    adamw = ("AdamW would hold", held[1], [adamw_state_bytes * 1e-6 for _ in held[1]])
    drawn.append(_picture("Optimizer state", "step", "MB", [held, adamw], True))
    drawn.append(_picture("Learning rate of the matrices", "step", "rate", [_curve(records, "lr", "step", "lr")]))
    return drawn


def write_report(
    path: Path,
    title: str,
    table: Sequence[tuple[str, str]],
    records: Sequence[Record],
    adamw_state_bytes: int,
    sample: str,
    configuration: str,
) -> None:
    """Write the page.

    Args:
        path: The HTML file.
        title: Its heading.
        table: The summary, as names and values.
        records: Of ``metrics.jsonl``.
        adamw_state_bytes: To compare optimizer bytes with.
        sample: What the model wrote.
        configuration: The resolved configuration as YAML.
    """
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in table)
    shown = "".join(f"<figure>{picture}</figure>" for picture in pictures(records, adamw_state_bytes))
    write_atomically(
        path,
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1><table>{rows}</table>{shown}"
        f"<h2>What it writes</h2><pre>{html.escape(sample) or 'no sample was asked for'}</pre>"
        f"<h2>Configuration</h2><pre>{html.escape(configuration)}</pre></body></html>\n",
    )
