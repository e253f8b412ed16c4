"""Checkpoints that are whole or absent: written aside, synced, hashed, and moved into place in one rename."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from adafrugal.core.errors import CheckpointError

FORMAT_VERSION = 1
_NAME = re.compile(r"^step-(\d{9})$")
_WRITING, _OLD = ".writing-", ".old-"
_MANIFEST = "manifest.json"


class Checkpoints:
    """The checkpoints of a run, newest last, of which so many are kept.

    A checkpoint is a folder ``step-000000200`` with one file for each part and a manifest of their sizes and hashes.
    It is written under another name, synced to the disk, and renamed: a kill at any moment leaves the ones before it
    as they were, and no folder of that name that is not whole.

    Args:
        folder: Where they live; made if need be.
        keep: How many are kept.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, step: int, parts: Mapping[str, Any]) -> int:
        """Write one, then let the oldest go.

        Args:
            step: The step that it was taken after.
            parts: Tensors and plain data by name; each becomes ``name.pt``, loadable with ``weights_only=True``.

        Returns:
            Bytes written.

        Raises:
            OSError: If the disk refuses, say because it is full; the older checkpoints are untouched then, and what
                was written of this one is removed.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self.sweep()
        aside = self._folder / f"{_WRITING}{step:09d}"
        aside.mkdir()
        try:
            files: dict[str, dict[str, Any]] = {}
            for name, part in parts.items():
                path = aside / f"{name}.pt"
                with path.open("wb") as stream:
                    _save(part, stream)
                    _sync(stream.fileno())
                files[path.name] = {"bytes": path.stat().st_size, "sha256": _hash(path)}
            manifest = {"format_version": FORMAT_VERSION, "step": step, "files": files}
            _write_synced(aside / _MANIFEST, json.dumps(manifest, indent=2))
            self._into_place(aside, step)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        for _, path in self._all()[: -self._keep]:
            self._remove(path)
        return sum(int(entry["bytes"]) for entry in files.values())

    def _into_place(self, aside: Path, step: int) -> None:
        target = self._folder / f"step-{step:09d}"
        _sync_folder(aside)
        if target.exists():
            self._remove(target)
        aside.rename(target)
        _sync_folder(self._folder)

    def _remove(self, path: Path) -> None:
        """Rename first, so that no half-removed folder carries the name of a checkpoint."""
        old = path.with_name(_OLD + path.name)
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        shutil.rmtree(old, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what a kill may have left half-written or half-removed."""
        if self._folder.exists():
            for path in self._folder.iterdir():
                if path.name.startswith((_WRITING, _OLD)):
                    shutil.rmtree(path, ignore_errors=True)

    def _all(self) -> list[tuple[int, Path]]:
        if not self._folder.exists():
            return []
        found = [(_NAME.match(path.name), path) for path in self._folder.iterdir()]
        return sorted((int(match.group(1)), path) for match, path in found if match)

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole, or None; broken ones are passed over with a warning."""
        for _, path in reversed(self._all()):
            fault = _fault(path)
            if fault is None:
                return path
            warnings.warn(f"checkpoint {path} is broken ({fault}); an older one is used", stacklevel=2)
        return None

    def load(self, path: Path) -> dict[str, Any]:
        """All parts of a checkpoint, by name, on the CPU.

        Raises:
            CheckpointError: If a file is missing, of another size or hash, or of a newer format.
        """
        fault = _fault(path)
        if fault is not None:
            raise CheckpointError(f"checkpoint {path}", fault, "whole files", "Resume from an older checkpoint.")
        manifest = json.loads((path / _MANIFEST).read_text())
        return {
            Path(name).stem: torch.load(path / name, map_location="cpu", weights_only=True)
            for name in manifest["files"]
        }


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        if manifest["format_version"] > FORMAT_VERSION:
            return f"format version {manifest['format_version']}, newer than {FORMAT_VERSION}"
        for name, entry in manifest["files"].items():
            file = path / name
            if file.stat().st_size != entry["bytes"] or _hash(file) != entry["sha256"]:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _save(part: Any, stream: BinaryIO) -> None:
    """torch.save, with a disk that refuses shown as OSError: torch turns it into a RuntimeError about positions."""
    try:
        torch.save(part, stream)
    except RuntimeError as error:
        reason = error.__context__
        if isinstance(reason, OSError):
            raise reason from error
        raise OSError(str(error).splitlines()[0]) from error


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        _sync(stream.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that is whole or as it was before."""
    aside = path.with_name(f".{path.name}.writing")
    try:
        _write_synced(aside, text)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
