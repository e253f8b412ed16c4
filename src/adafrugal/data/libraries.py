"""Heavy libraries are loaded where they are needed; a missing one is an error that says how to install it."""

from __future__ import annotations

import importlib
from typing import Any

from adafrugal.core.errors import DataError


def load_library(module: str, job: str, extra: str = "train") -> Any:
    """Import a module of one of the libraries in an extra of the package.

    Args:
        module: The module's full name, such as ``"datasets"`` or ``"pyarrow.parquet"``.
        job: What it is needed for, as half a sentence; used in the error.
        extra: Which extra installs it.

    Returns:
        The module. It is typed ``Any``, since these libraries have no types of their own.

    Raises:
        DataError: If the library is not installed.

    Example:
        >>> load_library("json", "reading JSON").loads("[1]")
        [1]
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise DataError(
            job,
            f"no module {error.name!r}",
            f"an installed {module.partition('.')[0]!r}",
            f'Run: pip install "adafrugal[{extra}]".',
        ) from error
