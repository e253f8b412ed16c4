"""What the benchmarks share: interleaved timing, the machine they ran on, tables, and dated result files."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("adafrugal", "torch", "transformers", "galore-torch", "apollo-torch", "badam", "bitsandbytes")


def machine() -> dict[str, Any]:
    """Processor, memory and versions, as far as they can be known."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        processor = names[0] if names else processor
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "processor": processor,
        "cores": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": versions,
    }


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Time each call once a round, in turn, so that the machine's drift falls on all of them alike.

    Returns:
        Seconds by name, without the warm-up rounds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup + rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[warmup:] for name, values in seconds.items()}


def median_ms(seconds: Sequence[float]) -> float:
    """Median in milliseconds."""
    return 1e3 * statistics.median(seconds)


def spread_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """First and third quartile in milliseconds."""
    quartiles = statistics.quantiles(seconds, n=4)
    return 1e3 * quartiles[0], 1e3 * quartiles[2]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; all columns but the first are numbers."""
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def save(name: str, result: Mapping[str, Any], table: str, folder: Path = RESULTS) -> Path:
    """Write ``NAME-DATE.json`` and the newest table as ``NAME.md`` into a folder of results."""
    folder.mkdir(parents=True, exist_ok=True)
    today = datetime.date.today().isoformat()
    full = {"date": today, "machine": machine(), **result}
    path = folder / f"{name}-{today}.json"
    path.write_text(json.dumps(full, indent=1) + "\n")
    (folder / f"{name}.md").write_text(table + "\n")
    print(table)
    print(f"\nwritten: {path} and {name}.md")
    return path
