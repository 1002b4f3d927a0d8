"""``tierlog object …``: look into the objects of tier 2, wherever they are."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierlog.cli.output import Output, OutputOption, print_json, print_rows, size_text
from tierlog.cli.session import command, load
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.scrub import REPAIR_COPY

if TYPE_CHECKING:
    from tierlog.format.inspect import Report

app = typer.Typer(no_args_is_help=True, help="Objects in tier 2.")

HEXDUMP_BYTES: Final = 4096
HEX_LINE: Final = 16


@app.command("inspect")
@command
def inspect(
    target: Annotated[str, typer.Argument(help="s3://BUCKET/KEY, or a file.")],
    *,
    hexdump: Annotated[
        bool, typer.Option("--hexdump", help="Print the fields' bytes too.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print a data, index, side or single object, or a manifest, with offsets and names.

    Exit 6 when it is damaged.
    """
    if target.startswith("s3://"):
        report, head = asyncio.run(_report_of_object(target))
    else:
        report, head = _report_of_path(target)
    if output is Output.TABLE:
        _print_tables(target, report)
        if hexdump:
            for line in hex_lines(head):
                print(line)  # noqa: T201
    else:
        document = document_of(target, report)
        if hexdump:
            document["hexdump"] = list(hex_lines(head))
        print_json(document, indent=output is Output.JSON)
    if not report.sound:
        first = report.problems[0]
        raise CorruptError(
            f"{target} has {len(report.problems)} problems, the first at byte {first.offset}: "
            f"{first.message}",
            remedy=REPAIR_COPY,
        )


def _report_of_path(target: str) -> "tuple[Report, bytes]":
    path = Path(target)
    try:
        size = path.stat().st_size
        if not path.is_file():
            kind = "a directory" if path.is_dir() else "no regular file"
            raise RefusedError(f"{path} is {kind}", remedy="Name a file or s3://BUCKET/KEY")
        return _report_of_file(path, size)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise RefusedError(
            f"{path} can't be read: {error.strerror}",
            reason=Reason.NO_SUCH_ENTRY if missing else Reason.INVALID_ARGUMENT,
            remedy="Name a file that exists, or s3://BUCKET/KEY",
        ) from error


def _report_of_file(path: Path, size: int) -> "tuple[Report, bytes]":
    from tierlog.format.inspect import inspect_object

    with path.open("rb") as file:

        def read(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        return inspect_object(read, size), read(0, HEXDUMP_BYTES)


async def _report_of_object(target: str) -> "tuple[Report, bytes]":
    from tierlog.format.inspect import inspect_object_async
    from tierlog.wiring.objects import open_bucket

    bucket, _, key = target.removeprefix("s3://").partition("/")
    if not bucket or not key:
        raise RefusedError(f"{target} names no object", remedy="Write s3://BUCKET/KEY")
    async with open_bucket(load_s3(), bucket) as objects:
        info = await objects.head(key)
        if info is None:
            raise RefusedError(
                f"there is no object {target}",
                reason=Reason.NO_SUCH_ENTRY,
                remedy="See the keys of a ledger's objects with: tierlog ledger show ID",
            )

        async def read(offset: int, length: int) -> bytes:
            data = await objects.get_range(key, offset, length)
            return b"" if data is None else data

        report = await inspect_object_async(read, info.size)
        return report, await read(0, min(HEXDUMP_BYTES, info.size))


def _print_tables(target: str, report: "Report") -> None:
    fields = [
        {"offset": f"{one.offset:08x}", "len": one.length, "name": one.name, "value": one.value}
        for one in report.fields
    ]
    columns: dict[str, Any] = dict.fromkeys(("offset", "len", "name", "value"))
    title = f"{target}: {report.kind.value} object of {report.size} bytes"
    print_rows(fields, columns, Output.TABLE, title=title)
    if report.blocks:
        block_columns: dict[str, Any] = dict.fromkeys(_BLOCK_KEYS)
        block_columns |= {"payload_len": size_text, "padding_len": None}
        print_rows(_blocks(report), block_columns, Output.TABLE, title="blocks")
    if report.problems:
        problems = [{"offset": f"{p.offset:08x}", "problem": p.message} for p in report.problems]
        print_rows(problems, {"offset": None, "problem": None}, Output.TABLE, title="problems")


_BLOCK_KEYS: Final = ("offset", "block_len", "first_entry_id", "last_entry_id", "entry_count")


def _blocks(report: "Report") -> list[dict[str, Any]]:
    return [
        {name: getattr(block, name) for name in (*_BLOCK_KEYS, "payload_len", "padding_len")}
        for block in report.blocks
    ]


def document_of(target: str, report: "Report") -> dict[str, Any]:
    """Return the inspection as JSON."""
    return {
        "target": target,
        "kind": report.kind.value,
        "size": report.size,
        "sound": report.sound,
        "entries": report.entry_count,
        "fields": [
            {"offset": one.offset, "length": one.length, "name": one.name, "value": one.value}
            for one in report.fields
        ],
        "blocks": _blocks(report),
        "problems": [{"offset": one.offset, "message": one.message} for one in report.problems],
    }


def hex_lines(data: bytes, *, offset: int = 0) -> Iterator[str]:
    """Iterate over a dump of ``data``; lines that repeat the one before are left out."""
    before, skipped = b"", False
    for start in range(0, len(data), HEX_LINE):
        line = data[start : start + HEX_LINE]
        if line == before:
            if not skipped:
                yield "*"
            skipped = True
            continue
        before, skipped = line, False
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in line)
        yield f"{offset + start:08x}  {line.hex(' '):<{3 * HEX_LINE - 1}}  |{text}|"


def load_s3() -> Any:  # noqa: ANN401 - settings are imported late
    """Return the settings, with the S3 server that ``tierlog up`` runs where none is set."""
    from tierlog.client.endpoints import FILE_NAME, read_endpoints_file

    settings = load()
    if settings.s3.endpoint_url is not None:
        return settings
    written = read_endpoints_file(settings.state_dir / FILE_NAME)
    if written is None:
        return settings
    servers = written.servers
    if "s3_secret_key" not in servers:
        # Somebody else's server: its keys come from the settings, as for tierlog up.
        s3 = settings.s3.model_copy(update={"endpoint_url": servers["s3"]})
        return settings.model_copy(update={"s3": s3})
    s3 = settings.s3.model_copy(
        update={
            "endpoint_url": servers["s3"],
            "access_key": servers["s3_access_key"],
            "secret_key": _secret(servers["s3_secret_key"]),
        }
    )
    return settings.model_copy(update={"s3": s3})


def _secret(text: str) -> Any:  # noqa: ANN401 - pydantic is imported late
    from pydantic import SecretStr

    return SecretStr(text)
