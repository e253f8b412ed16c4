"""The log of a run: one JSON object a line, flushed at once, cut back to the checkpoint on a resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from adafrugal.train.checkpoint import write_atomically


class MetricsLog:
    """``metrics.jsonl``: every line is a record with its step; numbers that are not finite become null.

    Args:
        path: The file; records are appended to what is there. None keeps no log, as on all ranks but the first.
        listener: Is told every record as well, such as a tracker.
    """

    def __init__(self, path: Path | None, listener: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self._path = path
        self._listener = listener

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and flush it."""
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({key: _finite(value) for key, value in record.items()}) + "\n")
        if self._listener is not None:
            self._listener(record)

    def records(self) -> Iterator[dict[str, Any]]:
        """All records; a last line that a kill cut off is left out."""
        if self._path is None or not self._path.exists():
            return
        with self._path.open(encoding="utf-8") as stream:
            for line in stream:
                if not line.endswith("\n"):
                    return
                yield json.loads(line)

    def cut_after(self, step: int) -> None:
        """Drop what was logged after a step, so that a resumed run logs it once."""
        if self._path is None:
            return
        kept = [record for record in self.records() if record["step"] <= step]
        write_atomically(self._path, "".join(json.dumps(record) + "\n" for record in kept))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and value - value != 0.0 else value
