"""``tierlog append``: events from a file or standard input into a stream."""

import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from tierlog.cli.inputs import EventParser, InputFormat, Keying
from tierlog.cli.output import Output, OutputOption, print_one, progress_bar
from tierlog.cli.session import Quiet, command, load
from tierlog.model.errors import RefusedError

if TYPE_CHECKING:
    from tierlog.client import Event, SyncWriter

PIECE_BYTES = 1024 * 1024


@command
def append(
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
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Append events to a stream; they are durable when this ends with 0.

    In a partitioned stream the key of an event decides its partition.
    """
    from tierlog.client import SyncClient
    from tierlog.model.ids import stream_name

    stream_name(stream)
    keying = _keying(key_field, key_separator, raw=raw)
    source = open_input(file)
    with (
        progress_bar(quiet=quiet) as progress,
        SyncClient(load()) as client,
        client.writer(stream, raw=raw, batch_bytes=batch_bytes, progress=progress) as writer,
    ):
        _append_all(source, EventParser(input_format), writer, keying)
        writer.flush()
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
    print_one(result, output)


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
