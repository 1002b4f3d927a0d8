"""``tierlog append``: events from a file or standard input into a stream."""

import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO
from uuid import UUID

import typer

from tierlog.cli.inputs import EVENT_BYTES_MAX, EventParser, InputFormat, Keying
from tierlog.cli.output import Output, OutputOption, print_one, progress_bar
from tierlog.cli.session import Quiet, command, load
from tierlog.cli.state_file import save_state, writer_state
from tierlog.model.errors import Reason, RefusedError

if TYPE_CHECKING:
    from tierlog.client import Event, SyncWriter, WriterState
    from tierlog.ports.progress import Progress

PIECE_BYTES = 1024 * 1024


class Compression(StrEnum):
    """How events of an entry are compressed."""

    NONE = "none"
    ZSTD = "zstd"
    LZ4 = "lz4"


@command
def append(  # noqa: PLR0913 - options of a command
    stream: Annotated[str, typer.Argument(help="The stream; made if there is none.")],
    file: Annotated[
        Path | None, typer.Argument(help="What to append; - or nothing: standard input.")
    ] = None,
    input_format: Annotated[
        InputFormat, typer.Option("--format", "-f", help="How events lie in the input.")
    ] = InputFormat.LINES,
    *,
    raw: Annotated[
        bool, typer.Option("--raw", help="Entry data is the event and nothing more.")
    ] = False,
    key_field: Annotated[
        str | None, typer.Option(help="The field of each JSON event that is its key.")
    ] = None,
    key_separator: Annotated[
        str | None, typer.Option(help="What stands between the key of each event and the rest.")
    ] = None,
    batch_bytes: Annotated[
        int | None, typer.Option("--batch-bytes", min=1, help="Events of one entry, in bytes.")
    ] = None,
    compression: Annotated[
        Compression | None,
        typer.Option(help="Of the events of each entry; without it, as the settings say."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="Where the writer's state is kept: again with it: what is there stays."),
    ] = None,
    writer_id: Annotated[
        UUID | None, typer.Option(help="The writer's id, in place of --state or of a random one.")
    ] = None,
    if_last_event_number: Annotated[
        int | None,
        typer.Option(min=0, help="All as one entry, if this is the writer's last event; 0: none."),
    ] = None,
    if_after: Annotated[
        str | None,
        typer.Option(help="All as one entry, if the last one is LEDGER:ENTRY; earliest: none is."),
    ] = None,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Append events to a stream; they are durable when this ends with 0.

    In a partitioned stream the key of an event decides its partition. With --state or --writer-id
    the same input can be given again after a crash: events that are there are passed over.
    """
    from tierlog.model.ids import stream_name

    stream_name(stream)
    keying = _keying(key_field, key_separator, raw=raw)
    given = _Given(
        stream,
        raw=raw,
        batch_bytes=batch_bytes,
        compression=compression,
        state=state,
        writer_id=writer_id,
    )
    source, parser = open_input(file), EventParser(input_format)
    if if_last_event_number is not None or if_after is not None:
        given.check_conditional()
        print_one(_append_if(given, source, parser, keying, if_last_event_number, if_after), output)
        return
    with progress_bar(quiet=quiet) as progress:
        print_one(_append(given, source, parser, keying, progress), output)


@dataclass(frozen=True, slots=True)
class _Given:
    """The options that say how to append."""

    stream: str
    raw: bool
    batch_bytes: int | None
    compression: Compression | None
    state: Path | None
    writer_id: UUID | None

    def check_conditional(self) -> None:
        if self.raw:
            raise RefusedError(
                "entries of a raw stream have no place for a condition", remedy="Leave out --raw"
            )
        if any(one is not None for one in (self.state, self.batch_bytes, self.compression)):
            raise RefusedError(
                "a conditional append is one entry that is not compressed, and keeps no state",
                remedy="Leave out --state, --batch-bytes and --compression",
            )


def _append(
    given: _Given,
    source: BinaryIO,
    parser: EventParser,
    keying: Keying | None,
    progress: "Progress",
) -> dict[str, object]:
    """Append by a writer; return what is printed of it."""
    from tierlog.client import SyncClient

    with SyncClient(load()) as client:
        state = writer_state(client, given.state, given.writer_id)
        with client.writer(
            given.stream,
            raw=given.raw,
            batch_bytes=given.batch_bytes,
            compression=given.compression,
            state=state,
            from_start=state is not None,
            progress=progress,
        ) as writer:
            try:
                _append_all(source, parser, writer, keying)
                writer.flush()
            finally:
                if given.state is not None:
                    save_state(given.state, writer.state())
            if state is not None:
                _check_same_input(writer)
            return _result(given.stream, writer, state)


def _result(stream: str, writer: "SyncWriter", state: "WriterState | None") -> dict[str, object]:
    places = {str(name): str(place) for name, place in writer.last_positions.items()}
    result: dict[str, object] = {
        "stream": stream,
        "events": writer.acked_events,
        "bytes": writer.acked_bytes,
    }
    if set(places) <= {stream}:
        result["last_position"] = places.get(stream)
    else:
        result["last_positions"] = places
    if state is not None:
        result["writer_id"] = str(state.writer_id)
        result["passed_over"] = writer.skipped_events
    return result


def _check_same_input(writer: "SyncWriter") -> None:
    there = sum(writer.resumed_event_numbers.values())
    if writer.skipped_events < there:
        raise RefusedError(
            f"{there} events of this writer are there, and the input has {writer.skipped_events}",
            remedy="Give the input that this state or writer id belongs to, from its first event",
        )


def _append_if(
    given: _Given,
    source: BinaryIO,
    parser: EventParser,
    keying: Keying | None,
    last_event_number: int | None,
    after: str | None,
) -> dict[str, object]:
    """Append all as one entry, if what is given holds; return what is printed of it."""
    from tierlog.client import SyncClient
    from tierlog.model.position import Edge, parse_position

    where = parse_position(after) if after is not None else None
    if where is Edge.LATEST:
        raise RefusedError("--if-after latest always holds", remedy="Name a position, or earliest")
    events = list(_all_of(source, parser, keying))
    with SyncClient(load()) as client:
        place = client.append(
            given.stream,
            events,
            writer_id=given.writer_id,
            last_event_number=last_event_number,
            after=where,
        )
    result: dict[str, object] = {
        "stream": given.stream,
        "events": len(events),
        "last_position": str(place) if place is not None else None,
    }
    if last_event_number is not None:
        result["last_event_number"] = last_event_number + len(events)
    return result


def _all_of(source: BinaryIO, parser: EventParser, keying: Keying | None) -> "Iterator[Event]":
    def plain() -> Iterator[bytes]:
        length = 0
        for piece in pieces_of(source):
            length += len(piece)
            if length > EVENT_BYTES_MAX:
                raise RefusedError(
                    f"the input is above the {EVENT_BYTES_MAX} bytes of one entry",
                    reason=Reason.TOO_LARGE,
                    remedy="Append it in several entries",
                )
            yield from parser.feed(piece)
        yield from parser.finish()

    yield from plain() if keying is None else keying.keyed(plain())


def _keying(field: str | None, separator: str | None, *, raw: bool) -> Keying | None:
    if field is None and separator is None:
        return None
    if field is not None and separator is not None:
        raise RefusedError("two places for one key", remedy="Use --key-field or --key-separator")
    if raw:
        raise RefusedError(
            "entries of a raw stream have no place for a key", remedy="Leave out --raw"
        )
    if separator == "":
        raise RefusedError("an empty --key-separator", remedy="Give at least one character")
    return Keying(field=field, separator=separator.encode() if separator else None)


def _append_all(
    source: BinaryIO, parser: EventParser, writer: "SyncWriter", keying: Keying | None
) -> None:
    def events(found: Iterator[bytes]) -> "Iterator[Event]":
        return found if keying is None else keying.keyed(found)

    try:
        for piece in pieces_of(source):
            writer.send_all(events(parser.feed(piece)))
            if not _more_at_once(source):
                writer.flush()
        writer.send_all(events(parser.finish()))
    except RefusedError as error:
        if "acknowledged_events" not in error.details:
            # The input is bad from here on; what came before it stands.
            writer.flush()
        count = error.details.get("acknowledged_events", str(writer.acked_events))
        error.remedy = f"{error.remedy}. The {count} events before it are appended".lstrip(". ")
        raise


def open_input(file: Path | None) -> BinaryIO:
    """Return what to read: a file, or standard input for none and for ``-``."""
    if file is None or str(file) == "-":
        return sys.stdin.buffer
    if file.is_dir():
        raise RefusedError(f"{file} is a directory", remedy="Name a file")
    try:
        return file.open("rb")
    except OSError as error:
        raise RefusedError(
            f"{file} can't be read: {error.strerror}", remedy="Check the path and its permissions"
        ) from error


def pieces_of(source: BinaryIO) -> Iterator[bytes]:
    """Iterate over the input as it comes."""
    read = getattr(source, "read1", source.read)
    while piece := read(PIECE_BYTES):
        yield piece


def _more_at_once(source: BinaryIO) -> bool:
    """Tell whether more input is there; if not, what was read is made durable meanwhile."""
    try:
        ready, _, _ = select.select([source], [], [], 0)
    except (OSError, ValueError):
        return True
    return bool(ready)
