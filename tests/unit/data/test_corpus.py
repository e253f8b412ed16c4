"""Corpora: which documents are held out, what the hash covers, and which settings are refused."""

import hashlib
import json
import sysconfig
from pathlib import Path

import pytest

from adafrugal.core.errors import ConfigError, DataError
from adafrugal.data import splitting
from adafrugal.data.corpus import Corpus, Document, TextConfig, open_corpus
from adafrugal.data.documents import cut_tail, is_held_out


def names(documents: object) -> list[str]:
    return [document.name for document in documents]  # type: ignore[attr-defined]


def rule(name: str, modulus: int = 20) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % modulus == 0


def hash_of(corpus: Corpus) -> str:
    sides = []
    for documents in (corpus.train(), corpus.validation()):
        digest = hashlib.sha256()
        for document in documents:
            data = document.text.encode()
            digest.update(document.name.encode() + b"\0" + str(len(data)).encode() + b"\0" + data)
        sides.append(digest.hexdigest())
    return hashlib.sha256("".join(sides).encode()).hexdigest()


def check_account(corpus: Corpus) -> None:
    train, validation = list(corpus.train()), list(corpus.validation())
    assert corpus.num_documents == len(train) + len(validation)
    assert corpus.num_validation_documents == len(validation)
    assert corpus.num_validation_bytes == sum(len(document.text.encode()) for document in validation)
    assert corpus.num_bytes == corpus.num_validation_bytes + sum(len(document.text.encode()) for document in train)
    assert corpus.content_hash == hash_of(corpus)
    assert list(corpus.train()) == train, "each call begins a new pass"
    assert list(corpus.validation()) == validation


@pytest.fixture(scope="module")
def standard_library() -> Corpus:
    return open_corpus(TextConfig())


def test_the_default_is_the_standard_library(standard_library: Corpus) -> None:
    corpus = standard_library
    check_account(corpus)
    assert corpus.name.startswith("stdlib of Python 3.")
    assert not corpus.is_streaming
    assert 5e6 < (corpus.num_bytes or 0) < 50e6, "some ten million bytes in each version of Python"
    held_out, trained = names(corpus.validation()), names(corpus.train())
    assert all(rule(name) for name in held_out)
    assert not any(rule(name) for name in trained)
    assert sorted(held_out) == held_out
    assert sorted(trained) == trained
    assert 0.01 < len(held_out) / len(trained) < 0.12, "about a twentieth"
    assert "pydoc_data/topics.py" in held_out + trained
    assert "argparse.py" in held_out + trained


def test_the_standard_library_leaves_out_tests_and_packages(standard_library: Corpus) -> None:
    left_out = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
    for document in (*standard_library.train(), *standard_library.validation()):
        assert not left_out & set(document.name.split("/")[:-1])
        assert document.name.endswith(".py")


def test_a_file_of_the_library_that_is_not_utf8_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(60):
        (tmp_path / f"{index}.py").write_text(f"# {index}\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    corpus = open_corpus(TextConfig())
    assert corpus.num_documents == 60
    assert "latin.py" not in names(corpus.train()) + names(corpus.validation())


def test_a_folder_is_split_by_the_rule_of_the_names(text_folder: Path) -> None:
    corpus = open_corpus(TextConfig(source=str(text_folder)))
    check_account(corpus)
    assert corpus.name == "texts"
    assert corpus.notes == ()
    expected = sorted(path.relative_to(text_folder).as_posix() for path in text_folder.rglob("*.txt"))
    assert names(corpus.train()) == [name for name in expected if not rule(name)]
    assert names(corpus.validation()) == [name for name in expected if rule(name)] != []
    half = open_corpus(TextConfig(paths=(str(text_folder),), held_out_modulus=2))
    assert names(half.validation()) == [name for name in expected if rule(name, 2)]


def test_the_split_and_hash_do_not_depend_on_where_the_folder_lies(text_folder: Path, tmp_path: Path) -> None:
    before = open_corpus(TextConfig(source=str(text_folder)))
    moved = tmp_path / "elsewhere" / "deeper"
    moved.parent.mkdir()
    text_folder.rename(moved)
    after = open_corpus(TextConfig(source="files", paths=(str(moved),)))
    assert after.content_hash == before.content_hash
    assert names(after.validation()) == [path for path in names(after.validation()) if rule(path)]


def test_the_hash_changes_with_a_byte_a_name_or_a_side(text_folder: Path) -> None:
    config = TextConfig(source=str(text_folder))
    hashes = {open_corpus(config).content_hash}
    hashes.add(open_corpus(TextConfig(source=str(text_folder), held_out_modulus=3)).content_hash)
    path = text_folder / "odd" / "7.txt"
    path.write_text(path.read_text().replace("line 3", "line 4"))
    hashes.add(open_corpus(config).content_hash)
    path.rename(path.with_name("700.txt"))
    hashes.add(open_corpus(config).content_hash)
    assert len(hashes) == 4


def test_records_are_held_out_by_path_and_index(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"text": f"record {index}"}) + "\n" for index in range(200)))
    corpus = open_corpus(TextConfig(source=str(path)))
    check_account(corpus)
    expected = [f"many.jsonl:{index}" for index in range(200) if rule(f"many.jsonl:{index}")]
    assert names(corpus.validation()) == expected != []


@pytest.mark.parametrize("name", ["book.txt", "39.txt"])
def test_of_a_single_file_the_tail_is_held_out_at_a_line_end(tmp_path: Path, name: str) -> None:
    text = "".join(f"This is the line with the number {index}.\n" for index in range(400))
    (tmp_path / name).write_text(text)
    corpus = open_corpus(TextConfig(source=str(tmp_path / name)))
    check_account(corpus)
    (train,), (tail,) = corpus.train(), corpus.validation()
    assert train.text + tail.text == text
    assert train.text.endswith("\n")
    assert len(tail.text) / len(text) == pytest.approx(1 / 20, abs=0.005), "to the nearest line of 400"
    assert "about the last 1/20 of each document is held out" in corpus.notes[0]


def test_where_the_rule_would_take_everything_the_tail_is_taken_too(tmp_path: Path) -> None:
    name = next(f"{index}.txt" for index in range(1000) if rule(f"{index}.txt"))
    (tmp_path / name).write_text("one line\n" * 100)
    corpus = open_corpus(TextConfig(source=str(tmp_path)))
    check_account(corpus)
    assert corpus.num_validation_bytes == 45


def test_the_tail_is_cut_at_a_line_a_space_or_anywhere() -> None:
    text = "a" * 40 + "\n" + "b" * 7
    assert text[cut_tail(text, 20) :] == "b" * 7
    words = "word " * 50
    assert words[cut_tail(words, 20) :] == "word word word "
    assert cut_tail("x" * 100, 20) == 95
    assert cut_tail("xy", 20) == 1
    for length in range(2, 60):
        for text in ("x" * length, "\n" * length, "x\n" * length, " x" * length):
            assert 0 < cut_tail(text, 20) < len(text)


def test_validation_paths_take_the_place_of_the_rule(text_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "valid.txt").write_text("Held apart.\n")
    corpus = open_corpus(TextConfig(source=str(text_folder), validation_paths=(str(tmp_path / "valid.txt"),)))
    check_account(corpus)
    assert len(list(corpus.train())) == 40
    assert list(corpus.validation()) == [Document(name="valid.txt", text="Held apart.\n")]


def test_what_is_validated_on_is_not_trained_on(text_folder: Path) -> None:
    corpus = open_corpus(TextConfig(source=str(text_folder), validation_paths=(str(text_folder / "odd" / "3.txt"),)))
    check_account(corpus)
    assert "odd/3.txt" not in names(corpus.train())
    assert len(list(corpus.train())) == 39
    assert corpus.notes == ("Files validated on, and so not trained on: 1.",)


def test_the_standard_library_with_validation_paths_is_trained_on_whole(
    tmp_path: Path, standard_library: Corpus
) -> None:
    (tmp_path / "valid.jsonl").write_text('{"body": "Held apart."}')
    config = TextConfig(validation_paths=(str(tmp_path / "valid.jsonl"),), field="body")
    corpus = open_corpus(config)
    assert corpus.num_validation_documents == 1
    assert corpus.num_documents == (standard_library.num_documents or 0) + 1


def test_empty_documents_and_other_files_are_noted(text_folder: Path) -> None:
    (text_folder / "empty.txt").write_text("")
    (text_folder / "README.md").write_text("# Not text for us")
    corpus = open_corpus(TextConfig(source=str(text_folder)))
    check_account(corpus)
    assert "empty.txt" not in names(corpus.train())
    assert corpus.notes == (
        "Files of other kinds in the folders, left out: 1.",
        "Empty documents left out: 1.",
    )


def test_a_split_out_of_balance_is_noted(tmp_path: Path) -> None:
    large = next(f"{index}.txt" for index in range(1000) if rule(f"{index}.txt"))
    (tmp_path / large).write_text("x" * 700)
    (tmp_path / "small.txt").write_text("x" * 300)
    assert not rule("small.txt")
    notes = open_corpus(TextConfig(source=str(tmp_path))).notes
    assert notes == ("The held-out documents are 70% of all bytes: give validation_paths for a better split.",)


def test_a_training_stream_resumes_at_any_document(text_folder: Path) -> None:
    corpus = open_corpus(TextConfig(source=str(text_folder)))
    stream = corpus.stream()
    seen = [stream.next_document() for _ in range(100)]
    passes = len(list(corpus.train())) + 1  # each ends with None
    assert seen[:passes] == [*corpus.train(), None]
    assert seen[passes : 2 * passes] == seen[:passes]
    for cut in (0, 1, passes - 2, passes - 1, passes, passes + 7):
        stream = corpus.stream()
        for _ in range(cut):
            stream.next_document()
        resumed = corpus.stream()
        resumed.next_document()  # a stream that has been used goes to the place all the same
        resumed.load_state_dict(stream.state_dict())
        assert [resumed.next_document() for _ in range(40)] == seen[cut : cut + 40]


# Bad input: one clear error each, before anything else.


@pytest.mark.parametrize("text", ["", "x"])
def test_an_empty_corpus(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    expected = r"TextConfig\(paths=\['.*a\.txt'\]\): received no text at all; allowed is a corpus with text.*more text"
    with pytest.raises(DataError, match=expected):
        open_corpus(TextConfig(source=str(tmp_path / "a.txt")))


def test_an_empty_validation_file(text_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"TextConfig\(validation_paths=.*received no text at all"):
        open_corpus(TextConfig(source=str(text_folder), validation_paths=(str(tmp_path / "a.txt"),)))


def test_a_fault_in_the_last_file_shows_when_the_corpus_is_opened(text_folder: Path) -> None:
    (text_folder / "zzz.txt").write_bytes(b"fine so far \xff")
    with pytest.raises(DataError, match=r"zzz\.txt: received byte 0xff at byte offset 12"):
        open_corpus(TextConfig(source=str(text_folder)))


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "half \\ud83c"}\n')
    with pytest.raises(DataError, match=r"document a\.jsonl:1: received half of a surrogate pair at character 5; "):
        open_corpus(TextConfig(source=str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("stdlb", r"the unknown source 'stdlb'; allowed is 'stdlib', 'files' .* owner/name. Correct it. .*'stdlib'\?"),
        ("tinystory", r"Did you mean 'tinystories'\?"),
        ("./texts/a.txt", r"'./texts/a.txt', which does not exist"),
        ("/no/such/folder", "which does not exist"),
        ("texts/a.jsonl", "which does not exist"),
        ("a.txt", "which does not exist"),
        ("C:\\texts", "which does not exist"),
    ],
)
def test_an_unknown_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=said):
        open_corpus(TextConfig(source=source))


def test_a_misspelt_file_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shakespeare.txt").write_text("text")
    with pytest.raises(DataError, match=r"Did you mean 'shakespeare\.txt'\?"):
        open_corpus(TextConfig(source="shakespear.txt"))


def test_files_without_paths() -> None:
    with pytest.raises(DataError, match="received no path"):
        open_corpus(TextConfig(source="files"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"held_out_modulus": 1}, r"TextConfig\(held_out_modulus=1\): received 1; allowed is a whole number from 2 on"),
        ({"field": ""}, r"TextConfig\(field=''\): received nothing"),
        ({"source": ""}, r"TextConfig\(source=''\): received nothing"),
        ({"field": "body"}, r"TextConfig\(field='body'\): received source='stdlib' beside it; .*would be ignored"),
        ({"hub_split": "test"}, r"TextConfig\(hub_split='test'\): received source='stdlib' beside it"),
        ({"source": "owner/name", "paths": ("a.txt",)}, "received two sources of text; allowed is one of both"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_corpus(TextConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["hub_config", "hub_split", "hub_validation_split"])
def test_hub_settings_beside_local_files(text_folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"TextConfig\({name}='en'\): received local files beside it"):
        open_corpus(TextConfig(source=str(text_folder), **{name: "en"}))  # type: ignore[arg-type]


def test_a_modulus_beside_validation_paths(text_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"TextConfig\(held_out_modulus=5\): received validation_paths beside it"):
        open_corpus(TextConfig(source=str(text_folder), validation_paths=(str(text_folder),), held_out_modulus=5))


def test_the_rule_is_the_one_that_is_documented() -> None:
    assert [is_held_out(f"{index}.txt", 20) for index in range(500)] == [rule(f"{index}.txt") for index in range(500)]
    assert splitting.HELD_OUT_STREAM_RECORDS == 10_000
