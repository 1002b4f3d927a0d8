"""``tierlog offload …``: what it says while it waits, and what of its options is refused."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from tests.simulation.virtual_loop import run_virtual
from tierlog.cli import main, offload, scrub
from tierlog.client import Client
from tierlog.offload.export import ExportCopy
from tierlog.ports.spending import CostMeter
from tierlog.wiring import exporting
from tierlog_ingest.cli import decommission
from tierlog_ingest.cli.node import app as node_app

LEDGERS = (4, 7)


class Scheduler:
    """A client of a stream whose ledgers are complete a while after they were asked for."""

    def __init__(self, *complete_at_s: float) -> None:
        self._complete_at_s = dict(zip(LEDGERS, complete_at_s, strict=True))

    async def offload(self, stream: str, before: object) -> dict[str, Any]:
        del before
        return {"stream": stream, "ledgers": [*LEDGERS], "requested": [*LEDGERS]}

    async def stream(self, stream: str) -> dict[str, Any]:
        now_s = asyncio.get_running_loop().time()
        ledgers = [
            {"ledger_id": one, "complete": now_s >= at_s, "entries": 1}
            for one, at_s in self._complete_at_s.items()
        ]
        return {"stream": stream, "ledgers": ledgers}


def over(client: Scheduler) -> Callable[[Callable[[Client], Awaitable[Any]]], Any]:
    """Return what runs a command's work with ``client``, on virtual time."""

    def with_client(work: Callable[[Client], Awaitable[Any]]) -> Any:
        found: list[Any] = []

        async def main() -> None:
            found.append(await work(cast("Client", client)))

        run_virtual(main(), until_s=1000)
        return found[0]

    return with_client


def test_waiting_for_an_offload_says_how_far_it_is_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "with_client", over(Scheduler(60, 300)))
    done = CliRunner().invoke(main.app, ["offload", "run", "logs", "--wait"])
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines() == [f"{count} of 2 ledgers in tier 2" for count in (0, 1)]
    assert "complete" in done.stdout


@pytest.mark.parametrize(
    ("seen", "code", "told"),
    [
        ({"complete": False, "entries": 3}, 3, "1 of 2 ledgers are gone from logs"),
        (None, 3, "tier 2 when they were last seen: 7 [TRIMMED]"),
        ({"complete": True, "entries": 3}, 0, ""),
        ({"complete": False, "entries": 0}, 0, ""),
    ],
)
def test_what_is_trimmed_before_it_has_a_copy_is_not_told_as_offloaded(
    monkeypatch: pytest.MonkeyPatch, seen: dict[str, Any] | None, code: int, told: str
) -> None:
    class Trimming(Scheduler):
        async def stream(self, stream: str) -> dict[str, Any]:
            found = await super().stream(stream)
            gone = asyncio.get_running_loop().time() >= 30 or seen is None
            last = [] if gone else [{"ledger_id": LEDGERS[1], **(seen or {})}]
            return {**found, "ledgers": [*found["ledgers"][:1], *last]}

    monkeypatch.setattr(offload, "with_client", over(Trimming(60, 0)))
    done = CliRunner().invoke(main.app, ["offload", "run", "logs", "--wait"])
    assert done.exit_code == code, done.output
    assert told in " ".join(done.stderr.split())
    assert ("complete" in done.stdout) is (code == 0)


def test_an_offload_that_does_not_come_names_where_it_may_have_been_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "with_client", over(Scheduler(60, 700)))
    done = CliRunner().invoke(main.app, ["offload", "run", "logs", "--wait"])
    assert done.exit_code == 5
    assert "is in tier 2 after 600 s [UNAVAILABLE]" in done.stderr
    assert "tierlog dlq list" in done.stderr


@pytest.mark.parametrize(("wait", "left"), [([], 2), (["--wait"], 0)])
def test_leftovers_are_shown_or_waited_for_until_none_is_left(
    monkeypatch: pytest.MonkeyPatch, wait: list[str], left: int
) -> None:
    class Sweeping(Scheduler):
        async def leftovers(self, stream: str) -> list[dict[str, Any]]:
            assert stream == "logs"
            now_s = asyncio.get_running_loop().time()
            gone_s = zip(LEDGERS, (60, 300), strict=True)
            return [{"ledger_id": one, "uuid": "u"} for one, at_s in gone_s if now_s < at_s]

    monkeypatch.setattr(offload, "with_client", over(Sweeping(0, 0)))
    done = CliRunner().invoke(main.app, ["offload", "gc", "logs", *wait, "-o", "json"])
    assert done.exit_code == 0, done.output
    assert [one["ledger_id"] for one in json.loads(done.stdout)] == [*LEDGERS][:left]
    told = [f"{count} attempts to clean" for count in (2, 1)] if wait else []
    assert done.stderr.splitlines() == told


@pytest.mark.parametrize("seconds", ["-1", "nan", "soon"])
@pytest.mark.parametrize(
    "words",
    [
        ["offload", "run", "logs", "--wait"],
        ["offload", "status", "logs", "--wait"],
        ["offload", "gc", "logs", "--wait"],
        ["scrub"],
        ["decommission", "node-1"],
    ],
    ids=" ".join,
)
def test_seconds_that_are_none_are_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, words: list[str], seconds: str
) -> None:
    for module, name in ((offload, "with_client"), (scrub, "with_client")):
        monkeypatch.setattr(module, name, lambda _: pytest.fail("asked"))
    monkeypatch.setattr(decommission, "with_catalog", lambda _: pytest.fail("asked"))
    app = node_app if words[0] == "decommission" else main.app
    done = CliRunner().invoke(app, [*words, "--timeout", seconds])
    assert done.exit_code == 2, done.output
    assert "Invalid value for '--timeout'" in done.output


@pytest.mark.parametrize("output", ["table", "json"])
def test_an_export_says_what_it_asked_the_store_for(
    monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    async def export_ledger(settings: object, ledger_id: int, *, meter: CostMeter) -> ExportCopy:
        meter.count("upload_part", requests=41, sent=1723, received=29)
        return ExportCopy(bucket="b", key="k", length=1700, entry_count=2, event_count=3)

    monkeypatch.setenv("TIERLOG_ZOOKEEPER__HOSTS", "127.0.0.1:1")
    monkeypatch.setattr(exporting, "export_ledger", export_ledger)
    done = CliRunner().invoke(main.app, ["offload", "export", "7", "-o", output])
    assert done.exit_code == 0, done.stderr
    for name, count in {"requests_sent": 41, "bytes_sent": 1723, "bytes_received": 29}.items():
        assert re.search(rf"{name}\W+{count}\b", done.stdout)


def test_the_status_of_one_stream_asks_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    class Told(Scheduler):
        async def offloads(self, stream: str | None = None) -> list[dict[str, Any]]:
            asked.append(stream)
            return [{"stream": stream, "ledger_id": 4, "state": "COMPLETE"}]

    monkeypatch.setattr(offload, "with_client", over(Told(0, 0)))
    for words in (["logs"], []):
        done = CliRunner().invoke(main.app, ["offload", "status", *words, "-o", "jsonl"])
        assert done.exit_code == 0, done.output
    assert asked == ["logs", None]
