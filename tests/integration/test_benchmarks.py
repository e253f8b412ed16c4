"""The benchmark scripts start, and their own checks hold; what they time is measured elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def python(code: str, *words: str) -> str:
    """Run code beside the scripts, as their users do."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_check_for_a_gpu_holds_on_a_cpu(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--compile", "false", "--results", str(tmp_path))
    out = python("import sys, gpu_check; sys.argv[0] = 'gpu_check.py'; gpu_check.main()", *words)
    (path,) = tmp_path.glob("gpu_check_cpu-*.json")
    result = json.loads(path.read_text())
    assert len(result["identities"]) >= 10
    assert all(row["holds"] for row in result["identities"])
    falls = result["shrinks"]
    assert [row["density"] for row in falls] == pytest.approx([0.25 - 0.025 * level for level in range(9)])
    assert all(row["held_bytes"] == row["promised_bytes"] for row in falls)
    assert "FRUGAL columns 0.25, foreach" in out


def test_counted_bytes_are_those_that_memory_reports() -> None:
    code = (
        "import dataclasses, json, optimizer_memory as m; from gpu_check import MINI; "
        "rows, _ = m.measured_table(dataclasses.replace(MINI, num_layers=6)); print(json.dumps(rows))"
    )
    rows = {row["optimizer"]: row for row in json.loads(python(code).splitlines()[-1])}
    ours = {key: row for key, row in rows.items() if row["reported_bytes"] is not None}
    assert len(ours) >= 18
    drawn = ("columns_scattered", "random")  # indices and bases that are drawn again instead of saved
    for key, row in ours.items():
        assert row["held_bytes"] == row["tensor_bytes"], f"{key}: every storage is its tensor's own"
        if not any(word in key for word in drawn):
            assert row["reported_bytes"] == row["held_bytes"], key
        else:
            assert row["reported_bytes"] > row["held_bytes"], key
    assert ours["SignSGD"]["held_bytes"] == 0
    assert ours["FRUGAL columns 0.25"]["held_bytes"] < 0.7 * rows["AdamW"]["held_bytes"]
