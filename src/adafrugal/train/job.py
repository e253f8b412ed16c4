"""A run from its folder's first file to its last: configuration, training, model, summary, report."""

from __future__ import annotations

import datetime
import json
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch

from adafrugal.core.errors import ConfigError
from adafrugal.data.rows import PairTokenizer
from adafrugal.train.assemble import Parts, assemble
from adafrugal.train.checkpoint import Checkpoints, write_atomically
from adafrugal.train.config import TrainConfig, as_plain
from adafrugal.train.console import Console, SilentConsole, clock
from adafrugal.train.distributed import Ranks, close_ranks
from adafrugal.train.gathering import whole_weights
from adafrugal.train.metrics import MetricsLog
from adafrugal.train.models import without_bars
from adafrugal.train.optimizers import adamw_bytes
from adafrugal.train.report import write_report
from adafrugal.train.sample import write_sample
from adafrugal.train.tracking import open_tracker
from adafrugal.train.trainer import Progress, Trainer

CONFIG_FILE = "config.yaml"
_MB = 1e6


def new_folder(config: TrainConfig) -> Path:
    """The folder of a new run, which must not hold one already.

    Raises:
        ConfigError: If there is something in it.
    """
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{stamp}-{Path(config.model).name}-{config.optim.name}"
    folder = Path(config.out) if config.out else Path("runs") / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"--out {folder}",
            f"{folder}, which is there already and not empty",
            "a new or empty folder",
            f"Choose another --out, or go on with --resume {folder}.",
        )
    return folder


def run_training(
    config: TrainConfig, folder: Path, console: Console, configuration: str, resume: bool, ranks: Ranks | None = None
) -> dict[str, Any]:
    """Train, and leave the run folder: log, checkpoints, model, summary and report.

    Args:
        config: What to do.
        folder: Where; made if need be.
        console: Where to show it.
        configuration: The text of ``config.yaml``, which a new run writes.
        resume: Go on from the newest checkpoint in the folder.
        ranks: The processes that train together, each of which makes this call; the first one shows, logs and writes.

    Returns:
        What ``summary.json`` holds.

    Raises:
        ConfigError: Before the first step, for what cannot work.
        DataError: Before the first step, for text that cannot be used.
        CheckpointError: If the checkpoint belongs to another model, optimizer or text.
        NonFiniteError: If a loss or gradient is not finite.
    """
    started = time.monotonic()
    config = config.with_default_budget()
    ranks = ranks or Ranks()
    console = console if ranks.is_first else SilentConsole()
    parts = assemble(config, console.say, ranks)
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep)
    log = MetricsLog(None)
    if ranks.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        if not resume:
            write_atomically(folder / CONFIG_FILE, configuration)
        tracker = open_tracker(config.track, folder, as_plain(config)) if config.track else None
        log = MetricsLog(folder / "metrics.jsonl", tracker)
        checkpoints.sweep()
    trainer = Trainer(
        config=config,
        parts=parts,
        budget=config.budget,
        checkpoints=checkpoints,
        log=log,
        console=console,
        progress=Progress(),
    )
    newest = ranks.from_first(checkpoints.newest) if resume else None
    if newest is not None:
        trainer.restore(newest)
        _say_resumed(console, newest, trainer.progress)
    log.cut_after(trainer.progress.step if newest is not None else -1)
    setup_seconds = time.monotonic() - started
    try:
        ended_by = trainer.run()
        summary = _summary(config, parts, trainer, ended_by, setup_seconds)
        _save_model(parts, folder / "model")
        sample = ""
        if config.sample.tokens and not isinstance(parts.tokenizer, PairTokenizer):
            sample = write_sample(parts.model, parts.tokenizer, config.sample, config.seed)
        close_ranks(ranks)
        if not ranks.is_first:
            return summary
        write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        table = summary_table(summary)
        write_report(
            folder / "report.html",
            f"adafrugal: {config.model} with {config.optim.name}",
            table,
            list(log.records()),
            summary["adamw_state_bytes"],
            sample,
            (folder / CONFIG_FILE).read_text(encoding="utf-8"),
        )
    finally:
        console.close()
    console.table(f"{folder}", table)
    if sample:
        console.say(f"a sample of what it writes:\n{sample}")
    console.say(f"the run is in {folder}; open {folder / 'report.html'}")
    return summary


def _say_resumed(console: Console, path: Path, progress: Progress) -> None:
    loss = "none yet" if progress.val_loss is None else f"{progress.val_loss:.4f}"
    spent = progress.ledger.total()
    console.say(
        f"resuming {path} at step {progress.step}: held-out loss {loss}, {spent.tokens:,} tokens and "
        f"{clock(spent.seconds)} spent"
    )


def _save_model(parts: Parts, folder: Path) -> None:
    """The model as transformers loads it, and its tokenizer; of several ranks the first one writes."""
    sharded = parts.ranks.layout.kind == "fsdp2"
    given = {"state_dict": whole_weights(parts.model, parts.ranks)} if sharded else {}
    if not parts.ranks.is_first:
        return
    with without_bars():
        cast(Any, parts.model).save_pretrained(folder, **given)
    parts.tokenizer.save(folder)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("adafrugal", "torch", "transformers", "datasets", "tokenizers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _settings_in_force(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's plain settings as they were at the end, with the peak rate in place of the last one."""
    plain: dict[str, Any] = {
        k: v for k, v in group.items() if isinstance(v, (int, float, str, tuple)) and k != "widths"
    }
    return {**plain, "lr": float(group["initial_lr"]), "num_parameters": sum(p.numel() for p in group["params"])}


def _summary(
    config: TrainConfig, parts: Parts, trainer: Trainer, ended_by: str, setup_seconds: float
) -> dict[str, Any]:
    progress = trainer.progress
    total, training = progress.ledger.total(), progress.ledger.account("training")
    return {
        "final_val_loss": progress.val_loss,
        "final_bits_per_byte": progress.bits_per_byte,
        "best_val_loss": progress.best_val_loss,
        "best_bits_per_byte": progress.best_bits_per_byte,
        "final_scores": progress.scores,
        "micro_sequences": progress.micro_sequences or parts.micro_sequences,
        "halved_for_memory": progress.micro_sequences is not None,
        "peak_optimizer_state_bytes": progress.peak_state_bytes,
        "mean_optimizer_state_bytes": round(progress.sum_state_bytes / max(1, progress.step)),
        "final_optimizer_state_bytes": trainer.whole_state_bytes(),
        "adamw_state_bytes": adamw_bytes(parts.model),
        "steps": progress.step,
        "tokens": total.tokens,
        "flops": total.flops,
        "seconds": total.seconds,
        "setup_seconds": setup_seconds,
        "tokens_per_second": training.tokens / training.seconds if training.seconds else 0.0,
        "ended_by": ended_by,
        "ledger": progress.ledger.state_dict(),
        "model": config.model,
        "num_parameters": sum(param.numel() for param in parts.model.parameters()),
        "optimizer": config.optim.name,
        "optimizer_groups": [_settings_in_force(group) for group in parts.optimizer.param_groups],
        "seed": config.seed,
        "text": parts.corpus.name,
        "text_sha256": parts.corpus.content_hash,
        "text_notes": list(parts.corpus.notes),
        "tokenizer": parts.tokenizer.name,
        "tokenizer_sha256": parts.tokenizer.fingerprint,
        "bytes_are_exact": not isinstance(parts.tokenizer, PairTokenizer) and parts.tokenizer.exact_bytes,
        "device": str(parts.device),
        "parallel": parts.ranks.layout.kind,
        "num_processes": parts.ranks.size,
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "versions": _versions(),
        "command": sys.argv,
    }


def summary_table(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary for people: names and values.

    Args:
        summary: Of ``summary.json``.
    """
    adamw = summary["adamw_state_bytes"]

    def held(kind: str) -> str:
        value = summary[f"{kind}_optimizer_state_bytes"]
        return f"{value / _MB:.2f} MB" + (f" ({value / adamw:.0%} of AdamW's)" if adamw else "")

    bits = summary["final_bits_per_byte"]
    unit, best = ("an example" if bits is None else "nats per token"), f"best {summary['best_val_loss']:.4f}"
    return [
        ("held-out loss", f"{summary['final_val_loss']:.4f} {unit} ({best})"),
        *([] if bits is None else [("bits per byte", f"{bits:.4f} (best {summary['best_bits_per_byte']:.4f})")]),
        *((name, f"{value:.4f}") for name, value in summary["final_scores"].items()),
        ("optimizer state, peak", held("peak")),
        ("optimizer state, mean", held("mean")),
        ("optimizer state, at the end", held("final")),
        ("AdamW would hold", f"{adamw / _MB:.2f} MB"),
        ("steps, tokens", f"{summary['steps']:,} steps, {summary['tokens']:,} tokens"),
        ("compute", f"{summary['flops']:.3e} FLOPs"),
        ("time", f"{clock(summary['seconds'])}, {summary['tokens_per_second']:,.0f} training tokens a second"),
        ("ended by", str(summary["ended_by"])),
    ]


def resolved_out(config: TrainConfig, folder: Path) -> TrainConfig:
    """The configuration with the folder that was chosen for it."""
    return replace(config, out=str(folder))
