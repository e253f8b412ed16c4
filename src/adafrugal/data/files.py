"""Local files as documents: .txt, .jsonl (both also .gz) and .parquet, read a piece at a time."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from adafrugal.core.errors import DataError, nearest_name
from adafrugal.data.documents import Document, missing_field, text_of
from adafrugal.data.libraries import load_library

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")

# A text file up to this size is one document. A larger one is cut at line ends into documents of about PART_BYTES,
# so that neither memory nor the tokenizer ever meets a file of gigabytes whole.
LARGEST_TEXT_BYTES = 8 * 2**20
PART_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """One file of a corpus.

    Args:
        path: Where it lies.
        name: Its path relative to the folder it was found in, with forward slashes; the bare name of a file given
            by itself. It says on which side of the hold-out a document falls, so it must not depend on the machine.
    """

    path: Path
    name: str


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DataError(
        f"reading {path}",
        f"{type(error).__name__} ({reason})",
        "a file or folder that this user can read",
        "Mend the file, correct its permissions, or leave it out.",
    )


def suffix_of(path: Path) -> str | None:
    """The suffix that says how a file is read, or None if it is of no known kind."""
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)


def _missing(setting: str, path: Path) -> DataError:
    try:
        neighbours = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        neighbours = []
    return DataError(
        setting,
        f"{str(path)!r}, which does not exist",
        "a file or folder that exists",
        f"Correct the path.{nearest_name(path.name, neighbours)}",
    )


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename or folder), error)

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def list_files(setting: str, paths: Iterable[str]) -> tuple[tuple[TextFile, ...], int]:
    """Find the files to read, sorted by name within each path given.

    Of a folder, files of other kinds and everything whose name begins with a dot are left out.

    Args:
        setting: The setting as the user wrote it, for errors.
        paths: Files or folders.

    Returns:
        The files, and how many in the folders are of another kind.

    Raises:
        DataError: If a path is missing, of an unknown kind, unreadable, or named twice, or if no file is found.
    """
    found: dict[Path, TextFile] = {}
    num_left_out = 0
    given = [Path(path).expanduser() for path in paths]
    for path in given:
        try:
            is_folder, is_file = path.is_dir(), path.is_file()
        except OSError as error:
            raise _unreadable(path, error) from error
        if not is_folder and not is_file:
            raise _missing(setting, path)
        if is_file and suffix_of(path) is None:
            raise DataError(
                setting,
                f"{str(path)!r}, a file of an unknown kind",
                f"a file that ends in {', '.join(SUFFIXES)}",
                f"Convert or rename it.{nearest_name(path.suffix, SUFFIXES)}",
            )
        files = [TextFile(path=path, name=path.name)]
        if is_folder:
            members = list(_walk(path))
            files = [TextFile(path=member, name=member.relative_to(path).as_posix()) for member in members]
        for file in sorted(files, key=lambda file: file.name):
            if suffix_of(file.path) is None:
                num_left_out += 1
            elif (place := file.path.resolve()) in found:
                raise DataError(
                    setting, f"{str(file.path)!r} twice", "each file once", "Name the folder or the file, not both."
                )
            else:
                found[place] = file
    if not found:
        raise DataError(
            setting,
            f"{', '.join(map(str, given)) or 'no path'}, which hold no text files",
            f"folders with files that end in {', '.join(SUFFIXES)}",
            "Name another folder, or rename the files.",
        )
    return tuple(found.values()), num_left_out


def read_file(file: TextFile, field: str) -> Iterator[Document]:
    """Read one file as documents.

    A text file is one document, unless it is larger than 8 MiB: then it is cut at line ends into documents of about
    1 MiB. A record of .jsonl or .parquet is one document. A byte-order mark at the start of a file is dropped.

    Args:
        file: The file.
        field: The key of the text in a record.

    Raises:
        DataError: If the file cannot be read, is not UTF-8, or holds a record without text.

    Cost:
        Memory for 8 MiB of text, one line or one batch of records, whichever is largest.
    """
    suffix = suffix_of(file.path)
    try:
        if suffix == ".parquet":
            yield from _parquet_records(file, field)
            return
        with _opened(file.path) as stream:
            is_text = suffix in (".txt", ".txt.gz")
            yield from (_text_parts(file, stream) if is_text else _lines(file, stream, field))
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(file.path, error) from error


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else path.open("rb")


def _decoded(file: TextFile, data: bytes, offset: int) -> str:
    if offset == 0:
        offset = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
        data = data[offset:]
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"reading {file.path}",
            f"byte 0x{data[error.start]:02x} at byte offset {offset + error.start}",
            "UTF-8 text",
            f"Convert the file, for example with: iconv -f LATIN1 -t UTF-8 {file.path}.",
        ) from error


def _text_parts(file: TextFile, stream: BinaryIO) -> Iterator[Document]:
    data = stream.read(LARGEST_TEXT_BYTES + 1)
    if len(data) <= LARGEST_TEXT_BYTES:
        yield Document(name=file.name, text=_decoded(file, data, 0))
        return
    offset = index = 0
    while data:
        end = _part_end(data)
        yield Document(name=f"{file.name}:{index}", text=_decoded(file, data[:end], offset))
        offset, index = offset + end, index + 1
        data = data[end:]
        if len(data) <= PART_BYTES:
            data += stream.read(LARGEST_TEXT_BYTES)


def _part_end(data: bytes) -> int:
    if len(data) <= PART_BYTES:
        return len(data)
    end = data.rfind(b"\n", 0, PART_BYTES) + 1
    if end:
        return end
    # A line longer than a part is cut between two characters, which begin with any byte but 0b10xxxxxx.
    end = PART_BYTES
    while end > PART_BYTES - 4 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _lines(file: TextFile, stream: BinaryIO, field: str) -> Iterator[Document]:
    offset = index = 0
    for number, line in enumerate(stream, 1):
        text = _decoded(file, line, offset)
        offset += len(line)
        if not text.strip():
            continue
        place = f"{file.path}, line {number}"
        try:
            record = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(
                place,
                f"text that is not JSON ({error})",
                "one JSON object a line",
                "Correct the line, or leave it out.",
            ) from error
        yield Document(name=f"{file.name}:{index}", text=text_of(record, field, place))
        index += 1


def _parquet_records(file: TextFile, field: str) -> Iterator[Document]:
    parquet = load_library("pyarrow.parquet", f"reading {file.path}")
    try:
        with parquet.ParquetFile(file.path) as table:
            names: list[str] = table.schema_arrow.names
            if field not in names:
                raise missing_field(names, field, str(file.path))
            index = 0
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    text = text_of({field: value}, field, f"{file.path}, record {index}")
                    yield Document(name=f"{file.name}:{index}", text=text)
                    index += 1
    except DataError:
        raise
    except ValueError as error:  # pyarrow's errors about broken files, and text that is not UTF-8, are ValueErrors
        raise _unreadable(file.path, error) from error
