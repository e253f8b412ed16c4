"""The parts of a run that answers labelled examples: rows in the place of windows, a classifier, its judge."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from adafrugal.core.errors import ConfigError, nearest_name
from adafrugal.data.labelled import TASKS, LabelledTask, MetricName, read_labelled
from adafrugal.data.rows import ExampleRows, PairTokenizer, encode_rows
from adafrugal.train.config import TaskConfig, TrainConfig
from adafrugal.train.models import is_preset

OWN = "own"


@dataclass(frozen=True, kw_only=True)
class LabelledText:
    """What a run of labelled examples reads, as `data.corpus.Corpus` is of plain text.

    Args:
        name: What to call it in a summary.
        content_hash: sha256 in hexadecimal over all rows of both sides.
        notes: What should be in the run record.
        labelled: Where things stand and how they are scored.
        tokenizer: Its ids are in the rows.
        train: Rows to learn from.
        validation: Rows to be judged on.
    """

    name: str
    content_hash: str
    notes: tuple[str, ...]
    labelled: LabelledTask
    tokenizer: PairTokenizer
    train: Sequence[Tensor]
    validation: Sequence[Tensor]

    def windows(self, seed: int) -> ExampleRows:
        """The rows to learn from, in the order of a seed."""
        return ExampleRows(self.train, seed)


def labelled_task(config: TaskConfig) -> LabelledTask:
    """The task that a configuration names or describes.

    Raises:
        ConfigError: For an unknown name, a description of a published task, or none of one's own.
    """
    described = {
        name: value
        for name in ("text_fields", "label_field", "classes", "metrics")
        if (value := getattr(config, name)) is not None
    }
    if config.name == OWN:
        if config.text_fields is None:
            raise ConfigError(
                "--task.name own", "no text_fields", "the fields of one or two texts", "Give --task.text_fields [text]."
            )
        if config.metrics is None:
            default: MetricName = "accuracy" if config.classes else "pearson"
            described["metrics"] = (default,)
        return LabelledTask(**described)
    name = str(config.name)
    if name not in TASKS.names():
        raise ConfigError(
            f"--task.name {name}",
            name,
            f"one of {', '.join(TASKS.names())}, or own",
            f"Choose one of these.{nearest_name(name, (*TASKS.names(), OWN))}",
        )
    if described:
        first, value = next(iter(described.items()))
        raise ConfigError(
            f"--task.name {name} --task.{first} {value}",
            first,
            f"no description of {name}, which has its own",
            f"Leave it out, or use --task.name {OWN}.",
        )
    return TASKS.create(name)


def read_labelled_text(config: TrainConfig, say: Callable[[str], None]) -> LabelledText:
    """Read and encode both sides.

    Args:
        config: The task, the model whose tokenizer is taken unless one is named, and the longest row.
        say: Told what was read.

    Raises:
        ConfigError: For a task that is not known, and a model without a tokenizer.
        DataError: For files that cannot be used.
    """
    task = labelled_task(config.task)
    if is_preset(config.model):
        raise ConfigError(
            f"--model {config.model} --task.name {config.task.name}",
            config.model,
            "a folder or a hub id of a pretrained model",
            "Name the model that shall be fine-tuned.",
        )
    given = config.tokenizer.name
    tokenizer = PairTokenizer(config.model if given == "bytes" else given)
    sides: list[list[Tensor]] = []
    for path, split in ((config.task.train, "train"), (config.task.validation, "validation")):
        examples = read_labelled(task, path, split, config.task.limit)
        sides.append(encode_rows(examples, tokenizer, config.batch.sequence_length))
    train, validation = sides
    digest = hashlib.sha256()
    for row in (*train, *validation):
        digest.update(row.numpy().tobytes())
    name = f"{config.task.name} ({config.task.train})"
    say(f"examples: {name}, {len(train):,} to learn from, {len(validation):,} held out")
    cut = sum(len(row) - 2 >= config.batch.sequence_length for row in (*train, *validation))
    notes = (f"{cut} examples fill --batch.sequence_length {config.batch.sequence_length} or were cut to it",)
    return LabelledText(
        name=name,
        content_hash=digest.hexdigest(),
        notes=notes if cut else (),
        labelled=task,
        tokenizer=tokenizer,
        train=train,
        validation=validation,
    )
