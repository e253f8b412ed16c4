"""Errors that carry four facts: the call, the value received, what is allowed, what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FourFactsError(Exception):
    """The base of all errors raised on purpose here; its message always holds four facts.

    Args:
        call: The call or setting as the user wrote it, such as ``"AdaFRUGAL(density=...)"``.
        value: What was received; shown with ``repr`` unless it is a string.
        allowed: What is allowed, as half a sentence.
        action: What to do next, as a whole sentence.

    Example:
        >>> print(ConfigError("FRUGAL(density=...)", 1.5, "a share in [0, 1]", "Write 0.25 for a quarter."))
        FRUGAL(density=...): received 1.5; allowed is a share in [0, 1]. Write 0.25 for a quarter.
    """

    def __init__(self, call: str, value: object, allowed: str, action: str) -> None:
        shown = value if isinstance(value, str) else repr(value)
        super().__init__(f"{call}: received {shown}; allowed is {allowed}. {action}")
        self.call = call
        self.value = value
        self.allowed = allowed
        self.action = action

    def __reduce__(self) -> tuple[type[FourFactsError], tuple[str, object, str, str]]:
        """Rebuild from the four facts, so that the error crosses process boundaries."""
        return type(self), (self.call, self.value, self.allowed, self.action)


class ConfigError(FourFactsError, ValueError):
    """A setting has a value that can never work; raised before any training step."""


class BudgetError(FourFactsError, ValueError):
    """A budget is missing, empty or contradicts itself."""


class NotSupportedError(FourFactsError, RuntimeError):
    """A combination of features is refused, with the reason and the way out."""


class DataError(FourFactsError, ValueError):
    """A text, file or tokenizer cannot be used for training; raised before the first step."""


class CheckpointError(FourFactsError, RuntimeError):
    """A checkpoint is absent, broken, or belongs to another model or configuration."""


class MemoryLimitError(FourFactsError, RuntimeError):
    """An allocator refused memory, and nothing is left that could be made smaller."""


class NonFiniteError(FourFactsError, ArithmeticError):
    """A gradient or loss held NaN or infinity; names the parameters and the step."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Name the known word that is closest to a misspelt one, as a clause for an error.

    Args:
        name: What the user wrote.
        known: The names that exist.

    Returns:
        ``" Did you mean 'x'?"``, or an empty string where nothing is close.

    Example:
        >>> nearest_name("adafrugl", ["adafrugal", "badam"])
        " Did you mean 'adafrugal'?"
    """
    close = get_close_matches(name.lower(), {word.lower(): word for word in known}, n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
