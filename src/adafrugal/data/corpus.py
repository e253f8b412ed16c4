"""Text in: the standard library, local files or a hub data set become one corpus with a training and a validation side.

A corpus is surveyed once when it is opened: every byte is read, so whatever is wrong with it is said before training
starts. Only a streamed data set is too long for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path

from adafrugal.core.errors import ConfigError, DataError, nearest_name
from adafrugal.data.documents import Document, DocumentStream
from adafrugal.data.files import TextFile, list_files, read_file, suffix_of
from adafrugal.data.hub import HUB_NAMES, HubText
from adafrugal.data.splitting import Corpus, Source, split, split_streamed
from adafrugal.data.standard_library import read_standard_library, standard_library_name, standard_library_root

__all__ = ["Corpus", "Document", "DocumentStream", "TextConfig", "open_corpus"]

# The validation split of a streamed data set may be as large as others' training splits.
VALIDATION_STREAM_RECORDS = 1_000

_HUB_SETTINGS = ("hub_config", "hub_split", "hub_validation_split", "streaming")


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Which text to train on, and which of it to keep for validation.

    Args:
        source: ``"stdlib"``, the Python standard library that is here already; a file or folder; ``"files"``, with
            ``paths``; or a data set of the Hugging Face hub as ``owner/name``.
        paths: Files or folders of .txt, .jsonl (both also .gz) and .parquet, instead of ``source``.
        field: The field that holds the text of a record in .jsonl, .parquet and hub data sets.
        hub_config: The configuration of a hub data set that has several, such as ``"en"`` of c4.
        hub_split: The split of a hub data set to train on.
        streaming: Read a hub data set over the network as training goes on, instead of downloading it first.
        validation_paths: Files or folders to validate on; nothing is then held out, and these are not trained on.
        hub_validation_split: The split of a hub data set to validate on; nothing is then held out.
        held_out_modulus: A document is held out if sha256(name) mod this = 0; 20 keeps about a twentieth.

    Raises:
        ConfigError: If ``held_out_modulus`` is below 2, or ``field`` or ``source`` is empty.

    Example:
        >>> TextConfig(source="owner/name", hub_config="en").streaming
        True
    """

    source: str = "stdlib"
    paths: tuple[str, ...] = ()
    field: str = "text"
    hub_config: str | None = None
    hub_split: str = "train"
    streaming: bool = True
    validation_paths: tuple[str, ...] = ()
    hub_validation_split: str | None = None
    held_out_modulus: int = 20

    def __post_init__(self) -> None:
        if self.held_out_modulus < 2:
            raise ConfigError(
                f"TextConfig(held_out_modulus={self.held_out_modulus})",
                self.held_out_modulus,
                "a whole number from 2 on",
                "Write 20 to hold out a twentieth.",
            )
        for name in ("source", "field"):
            if not getattr(self, name):
                raise ConfigError(f"TextConfig({name}='')", "nothing", "a name", f"Leave out {name!r} for its default.")


def open_corpus(config: TextConfig) -> Corpus:
    """Find the text, survey it, and split it into a training and a validation side.

    Documents are held out whole by their names. Where that leaves one side empty, as with a single file, the tail of
    each document is held out instead, and a note says so.

    Args:
        config: What to read.

    Returns:
        The corpus.

    Raises:
        ConfigError: If a setting would be ignored.
        DataError: If the source is unknown, a file is missing, unreadable or broken, or there is no text in it.

    Cost:
        One pass over all text, at some 100 MB a second; for a streamed data set the first 10,000 records.
    """
    if config.paths or config.source == "files":
        return _open_files(config)
    if config.source == "stdlib":
        return _open_standard_library(config)
    if _exists(config.source):
        return _open_files(config)
    return _open_hub(config)


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except OSError:
        return True  # something is there that may not be looked at: reading it says so


def _refuse_ignored(config: TextConfig, names: tuple[str, ...], because: str) -> None:
    defaults = {field.name: field.default for field in fields(config)}
    for name in names:
        value = getattr(config, name)
        if value != defaults[name]:
            raise ConfigError(
                f"TextConfig({name}={value!r})",
                f"{because} beside it",
                f"one without the other, since {name!r} would be ignored",
                f"Leave out {name!r}, or what it goes against.",
            )


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and all(name.split("/")) and name[0] not in "./~" and suffix_of(Path(name)) is None


def _unknown_source(source: str) -> DataError:
    if "/" in source or "\\" in source or suffix_of(Path(source)) is not None:
        value = f"{source!r}, which does not exist"
    else:
        value = f"the unknown source {source!r}"
    neighbours = [entry.name for entry in Path(source).parent.glob("*")]
    return DataError(
        f"TextConfig(source={source!r})",
        value,
        "'stdlib', 'files' with paths, a file or folder that exists, or a hub data set as owner/name",
        f"Correct it.{nearest_name(Path(source).name, ('stdlib', 'files', *HUB_NAMES, *neighbours))}",
    )


def _open_standard_library(config: TextConfig) -> Corpus:
    setting = "TextConfig(source='stdlib')"
    _refuse_ignored(config, _HUB_SETTINGS if config.validation_paths else (*_HUB_SETTINGS, "field"), "source='stdlib'")
    read = partial(read_standard_library, standard_library_root())
    source = Source(name=standard_library_name(), setting=setting, read=read)
    return split(source, _validation_source(config, _validation_files(config)), config.held_out_modulus)


def _open_files(config: TextConfig) -> Corpus:
    if config.paths and config.source not in ("stdlib", "files"):
        raise ConfigError(
            f"TextConfig(source={config.source!r}, paths={list(config.paths)!r})",
            "two sources of text",
            "one of both",
            "Put all files and folders into `paths`, or leave it out.",
        )
    _refuse_ignored(config, _HUB_SETTINGS, "local files")
    paths = config.paths or (() if config.source == "files" else (config.source,))
    setting = f"TextConfig(paths={list(paths)!r})"
    files, num_left_out = list_files(setting, paths)
    validation_files = _validation_files(config)
    both = {file.path.resolve() for file in validation_files}
    train_files = tuple(file for file in files if file.path.resolve() not in both)
    notes: tuple[str, ...] = ()
    if num_left_out:
        notes += (f"Files of other kinds in the folders, left out: {num_left_out}.",)
    if len(train_files) < len(files):
        notes += (f"Files validated on, and so not trained on: {len(files) - len(train_files)}.",)
    name = ", ".join(Path(path).expanduser().resolve().name for path in paths)
    source = Source(name=name, setting=setting, read=partial(_read_files, train_files, config.field), notes=notes)
    return split(source, _validation_source(config, validation_files), config.held_out_modulus)


def _open_hub(config: TextConfig) -> Corpus:
    name = HUB_NAMES.get(config.source, config.source)
    if not _is_hub_name(name):
        raise _unknown_source(config.source)
    text = HubText(
        setting=f"TextConfig(source={config.source!r})",
        name=name,
        hub_config=config.hub_config,
        split=config.hub_split,
        field=config.field,
        streaming=config.streaming,
    )
    validation = _validation_source(config, _validation_files(config))
    if config.hub_validation_split is not None:
        _refuse_ignored(config, ("held_out_modulus",), "hub_validation_split")
        validation = _hub_validation_source(replace(text, split=config.hub_validation_split))
    if config.streaming:
        return split_streamed(text, validation, config.held_out_modulus)
    return split(Source(name=text.label, setting=text.setting, read=text.read), validation, config.held_out_modulus)


def _hub_validation_source(text: HubText) -> Source:
    if not text.streaming:
        return Source(name=text.label, setting=text.setting, read=text.read)
    num_first = VALIDATION_STREAM_RECORDS
    documents = tuple(islice(text.read(), num_first))
    note = f"The first {num_first:,} records of the split {text.split!r} are validated on."
    return Source(name=text.label, setting=text.setting, read=lambda: iter(documents), notes=(note,))


def _validation_files(config: TextConfig) -> tuple[TextFile, ...]:
    if not config.validation_paths:
        return ()
    _refuse_ignored(config, ("held_out_modulus", "hub_validation_split"), "validation_paths")
    return list_files(_validation_setting(config), config.validation_paths)[0]


def _validation_source(config: TextConfig, files: tuple[TextFile, ...]) -> Source | None:
    if not files:
        return None
    read = partial(_read_files, files, config.field)
    return Source(name="validation_paths", setting=_validation_setting(config), read=read)


def _validation_setting(config: TextConfig) -> str:
    return f"TextConfig(validation_paths={list(config.validation_paths)!r})"


def _read_files(files: tuple[TextFile, ...], field: str) -> Iterator[Document]:
    for file in files:
        yield from read_file(file, field)
