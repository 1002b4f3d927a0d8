"""``tierlog policy …``: the thresholds of streams, namespaces and the cluster."""

import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierlog.cli.output import (
    Output,
    OutputOption,
    print_json,
    print_one,
    print_table,
    time_text,
)
from tierlog.cli.session import command
from tierlog.cli.stream import Name, with_client
from tierlog.model.errors import RefusedError
from tierlog.model.ids import INT64_MAX
from tierlog.model.policy import MIB, MINUTE_MS, NEVER, check_namespace

if TYPE_CHECKING:
    from tierlog.client import Client

app = typer.Typer(no_args_is_help=True, help="Thresholds: when to roll, offload, delete, trim.")

_SIZES: Final = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_TIMES: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL_COLUMNS: Final = ("threshold", "own", "effective")
_NEVER: Final = ("never", str(NEVER))
_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)

Time = Annotated[str | None, typer.Option(help="As 500ms, 30s, 10m, 4h, 7d; never; none: unset.")]
Age = Annotated[str | None, typer.Option(help="As 500ms, 30s, 10m, 4h, 7d; none: unset.")]
Size = Annotated[str | None, typer.Option(help="As 512k, 64M, 1G; none: unset.")]
Count = Annotated[str | None, typer.Option(help="As 100000; none: unset.")]
Limit = Annotated[str | None, typer.Option(help="As 512k, 64M, 1G; never; none: unset.")]
Sha256 = Annotated[
    str | None, typer.Option(help="yes or no: keep a SHA-256 of each data object; none: unset.")
]
HowMuch = Annotated[
    str | None,
    typer.Option(help="sample or full: what of a copy is read before the local goes; none: unset."),
]
Stream = Annotated[str | None, typer.Argument(help="The stream.")]
Namespace = Annotated[
    str | None, typer.Option(help="Of all streams whose name begins with this and a dot.")
]
Cluster = Annotated[bool, typer.Option("--cluster", help="Of all streams.")]

# The seed's names and units, of the same thresholds.
OffloadMinutes = Annotated[
    float | None, typer.Option("--offloadTimeInMinutes", help="The same as --offload-time.")
]
OffloadMegabytes = Annotated[
    float | None, typer.Option("--offloadSizeInMB", help="The same as --offload-size.")
]
RetentionMinutes = Annotated[
    float | None, typer.Option("--retentionTimeInMinutes", help="The same as --retention-time.")
]
RetentionMegabytes = Annotated[
    float | None, typer.Option("--retentionSizeInMB", help="The same as --retention-size.")
]

STEPS: Final = {"ledger_id": None, "what": None, "in": None, "at_ms": time_text, "why": None}


@app.command("show")
@command
def show(
    stream: Stream = None,
    *,
    namespace: Namespace = None,
    cluster: Cluster = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the thresholds of a stream, of a namespace or of the cluster."""
    level = _level(stream, namespace, cluster=cluster)
    _print(with_client(lambda client: _read(client, stream, level)), output)


@app.command("set")
@command
def set_policy(  # noqa: PLR0913 - one option a threshold
    stream: Stream = None,
    *,
    namespace: Namespace = None,
    cluster: Cluster = False,
    offload_time: Time = None,
    offload_size: Limit = None,
    retention_time: Time = None,
    retention_size: Limit = None,
    deletion_lag: Time = None,
    ledger_bytes_max: Size = None,
    ledger_entries_max: Count = None,
    ledger_age_max: Age = None,
    block_size: Size = None,
    offloaded_read_priority: Annotated[
        str | None, typer.Option(help="tier1 or tier2: where to read what both have; none: unset.")
    ] = None,
    data_sha256: Sha256 = None,
    read_back: HowMuch = None,
    offload_minutes: OffloadMinutes = None,
    offload_megabytes: OffloadMegabytes = None,
    retention_minutes: RetentionMinutes = None,
    retention_megabytes: RetentionMegabytes = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change some thresholds of a stream, of a namespace or of the cluster; the others stay."""
    level = _level(stream, namespace, cluster=cluster)
    changes: dict[str, Any] = {
        "offload_time_ms": _parsed(offload_time, parse_time),
        "offload_size_bytes": _parsed(offload_size, parse_limit),
        "retention_time_ms": _parsed(retention_time, parse_time),
        "retention_size_bytes": _parsed(retention_size, parse_limit),
        "deletion_lag_ms": _parsed(deletion_lag, parse_time),
        "ledger_bytes_max": _parsed(ledger_bytes_max, parse_size),
        "ledger_entries_max": _parsed(ledger_entries_max, parse_count),
        "ledger_age_ms_max": _parsed(ledger_age_max, parse_age),
        "block_size": _parsed(block_size, parse_size),
        "offloaded_read_priority": _parsed(offloaded_read_priority, str),
        "data_sha256": _parsed(data_sha256, parse_yes),
        "read_back": _parsed(read_back, str),
    }
    for name, amount, factor in (
        ("offload_time_ms", offload_minutes, MINUTE_MS),
        ("offload_size_bytes", offload_megabytes, MIB),
        ("retention_time_ms", retention_minutes, MINUTE_MS),
        ("retention_size_bytes", retention_megabytes, MIB),
    ):
        if amount is None:
            continue
        if changes[name] is not None:
            raise RefusedError(
                f"{name} is given in two units", remedy="Give one of the two options"
            )
        changes[name] = (NEVER if amount == NEVER else _whole(amount * factor, str(amount)),)
    changed = {name: one[0] for name, one in changes.items() if one is not None}
    if not changed:
        raise RefusedError("no threshold is given", remedy="See: tierlog policy set --help")

    async def change(client: "Client") -> Any:  # noqa: ANN401 - JSON
        if stream is not None:
            return await client.change_policy(stream, changed)
        return await client.change_level(level, changed)

    _print(with_client(change), output)


@app.command("explain")
@command
def explain(stream: Name, *, output: OutputOption = Output.TABLE) -> None:
    """Show which level gives each threshold, and what happens to each ledger, when and why."""
    found = dict(with_client(lambda client: client.explain(stream)))
    if output is not Output.TABLE:
        print_json(found, indent=output is Output.JSON)
        return
    thresholds, steps = found.pop("thresholds"), found.pop("ledgers")
    print_one(found, output)
    print_table(thresholds, {"name": None, "value": None, "level": None})
    partitioned = any(one.get("stream", stream) != stream for one in steps)
    columns = {"stream": None, **STEPS} if partitioned else STEPS
    print_table([{**one, "in": _until(one["in_ms"])} for one in steps], columns)


def _until(in_ms: int | None) -> str:
    """Return how long it is till then, for people."""
    if in_ms is None:
        return "-"
    if in_ms == 0:
        return "now"
    seconds = in_ms / 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _level(stream: str | None, namespace: str | None, *, cluster: bool) -> str | None:
    """Check that one thing is named; return the namespace, or None."""
    if (stream is not None) + (namespace is not None) + cluster != 1:
        raise RefusedError(
            "name a stream, or --namespace, or --cluster",
            remedy="As: tierlog policy show orders.paid; tierlog policy show --namespace orders",
        )
    return check_namespace(namespace) if namespace is not None else None


async def _read(client: "Client", stream: str | None, namespace: str | None) -> Any:  # noqa: ANN401
    if stream is not None:
        return await client.policy(stream)
    return await client.level(namespace)


def _print(found: Any, output: Output) -> None:  # noqa: ANN401 - JSON
    if output is not Output.TABLE:
        print_json(found, indent=output is Output.JSON)
        return
    levels = found.get("levels", {})
    rows = [
        {
            "threshold": name,
            "own": found["own"][name],
            "effective": value,
            "level": levels.get(name),
        }
        for name, value in found["effective"].items()
    ]
    columns = ("threshold", "own", "effective", "level") if levels else _LEVEL_COLUMNS
    print_table(rows, dict.fromkeys(columns))


def _parsed(text: str | None, parse: Any) -> tuple[Any] | None:  # noqa: ANN401
    """Return a one-tuple of the new value; None: not given."""
    if text is None:
        return None
    return (None,) if text == "none" else (parse(text),)


def parse_size(text: str) -> int:
    """Read a number of bytes, as 64M; units are binary."""
    amount, unit = _amount(text)
    factor = _SIZES.get(unit.removesuffix("ib").removesuffix("b") or unit[:0])
    if factor is None:
        raise _refused(text, "a size", "512k, 64M, 1G")
    return _whole(amount * factor, text)


def parse_limit(text: str) -> int:
    """Read a number of bytes, as 64M; ``never`` or -1."""
    return NEVER if text in _NEVER else parse_size(text)


def parse_time(text: str) -> int:
    """Read a time in milliseconds, as 10m; ``never`` or -1."""
    return NEVER if text in _NEVER else parse_age(text)


def parse_age(text: str) -> int:
    """Read a time in milliseconds that comes, as 10m."""
    if text in _NEVER:
        raise _refused(text, "an age, which each ledger reaches", "4h, 7d, or as long as it may be")
    amount, unit = _amount(text)
    if unit not in _TIMES:
        raise _refused(text, "a time", "500ms, 30s, 10m, 4h, 7d")
    return _whole(amount * _TIMES[unit], text)


def parse_count(text: str) -> int:
    """Read a number."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < INT64_MAX):
        raise _refused(text, "a number from 1 on", "100000")
    return int(text)


def parse_yes(text: str) -> bool:
    """Read yes or no."""
    if text not in {"yes", "no"}:
        raise _refused(text, "yes or no", "yes, no, or none to leave it to the level above")
    return text == "yes"


def _whole(amount: float, text: str) -> int:
    """Return a number of bytes or milliseconds that 64 bits hold."""
    if not abs(amount) < INT64_MAX:
        raise _refused(text, "an amount that 64 bits hold", "64M, 10m, or never")
    return round(amount)


def _amount(text: str) -> tuple[float, str]:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise _refused(text, "an amount", "64M, 10m, or never where that is one")
    return float(match[1]), match[2].lower()


def _refused(text: str, what: str, examples: str) -> RefusedError:
    return RefusedError(f"{text[:40]!r} is not {what}", remedy=f"Write it as {examples}")
