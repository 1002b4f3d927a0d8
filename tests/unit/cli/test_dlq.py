"""``tierlog dlq …``: what it prints of a letter."""

import asyncio
from types import SimpleNamespace
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


@pytest.mark.parametrize("left_off", [0, 17])
def test_a_list_says_how_many_it_leaves_off(monkeypatch: pytest.MonkeyPatch, left_off: int) -> None:
    class Desk:
        async def listing(self, **_: Any) -> dict[str, Any]:
            return {"dead_letters": [LETTER], "left_off": left_off}

    def ask(work: Any) -> Any:
        return asyncio.run(work(SimpleNamespace(dead_letters=Desk())))

    monkeypatch.setattr(dlq, "with_client", ask)
    done = CliRunner().invoke(main.app, ["dlq", "list", "-o", "jsonl"])
    assert (done.exit_code, done.stdout.count("\n")) == (0, 1)
    assert ("17 older ones are not shown" in done.stderr) is bool(left_off)


def test_a_replay_that_did_not_come_to_all_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(left: int) -> str:
        done = {"replayed": ["0:7"], "refused": [], "left": left}
        monkeypatch.setattr(dlq, "with_client", lambda _: done)
        return CliRunner().invoke(main.app, ["dlq", "replay", "--all"]).stderr

    assert "500 more wait, newer ones: run it again" in said(500)
    assert "more wait" not in said(0)
