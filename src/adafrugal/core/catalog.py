"""A catalogue maps a name to a factory, and answers an unknown name with the nearest known one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from adafrugal.core.errors import ConfigError, nearest_name

T = TypeVar("T")


class Catalog(Generic[T]):
    """Factories by name. Each folder fills its own catalogue with one line per entry.

    Args:
        kind: What the entries are, in the singular; used in errors, such as ``"subspace"``.

    Example:
        >>> colours: Catalog[str] = Catalog("colour")
        >>> colours.add("red", lambda: "#f00")
        >>> colours.create("red")
        '#f00'
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._factories: dict[str, Callable[..., T]] = {}

    def add(self, name: str, factory: Callable[..., T]) -> None:
        """Add one entry; a name that is taken is a programming error.

        Raises:
            ValueError: If ``name`` is already in the catalogue.
        """
        if name in self._factories:
            raise ValueError(f"{self.kind} {name!r} is in the catalogue already")
        self._factories[name] = factory

    def factory(self, name: str) -> Callable[..., T]:
        """Look a factory up without calling it.

        Raises:
            ConfigError: If the name is unknown; lists the known ones and the nearest.
        """
        if name not in self._factories:
            raise ConfigError(
                f"{self.kind}={name!r}",
                name,
                f"one of {', '.join(self.names())}",
                f"Choose one of these names.{nearest_name(name, self._factories)}",
            )
        return self._factories[name]

    def create(self, name: str, *args: object, **settings: object) -> T:
        """Call the factory of that name with the given arguments.

        Raises:
            ConfigError: If the name is unknown.
        """
        return self.factory(name)(*args, **settings)

    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they were added."""
        return tuple(self._factories)
