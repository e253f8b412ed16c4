"""Tokenizers of the `tokenizers` library: trained here, or loaded from a folder or the hub through transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from adafrugal.core.errors import DataError
from adafrugal.data.libraries import load_library

Tokens = NDArray[np.integer[Any]]

SEPARATOR = "<|endoftext|>"

# Text that a tokenizer with byte fallback, a normaliser, or a space put in front would give away.
_PROBE = "Count every byte:  two spaces,\ttab,\nline; ÀÉ ệ ữ; 文字 🎉 \x7f"
_SEPARATOR_NAMES = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The smallest type that holds every id: two bytes a token up to 65,536 ids, else four.

    Example:
        >>> token_dtype(8000).__name__, token_dtype(100_000).__name__
        ('uint16', 'int32')
    """
    return np.uint16 if vocab_size <= 2**16 else np.int32


def byte_alphabet() -> list[str]:
    """The character that byte-level tokenizers write for each byte.

    Source:
        GPT-2's ``bytes_to_unicode``: printable bytes stand for themselves, the rest for the characters from 256 on.

    Example:
        >>> alphabet = byte_alphabet()
        >>> alphabet[ord("a")], alphabet[ord(" ")], len(set(alphabet))
        ('a', 'Ġ', 256)
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_folder(backend: Any, folder: Path) -> None:
    """Write a tokenizer so that ``transformers.AutoTokenizer.from_pretrained(folder)`` gives the same ids.

    Args:
        backend: A ``tokenizers.Tokenizer`` whose separator is ``<|endoftext|>``.
        folder: Made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # This class name is the one that transformers 4 and 5 both know.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SEPARATOR,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


class PretrainedTokenizer:
    """A tokenizer with a vocabulary of its own. Text that spells a special token is text, never that token.

    Its bytes are exact if it is byte-level. They are not if it lower-cases, drops spaces (WordPiece), or puts a space
    in front of each text (many SentencePiece models: one byte a document).

    Args:
        backend: A ``tokenizers.Tokenizer``; it is copied.
        separator_id: The id put after each document.
        name: What to call it in a summary.
        original: The transformers tokenizer it came from, which then saves itself with all its settings.
    """

    def __init__(self, backend: Any, *, separator_id: int, name: str, original: Any = None) -> None:
        # A copy, because padding, truncation and the reading of special tokens are settings of the object.
        self._backend = load_library("tokenizers", f"tokenizer {name!r}").Tokenizer.from_str(backend.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True
        self._original = original
        self.name = name
        self.separator_id = separator_id
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        described: dict[str, Any] = json.loads(self._backend.to_str())
        described.pop("post_processor")  # puts special tokens around a text, which is not done here
        canonical = f"{json.dumps(described, sort_keys=True)}\0{separator_id}"
        self.vocab_size = max(vocabulary.values()) + 1
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()
        self.token_bytes = _token_bytes(self._backend, described, self.vocab_size)
        self.exact_bytes = int(self.token_bytes[self.encode(_PROBE)].sum()) == len(_PROBE.encode())

    def encode(self, text: str) -> Tokens:
        """The ids of a text, without separator.

        Cost:
            About 2 MB of text a second on one core.
        """
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[Tokens]:
        """The ids of each text; on all cores, where encoding one at a time uses one."""
        dtype = token_dtype(self.vocab_size)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """The text of ids; special tokens are left out, and broken bytes become the replacement character."""
        return cast(str, self._backend.decode([int(index) for index in ids], skip_special_tokens=True))

    def save(self, folder: str | Path) -> None:
        """Write it so that ``transformers.AutoTokenizer`` loads it."""
        if self._original is None:
            write_folder(self._backend, Path(folder))
        else:
            self._original.save_pretrained(str(folder))


def _token_bytes(backend: Any, described: dict[str, Any], vocab_size: int) -> NDArray[np.int64]:
    parts = json.dumps([described["pre_tokenizer"], described["decoder"]], ensure_ascii=False)
    model: dict[str, Any] = described["model"]
    prefix: str = model.get("continuing_subword_prefix") or ""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for token, index in backend.get_vocab(with_added_tokens=False).items():
        if '"ByteLevel"' in parts:
            counts[index] = len(token)  # each character is one byte
        elif '"▁"' in parts:
            is_byte = bool(model.get("byte_fallback")) and len(token) == 6 and token[:3] == "<0x"
            counts[index] = 1 if is_byte else len(token.replace("▁", " ").encode())
        else:
            counts[index] = len(token.removeprefix(prefix).encode())
    for index, added in backend.get_added_tokens_decoder().items():
        counts[index] = 0 if added.special else len(added.content.encode())
    return counts


def load_tokenizer(name_or_folder: str) -> PretrainedTokenizer:
    """Load a tokenizer from a folder or the Hugging Face hub.

    The separator is its end-of-sequence token; where it has none, its separator token, then a token with a well-known
    name such as ``</s>``, then its beginning-of-sequence token.

    Args:
        name_or_folder: A folder with ``tokenizer.json``, or a hub id such as ``"owner/name"``.

    Raises:
        DataError: If it does not load, has no fast form, or has no token that can stand between documents.
    """
    setting = f"TokenizerConfig(name={name_or_folder!r})"
    transformers = load_library("transformers", setting)
    folder = Path(name_or_folder).expanduser()
    try:
        original = transformers.AutoTokenizer.from_pretrained(str(folder) if folder.exists() else name_or_folder)
    except Exception as error:  # transformers raises many types here: its own, the hub's, the network's, the parser's
        reason = (str(error).strip().splitlines() or [""])[0]
        raise DataError(
            setting,
            f"a tokenizer that did not load ({type(error).__name__}: {reason})",
            "'bytes', a folder that holds a tokenizer, or a hub id",
            "Correct the name; without a network, use 'bytes' or train one with TokenizerConfig(train=8000).",
        ) from error
    if not original.is_fast:
        raise DataError(
            setting,
            f"a {type(original).__name__}, which has no fast form",
            "a tokenizer with a tokenizer.json",
            "Convert it with transformers, or train one with TokenizerConfig(train=8000).",
        )
    return PretrainedTokenizer(
        original.backend_tokenizer,
        separator_id=_separator(setting, original),
        name=folder.resolve().name if folder.exists() else name_or_folder,
        original=original,
    )


def _separator(setting: str, original: Any) -> int:
    vocabulary: dict[str, int] = original.get_vocab()
    candidates = (original.eos_token, original.sep_token, *_SEPARATOR_NAMES, original.bos_token)
    for token in candidates:
        if token is not None and token in vocabulary:
            return vocabulary[token]
    known = ", ".join(original.all_special_tokens) or "none"
    raise DataError(
        setting,
        f"a tokenizer without an end-of-sequence token (its special tokens: {known})",
        "one with a token that can stand between documents",
        "Set its eos_token with transformers, save it, and name that folder.",
    )
