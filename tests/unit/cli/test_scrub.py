"""``tierlog scrub``: its exit code says whether anything is left, its table what."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from typer.testing import CliRunner

from tierlog.cli import main, scrub
from tierlog.model.ids import EntryId
from tierlog.model.scrub import Finding, FindingKind, ScrubReport, ScrubState, ScrubWish
from tierlog_scheduler.scrubs_api import FindingDocument, ScrubSummary


def document(*findings: Finding, unread: tuple[str, ...] = ()) -> dict[str, Any]:
    report = ScrubReport(
        scrub_id=UUID(int=1), wish=ScrubWish(), started_ms=1, findings_max=9, unread=[*unread]
    )
    report.state = ScrubState.DONE
    for one in findings:
        report.add(one)
    shown = [FindingDocument.of(one).model_dump() for one in report.findings]
    return {**ScrubSummary.of(report).model_dump(), "findings": shown, "findings_left_off": 0}


ORPHAN = Finding(kind=FindingKind.ORPHAN_OBJECTS, stream="logs", kept="the stream is paused")
DELETED = Finding(kind=FindingKind.ORPHAN_OBJECTS, stream="logs", repaired="deleted")
YOUNG = Finding(kind=FindingKind.TOO_YOUNG, stream="logs")


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (document(), 0, "clean"),
        (document(DELETED, YOUNG), 0, "deleted"),
        (document(ORPHAN), 6, "no: the stream is paused"),
        (document(unread=("stream a: unreachable",)), 5, "unreachable"),
    ],
)
def test_the_exit_code_says_whether_anything_is_left(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], code: int, words: str
) -> None:
    monkeypatch.setattr(scrub, "with_client", lambda _: found)
    done = CliRunner().invoke(main.app, ["scrub"])
    assert done.exit_code == code, done.output
    assert words in " ".join(done.output.split())


LOST = Finding(
    kind=FindingKind.DAMAGED_DATA,
    stream="logs",
    kept="4 entries are in no copy",
    lost=((EntryId(3), EntryId(5)), (EntryId(9), EntryId(9))),
    lost_count=4,
)


def test_lost_entries_are_named_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "with_client", lambda _: document(LOST))
    monkeypatch.setenv("COLUMNS", "300")
    done = CliRunner().invoke(main.app, ["scrub", "show"])
    assert done.exit_code == 6
    assert "4 entries: 3-5, 9-9" in " ".join(done.output.split())


class Desk:
    """What a scheduler has of scrubs."""

    def __init__(self, *found: dict[str, Any]) -> None:
        self._found = {one["scrub_id"]: one for one in found}

    async def find(self) -> list[dict[str, Any]]:
        return list(self._found.values())

    async def get(self, scrub_id: str) -> dict[str, Any]:
        return self._found[scrub_id]


def test_the_newest_that_ended_is_shown_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = {**document(), "scrub_id": str(UUID(int=3)), "state": "running", "clean": False}
    newest = {**document(ORPHAN), "scrub_id": str(UUID(int=2))}
    oldest = {**document(), "scrub_id": str(UUID(int=1))}
    desk = Desk(running, newest, oldest)

    def ask(work: Any) -> Any:
        return asyncio.run(work(SimpleNamespace(scrubs=desk)))

    monkeypatch.setattr(scrub, "with_client", ask)

    def run(*words: str) -> tuple[int, Any]:
        done = CliRunner().invoke(main.app, ["scrub", *words, "-o", "json"])
        return done.exit_code, json.loads(done.output)

    assert run("show") == (6, newest)
    assert run("show", oldest["scrub_id"]) == (0, oldest)
    assert run("show", running["scrub_id"]) == (5, running)
    assert run("list") == (0, [running, newest, oldest])
    desk._found = {running["scrub_id"]: running}
    done = CliRunner().invoke(main.app, ["scrub", "show"])
    assert done.exit_code not in {0, 5, 6}


def test_what_is_no_id_of_a_scrub_is_refused_before_anybody_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scrub, "with_client", lambda _: pytest.fail("asked"))
    done = CliRunner().invoke(main.app, ["scrub", "show", "newest"])
    assert done.exit_code == 2
    assert "valid UUID" in done.output


def test_a_report_says_what_is_read_back_and_repaired(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    class Begins(Desk):
        async def begin(self, **wish: Any) -> dict[str, Any]:
            asked.append(wish)
            return document()

    def ask(work: Any) -> Any:
        return asyncio.run(work(SimpleNamespace(scrubs=Begins(document()))))

    monkeypatch.setattr(scrub, "with_client", ask)
    path = tmp_path / "report.json"

    def run(*words: str, report: Any) -> Any:
        path.write_text(json.dumps(report), encoding="utf-8")
        return CliRunner().invoke(main.app, ["scrub", "--from-report", str(path), *words])

    rows = [{"ledger_id": 7}, {"ledger_id": None}, {"ledger_id": 3}, {"ledger_id": 7}]
    assert run("--repair", report={"rows": rows}).exit_code == 0
    assert run(report={"findings": rows}).exit_code == 0
    assert asked == [
        {"repair": True, "deep": True, "ledgers": [3, 7]},
        {"repair": False, "deep": True, "ledgers": [3, 7]},
    ]
    # Orphans, say: what is left of them is looked at, and no data.
    assert run("--repair", report={"rows": [{"ledger_id": None}]}).exit_code == 0
    assert asked.pop() == {"repair": True, "deep": True, "ledgers": []}
    clean = run("--repair", report={"rows": []})
    assert (clean.exit_code, len(asked)) == (0, 2)
    assert "nothing is to be done" in clean.output
    told = run("-o", "json", "--quiet", report={"rows": []})
    assert json.loads(told.stdout) == {
        "state": "done",
        "clean": True,
        "remaining": 0,
        "findings": [],
    }
    nonsense: list[Any] = [[], {"rows": 3}, {"rows": [{"ledger_id": "x"}]}, {"rows": [{}]}, "x"]
    for bad in nonsense:
        refused = run(report=bad)
        assert refused.exit_code == 2, bad
        assert "tierlog spark scrub -o json" in refused.output
    many = run(report={"rows": [{"ledger_id": number} for number in range(10_001)]})
    assert many.exit_code == 2
    assert "scrub --repair --deep" in many.output


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"state": "done", "findings_left_off": 5}, "room"),
        ({"state": "running", "findings_left_off": 0}, "is running"),
        ({"state": "failed", "findings_left_off": 0}, "is failed"),
        ({"state": "done", "deep_next": {"stream": "logs", "ledger_id": 8}}, "out of time"),
        ({"state": "done", "unread": ["stream logs: unreachable"]}, "look at everything"),
        ({"remaining": 2, "unread": 0}, "room"),
        ({"remaining": 1, "unread": 3}, "look at everything"),
    ],
)
def test_what_is_repaired_by_a_report_that_does_not_name_all_is_not_called_clean(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: dict[str, Any], why: str
) -> None:
    asked: list[dict[str, Any]] = [document(), document(ORPHAN)]
    monkeypatch.setattr(scrub, "with_client", lambda _: asked.pop(0))
    path = tmp_path / "report.json"

    def run(rows: list[Any]) -> tuple[int, str]:
        name = "findings" if "state" in report else "rows"
        path.write_text(json.dumps({**report, name: rows}), encoding="utf-8")
        done = CliRunner().invoke(main.app, ["scrub", "--repair", "--from-report", str(path)])
        return done.exit_code, " ".join(done.output.split())

    for code in (5, 6):
        exit_code, words = run([{"ledger_id": 7}])
        assert exit_code == code
        assert why in words
    assert run([])[0] == 5
