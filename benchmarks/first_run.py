"""The picture of README: the default job with AdaFRUGAL and with its neighbours, three seeds each, loss beside bytes.

python benchmarks/first_run.py                            # about twenty minutes on two cores
python benchmarks/first_run.py --seeds 1 --arms adafrugal adamw
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

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "first_run.svg"
ARMS = {"adafrugal": "AdaFRUGAL", "adamw": "AdamW", "signsgd": "SignSGD"}
COLOURS = {"adafrugal": "#1b6ca8", "adamw": "#d1495b", "signsgd": "#7a7a7a"}


def run(name: str, seed: int, tokens: int) -> dict:
    """The default job with one optimizer at its default rates, in a process of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "adafrugal", "train", "--out", str(out), "--optim.name", name, "--seed", str(seed)),
            *("--budget.tokens", str(tokens), "--sample.tokens", "0"),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((out / "summary.json").read_text())
    print(f"{name}, seed {seed}: {summary['final_bits_per_byte']:.4f} bits per byte", flush=True)
    keys = ("tokens", "bits_per_byte")
    curve = [[record[key] for key in keys] for record in records if "val_loss" in record]
    held = [[r["tokens"], r["optimizer_state_bytes"]] for r in records if "train_loss" in r]
    return {"optimizer": name, "seed": seed, "summary": summary, "curve": curve, "held_bytes": held}


def draw(runs: list[dict]) -> None:
    """Bits per byte and optimizer bytes over the tokens, one line a seed."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "adafrugal", "font.size": 9, "axes.spines.top": False})
    matplotlib.rcParams["axes.spines.right"] = False
    from matplotlib import pyplot

    figure, (loss, held) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    told = set()
    for one in runs:
        name = one["optimizer"]
        label = None if name in told else ARMS[name]
        told.add(name)
        loss.plot(*zip(*one["curve"], strict=True), color=COLOURS[name], linewidth=1.2, label=label)
        tokens, held_bytes = zip(*one["held_bytes"], strict=True)
        held.plot(tokens, [b / 1e6 for b in held_bytes], color=COLOURS[name], linewidth=1.2)
    loss.set_ylim(top=4.5)
    loss.set_ylabel("held-out bits per byte")
    held.set_ylabel("optimizer state, MB")
    held.set_ylim(bottom=-0.1)
    for axes in (loss, held):
        axes.set_xlabel("bytes of text seen")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:.0f}k")
        axes.grid(alpha=0.25)
    loss.legend(frameon=False)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Run, draw, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--tokens", type=int, default=819_200)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    jobs = [(name, seed, arguments.tokens) for seed in range(arguments.seeds) for name in arguments.arms]
    with ThreadPoolExecutor(arguments.workers) as pool:
        runs = list(pool.map(lambda job: run(*job), jobs))
    cells = []
    for name in arguments.arms:
        found = [one["summary"] for one in runs if one["optimizer"] == name]
        bits = [s["final_bits_per_byte"] for s in found]
        spread = statistics.stdev(bits) if len(bits) > 1 else float("nan")
        state = [[s[f"{kind}_optimizer_state_bytes"] / 1e6 for s in found] for kind in ("peak", "mean", "final")]
        cells.append(
            [ARMS[name], f"{statistics.mean(bits):.3f} ± {spread:.3f}", *(f"{statistics.mean(v):.2f}" for v in state)]
        )
    head = ["0.87M Llama, default text", "bits per byte", "state at most, MB", "on average, MB", "at the end, MB"]
    draw(runs)
    save("first_run", {"tokens": arguments.tokens, "runs": runs}, markdown(head, cells))


if __name__ == "__main__":
    main()
