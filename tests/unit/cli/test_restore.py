"""What ``tierlog restore`` prints, and how it ends."""

from typing import Any
from uuid import UUID

import orjson
import pytest
from typer.testing import CliRunner

from tests.unit.format.test_manifest import CLUSTER, HEAD, ledger
from tierlog.cli import restore as command
from tierlog.cli.main import app
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.node import Cluster
from tierlog.model.policy import NO_LEVELS
from tierlog.offload.restore import Finding, RestorePlan, StreamPlan, Verdict

LOST = Finding(
    verdict=Verdict.LOST,
    stream=StreamName("orders"),
    ledger_id=LedgerId(9),
    entries=3,
    in_the_middle=True,
    cause="it was not offloaded",
)


def plan(*findings: Finding) -> RestorePlan:
    return RestorePlan(
        cluster=Cluster(cluster_id=CLUSTER, created_ms=1, ledger_id_base=1_000_010),
        levels=NO_LEVELS,
        streams=(StreamPlan(head=HEAD, written_ms=1_700_000_000_000, ledgers=(ledger(5),)),),
        findings=findings,
        ledger_id_seen=LedgerId(9),
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was asked for; the answer, of two requests, is a plan with a loss amid a stream."""
    seen: list[dict[str, Any]] = []

    async def answer(bucket: str, prefix: str, **more: Any) -> RestorePlan:
        more.pop("meter").count("GetObject", requests=2, received=3 * 1024)
        seen.append({"bucket": bucket, "prefix": prefix, **more})
        return plan(LOST)

    monkeypatch.setattr(command, "_restore", answer)
    return seen


def test_a_dry_run_prints_tables_and_refuses_what_nobody_accepted(asked: list[Any]) -> None:
    done = CliRunner().invoke(app, ["restore", "--from", "s3://b/a/c/", "--dry-run"])
    assert done.exit_code == 2
    assert asked == [
        {
            "bucket": "b",
            "prefix": "a/c",
            "cluster_id": None,
            "margin": 1_000_000,
            "accepted": None,
        }
    ]
    for word in ("orders", "lost", "it was not offloaded", "2023-11-14"):
        assert word in done.stdout
    assert f"cluster {CLUSTER} would be restored" in done.stderr
    assert "1000010" in done.stderr
    assert "2 requests, 3.0 KiB received" in done.stderr
    assert "--accept-loss" in done.stderr


def test_what_is_accepted_goes_on_and_json_says_all_of_it(asked: list[Any]) -> None:
    arguments = ["restore", "--from", "s3://b", "--accept-loss", "--cluster", str(CLUSTER)]
    done = CliRunner().invoke(app, [*arguments, "-o", "json"])
    assert done.exit_code == 0, done.stderr
    assert asked[0]["accepted"] == (True, False)
    assert asked[0]["cluster_id"] == UUID(str(CLUSTER))
    found = orjson.loads(done.stdout)
    assert found["applied"] is True
    assert found["ledger_id_base"] == 1_000_010
    counts = {"requests_sent": 2, "bytes_sent": 0, "bytes_received": 3 * 1024}
    assert counts.items() <= found.items()
    (stream,) = found["streams"]
    assert (stream["stream"], stream["ledgers"], stream["entries"]) == ("orders", 1, 2)
    (finding,) = found["findings"]
    assert (finding["verdict"], finding["ledger_id"], finding["in_the_middle"]) == ("lost", 9, True)


@pytest.mark.parametrize(
    "more", [["--from", "b"], ["--from", "s3:///x"], ["--from", "s3://b", "--cluster", "x"]]
)
def test_what_makes_no_sense_is_refused_before_anything_is_read(
    asked: list[Any], more: list[str]
) -> None:
    done = CliRunner().invoke(app, ["restore", *more])
    assert done.exit_code == 2
    assert "remedy" in done.stderr
    assert asked == []
