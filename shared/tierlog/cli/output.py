"""What commands print: tables for people, JSON for programs; progress on standard error.

Invariant: with json or jsonl nothing but JSON goes to standard output.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tierlog.ports.progress import Progress


class Output(StrEnum):
    """How a command prints its result."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="How to print the result.")]

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Any], str] | None]


def print_rows(rows: Sequence[Row], columns: Columns, output: Output, *, title: str = "") -> None:
    """Print rows; ``columns`` are what a table shows, in order, and how."""
    if output is Output.JSONL:
        for row in rows:
            print_json(row)
    elif output is Output.JSON:
        print_json(list(rows), indent=True)
    else:
        print_table(rows, columns, title=title)


def print_one(row: Row, output: Output, *, title: str = "") -> None:
    """Print one thing: its fields below each other in a table."""
    if output is Output.TABLE:
        shown = [{"field": name, "value": text_of(value)} for name, value in row.items()]
        print_table(shown, {"field": None, "value": None}, title=title)
    else:
        print_json(row, indent=output is Output.JSON)


def print_table(rows: Sequence[Row], columns: Columns, *, title: str = "") -> None:
    """Print a table to standard output, in plain ASCII where that is not a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    table = Table(title=title or None, box=box.ASCII2 if ascii_only() else box.SIMPLE_HEAD)
    for name in columns:
        numeric = all(isinstance(row.get(name), int | float) for row in rows) and bool(rows)
        table.add_column(
            name.replace("_", " "), justify="right" if numeric else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(
            *(
                Text((show or text_of)(row.get(name)) if row.get(name) is not None else "-")
                for name, show in columns.items()
            )
        )
    console.print(table)


def stdout_console() -> Any:  # noqa: ANN401 - rich is imported late
    """Return a console on standard output that is never narrower than a table needs."""
    from rich.console import Console

    class Stdout(Console):
        """Leaves it to the command what becomes of a reader that has enough; rich ends with 1."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    width = None if sys.stdout.isatty() else 160
    return Stdout(file=sys.stdout, width=width, highlight=False)


def ascii_only() -> bool:
    """Tell whether standard output takes ASCII alone, or is no terminal."""
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    return encoding not in {"utf8", "utf16", "utf32"} or not sys.stdout.isatty()


def print_json(value: object, *, indent: bool = False) -> None:
    """Print one JSON document and a line's end."""
    sys.stdout.buffer.write(json_of(value, indent=indent) + b"\n")
    sys.stdout.buffer.flush()


def json_of(value: object, *, indent: bool = False) -> bytes:
    """Return a JSON document."""
    import orjson

    options = orjson.OPT_INDENT_2 if indent else 0
    return orjson.dumps(value, default=str, option=options | orjson.OPT_NON_STR_KEYS)


def text_of(value: object) -> str:
    """Return a value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {text_of(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return "\n".join(text_of(one) for one in value) or "-"
    return str(value)


def size_text(size: object) -> str:
    """Return a number of bytes for people."""
    if not isinstance(size, int | float):
        return text_of(size)
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def time_text(value_ms: object) -> str:
    """Return milliseconds since 1970 for people, in UTC."""
    from datetime import UTC, datetime

    if not isinstance(value_ms, int) or value_ms <= 0:
        return "-"
    return datetime.fromtimestamp(value_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _tell_nobody(what: str, done: int, total: int | None) -> None:
    pass


@contextlib.contextmanager
def progress_bar(*, quiet: bool) -> "Iterator[Progress]":
    """Give a ``Progress`` that draws on standard error; silent with --quiet and off a terminal."""
    if quiet or not sys.stderr.isatty():
        yield _tell_nobody
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(file=sys.stderr)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("", total=None)

        def tell(what: str, done: int, total: int | None) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield tell


def say(text: str, *, quiet: bool = False) -> None:
    """Say something on standard error."""
    if not quiet:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
