"""Data sets of the Hugging Face hub through `datasets`: whole, or streamed with a place that can be saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from adafrugal.core.errors import DataError
from adafrugal.data.documents import Document, encoded, missing_field, text_of
from adafrugal.data.libraries import load_library

# Short names for data sets that people know by one word; any other is written owner/name.
HUB_NAMES = {
    "c4": "allenai/c4",
    "fineweb-edu": "HuggingFaceFW/fineweb-edu",
    "tinystories": "roneneldan/TinyStories",
    "wikitext": "Salesforce/wikitext",
}


@dataclass(frozen=True, kw_only=True)
class HubText:
    """One split of one data set.

    Args:
        setting: The setting as the user wrote it, for errors.
        name: ``owner/name`` on the hub.
        hub_config: The configuration of the data set, where it has several.
        split: The split, such as ``"train"``; slices such as ``"train[:1%]"`` work where nothing is streamed.
        field: The field of the text.
        streaming: Read over the network as training goes on, instead of downloading first.
    """

    setting: str
    name: str
    hub_config: str | None
    split: str
    field: str
    streaming: bool

    @property
    def label(self) -> str:
        """The name of the data set with its configuration, if it has one."""
        return self.name if self.hub_config is None else f"{self.name} ({self.hub_config})"

    def open(self) -> Any:
        """Load the data set, with the text as its only column where the columns are known.

        Raises:
            DataError: If `datasets` is missing, or cannot load it; its reason is in the message.
        """
        datasets = load_library("datasets", self.setting)
        try:
            dataset = datasets.load_dataset(self.name, self.hub_config, split=self.split, streaming=self.streaming)
        except Exception as error:  # datasets raises a score of types here: its own, the hub's, the network's
            reason = (str(error).strip().splitlines() or [""])[0]
            raise DataError(
                self.setting,
                f"the data set {self.name!r} (hub_config={self.hub_config!r}, split={self.split!r}), which did not "
                f"load: {type(error).__name__}: {reason}",
                "a file or folder that exists here, or a data set that the hub knows",
                "Correct the name, hub_config or split; without a network, give text files instead.",
            ) from error
        columns: list[str] | None = dataset.column_names
        if columns is None:
            return dataset
        if self.field not in columns:
            raise missing_field(columns, self.field, self.place(0))
        return dataset.select_columns([self.field])

    def place(self, index: int) -> str:
        """Where a record stands, for errors."""
        return f"{self.name}, split {self.split}, record {index}"

    def document(self, record: Any, index: int) -> Document:
        """The document in a record."""
        document = Document(name=f"{self.name}:{index}", text=text_of(record, self.field, self.place(index)))
        if self.streaming:
            encoded(document)  # nobody surveys a streamed corpus before training
        return document

    def read(self) -> Iterator[Document]:
        """One pass over the documents."""
        for index, record in enumerate(self.open()):
            yield self.document(record, index)


class HubStream:
    """A stream over a data set that is read over the network.

    Args:
        text: The data set.
        keep: Which documents to let through; the others are held out.

    Cost:
        Loading a state opens the shard it names and skips to the record; earlier shards are not read again.
    """

    def __init__(self, text: HubText, keep: Callable[[Document, int], bool]) -> None:
        self._text = text
        self._keep = keep
        self._dataset = text.open()
        # A state once loaded into an IterableDataset would also begin each later pass, so passes begin with this one.
        self._start = copy.deepcopy(self._dataset.state_dict())
        self._records = 0
        self._pass: Iterator[Any] | None = None

    def next_document(self) -> Document | None:
        """The next document that is not held out, or None at the end of a pass."""
        if self._pass is None:
            self._pass = iter(self._dataset)
        for record in self._pass:
            document, index = self._text.document(record, self._records), self._records
            self._records += 1
            if document.text and self._keep(document, index):
                return document
        self.load_state_dict({"records": 0, "dataset": self._start})
        return None

    def state_dict(self) -> dict[str, Any]:
        """The count of records read in this pass, and the data set's own state: plain numbers and strings."""
        return {"records": self._records, "dataset": copy.deepcopy(self._dataset.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to that record of a pass."""
        self._dataset.load_state_dict(copy.deepcopy(state["dataset"]))
        self._records = int(state["records"])
        self._pass = None
