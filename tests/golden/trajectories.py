"""Fifty steps of every method on fixed gradients, in float64: what a refactor has to reproduce.

Run as a script to write the files anew, when a change is meant to change numbers; say so in LOG.md.
"""

import json
import sys
from pathlib import Path

import torch

from adafrugal import FRUGAL, AdaFRUGAL, BAdam, GaLore, SignSGD
from adafrugal.optim.split import SplitOptimizer
from problems import draw, follow, gradient_sequence, parameters

FOLDER = Path(__file__).parent
CURVES, STATE = FOLDER / "curves.json", FOLDER / "state_format_1.pt"
SHAPES = [(32, 24), (24, 32), (32, 24), (24, 32), (24,)]
NAMES = [*(f"layers.{i}.weight" for i in range(4)), "norm.weight"]
STEPS = 50


def groups(params: list) -> list[dict]:
    """Four matrices that split and a vector that does not."""
    return [
        {"params": params[:4], "param_names": NAMES[:4], "role": "split"},
        {"params": params[4:], "param_names": NAMES[4:], "role": "stateful"},
    ]


def ada(params: list, subspace: str, **settings: object) -> AdaFRUGAL:
    """Density and gap move."""
    return AdaFRUGAL(
        groups(params), 1e-2, total_steps=STEPS, density=0.6, density_end=0.26, update_gap=6, update_gap_max=13,
        subspace=subspace, weight_decay=0.01, plateau_tolerance=0.01, **settings,
    )  # fmt: skip


METHODS = {
    **{f"adafrugal {s}": lambda p, s=s: ada(p, s) for s in (
        "columns", "rows", "rows_striped", "columns_scattered", "rows_scattered", "blocks", "layers", "random", "svd",
    )},
    "adafrugal reset": lambda p: ada(p, "columns", on_refresh="reset"),
    "frugal": lambda p: FRUGAL(groups(p), 1e-2, update_gap=7),
    "frugal lion": lambda p: FRUGAL(groups(p), 1e-3, update_gap=7, rule="lion"),
    "galore": lambda p: GaLore(groups(p), 1e-2, update_gap=7, on_refresh="project"),
    "badam": lambda p: BAdam(list(zip(NAMES, p, strict=True)), 1e-2, update_gap=7),
    "signsgd": lambda p: SignSGD(p, 1e-3, weight_decay=0.1),
}  # fmt: skip


def run(name: str) -> tuple[list[list[float]], SplitOptimizer]:
    """Two numbers of the weights at every tenth step, and the optimizer at the end."""
    params = parameters(SHAPES)
    optimizer = METHODS[name](params)
    probe = [draw(shape, 900 + i) for i, shape in enumerate(SHAPES)]
    curve = []

    def before(step: int) -> None:
        if step % 10 == 0:
            total = sum(float((p.detach() * q).sum()) for p, q in zip(params, probe, strict=True))
            curve.append([total, sum(float(p.detach().abs().sum()) for p in params)])
        if step % 5 == 4 and isinstance(optimizer, AdaFRUGAL):
            optimizer.observe(2.0 if step < 20 else 1.0 / step)

    follow(optimizer, params, gradient_sequence(SHAPES, STEPS), before)
    before(STEPS)
    return curve, optimizer


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parent))
    CURVES.write_text(json.dumps({name: run(name)[0] for name in METHODS}, indent=1) + "\n")
    torch.save(run("adafrugal columns")[1].state_dict(), STATE)
