"""``tierlog policy …``: the thresholds of a stream."""

import re
from typing import Annotated, Any, Final

import typer

from tierlog.cli.output import Output, OutputOption, print_json, print_table
from tierlog.cli.session import command
from tierlog.cli.stream import Name, with_client
from tierlog.model.errors import RefusedError

app = typer.Typer(no_args_is_help=True, help="Thresholds: when to roll, offload, delete, trim.")

_SIZES: Final = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_TIMES: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_AMOUNT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)

Time = Annotated[str | None, typer.Option(help="As 500ms, 30s, 10m, 4h, 7d; never; none: unset.")]
Size = Annotated[str | None, typer.Option(help="As 512k, 64M, 1G; none: unset.")]


@app.command("show")
@command
def show(stream: Name, *, output: OutputOption = Output.TABLE) -> None:
    """Show a stream's thresholds."""
    _print(with_client(lambda client: client.policy(stream)), output)


@app.command("set")
@command
def set_policy(  # noqa: PLR0913 - one option a threshold
    stream: Name,
    *,
    offload_time: Time = None,
    offload_size: Size = None,
    retention_time: Time = None,
    retention_size: Size = None,
    deletion_lag: Time = None,
    ledger_bytes_max: Size = None,
    ledger_entries_max: Annotated[int | None, typer.Option(min=1)] = None,
    ledger_age_max: Time = None,
    block_size: Size = None,
    offloaded_read_priority: Annotated[
        str | None, typer.Option(help="tier1 or tier2: where to read what both have.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change some of a stream's own thresholds; the others stay."""
    changes: dict[str, Any] = {
        "offload_time_ms": _parsed(offload_time, parse_time),
        "offload_size_bytes": _parsed(offload_size, parse_size),
        "retention_time_ms": _parsed(retention_time, parse_time),
        "retention_size_bytes": _parsed(retention_size, parse_size),
        "deletion_lag_ms": _parsed(deletion_lag, parse_time),
        "ledger_bytes_max": _parsed(ledger_bytes_max, parse_size),
        "ledger_entries_max": (ledger_entries_max,) if ledger_entries_max else None,
        "ledger_age_ms_max": _parsed(ledger_age_max, parse_time),
        "block_size": _parsed(block_size, parse_size),
        "offloaded_read_priority": (offloaded_read_priority,) if offloaded_read_priority else None,
    }
    changed = {name: one[0] for name, one in changes.items() if one is not None}
    if not changed:
        raise RefusedError("no threshold is given", remedy="See: tierlog policy set --help")

    async def change(client: Any) -> Any:  # noqa: ANN401 - JSON
        found = await client.policy(stream)
        return await client.set_policy(stream, {**found["own"], **changed})

    _print(with_client(change), output)


def _print(found: Any, output: Output) -> None:  # noqa: ANN401 - JSON
    if output is not Output.TABLE:
        print_json(found, indent=output is Output.JSON)
        return
    rows = [
        {"threshold": name, "own": found["own"][name], "effective": value}
        for name, value in found["effective"].items()
    ]
    print_table(rows, dict.fromkeys(("threshold", "own", "effective")))


def _parsed(text: str | None, parse: Any) -> tuple[int | None] | None:  # noqa: ANN401
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
    return int(amount * factor)


def parse_time(text: str) -> int:
    """Read a time in milliseconds, as 10m; ``never`` is -1."""
    if text == "never":
        return -1
    amount, unit = _amount(text)
    if unit not in _TIMES:
        raise _refused(text, "a time", "500ms, 30s, 10m, 4h, 7d")
    return int(amount * _TIMES[unit])


def _amount(text: str) -> tuple[float, str]:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise _refused(text, "an amount", "64M, 10m")
    return float(match[1]), match[2].lower()


def _refused(text: str, what: str, examples: str) -> RefusedError:
    return RefusedError(f"{text[:40]!r} is not {what}", remedy=f"Write it as {examples}")
