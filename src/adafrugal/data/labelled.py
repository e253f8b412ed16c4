"""Labelled texts, one or two to an example: GLUE's tasks as they are published, and anybody's own files.

An example is one or two texts and a class or a number. Files are .tsv or .jsonl (both also .gz); a data set of the
hub is named ``owner/name``.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from adafrugal.core.catalog import Catalog
from adafrugal.core.errors import ConfigError, DataError, nearest_name
from adafrugal.data.libraries import load_library

MetricName = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]
METRICS: tuple[MetricName, ...] = get_args(MetricName)
SUFFIXES = (".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz")


@dataclass(frozen=True, kw_only=True)
class Example:
    """What is read, and what is to be said of it.

    Args:
        texts: One text, or a pair.
        target: The index of a class, or a number where a number is asked for.
    """

    texts: tuple[str, ...]
    target: float


@dataclass(frozen=True, kw_only=True)
class LabelledTask:
    """Where texts and labels stand in a record, what the labels are, and how answers are scored.

    Args:
        text_fields: Names of the fields of the texts, one or two.
        label_field: The name of the label's.
        classes: The labels in the order of their indices; empty for a number.
        metrics: How answers are scored; the first is the one that is reported.
        header: Names of the columns of a .tsv file that has none of its own; empty where it has.
        hub_name: ``owner/name`` on the hub, and the configuration there.
        hub_fields: The fields of texts and label there, in the order of ours, where their names differ.

    Raises:
        ConfigError: For no text or three, or fewer than two classes.

    Source:
        GLUE (arXiv 1804.07461), table 1: tasks and metrics; columns as in the published files.
    """

    text_fields: tuple[str, ...]
    label_field: str = "label"
    classes: tuple[str, ...] = ()
    metrics: tuple[MetricName, ...] = ("accuracy",)
    header: tuple[str, ...] = ()
    hub_name: tuple[str, str] | None = None
    hub_fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [name for name in self.metrics if name not in METRICS]
        if unknown or not self.metrics:
            raise ConfigError(
                f"LabelledTask(metrics={self.metrics})",
                unknown[0] if unknown else "no metric",
                f"one or more of {', '.join(METRICS)}",
                f"Choose among them.{nearest_name(unknown[0], METRICS) if unknown else ''}",
            )
        if len(self.text_fields) not in (1, 2):
            raise ConfigError(
                f"LabelledTask(text_fields={self.text_fields})",
                self.text_fields,
                "one or two fields",
                "Name one or two.",
            )
        if len(self.classes) == 1 or len(set(self.classes)) != len(self.classes):
            raise ConfigError(
                f"LabelledTask(classes={self.classes})",
                self.classes,
                "two or more labels that differ, or none for a number",
                "List each label once.",
            )

    @property
    def is_regression(self) -> bool:
        """Whether a number is asked for."""
        return not self.classes

    @property
    def num_outputs(self) -> int:
        """Outputs of the model's head: one for a number, one a class else."""
        return len(self.classes) or 1


TASKS: Catalog[LabelledTask] = Catalog("task")


def _add(name: str, task: LabelledTask) -> None:
    TASKS.add(name, lambda: task)


_ENTAILMENT = ("entailment", "not_entailment")
_HUB = "nyu-mll/glue"
_add("sst2", LabelledTask(text_fields=("sentence",), classes=("0", "1"), hub_name=(_HUB, "sst2")))
_add(
    "cola",
    LabelledTask(
        text_fields=("sentence",),
        classes=("0", "1"),
        metrics=("matthews", "accuracy"),
        header=("source", "label", "mark", "sentence"),
        hub_name=(_HUB, "cola"),
    ),
)
_add(
    "mrpc",
    LabelledTask(
        text_fields=("#1 String", "#2 String"),
        label_field="Quality",
        classes=("0", "1"),
        metrics=("f1", "accuracy"),
        hub_name=(_HUB, "mrpc"),
        hub_fields=("sentence1", "sentence2", "label"),
    ),
)
_add(
    "stsb",
    LabelledTask(
        text_fields=("sentence1", "sentence2"),
        label_field="score",
        metrics=("pearson", "spearman"),
        hub_name=(_HUB, "stsb"),
        hub_fields=("sentence1", "sentence2", "label"),
    ),
)
_add("rte", LabelledTask(text_fields=("sentence1", "sentence2"), classes=_ENTAILMENT, hub_name=(_HUB, "rte")))
_add(
    "qnli",
    LabelledTask(
        text_fields=("question", "sentence"), classes=_ENTAILMENT, hub_name=(_HUB, "qnli"),
    ),
)  # fmt: skip


# --- reading ----------------------------------------------------------------------------------------------------------


def read_labelled(task: LabelledTask, path: str, split: str = "train", limit: int | None = None) -> list[Example]:
    """Read all examples of a file, or of a split of a hub data set.

    Args:
        task: Where things stand, and what labels there are.
        path: A file, or ``"hub"`` for the task's own data set, or ``owner/name`` of another.
        split: The split of a hub data set.
        limit: The first so many examples alone; None for all.

    Returns:
        In the order of the file.

    Raises:
        DataError: For a file that is missing, of another kind or not UTF-8, a missing field, an unknown label, or none.
    """
    examples: list[Example] = []
    for place, record in _records(task, path, split):
        if limit is not None and len(examples) == limit:
            break
        examples.append(_example(task, record, place))
    if not examples:
        raise DataError(path, "no example", "at least one", "Check the file.")
    return examples


def _records(task: LabelledTask, path: str, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path == "hub" or ("/" in path and not Path(path).suffix and not Path(path).exists()):
        yield from _hub_records(task, path, split)
        return
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(
            path,
            f"{path!r}, which does not exist",
            f"a file that ends in {', '.join(SUFFIXES)}, or hub",
            "Correct the path."
            + (nearest_name(file.name, [p.name for p in file.parent.iterdir()]) if file.parent.is_dir() else ""),
        )
    suffix = next((end for end in SUFFIXES if file.name.lower().endswith(end)), None)
    if suffix is None:
        raise DataError(path, file.name, f"a file that ends in {', '.join(SUFFIXES)}", "Convert or rename it.")
    lines = _lines(file)
    yield from (_json_records(path, lines) if "jsonl" in suffix else _tsv_records(task, path, lines))


def _lines(file: Path) -> list[str]:
    """Lines without their ends. Quotes mean nothing, and only a line feed ends a line: some sentences hold others."""
    try:
        data = gzip.decompress(file.read_bytes()) if file.name.lower().endswith(".gz") else file.read_bytes()
        text = data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(
            f"reading {file}",
            f"{type(error).__name__} ({error})",
            "a readable file of UTF-8 text",
            "Convert or mend it.",
        ) from error
    return [line.removesuffix("\r") for line in text.split("\n")]


def _tsv_records(task: LabelledTask, path: str, lines: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    header = list(task.header) or lines[0].split("\t")
    for number, line in enumerate(lines if task.header else lines[1:], start=1 if task.header else 2):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) != len(header):
            raise DataError(
                f"{path}, line {number}",
                f"{len(cells)} columns",
                f"the {len(header)} columns {', '.join(header)}",
                "Correct the line; a tab inside a text must be a space.",
            )
        yield f"{path}, line {number}", dict(zip(header, cells, strict=True))


def _json_records(path: str, lines: Iterable[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(
                f"{path}, line {number}", f"no JSON ({error})", "one JSON object a line", "Correct the line."
            ) from error
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}", type(record).__name__, "a JSON object", "Correct the line.")
        yield f"{path}, line {number}", cast(dict[str, Any], record)


def _hub_records(task: LabelledTask, path: str, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path == "hub" and task.hub_name is None:
        raise DataError(path, "hub", "a file, or owner/name, for a task of your own", "Name the data set.")
    name, config = (path, None) if path != "hub" else cast(tuple[str, str], task.hub_name)
    datasets = load_library("datasets", "reading labelled texts from the hub")
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # datasets raises a score of types here: its own, the hub's, the network's
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DataError(
            f"{name}, split {split}",
            f"{type(error).__name__} ({reason})",
            "a data set of the hub",
            "Check name and network.",
        ) from error
    ours = (*task.text_fields, task.label_field)
    theirs = task.hub_fields if path == "hub" and task.hub_fields else ours
    for index, record in enumerate(loaded):
        renamed = {mine: record.get(their) for mine, their in zip(ours, theirs, strict=True)}
        yield f"{name}, {split} record {index}", {mine: v for mine, v in renamed.items() if v is not None}


def _example(task: LabelledTask, record: Mapping[str, Any], place: str) -> Example:
    for name in (*task.text_fields, task.label_field):
        if name not in record:
            raise DataError(
                place,
                f"no field {name!r}, only {', '.join(map(repr, record))}",
                f"texts in {', '.join(task.text_fields)} and the label in {task.label_field}",
                f"Name the fields that are there.{nearest_name(name, list(record))}",
            )
    texts = tuple(record[name] for name in task.text_fields)
    if not all(isinstance(text, str) for text in texts):
        raise DataError(place, f"{texts!r}", "texts", "Correct the record.")
    return Example(texts=texts, target=_target(task, record[task.label_field], place))


def _target(task: LabelledTask, label: Any, place: str) -> float:
    """A class by its name, or by its index where the record holds a whole number."""
    if task.is_regression:
        try:
            return float(label)
        except (TypeError, ValueError) as error:
            raise DataError(place, f"label {label!r}", "a number", "Correct it, or list the classes.") from error
    if str(label) in task.classes:
        return float(task.classes.index(str(label)))
    if isinstance(label, int) and 0 <= label < len(task.classes):
        return float(label)
    raise DataError(
        place,
        f"label {label!r}",
        f"one of {', '.join(task.classes)}",
        f"Correct it, or list it among the classes.{nearest_name(str(label), task.classes)}",
    )
