"""Reading local files: each kind gives the same documents, and each fault is one clear error."""

import gzip
import json
import os
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from adafrugal.core.errors import DataError
from adafrugal.data import files
from adafrugal.data.files import TextFile, list_files, read_file

TEXTS = ["The first text.\n", "Đây là văn bản thứ hai, có dấu.", "", "  the fourth\r\nhas two lines "]


def read(path: Path, field: str = "text") -> list[tuple[str, str]]:
    return [(document.name, document.text) for document in read_file(TextFile(path=path, name=path.name), field)]


def four_facts(error: pytest.ExceptionInfo[DataError]) -> str:
    message = str(error.value)
    assert re.fullmatch(r"(?s).+: received .+; allowed is .+\. .+\.?.*", message), message
    assert "\n" not in message
    return message


def test_the_same_records_come_from_jsonl_its_gzip_and_parquet(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"n": 1, "body": text}, ensure_ascii=False) + "\n" for text in TEXTS)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pyarrow.table({"n": [1] * len(TEXTS), "body": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=3)
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert read(tmp_path / name, "body") == [(f"{name}:{index}", text) for index, text in enumerate(TEXTS)]


def test_blank_lines_of_jsonl_are_no_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n   \n{"text": "y"}')
    assert read(tmp_path / "a.jsonl") == [("a.jsonl:0", "x"), ("a.jsonl:1", "y")]


def test_a_text_file_is_one_document_to_the_byte(tmp_path: Path) -> None:
    text = "Line one\r\nline two\x00\n\n  Việt  "
    (tmp_path / "a.TXT").write_bytes(text.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert read(tmp_path / "a.TXT") == [("a.TXT", text)]
    assert read(tmp_path / "a.txt.gz") == [("a.txt.gz", text)]


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfText")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "Text"}')
    assert read(tmp_path / "a.txt") == [("a.txt", "Text")]
    assert read(tmp_path / "a.jsonl") == [("a.jsonl:0", "Text")]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_a_large_text_file_is_cut_at_line_ends_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(files, "LARGEST_TEXT_BYTES", 1000)
    monkeypatch.setattr(files, "PART_BYTES", 300)
    lines = [f"Dòng số {index} có chữ.\n" for index in range(200)]
    for text in ("".join(lines), "".join(lines) + "no end of line"):
        data = text.encode()
        path = tmp_path / f"a{suffix}"
        path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
        parts = read(path)
        assert "".join(part for _, part in parts) == text
        assert [name for name, _ in parts] == [f"a{suffix}:{index}" for index in range(len(parts))]
        assert all(part.endswith("\n") for _, part in parts[:-1])
        assert all(len(part.encode()) <= 300 for _, part in parts)


def test_a_line_longer_than_a_part_is_cut_between_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_TEXT_BYTES", 100)
    monkeypatch.setattr(files, "PART_BYTES", 30)
    text = "ệ🎉é" * 60  # 3, 4 and 2 bytes, so that parts end at every place within a character
    (tmp_path / "a.txt").write_text(text)
    parts = [part for _, part in read(tmp_path / "a.txt")]
    assert "".join(parts) == text
    assert len(parts) > 15


def test_files_are_listed_by_name_and_others_left_out(tmp_path: Path) -> None:
    for name in ("b/x.txt", "a/z.jsonl", "a.txt", "notes.md", ".hidden.txt", ".git/c.txt", "a/picture.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    found, num_left_out = list_files("paths", [str(tmp_path)])
    assert [file.name for file in found] == ["a.txt", "a/z.jsonl", "b/x.txt"]
    assert num_left_out == 2
    assert list_files("paths", [str(tmp_path / "b" / "x.txt")])[0][0].name == "x.txt"


def test_a_missing_path_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    with pytest.raises(DataError, match=r"received '.*corpsu\.txt', which does not exist.*'corpus\.txt'\?") as error:
        list_files("TextConfig(paths=...)", [str(tmp_path / "corpsu.txt")])
    four_facts(error)


def test_an_unknown_kind_lists_the_known(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(DataError, match=r"a file of an unknown kind; .*\.txt, .*\.parquet.*'\.jsonl'\?") as error:
        list_files("TextConfig(paths=...)", [str(tmp_path / "a.json")])
    four_facts(error)


def test_a_folder_without_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(DataError, match="which hold no text files; allowed is folders with files that end in") as error:
        list_files("TextConfig(paths=...)", [str(tmp_path)])
    four_facts(error)
    with pytest.raises(DataError, match="received no path, which hold no text files"):
        list_files("TextConfig(paths=...)", [])


def test_a_file_named_twice(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"a\.txt' twice; allowed is each file once") as error:
        list_files("TextConfig(paths=...)", [str(tmp_path), str(tmp_path / "a.txt")])
    four_facts(error)


@pytest.mark.parametrize(
    ("name", "data", "offset"),
    [
        ("a.txt", b"abc\xe9def", 3),
        ("a.txt", b"\xef\xbb\xbfabc\xff", 6),
        ("a.txt", b"cut short \xe1\xba", 10),
        ("a.txt.gz", b"abc\xe9def", 3),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', 24),
        ("a.txt", "text".encode("utf-16"), 0),
    ],
)
def test_text_that_is_not_utf8_names_file_and_byte(tmp_path: Path, name: str, data: bytes, offset: int) -> None:
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    expected = rf"reading .*{re.escape(name)}: received byte 0x[0-9a-f]{{2}} at byte offset {offset}; .*UTF-8.*iconv"
    with pytest.raises(DataError, match=expected) as error:
        read(tmp_path / name)
    four_facts(error)


def test_the_offset_counts_from_the_start_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGEST_TEXT_BYTES", 1000)
    monkeypatch.setattr(files, "PART_BYTES", 300)
    data = b"a line of text\n" * 200
    (tmp_path / "a.txt").write_bytes(data[:2345] + b"\xff" + data[2346:])
    with pytest.raises(DataError, match="byte 0xff at byte offset 2345;"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'text': 1}", "text that is not JSON"),
        ('["text"]', "a list; allowed is one JSON object a record"),
        (
            '{"body": "x", "title": "y"}',
            "a record without the field 'text'; allowed is one of its fields: body, title",
        ),
        ('{"texts": "x"}', "Did you mean 'texts'?"),
        ("{}", "one of its fields: none"),
        ('{"text": null}', "a NoneType in the field 'text'; allowed is text"),
        ('{"text": ["x"]}', "a list in the field 'text'; allowed is text"),
    ],
)
def test_a_broken_record_names_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: received .*" + re.escape(said)) as error:
        read(tmp_path / "a.jsonl")
    four_facts(error)


def test_a_parquet_file_without_the_field_lists_its_fields(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"without the field 'text'; allowed is one of its fields: body, n") as error:
        read(tmp_path / "a.parquet")
    four_facts(error)
    with pytest.raises(DataError, match=r"a\.parquet, record 0: received a int in the field 'n'"):
        read(tmp_path / "a.parquet", "n")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.parquet", b"not parquet at all"),
        ("a.txt.gz", b"not gzip at all"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 100, mtime=0)[:-12]),
    ],
    ids=["parquet", "text", "cut off"],
)
def test_a_broken_file_is_unreadable(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"reading .*{re.escape(name)}: received .*Mend the file") as error:
        read(tmp_path / name)
    four_facts(error)


def test_a_file_without_permission_is_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    path.chmod(0)
    if os.geteuid() == 0:  # nothing is forbidden to root, so the refusal is acted

        def refuse(self: Path, mode: str = "r") -> None:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"received PermissionError \(Permission denied\); .*permissions") as error:
        read(path)
    four_facts(error)


def test_a_folder_without_permission_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_text("text")
    (tmp_path / "a").chmod(0)
    if os.geteuid() == 0:
        real = os.scandir

        def refuse(path: str) -> object:
            if os.fspath(path).endswith("a"):
                raise PermissionError(13, "Permission denied", os.fspath(path))
            return real(path)

        monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"reading .*a: received PermissionError"):
        list_files("TextConfig(paths=...)", [str(tmp_path)])
    (tmp_path / "a").chmod(0o700)
