"""Documents: the pieces a corpus is made of, the rule that holds some of them out, and streams that resume."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, cast

from adafrugal.core.errors import DataError, nearest_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text with a name that stays the same on every machine.

    Args:
        name: The relative path of a text file, or ``"relative path:index"`` of a record in a file of many.
        text: The text itself.
    """

    name: str
    text: str


class DocumentStream(Protocol):
    """Documents one after the other, from a place that can be saved and found again."""

    def next_document(self) -> Document | None:
        """The next document; None once at the end of each pass, after which the next pass begins."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The place reached, as plain data that survives a weights-only load."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place of an earlier state."""
        ...


class CountedStream:
    """A stream over anything that can be read again from its start; its place is a count of documents.

    Args:
        read: Starts one pass over the documents, in the same order each time.

    Cost:
        Loading a state reads the pass again up to the place.

    Example:
        >>> texts = [Document(name="a", text="x"), Document(name="b", text="y")]
        >>> stream = CountedStream(lambda: iter(texts))
        >>> [document and document.name for document in (stream.next_document() for _ in range(4))]
        ['a', 'b', None, 'a']
    """

    def __init__(self, read: Callable[[], Iterator[Document]]) -> None:
        self._read = read
        self._pass: Iterator[Document] | None = None
        self._documents = 0

    def next_document(self) -> Document | None:
        """The next document, or None at the end of a pass."""
        if self._pass is None:
            self._pass = islice(self._read(), self._documents, None)
        document = next(self._pass, None)
        if document is None:
            self._pass, self._documents = None, 0
        else:
            self._documents += 1
        return document

    def state_dict(self) -> dict[str, Any]:
        """How many documents of this pass have been read."""
        return {"documents": self._documents}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to that document of a pass."""
        self._pass, self._documents = None, int(state["documents"])


def is_held_out(name: str, modulus: int) -> bool:
    """Whether a document is kept for validation: sha256(name) mod modulus = 0, about one in ``modulus``.

    The rule looks at nothing but the name, so that a document stays on its side when others come or go.

    Example:
        >>> [name for name in ("a.txt", "b.txt", "c.txt", "d.txt") if is_held_out(name, 2)]
        ['c.txt', 'd.txt']
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % modulus == 0


def cut_tail(text: str, modulus: int) -> int:
    r"""Where to cut a text so that its last 1/modulus can be held out: at a line's end, else a space, else anywhere.

    Args:
        text: At least two characters.
        modulus: The tail has about ``len(text) / modulus`` characters; up to four times as many to reach a boundary.

    Returns:
        The index of the tail's first character, from 1 to ``len(text) - 1``.

    Example:
        >>> text = "one line\n" * 40
        >>> text[cut_tail(text, 20):]
        'one line\none line\n'
    """
    size = max(1, len(text) // modulus)
    target = len(text) - size
    for boundary in ("\n", " "):
        before = text.rfind(boundary, 0, target) + 1
        if before and len(text) - before <= 4 * size:
            return before
        after = text.find(boundary, target) + 1
        if 0 < after < len(text):
            return after
    return target


def missing_field(fields: Iterable[str], field: str, place: str) -> DataError:
    """The error for a record without the field of the text; lists the fields there are and the nearest."""
    names = list(fields)
    return DataError(
        place,
        f"a record without the field {field!r}",
        f"one of its fields: {', '.join(names) or 'none'}",
        f"Set `field` to one of these.{nearest_name(field, names)}",
    )


def text_of(record: Any, field: str, place: str) -> str:
    """The text in one record.

    Args:
        record: A mapping with string keys, if it is sound.
        field: The key of the text.
        place: Where the record stands, for the error: a file and line, or a data set and index.

    Raises:
        DataError: If the record is no mapping, lacks the field, or holds something else than text in it.
    """
    if not isinstance(record, Mapping):
        raise DataError(
            place,
            f"a {type(record).__name__}",
            "one JSON object a record",
            f'Write {{"{field}": "..."}} for each text.',
        )
    fields = cast(Mapping[str, Any], record)
    if field not in fields:
        raise missing_field(fields, field, place)
    value = fields[field]
    if not isinstance(value, str):
        raise DataError(
            place,
            f"a {type(value).__name__} in the field {field!r}",
            "text",
            "Leave such records out, or set `field` to the field that holds the text.",
        )
    return value


def encoded(document: Document) -> bytes:
    """The UTF-8 bytes of a document.

    Raises:
        DataError: If the text has no UTF-8 form, because JSON smuggled in half of a surrogate pair.
    """
    try:
        return document.text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"document {document.name}",
            f"half of a surrogate pair at character {error.start}",
            "text that UTF-8 can write",
            "Remove the character, or write the pair whole.",
        ) from error
