"""``tierlog scrub``: its exit code says whether anything is left, its table what."""

from typing import Any
from uuid import UUID

import pytest
from typer.testing import CliRunner

from tierlog.cli import main, scrub
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
