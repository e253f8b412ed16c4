"""Bytes as people write them."""

import pytest

from adafrugal.core.errors import ConfigError
from adafrugal.plan.units import format_bytes, parse_bytes


@pytest.mark.parametrize(("text", "size"), [
    ("24GB", 24 * 10**9), ("24GiB", 24 * 2**30), ("24 gib", 24 * 2**30), ("1.5MiB", 3 * 2**19), ("512KB", 512_000),
    ("2TiB", 2 * 2**40), ("1e3 B", 1000), ("7.", None), ("24", None), ("24G", None), ("-1GB", None), ("GB", None),
    ("0.1B", None), ("24 GB GB", None),
])  # fmt: skip
def test_a_number_needs_its_unit(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(ConfigError, match=r"--memory .*allowed is a(t least one byte| number with one of B, KB)"):
            parse_bytes(text, "--memory")
    else:
        assert parse_bytes(text, "--memory") == size


def test_a_bare_number_is_told_both_meanings() -> None:
    with pytest.raises(
        ConfigError, match=r"24 without a unit.*24GiB for 24 \* 2\*\*30 bytes.* or 24GB for 24 \* 10\*\*9"
    ):
        parse_bytes("24", "--memory")


@pytest.mark.parametrize("size", [1, 1023, 1024, 5 * 2**20, 24 * 2**30, 3 * 2**40])
def test_what_is_written_reads_back(size: int) -> None:
    assert parse_bytes(format_bytes(size), "x") == pytest.approx(size, rel=0.005)  # two decimals
