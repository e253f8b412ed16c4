"""The page of field cases tells the truth: every test that it names is there, and every case names one."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "field_cases.md"
TEXT = PAGE.read_text()
BUILT, LATER = TEXT.split("\n## Not yet\n")
LONGEST = 15


def rows_of(text: str) -> list[list[str]]:
    """The cells of every table's rows, without their headings."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return [row for row in cells if row[0] != "seen in"]


def links_in(text: str) -> list[tuple[str, str, str]]:
    """What is shown, where it leads, and its title."""
    return re.findall(r'\[([^]]+)\]\(([^ )]+)(?: "([^"]+)")?\)', text)


def test_every_case_says_where_what_and_how_and_names_its_tests() -> None:
    rows = rows_of(BUILT)
    assert len(rows) >= 70
    for row in rows:
        assert len(row) == 4, row[0]
        source, what, here, tests = row
        assert re.search(r"\d", source) or source.startswith(("torch ", "HF ", "optimi ")), "a report has a number"
        assert len(what.split()) <= LONGEST, what
        assert here.startswith(("works", "refused", "documented")), here
        assert re.sub(r"\[test_\w+\]\([^)]+\)", "", tests).strip(", ") == "", "a list of links, and nothing else"
        assert links_in(tests), what


def test_every_named_test_is_there_and_every_link_leads_to_it() -> None:
    links = links_in(TEXT)
    assert len(links) >= 100
    for name, path, title in links:
        target = (PAGE.parent / path).resolve()
        assert target.is_relative_to(ROOT / "tests"), path
        assert target.is_file(), path
        assert name == title, "the name is shown, and shown again where one points at it"
        assert re.search(rf"^def {name}\(", target.read_text(), re.MULTILINE), f"{path} has no {name}"


def test_what_is_not_tested_says_why_in_few_words() -> None:
    rows = rows_of(LATER)
    assert rows
    for _, what, why in rows:
        assert len(what.split()) <= LONGEST
        assert 0 < len(why.split()) <= 5
    assert not links_in(LATER)
