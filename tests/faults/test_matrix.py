"""Every row of the fault matrix names tests, and each of them is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "faults.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PARTS = {"Offloader", "Deleter and scheduler", "Kafka", "S3", "ZooKeeper"}


def rows() -> list[tuple[str, list[str]]]:
    """Return each row with its part of the page."""
    part, found = "", []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            part = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| fault |"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found.append((part, cells))
    return found


def test_each_row_names_a_test_that_is_there():
    functions: dict[str, set[str]] = {}
    for _, (fault, expected, shown) in rows():
        named = NAMED.findall(shown)
        assert fault, shown
        assert expected, fault
        assert named, fault
        assert re.sub(NAMED, "", shown).strip(", ") == "", fault
        for path, name in named:
            if path not in functions:
                tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
                kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
                functions[path] = {n.name for n in ast.walk(tree) if isinstance(n, kinds)}
            assert name in functions[path], f"{path} has no {name}"


def test_each_part_has_rows():
    assert {part for part, _ in rows()} == PARTS
    assert len(rows()) > 25
