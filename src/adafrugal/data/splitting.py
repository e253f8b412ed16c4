"""Corpora: which documents are trained on, which are validated on, and what one pass over both of them finds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from adafrugal.core.errors import DataError
from adafrugal.data.documents import CountedStream, Document, DocumentStream, cut_tail, encoded, is_held_out
from adafrugal.data.hub import HubStream, HubText

# A streamed data set has no end that one could wait for: documents are held out of its first records alone.
HELD_OUT_STREAM_RECORDS = 10_000


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text with a training side and a validation side, both of which can be read again and again.

    Args:
        name: What to call it in a summary.
        content_hash: sha256 in hexadecimal over names and bytes of all documents of both sides; of a streamed data
            set, over its description and the validation side.
        num_documents: Documents of both sides; None if streamed.
        num_bytes: UTF-8 bytes of both sides; None if streamed.
        num_validation_documents: Documents of the validation side.
        num_validation_bytes: UTF-8 bytes of the validation side.
        notes: What was decided on the way and should be in the run record, a sentence each.
        is_streaming: Whether the training side is read over the network as training goes on.
        read_validation: Starts a pass over the validation side.
        open_stream: Opens a stream over the training side.
    """

    name: str
    content_hash: str
    num_documents: int | None
    num_bytes: int | None
    num_validation_documents: int
    num_validation_bytes: int
    notes: tuple[str, ...]
    is_streaming: bool
    read_validation: Callable[[], Iterator[Document]]
    open_stream: Callable[[], DocumentStream]

    def train(self) -> Iterator[Document]:
        """One pass over the documents of the training side, in their fixed order."""
        stream = self.open_stream()
        while (document := stream.next_document()) is not None:
            yield document

    def validation(self) -> Iterator[Document]:
        """One pass over the documents of the validation side, in their fixed order."""
        return self.read_validation()

    def stream(self) -> DocumentStream:
        """A stream over the training side, whose place can be saved."""
        return self.open_stream()


@dataclass(frozen=True, kw_only=True)
class Source:
    """Documents before they are split.

    Args:
        name: What to call them in a summary.
        setting: The setting as the user wrote it, for errors.
        read: Starts a pass over them.
        notes: What was decided while they were found.
    """

    name: str
    setting: str
    read: Callable[[], Iterator[Document]]
    notes: tuple[str, ...] = ()


# A side is what one pass over a source lets through: documents whole, cut, or not at all.
_Side = Callable[[Document], Document | None]


def _whole(document: Document) -> Document | None:
    return document


def _kept(modulus: int, document: Document) -> Document | None:
    return None if is_held_out(document.name, modulus) else document


def _held_out(modulus: int, document: Document) -> Document | None:
    return document if is_held_out(document.name, modulus) else None


def _head(modulus: int, document: Document) -> Document | None:
    if len(document.text) < 2:
        return document
    return replace(document, text=document.text[: cut_tail(document.text, modulus)])


def _tail(modulus: int, document: Document) -> Document | None:
    if len(document.text) < 2:
        return None
    return replace(document, text=document.text[cut_tail(document.text, modulus) :])


def _read_side(read: Callable[[], Iterator[Document]], side: _Side) -> Iterator[Document]:
    for document in read():
        if document.text and (part := side(document)) is not None:
            yield part


class _Survey:
    """Counts and hashes the documents of one side; the hash is fed name, zero, length, zero, bytes of each."""

    def __init__(self) -> None:
        self.num_documents = 0
        self.num_bytes = 0
        self.hash = hashlib.sha256()

    def add(self, document: Document | None) -> None:
        if document is None:
            return
        data = encoded(document)
        self.num_documents += 1
        self.num_bytes += len(data)
        self.hash.update(document.name.encode() + b"\0" + str(len(data)).encode() + b"\0")
        self.hash.update(data)


def _survey(read: Callable[[], Iterator[Document]], *sides: _Side) -> tuple[list[_Survey], int]:
    surveys = [_Survey() for _ in sides]
    num_empty = 0
    for document in read():
        if not document.text:
            num_empty += 1
            continue
        for survey, side in zip(surveys, sides, strict=True):
            survey.add(side(document))
    return surveys, num_empty


def _refuse_empty(survey: _Survey, source: Source) -> None:
    if not survey.num_documents:
        raise DataError(
            source.setting, "no text at all", "a corpus with text to train on and to validate on", "Give more text."
        )


def split(source: Source, validation: Source | None, modulus: int) -> Corpus:
    """Survey a source of documents and make a corpus of it.

    Documents are held out whole by their names. Where that leaves one side empty, as with a single file, the tail of
    each document is held out instead, and a note says so.

    Args:
        source: What to train on, and to hold documents out of if nothing else is validated on.
        validation: What to validate on instead.
        modulus: One in how many documents is held out, about.

    Raises:
        DataError: If either side is without text, or a document has no UTF-8 form.

    Cost:
        One pass over all text, hashed at some 500 MB a second; two where tails are held out.
    """
    notes = source.notes
    sides: tuple[_Side, _Side] = (partial(_kept, modulus), partial(_held_out, modulus))
    if validation is not None:
        (train_survey,), num_empty = _survey(source.read, _whole)
        (validation_survey,), _ = _survey(validation.read, _whole)
        sides = (_whole, _whole)
    else:
        (train_survey, validation_survey), num_empty = _survey(source.read, *sides)
        if bool(train_survey.num_documents) != bool(validation_survey.num_documents):
            sides = (partial(_head, modulus), partial(_tail, modulus))
            (train_survey, validation_survey), _ = _survey(source.read, *sides)
            notes += (
                f"Too few documents to hold some out whole: about the last 1/{modulus} of each document is held out.",
            )
    _refuse_empty(train_survey, source)
    _refuse_empty(validation_survey, validation or source)
    if num_empty:
        notes += (f"Empty documents left out: {num_empty}.",)
    num_bytes = train_survey.num_bytes + validation_survey.num_bytes
    if validation is None and validation_survey.num_bytes * 4 > num_bytes:
        share = validation_survey.num_bytes / num_bytes
        notes += (f"The held-out documents are {share:.0%} of all bytes: give validation_paths for a better split.",)
    digest = hashlib.sha256((train_survey.hash.hexdigest() + validation_survey.hash.hexdigest()).encode())
    return Corpus(
        name=source.name,
        content_hash=digest.hexdigest(),
        num_documents=train_survey.num_documents + validation_survey.num_documents,
        num_bytes=num_bytes,
        num_validation_documents=validation_survey.num_documents,
        num_validation_bytes=validation_survey.num_bytes,
        notes=notes,
        is_streaming=False,
        read_validation=partial(_read_side, (validation or source).read, sides[1]),
        open_stream=partial(CountedStream, partial(_read_side, source.read, sides[0])),
    )


def split_streamed(text: HubText, validation: Source | None, modulus: int) -> Corpus:
    """Make a corpus of a data set that is read over the network as training goes on.

    Its training side is not surveyed. Documents are held out by their names among the first 10,000 records; all later
    records are trained on.

    Args:
        text: What to train on, and to hold documents out of if nothing else is validated on.
        validation: What to validate on instead.
        modulus: One in how many of the first records is held out, about.

    Raises:
        DataError: If the data set does not load, or the validation side is without text.

    Cost:
        10,000 records are read, and one in ``modulus`` of them stays in memory.
    """
    num_first = 0 if validation is not None else HELD_OUT_STREAM_RECORDS
    notes = validation.notes if validation is not None else ()
    if validation is None:
        first = partial(_read_side, lambda: islice(text.read(), num_first), partial(_held_out, modulus))
        documents = tuple(first())
        validation = Source(name=text.label, setting=text.setting, read=lambda: iter(documents))
        notes += (f"Held out of the first {num_first:,} records of the stream: {len(documents)} documents.",)
    (survey,), _ = _survey(validation.read, _whole)
    _refuse_empty(survey, validation)
    described = f"{text.label}\0{text.split}\0{text.field}\0{num_first}\0{modulus}\0{survey.hash.hexdigest()}"

    def keep(document: Document, index: int) -> bool:
        return index >= num_first or not is_held_out(document.name, modulus)

    return Corpus(
        name=text.label,
        content_hash=hashlib.sha256(described.encode()).hexdigest(),
        num_documents=None,
        num_bytes=None,
        num_validation_documents=survey.num_documents,
        num_validation_bytes=survey.num_bytes,
        notes=notes,
        is_streaming=True,
        read_validation=partial(_read_side, validation.read, _whole),
        open_stream=partial(HubStream, text, keep),
    )
