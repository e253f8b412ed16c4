"""The text that every Python carries: the source and documentation of its standard library. Nothing to download."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from adafrugal.data.documents import Document

# Tests repeat themselves, codec tables are numbers, and installed packages differ from machine to machine.
LEFT_OUT_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
)


def standard_library_root() -> Path:
    """The folder of the standard library of the Python that runs."""
    return Path(sysconfig.get_path("stdlib"))


def standard_library_name() -> str:
    """What to call this corpus; source differs between versions of Python, so the version is part of it.

    Example:
        >>> standard_library_name().startswith("stdlib of Python 3.")
        True
    """
    return f"stdlib of Python {platform.python_version()}"


def read_standard_library(root: Path) -> Iterator[Document]:
    """Read the library's .py files in order of their relative paths; a file is one document.

    ``pydoc_data``, which holds the language reference as text, is among them. Folders of tests, ``encodings`` and
    installed packages are left out, and so is a file that is not UTF-8.

    Args:
        root: The folder of the library.

    Cost:
        About 13 MB are read, in a fraction of a second.
    """
    names: list[str] = []
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT_FOLDERS]
        names += [Path(parent, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    for name in sorted(names):
        try:
            text = (root / name).read_bytes().decode()
        except UnicodeDecodeError:
            continue
        yield Document(name=name, text=text)
