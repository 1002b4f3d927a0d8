"""Cases whose names or order follow hashes are refused where they are collected (``fix_names``)."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins import fix_names

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("cases", "is_refused"),
    [
        ("[{'a', 'b'}, {'c'}], ids=str", True),
        ("{'a', 'b'}", True),
        ("[{'a', 'b'}, {'c'}]", False),
        ("[{'c'}], ids=str", False),
        ("sorted({'a', 'b'})", False),
    ],
)
def test_no_case_is_named_or_ordered_by_a_set(tmp_path: Path, cases: str, is_refused: bool) -> None:
    test = f"import pytest\n@pytest.mark.parametrize('one', {cases})\ndef test(one): pass\n"
    (tmp_path / "test_it.py").write_text(test, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", fix_names.__name__, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ("sort the set" in done.stdout) is is_refused, done.stdout + done.stderr
    assert done.returncode == (pytest.ExitCode.INTERRUPTED if is_refused else pytest.ExitCode.OK)
