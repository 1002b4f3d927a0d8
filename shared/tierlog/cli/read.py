"""``tierlog read``: events of a stream to standard output."""

import asyncio
import base64
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierlog.cli.output import json_of, print_json, print_table
from tierlog.cli.session import command, load
from tierlog.model.errors import RefusedError

if TYPE_CHECKING:
    from tierlog.client import Edge, Position, ReadEvent


COLUMNS: Final = ("position", "index", "tier", "bytes", "payload")


class ReadOutput(StrEnum):
    """How events are printed."""

    RAW = "raw"
    BINARY = "binary"
    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


@command
def read(
    stream: Annotated[str, typer.Argument(help="The stream.")],
    start: Annotated[
        str, typer.Option("--from", help="earliest, latest or LEDGER:ENTRY.")
    ] = "earliest",
    until: Annotated[
        str | None, typer.Option("--to", help="Stop before this LEDGER:ENTRY.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("-n", min=0, help="At most that many events.")
    ] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Go on as events are appended.")] = False,
    output: Annotated[
        ReadOutput,
        typer.Option(
            "--output", "-o", help="raw: payload and line feed; binary: 4 bytes of length before."
        ),
    ] = ReadOutput.RAW,
) -> None:
    """Print the events of a stream from any position on, whichever tier has them.

    Of a partitioned stream each partition's events come in order.
    """
    from tierlog.model.ids import stream_name
    from tierlog.model.position import Position, parse_position

    stream_name(stream)
    where = parse_position(start)
    end = Position.parse(until) if until is not None else None
    if follow and limit is None and output is ReadOutput.TABLE:
        raise RefusedError(
            "a table is printed at the end, and --follow has none",
            remedy="Use -o jsonl, or say how many events with -n",
        )
    asyncio.run(_read(stream, where, end, limit, follow=follow, output=output))


async def _read(
    stream: str,
    where: "Position | Edge",
    end: "Position | None",
    limit: int | None,
    *,
    follow: bool,
    output: ReadOutput,
) -> None:
    from tierlog.client import open_client
    from tierlog.client.reading import entries_of, events_of

    shown, count = _Shown(output), 0
    async with open_client(load()) as client:
        reader = client.reader(stream, start=where, until=end, limit=limit, follow=follow)
        async for answer in reader.answers():
            for entry in entries_of(answer):
                for event in events_of(entry):
                    if count == limit:
                        break
                    shown.add(event)
                    count += 1
            sys.stdout.buffer.flush()
            if count == limit:
                break
    shown.end()


class _Shown:
    """Prints events as they come; a table alone waits for its end, with little of each."""

    def __init__(self, output: ReadOutput) -> None:
        self._output = output
        self._rows: list[dict[str, Any]] = []
        self._count = 0

    def add(self, event: "ReadEvent") -> None:
        """Take one event."""
        if self._output is ReadOutput.TABLE:
            self._rows.append(_row_of(event))
        elif self._output is ReadOutput.JSONL:
            print_json(document_of(event))
        elif self._output is ReadOutput.JSON:
            sys.stdout.buffer.write(b",\n" if self._count else b"[\n")
            sys.stdout.buffer.write(json_of(document_of(event)))
        else:
            print_payload(event.payload, self._output)
        self._count += 1

    def end(self) -> None:
        """End a table, or a list."""
        if self._output is ReadOutput.TABLE:
            print_table(self._rows, dict.fromkeys(COLUMNS))
        elif self._output is ReadOutput.JSON:
            sys.stdout.buffer.write(b"\n]\n" if self._count else b"[]\n")
        sys.stdout.buffer.flush()


def _row_of(event: "ReadEvent") -> dict[str, Any]:
    return {
        "position": str(event.position),
        "index": event.batch_index,
        "tier": event.tier,
        "bytes": len(event.payload),
        "payload": event.payload[:60].decode(errors="replace"),
    }


def print_payload(payload: bytes, output: ReadOutput) -> None:
    """Print a payload as it is: with a line feed after it, or its length before it."""
    write = sys.stdout.buffer.write
    if output is ReadOutput.BINARY:
        write(len(payload).to_bytes(4, "big"))
        write(payload)
    else:
        write(payload)
        write(b"\n")


def document_of(event: "ReadEvent") -> dict[str, Any]:
    """Return an event as JSON."""
    document: dict[str, Any] = {
        "position": str(event.position),
        "index": event.batch_index,
        "tier": event.tier,
    }
    if event.partition is not None:
        document["partition"] = event.partition
    if event.publish_time_ms is not None:
        document["publish_time_ms"] = event.publish_time_ms
    if event.writer_id is not None:
        document["writer_id"] = str(event.writer_id)
    if event.event_time_ms is not None:
        document["event_time_ms"] = event.event_time_ms
    if event.properties:
        document["properties"] = dict(event.properties)
    if event.key is not None:
        document |= text_or_base64("key", event.key)
    return document | text_or_base64("payload", event.payload)


def text_or_base64(name: str, data: bytes) -> dict[str, str]:
    """Return data as a field of JSON: as text where it is UTF-8, else in base64."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode("ascii")}
