"""Benchmarks take their options before they start anything: what can't be measured is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "words",
    [
        ("bench_read.py", "--runs", "0"),
        ("bench_node.py", "--sizes", "1000,x"),
    ],
    ids=" ".join,
)
def test_a_number_that_is_none_is_refused_at_once(words: tuple[str, ...]) -> None:
    program, *options = words
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / program), *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"argument {options[0]}" in done.stderr
    assert "is not a whole number above 0" in done.stderr
