"""``tierlog scrub``: compare the bucket with the metadata, and mend what differs."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import typer

from tierlog.cli.append import open_input
from tierlog.cli.output import (
    Output,
    OutputOption,
    print_json,
    print_one,
    print_rows,
    say,
    time_text,
)
from tierlog.cli.session import Quiet, Timeout, command
from tierlog.cli.stream import with_client
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import LedgerId
from tierlog.model.scrub import ASKED_LEDGERS_MAX

if TYPE_CHECKING:
    from tierlog.client import Client

POLL_S: Final = 0.5
RUNNING: Final = "running"
DONE: Final = "done"
EXIT_INCOMPLETE: Final = 5
EXIT_FINDINGS: Final = 6

COLUMNS: Final = {
    "kind": None,
    "stream": None,
    "ledger_id": None,
    "uuid": None,
    "cause": None,
    "repaired": None,
    "lost": None,
    "remedy": None,
}
LIST_COLUMNS: Final = {
    "scrub_id": None,
    "started_ms": time_text,
    "state": None,
    "repair": None,
    "deep": None,
    "clean": None,
    "remaining": None,
    "error": None,
}
LOST_SHOWN_MAX: Final = 20

app = typer.Typer()


@app.callback(invoke_without_command=True)
@command
def scrub(
    ctx: typer.Context,
    *,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Delete orphans, and repair damaged copies."),
    ] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read back and compare all data.")] = False,
    from_report: Annotated[
        Path | None,
        typer.Option(
            "--from-report",
            help="Read back, and repair, only the ledgers of this report, which tierlog spark "
            "scrub or tierlog scrub wrote with -o json.",
        ),
    ] = None,
    timeout_s: Timeout = 3600.0,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Look for objects, uploads and copies in S3 that are not as the metadata say.

    Exits with 6 while anything is wrong, with 5 when not all of it could be looked at, by this
    scrub or by the one whose report it is given. What is younger than the safety age, or of another
    cluster, is counted and left alone.
    """
    if ctx.invoked_subcommand is not None:
        return

    told = None if from_report is None else read_report(from_report)
    cut = told.cut if told is not None else ""
    if cut:
        say(f"{from_report} may not name all that is wrong: {cut}", quiet=quiet)
    if told is not None and not told.findings:
        say(f"{from_report} names nothing: nothing is to be done", quiet=quiet)
        print_one({"state": "done", "clean": not cut, "remaining": 0, "findings": []}, output)
        raise typer.Exit(EXIT_INCOMPLETE if cut else 0)
    ledgers = told.ledgers if told is not None else None

    async def ask(client: "Client") -> Any:  # noqa: ANN401 - JSON
        begun = await client.scrubs.begin(
            repair=repair, deep=deep or ledgers is not None, ledgers=ledgers
        )
        return await _wait(client, begun["scrub_id"], timeout_s, quiet=quiet)

    found = with_client(ask)
    _show(found, output)
    _end(found)
    if cut:
        raise typer.Exit(EXIT_INCOMPLETE)


@app.command("list")
@command
def list_scrubs(*, output: OutputOption = Output.TABLE) -> None:
    """List the newest scrubs; which scheduler made them does not matter."""

    async def find(client: "Client") -> list[Any]:
        return list(await client.scrubs.find())

    print_rows(with_client(find), LIST_COLUMNS, output)


@app.command("show")
@command
def show(
    scrub_id: Annotated[
        UUID | None,
        typer.Argument(help="As list shows it; without one, the newest that ended."),
    ] = None,
    *,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what a scrub found, with the same exit codes."""

    async def ask(client: "Client") -> Any:  # noqa: ANN401 - JSON
        return await client.scrubs.get(str(scrub_id or await _newest(client)))

    found = with_client(ask)
    _show(found, output)
    _end(found)


async def _newest(client: "Client") -> str:
    for one in await client.scrubs.find():
        if one["state"] != RUNNING:
            return str(one["scrub_id"])
    raise RefusedError(
        "no scrub has ended yet",
        reason=Reason.NO_SUCH_ENTRY,
        remedy="Begin one with: tierlog scrub",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldReport:
    """What a report names. ``cut``: why there may be more that is wrong; empty: there is not."""

    findings: int
    ledgers: list[LedgerId]
    cut: str


def read_report(path: Path) -> ToldReport:
    """Return what a report names; ``RefusedError`` when it is none."""
    try:
        with open_input(path) as file:
            found = json.load(file)
        rows = found["findings"] if "findings" in found else found["rows"]
        named = {LedgerId(int(one["ledger_id"])) for one in rows if one["ledger_id"] is not None}
        told = ToldReport(findings=len(rows), ledgers=sorted(named), cut=_cut(found, len(rows)))
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedError(
            f"{path} is no report of a scrub",
            remedy="Write one with: tierlog spark scrub -o json",
        ) from error
    if len(named) > ASKED_LEDGERS_MAX:
        raise RefusedError(
            f"{path} names {len(named)} ledgers, and a scrub is asked for {ASKED_LEDGERS_MAX}",
            remedy="Repair all there is: tierlog scrub --repair --deep",
        )
    return told


def _cut(report: Mapping[str, Any], findings: int) -> str:
    """Say why a report may not name all that is wrong, of either kind of scrub."""
    state = report.get("state", DONE)
    if state != DONE:
        return f"the state of its scrub is {state}"
    # A job of Spark says how many there are alone.
    if report.get("findings_left_off") or report.get("remaining", 0) > findings:
        return "not all findings had room in it"
    if report.get("deep_next") is not None:
        return "its scrub ran out of time"
    return "its scrub could not look at everything" if report.get("unread") else ""


def _end(found: Mapping[str, Any]) -> None:
    if found["remaining"]:
        raise typer.Exit(EXIT_FINDINGS)
    if not found["clean"]:
        raise typer.Exit(EXIT_INCOMPLETE)


async def _wait(client: "Client", scrub_id: str, timeout_s: float, *, quiet: bool) -> Any:  # noqa: ANN401 - JSON
    said = ""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                found = await client.scrubs.get(scrub_id)
                if found["state"] != RUNNING:
                    return found
                now = _progress(found)
                if now != said:
                    said = now
                    say(now, quiet=quiet)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise RetryableError(
            f"scrub {scrub_id} did not end within {timeout_s:g} s",
            remedy=f"It goes on; look at it with: tierlog scrub show {scrub_id}",
        ) from None


def _progress(found: Mapping[str, Any]) -> str:
    phase = found["phase"] or "begins"
    return f"{phase}: {found['objects']} objects, {found['ledgers']} ledgers"


def _show(found: Mapping[str, Any], output: Output) -> None:
    if output is not Output.TABLE:
        print_json(found, indent=output is Output.JSON)
        return
    rows = [{**one, "repaired": _done(one), "lost": _lost(one)} for one in found["findings"]]
    print_rows(rows, COLUMNS, output)
    hidden = {"findings", "scrub_id", "phase", "started_ms", "ended_ms"}
    print_one({name: value for name, value in found.items() if name not in hidden}, output)


def _done(finding: Mapping[str, Any]) -> str | None:
    """Return what was done about a finding, or why nothing was."""
    kept = finding["kept"]
    return finding["repaired"] or (f"no: {kept}" if kept else None)


def _lost(finding: Mapping[str, Any]) -> str | None:
    """Return the entries that are in no copy, as far as there is room."""
    ranges = finding["lost"]
    if not ranges:
        return None
    shown = [f"{one['first_entry_id']}-{one['last_entry_id']}" for one in ranges[:LOST_SHOWN_MAX]]
    more = ", ..." if len(ranges) > len(shown) else ""
    return f"{finding['lost_count']} entries: {', '.join(shown)}{more}"
