"""What a person sees while a run goes on: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO, cast

from adafrugal.data.libraries import load_library

_PLAIN_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Status:
    """The numbers of the moment.

    Args:
        step: Steps taken.
        progress: Share in [0, 1] of the budget spent.
        binding: The limit that binds.
        loss: Mean training loss of late, in nats per token.
        bits_per_byte: Of the newest evaluation, or None before it.
        tokens_per_second: Of late.
        density: Of the split groups, or None for other optimizers.
        update_gap: Of the split groups, or None.
        state_bytes: Bytes of optimizer state held.
        elapsed_seconds: Billed so far.
    """

    step: int
    progress: float
    binding: str
    loss: float | None
    bits_per_byte: float | None
    tokens_per_second: float
    density: float | None
    update_gap: int | None
    state_bytes: int
    elapsed_seconds: float

    @property
    def seconds_left(self) -> float | None:
        """Time left at the present pace, or None before there is one."""
        if self.progress <= 0.0:
            return None
        return self.elapsed_seconds * (1.0 - self.progress) / self.progress

    def words(self) -> list[str]:
        """The numbers as short texts, without those that are not known."""
        left = self.seconds_left
        return [
            f"step {self.step}",
            *([] if self.loss is None else [f"loss {self.loss:.3f}"]),
            *([] if self.bits_per_byte is None else [f"{self.bits_per_byte:.3f} bits/byte"]),
            f"{self.tokens_per_second:,.0f} tokens/s",
            *([] if self.density is None else [f"density {self.density:.3f}"]),
            *([] if self.update_gap is None else [f"gap {self.update_gap}"]),
            f"optimizer {self.state_bytes / 1e6:.2f} MB",
            f"{1.0 - self.progress:.0%} of {self.binding} left",
            *([] if left is None else [f"{clock(left)} to go"]),
        ]


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, or hours and minutes.

    Example:
        >>> clock(75), clock(7500)
        ('1:15', '2h05')
    """
    whole = int(seconds + 0.5)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}"


class Console(Protocol):
    """Where a run shows itself."""

    def say(self, text: str) -> None:
        """Print a line that stays."""
        ...

    def show(self, status: Status) -> None:
        """Show where the run stands."""
        ...

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print a table of names and values."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class PlainConsole:
    """Lines of text: at most one status line in ten seconds.

    Args:
        stream: Where they go.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = 0.0

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._stream, flush=True)

    def show(self, status: Status) -> None:
        """Print a status line, unless there was one a moment ago."""
        now = time.monotonic()
        if now - self._last >= _PLAIN_SECONDS:
            self._last = now
            self.say("  ".join(status.words()))

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print names and values in two columns."""
        self.say(title)
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.say(f"  {name.ljust(width)}  {value}")

    def close(self) -> None:
        """There is nothing to put back."""


class SilentConsole:
    """Says nothing: for the ranks of a job that are not the first."""

    def say(self, text: str) -> None:
        """Nothing."""

    def show(self, status: Status) -> None:
        """Nothing."""

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class LiveConsole:
    """A live bar at the foot of a terminal, with lines scrolling above it.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._rich_table: Any = load_library("rich.table", "the live bar")
        progress: Any = load_library("rich.progress", "the live bar")
        self._console: Any = load_library("rich.console", "the live bar").Console(file=stream, highlight=False)
        columns = (
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.percentage:>3.0f}%"),
            progress.TextColumn("{task.description}"),
        )
        self._bar = progress.Progress(*columns, console=self._console, transient=True)
        self._task: Any = None

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def show(self, status: Status) -> None:
        """Move the bar."""
        words = "  ".join(status.words())
        if self._task is None:
            self._task = self._bar.add_task(words, total=1.0)
            self._bar.start()
        self._bar.update(self._task, completed=status.progress, description=words)

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print a table."""
        table = self._rich_table.Table(title=title, show_header=False, title_justify="left")
        for name, value in rows:
            table.add_row(name, value)
        self._console.print(table)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def open_console(stream: TextIO | None = None) -> Console:
    """A live bar if the stream is a terminal, else plain lines.

    Args:
        stream: Standard output, unless another is given.
    """
    target = cast(TextIO, stream or sys.stdout)
    return LiveConsole(target) if target.isatty() else PlainConsole(target)
