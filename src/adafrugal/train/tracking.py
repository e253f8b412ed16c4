"""Sends the log to a tracker as well, through accelerate; never started unless asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from adafrugal.core.errors import ConfigError
from adafrugal.data.libraries import load_library

Listener = Callable[[Mapping[str, Any]], None]


def open_tracker(name: str, folder: Path, configuration: Mapping[str, Any]) -> Listener:
    """Start one of accelerate's trackers.

    Args:
        name: ``"tensorboard"``, ``"trackio"`` or ``"wandb"``.
        folder: Of the run; files go there.
        configuration: Of the run; its flat values are stored with it.

    Returns:
        A function that takes each record of the log.

    Raises:
        ConfigError: If the tracker's own package is not installed.
    """
    accelerate: Any = load_library("accelerate", f"tracking with {name}", extra="track")
    tracking: Any = load_library("accelerate.tracking", f"tracking with {name}", extra="track")
    if name not in {str(known) for known in tracking.get_available_trackers()}:
        raise ConfigError(
            f"--track {name}",
            f"{name}, whose package is not installed",
            "a tracker that is installed here",
            f"pip install {name}, or leave --track out.",
        )
    accelerator = accelerate.Accelerator(log_with=name, project_dir=str(folder), cpu=True)
    flat = {key: value for key, value in configuration.items() if isinstance(value, (int, float, str, bool))}
    accelerator.init_trackers(folder.name, config=flat)

    def send(record: Mapping[str, Any]) -> None:
        numbers = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "step"}
        accelerator.log(numbers, step=int(record["step"]))

    return send
