"""Tokenizers: ids and back, the bytes each id stands for, and the folder that transformers loads."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from adafrugal.core.errors import ConfigError, DataError
from adafrugal.data.corpus import TextConfig, open_corpus
from adafrugal.data.pretrained import PretrainedTokenizer, byte_alphabet
from adafrugal.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    TokenizerConfig,
    check_vocabulary,
    load_tokenizer,
    open_tokenizer,
    token_dtype,
    train_bpe,
)

ENGLISH = "A frugal run keeps its promises:  it counts every byte,\tand wastes none.\n"
VIETNAMESE = "Chúng tôi huấn luyện mô hình ngôn ngữ với ít bộ nhớ, và kết quả vẫn rất tốt.\n"
OTHERS = "文字列 🎉 \x00\x7f <|endoftext|> naïve ﬁ \u2028"
TEXTS = [ENGLISH, VIETNAMESE, OTHERS, "", " ", ENGLISH + VIETNAMESE + OTHERS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PretrainedTokenizer:
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "texts").mkdir()
    for index in range(30):
        (folder / "texts" / f"{index}.txt").write_text((ENGLISH + VIETNAMESE) * 3)
    return train_bpe(open_corpus(TextConfig(source=str(folder / "texts"))), 400, folder / "cache")


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, trained: PretrainedTokenizer) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else trained


def sentencepiece(*, prepend: str = "never") -> Any:
    """A model as Llama has it: pieces with a mark for the space, and single bytes for all else."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ("▁", *"abcdefghijklmnopqrstuvwxyz", "▁a", "ru", "fru", "▁▁"):
        vocabulary[piece] = len(vocabulary)
    merges = [("▁", "a"), ("r", "u"), ("f", "ru"), ("▁", "▁")]
    model = tokenizers.models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def save(backend: Any, folder: Path, **special: str) -> str:
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_become_the_text_again_and_their_bytes_add_up(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.separator_id not in ids, "text that spells the separator is text"
    assert all(0 <= index < tokenizer.vocab_size for index in ids)
    assert tokenizer.exact_bytes


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_no_text_is_out_of_reach(trained: PretrainedTokenizer, text: str) -> None:
    for tokenizer in (ByteTokenizer(), trained):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())


def test_bpe_has_fewer_tokens_than_bytes(trained: PretrainedTokenizer) -> None:
    assert len(trained.encode(VIETNAMESE)) < len(VIETNAMESE.encode()) / 2


def test_many_texts_at_once_are_the_same(tokenizer: Tokenizer) -> None:
    together = tokenizer.encode_many(TEXTS)
    assert len(together) == len(TEXTS)
    for ids, text in zip(together, TEXTS, strict=True):
        assert np.array_equal(ids, tokenizer.encode(text))


def test_the_separator_stands_for_no_byte_and_is_left_out_of_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("ab").tolist(), tokenizer.separator_id, *tokenizer.encode("c").tolist()]
    assert tokenizer.decode(ids) == "abc"
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes[tokenizer.separator_id] == 0
    assert (np.delete(tokenizer.token_bytes, tokenizer.separator_id) >= 1).all()


def test_broken_bytes_are_shown_not_raised(tokenizer: Tokenizer) -> None:
    first_byte = tokenizer.encode("ệ" if tokenizer.name == "bytes" else "文")[:1]
    assert tokenizer.decode(first_byte) == "�"


def test_byte_ids_are_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé").tolist() == [97, 195, 169]
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.separator_id) == ("bytes", 257, 256)
    assert tokenizer.token_bytes.tolist() == [1] * 256 + [0]


def test_the_alphabet_is_that_of_the_library() -> None:
    assert sorted(byte_alphabet()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for byte in range(128):
        assert split.pre_tokenize_str(chr(byte))[0][0] == byte_alphabet()[byte]


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_transformers_loads_the_folder_and_gives_the_same_ids(
    tokenizer: Tokenizer, tmp_path: Path, beside_a_model: bool
) -> None:
    folder = tmp_path / "deep" / "model"
    tokenizer.save(folder)
    if beside_a_model:  # the model's configuration must not make transformers take another tokenizer class
        transformers.LlamaConfig(vocab_size=tokenizer.vocab_size).save_pretrained(folder)
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(loaded) == tokenizer.vocab_size
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|endoftext|>", tokenizer.separator_id)
    for text in (ENGLISH, VIETNAMESE, OTHERS.replace("<|endoftext|>", ""), ""):
        ids = tokenizer.encode(text).tolist()
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids) == text


def test_a_saved_tokenizer_loads_as_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(str(tmp_path / "saved"))
    assert loaded.name == "saved"
    assert (loaded.vocab_size, loaded.separator_id) == (tokenizer.vocab_size, tokenizer.separator_id)
    assert np.array_equal(loaded.token_bytes, tokenizer.token_bytes)
    assert loaded.exact_bytes
    for text in TEXTS:
        assert np.array_equal(loaded.encode(text), tokenizer.encode(text))
    if isinstance(tokenizer, PretrainedTokenizer):
        assert loaded.fingerprint == tokenizer.fingerprint
    loaded.save(tmp_path / "again")
    assert load_tokenizer(str(tmp_path / "again")).fingerprint == loaded.fingerprint


def test_fingerprints_tell_tokenizers_apart(trained: PretrainedTokenizer) -> None:
    backend = sentencepiece()
    prints = {
        ByteTokenizer().fingerprint,
        trained.fingerprint,
        PretrainedTokenizer(backend, separator_id=1, name="a").fingerprint,
        PretrainedTokenizer(backend, separator_id=2, name="a").fingerprint,
        PretrainedTokenizer(sentencepiece(prepend="first"), separator_id=2, name="a").fingerprint,
    }
    assert len(prints) == 5
    assert PretrainedTokenizer(backend, separator_id=2, name="b").fingerprint in prints, "a name changes no id"


def test_pieces_of_a_sentencepiece_model_count_their_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(sentencepiece(), tmp_path, eos_token="</s>", bos_token="<s>"))
    vocabulary = sentencepiece().get_vocab()
    counts = {piece: tokenizer.token_bytes[index] for piece, index in vocabulary.items()}
    assert counts["▁"] == counts["a"] == counts["<0xE1>"] == 1
    assert counts["▁a"] == counts["▁▁"] == 2
    assert counts["fru"] == 3
    assert counts["<s>"] == counts["</s>"] == counts["<unk>"] == 0
    for text in ("a frugal run", "  tiếng Việt ", VIETNAMESE):
        assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text.encode())
    assert tokenizer.exact_bytes
    assert tokenizer.separator_id == 2


def test_a_space_put_in_front_is_not_exact() -> None:
    tokenizer = PretrainedTokenizer(sentencepiece(prepend="first"), separator_id=2, name="llama-like")
    assert not tokenizer.exact_bytes
    assert tokenizer.token_bytes[tokenizer.encode("frugal")].sum() == len("frugal") + 1


def test_word_pieces_count_without_their_mark_and_are_not_exact(tmp_path: Path) -> None:
    model = tokenizers.models.WordPiece(vocab={"[UNK]": 0, "[SEP]": 1, "frug": 2, "##al": 3}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    tokenizer = load_tokenizer(save(backend, tmp_path, sep_token="[SEP]", unk_token="[UNK]"))
    assert tokenizer.token_bytes.tolist() == [0, 0, 4, 2]
    assert not tokenizer.exact_bytes
    assert tokenizer.separator_id == 1, "where there is no end of sequence, the separator"


def test_settings_of_the_loaded_object_do_not_reach_the_data(tmp_path: Path) -> None:
    backend = sentencepiece()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = load_tokenizer(save(backend, tmp_path, eos_token="</s>"))
    assert tokenizer.decode(tokenizer.encode("a frugal run")) == "a frugal run"
    assert len(tokenizer.encode("abc")) == 3


@pytest.mark.parametrize(
    ("special", "separator"), [({"bos_token": "<s>"}, "</s>"), ({"bos_token": "<s>", "eos_token": "<unk>"}, "<unk>")]
)
def test_the_separator_is_the_best_there_is(tmp_path: Path, special: dict[str, str], separator: str) -> None:
    tokenizer = load_tokenizer(save(sentencepiece(), tmp_path, **special))
    assert tokenizer.separator_id == sentencepiece().token_to_id(separator)


def plain_backend() -> Any:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "<begin>": 2}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return backend


def test_the_beginning_of_a_sequence_is_the_last_resort(tmp_path: Path) -> None:
    assert load_tokenizer(save(plain_backend(), tmp_path, bos_token="<begin>")).separator_id == 2


def test_a_tokenizer_without_any_separator(tmp_path: Path) -> None:
    folder = save(plain_backend(), tmp_path, pad_token="<begin>")
    expected = (
        r"TokenizerConfig\(name='.*'\): received a tokenizer without an end-of-sequence token \(its special tokens: "
        r"<begin>\); allowed is one with a token that can stand between documents. Set its eos_token"
    )
    with pytest.raises(DataError, match=expected):
        load_tokenizer(folder)


@pytest.mark.parametrize("broken", [False, True])
def test_a_folder_without_a_tokenizer(tmp_path: Path, broken: bool) -> None:
    if broken:
        (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "mod')
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(DataError, match=r"received a tokenizer that did not load \(.+\); allowed is 'bytes', a folder"):
        load_tokenizer(str(tmp_path))


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name} is not a local folder and is not a valid model identifier\nmore lines")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(DataError, match=r"\(OSError: owner/nmae is not a local .* identifier\); .*without a network"):
        open_tokenizer(TokenizerConfig(name="owner/nmae"), None, "unused")  # type: ignore[arg-type]


def test_a_tokenizer_without_a_fast_form(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowTokenizer:
        is_fast = False

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: SlowTokenizer())
    with pytest.raises(DataError, match=r"received a SlowTokenizer, which has no fast form; .*Convert it"):
        load_tokenizer("owner/slow")


@pytest.mark.parametrize("module", ["transformers", "tokenizers"])
def test_a_missing_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"no module '{module}'; .*pip install \"adafrugal\[train\]\""):
        load_tokenizer("owner/name") if module == "transformers" else ByteTokenizer().save(tmp_path)


def test_a_configuration_chooses_one_tokenizer(text_folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(TextConfig(source=str(text_folder)))
    assert open_tokenizer(TokenizerConfig(), corpus, tmp_path).name == "bytes"
    assert open_tokenizer(TokenizerConfig(train=300), corpus, tmp_path).vocab_size == 300
    ByteTokenizer().save(tmp_path / "folder")
    assert open_tokenizer(TokenizerConfig(name=str(tmp_path / "folder")), corpus, tmp_path).name == "folder"
    with pytest.raises(ConfigError, match=r"TokenizerConfig\(name='gpt2', train=300\): received two tokenizers"):
        TokenizerConfig(name="gpt2", train=300)


def test_a_tokenizer_larger_than_the_model() -> None:
    check_vocabulary(ByteTokenizer(), 257)
    expected = (
        "tokenizer 'bytes': received 257 ids for a model with a vocabulary of 256; allowed is at most 256 ids. Choose"
    )
    with pytest.raises(DataError, match=expected):
        check_vocabulary(ByteTokenizer(), 256)


def test_ids_take_two_bytes_where_they_fit() -> None:
    assert token_dtype(2**16) is np.uint16
    assert token_dtype(2**16 + 1) is np.int32
