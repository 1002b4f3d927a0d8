"""What the demo shows at its end: a table of ledgers, and a picture of the stream by tier."""

import sys
from typing import Any, Final

from tierlog.cli.demo.job import Outcome
from tierlog.cli.output import Output, print_json, print_rows, size_text, stdout_console

WIDTH: Final = 72
MARKS: Final = {"S3": ("#", "blue"), "both": ("=", "magenta"), "local": (".", "green")}
MEANINGS: Final = {"S3": "S3 alone", "both": "S3 and local disk", "local": "local disk"}


def document_of(outcome: Outcome, *, elapsed_s: float) -> dict[str, Any]:
    """Return the whole outcome as JSON."""
    document = outcome.document()
    document["read"]["events_by_tier"] = outcome.tiers_read
    return document | {
        "killed_offloader": {
            "ledger_id": outcome.killed_ledger,
            "attempt": str(outcome.killed_attempt),
            "left_behind": outcome.left_behind,
        },
        "killed_ingest": {
            "events_in_flight": outcome.unacknowledged_at_kill,
            "answers_settled_by_number": outcome.resolved_count,
            "acknowledged_events": outcome.acknowledged,
            "events_lost": outcome.lost_count,
            "events_doubled": outcome.doubled_count,
        },
        "bytes_on_local_disk": outcome.disk_bytes,
        "ledgers": outcome.ledgers,
        "seconds": round(elapsed_s, 1),
    }


def show(outcome: Outcome, output: Output, *, elapsed_s: float) -> None:
    """Print the outcome."""
    document = document_of(outcome, elapsed_s=elapsed_s)
    if output is not Output.TABLE:
        print_json(document, indent=output is Output.JSON)
        return
    columns = {
        "ledger_id": None,
        "state": None,
        "entries": None,
        "bytes": size_text,
        "where": None,
        "attempts": None,
        "blocks": None,
        "uuid": None,
    }
    print_rows(outcome.ledgers, columns, Output.TABLE, title="The stream's ledgers")
    _draw(outcome)
    _sum_up(document)


def picture_of(ledgers: list[dict[str, Any]], width: int = WIDTH) -> list[tuple[str, str]]:
    """Return (marks, where) for each ledger; lengths are in proportion to entries."""
    total = sum(one["entries"] for one in ledgers) or 1
    pieces = []
    for one in ledgers:
        length = max(1, round(width * one["entries"] / total))
        pieces.append((MARKS[one["where"]][0] * length, one["where"]))
    return pieces


def _draw(outcome: Outcome) -> None:
    from rich.text import Text

    console = stdout_console()
    bar = Text("  oldest |")
    for marks, where in picture_of(outcome.ledgers):
        bar.append(marks, style=MARKS[where][1] if sys.stdout.isatty() else "")
        bar.append("|")
    bar.append(" newest")
    console.print(Text("The stream by tier"))
    console.print(bar)
    legend = "   ".join(f"{mark} {MEANINGS[where]}" for where, (mark, _) in MARKS.items())
    console.print(Text(f"  {legend}   | a ledger's end"))


def _sum_up(document: dict[str, Any]) -> None:
    crash, ingest = document["killed_offloader"], document["killed_ingest"]
    lines = [
        (
            f"offloader killed in the upload of ledger {crash['ledger_id']} "
            f"(attempt {crash['attempt']}): {len(crash['left_behind'])} leftovers"
        ),
        (
            f"ingest killed with {ingest['events_in_flight']} events in flight: "
            f"{ingest['events_lost']} lost, {ingest['events_doubled']} doubled "
            f"(lost answers settled: {ingest['answers_settled_by_number']})"
        ),
    ]
    print_summary(document, lines)


def print_summary(document: dict[str, Any], lines: list[str]) -> None:
    """Print what was appended and read, what a job says of it, and the time."""
    from rich.text import Text

    appended, read = document["appended"], document["read"]
    by_tier = read.get("events_by_tier", {})
    tiers = ", ".join(f"{count} from {tier}" for tier, count in by_tier.items())
    console = stdout_console()
    for line in (
        f"appended {_volume(appended)}",
        f"read     {_volume(read)}{f' ({tiers})' if tiers else ''}",
        *lines,
        f"all of it in {document['seconds']} s: the same, byte for byte",
    ):
        console.print(Text(line))


def _volume(found: dict[str, Any]) -> str:
    size = f"{found['events']} events, {found['bytes'] / 1e6:.1f} MB"
    return f"{size} in {found['seconds']} s, SHA-256 {found['sha256']}"
