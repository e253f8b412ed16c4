"""Which rates the default job should have: a small grid on the default model and text, three seeds each.

python benchmarks/learning_rates.py                      # about an hour and a half on two cores
python benchmarks/learning_rates.py --seeds 1 --arms adamw
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measuring import markdown, save

Options = dict[str, str]
ARMS: dict[str, list[Options]] = {
    "adafrugal": [
        {"optim.lr": lr, "optim.stateless_lr_scale": scale}
        for lr, scale in [
            ("2e-3", "0.1"), ("4e-3", "0.03"), ("4e-3", "0.1"), ("4e-3", "0.3"), ("8e-3", "0.1"), ("8e-3", "0.03"),
        ]
    ]
    + [
        {"optim.lr": "4e-3", "optim.stateless_lr_scale": "0.1", "optim.embedding_lr": rate}
        for rate in ("2e-3", "1e-2", "2e-2")
    ],
    "adamw": [
        {"optim.lr": lr, "optim.embedding_lr": e}
        for lr, e in [
            ("1e-3", "1e-3"), ("1e-3", "1e-2"), ("1.5e-3", "1e-2"), ("3e-3", "1e-2"), ("4e-3", "4e-3"),
        ]
    ],
    "galore": [{"optim.lr": lr, "optim.embedding_lr": "4e-3"} for lr in ("4e-3", "1e-2", "2e-2")],
    "badam": [{"optim.lr": lr} for lr in ("1e-3", "2e-3", "4e-3")],
    "signsgd": [{"optim.lr": lr} for lr in ("1e-4", "3e-4", "1e-3", "3e-3")],
    "sgd": [{"optim.lr": lr} for lr in ("0.1", "0.3", "1.0")],
}  # fmt: skip


def run(name: str, options: Options, seed: int, tokens: int) -> dict:
    """One run of the default job in a process of one thread; returns its summary, or that it diverged."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = [f"--{key}={value}" for key, value in options.items()]
        command = [
            *(sys.executable, "-m", "adafrugal", "train", "--out", str(out), "--optim.name", name, "--seed", str(seed)),
            *("--budget.tokens", str(tokens), "--sample.tokens", "0", "--eval.every_steps", "100", *words),
        ]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode != 0:
            return {"diverged": done.stderr.strip().splitlines()[-1]}
        summary = json.loads((out / "summary.json").read_text())
        print(f"{name} {' '.join(words)}, seed {seed}: {summary['final_val_loss']:.4f}", flush=True)
        return summary


def main() -> None:
    """Run the grid and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--tokens", type=int, default=819_200)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    jobs = [(name, o, seed) for seed in range(arguments.seeds) for name in arguments.arms for o in ARMS[name]]
    with ThreadPoolExecutor(arguments.workers) as pool:
        summaries = list(pool.map(lambda job: run(*job, arguments.tokens), jobs))
    rows, cells = [], []
    for name in arguments.arms:
        for options in ARMS[name]:
            found = [s for (n, o, _), s in zip(jobs, summaries, strict=True) if n == name and o is options]
            losses = [s["final_val_loss"] for s in found if "diverged" not in s]
            rows.append({"optimizer": name, "options": options, "losses": losses, "diverged": len(found) - len(losses)})
            mean = statistics.mean(losses) if losses else float("nan")
            spread = statistics.stdev(losses) if len(losses) > 1 else float("nan")
            held = [s["mean_optimizer_state_bytes"] / s["adamw_state_bytes"] for s in found if "diverged" not in s]
            told = ", ".join(f"{key.removeprefix('optim.')} {value}" for key, value in options.items())
            share = f"{statistics.mean(held):.0%}" if held else "-"
            cells.append([f"{name}: {told}", f"{mean:.4f}", f"{spread:.4f}", share, str(len(found) - len(losses))])
    head = [
        "tiny on stdlib, " + f"{arguments.tokens:,} bytes",
        "held-out nats a byte",
        "deviation over seeds",
        "mean state / AdamW's",
        "diverged",
    ]
    save("learning_rates", {"tokens": arguments.tokens, "seeds": arguments.seeds, "rows": rows}, markdown(head, cells))


if __name__ == "__main__":
    main()
