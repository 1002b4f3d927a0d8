"""Sizes stay readable: files up to 600 lines, functions up to 70; and locks hold no address."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
FOLDERS = ("shared", "services", "pipeline", "tests", "tools", "benchmarks")
GENERATED = ROOT / "shared" / "tierlog" / "proto"

SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if GENERATED not in path.parents
]


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := len(path.read_text().splitlines())) > FILE_LINES_MAX
    }
    assert long == {}


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": length
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and (length := node.end_lineno - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert long == {}


@pytest.mark.parametrize("lock", sorted(ROOT.glob("requirements*.lock")), ids=lambda p: p.name)
def test_locks_hold_hashes_and_no_addresses(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    assert text.count("==") <= text.count("--hash=sha256:")
