"""``tierlog dlq …``: what it prints of a letter."""

from typing import Any

import pytest
from typer.testing import CliRunner

from tierlog.cli import dlq, main

LETTER: dict[str, Any] = {"place": "0:7", "state": "waiting", "stored_ms": 1_795_318_608_896}


@pytest.mark.parametrize("verb", ["show", "replay", "dismiss"])
def test_people_get_dates_and_programs_milliseconds(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(dlq, "with_client", lambda _: LETTER)

    def run(*options: str) -> str:
        return CliRunner().invoke(main.app, ["dlq", verb, "0:7", *options]).stdout

    assert "2026-11-22 03:36:48" in run()
    assert '"stored_ms":1795318608896' in run("-o", "jsonl")
