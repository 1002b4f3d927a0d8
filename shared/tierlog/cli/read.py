"""``tierlog read``: events of a stream to standard output; ``read explain``: how they are read."""

import asyncio
import base64
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, Self, TypeVar

import typer

from tierlog.cli.output import Output, json_of, print_json, print_one, print_table
from tierlog.cli.session import command, load
from tierlog.model.errors import RefusedError

if TYPE_CHECKING:
    from tierlog.client import Edge, Position, ReadEvent


STEP_COLUMNS: Final = ("what", "where", "start", "length", "outcome", "begun_us", "took_us")
ROWS_AT_ONCE: Final = 1000
COLUMNS: Final = ("position", "index", "tier", "bytes", "payload")

Thing = TypeVar("Thing")


class ReadOutput(StrEnum):
    """How events are printed."""

    RAW = "raw"
    BINARY = "binary"
    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


@command
def read(
    stream: Annotated[str, typer.Argument(help="The stream; or explain, and the stream after it.")],
    explained: Annotated[
        str | None,
        typer.Argument(metavar="[STREAM]", help="After explain: read once and say how."),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from", help="earliest, latest, LEDGER:ENTRY, or time:2026-01-31T12:00:00Z."
        ),
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

    Of a partitioned stream each partition's events come in order. With explain before the stream
    nothing is printed of it but which tier, which objects and which requests answered, and how
    many microseconds each took.
    """
    from tierlog.model.ids import stream_name
    from tierlog.model.position import TIME_PREFIX, Edge, Position, parse_position

    if explained is not None:
        _check_explain(stream)
        stream_name(explained)
        if follow or until is not None:
            raise RefusedError(
                "explain reads once, from --from on", remedy="Leave out --follow and --to"
            )
        asyncio.run(_explain(explained, start, limit or 1, output))
        return
    stream_name(stream)
    time = start.removeprefix(TIME_PREFIX) if start.startswith(TIME_PREFIX) else None
    where = parse_position(start, or_time=True) if time is None else Edge.EARLIEST
    end = Position.parse(until) if until is not None else None
    if follow and limit is None and output is ReadOutput.TABLE:
        raise RefusedError(
            f"a table is printed {ROWS_AT_ONCE} rows at a time, for which --follow may wait long",
            remedy="Use -o jsonl, or say how many events with -n",
        )
    asyncio.run(_read(stream, where, time, end, limit, follow=follow, output=output))


async def _read(
    stream: str,
    where: "Position | Edge",
    time: str | None,
    end: "Position | None",
    limit: int | None,
    *,
    follow: bool,
    output: ReadOutput,
) -> None:
    from tierlog.client import open_client
    from tierlog.client.reading import entries_of

    count = 0
    shown = Shown(
        output,
        COLUMNS,
        payload_of=attrgetter("payload"),
        row_of=_row_of,
        document_of=document_of,
    )
    async with open_client(load()) as client:
        if time is not None:
            where = await client.position_at(stream, time)
        # A limit of entries would do harm: one that changes attributes alone has no events.
        none = 0 if limit == 0 else None
        reader = client.reader(stream, start=where, until=end, limit=none, follow=follow)
        with shown:
            async for answer in reader.answers():
                for entry in entries_of(answer):
                    for event in reader.events_of(entry):
                        if count == limit:
                            break
                        shown.add(event)
                        count += 1
                sys.stdout.buffer.flush()
                if count == limit:
                    break


def _check_explain(word: str) -> None:
    if word != "explain":
        raise RefusedError(
            f"{word!r} and another word after it are two streams",
            remedy="Read one at a time; or say how it is read with: tierlog read explain STREAM",
        )


async def _explain(stream: str, start: str, limit: int, output: ReadOutput) -> None:
    from tierlog.client import open_client

    async with open_client(load()) as client:
        found = await client.explain_read(stream, start, entries=limit)
    if output in {ReadOutput.JSON, ReadOutput.JSONL}:
        print_json(found, indent=output is ReadOutput.JSON)
        return
    told = {name: value for name, value in found.items() if name != "steps"}
    print_one(told, Output.TABLE, title=f"A read of {stream}")
    print_table(found["steps"], dict.fromkeys(STEP_COLUMNS), title="Its steps")


class Shown(Generic[Thing]):
    """Prints things as they come, a table every ``ROWS_AT_ONCE`` of them, and what came at its end.

    A list in JSON that was not ended is not closed: whoever reads it sees that something lacks.
    """

    def __init__(
        self,
        output: ReadOutput,
        columns: Sequence[str],
        *,
        payload_of: Callable[[Thing], bytes],
        row_of: Callable[[Thing], dict[str, Any]],
        document_of: Callable[[Thing], dict[str, Any]],
    ) -> None:
        self._output = output
        self._columns = columns
        self._payload_of = payload_of
        self._row_of = row_of
        self._document_of = document_of
        self._rows: list[dict[str, Any]] = []
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if self._output is ReadOutput.TABLE and (self._rows or not self._count):
            self._print_rows()
        elif self._output is ReadOutput.JSON and error_type is None:
            sys.stdout.buffer.write(b"\n]\n" if self._count else b"[]\n")
        sys.stdout.buffer.flush()

    def add(self, thing: Thing) -> None:
        """Take one."""
        if self._output is ReadOutput.TABLE:
            self._rows.append(self._row_of(thing))
            if len(self._rows) == ROWS_AT_ONCE:
                self._print_rows()
        elif self._output is ReadOutput.JSONL:
            print_json(self._document_of(thing))
        elif self._output is ReadOutput.JSON:
            sys.stdout.buffer.write(b",\n" if self._count else b"[\n")
            sys.stdout.buffer.write(json_of(self._document_of(thing)))
        else:
            print_payload(self._payload_of(thing), self._output)
        self._count += 1

    def _print_rows(self) -> None:
        print_table(self._rows, dict.fromkeys(self._columns))
        self._rows.clear()


def _row_of(event: "ReadEvent") -> dict[str, Any]:
    return {
        "position": str(event.position),
        "index": event.batch_index,
        "tier": event.tier,
        "bytes": len(event.payload),
        "payload": beginning_of(event.payload),
    }


def beginning_of(data: bytes) -> str:
    """Return as much of some data as a table shows."""
    return data[:60].decode(errors="replace")


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
