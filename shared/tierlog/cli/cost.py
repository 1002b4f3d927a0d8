"""``tierlog cost …``: what the object store is asked for, and what that costs."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierlog.cli.output import Output, OutputOption, print_rows, say, size_text
from tierlog.cli.session import command, load
from tierlog.model.errors import RefusedError

if TYPE_CHECKING:
    from tierlog.model.prices import Prices
    from tierlog.runtime.security import SecuritySettings
    from tierlog.runtime.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Requests to the object store, and their price.")

TIMEOUT_S: Final = 10.0
SERVICES: Final = ("ingest", "offloader", "reader", "scheduler")
"""All kinds that ask the store for anything."""
AMOUNT_MAX: Final = 1e9
LEFT_OUT: Final = "manifests, attributes, and requests that are sent again"


def _price_text(value: float) -> str:
    return f"{value:.6f}"


SHOW_COLUMNS: Final = {
    "service": None,
    "stream": None,
    "cause": None,
    "operation": None,
    "requests": None,
    "bytes_sent": size_text,
    "bytes_received": size_text,
    "price": _price_text,
}

WHAT_IF_COLUMNS: Final = {
    "cause": None,
    "operation": None,
    "requests_per_month": None,
    "price_per_month": _price_text,
}


@app.command("show")
@command
def show(
    *,
    stream: Annotated[str | None, typer.Option(help="Only this stream.")] = None,
    service: Annotated[
        list[str] | None,
        typer.Option(help="HOST:PORT of a service; repeat it. Default: all of tierlog up."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what services asked of the store since they began, and what that cost.

    Prices are those of the settings (section prices); tries that were repeated are counted.
    """
    from tierlog.ports.spending import STREAMS_MAX

    settings = load()
    known = dict.fromkeys(service, "") if service else _known(settings)
    rows = asyncio.run(_rows(list(known), prices_of(settings), settings.security))
    rows, together = _of_stream(rows, stream)
    rows = [{**row, "currency": settings.prices.currency} for row in rows]
    print_rows(rows, SHOW_COLUMNS, output)
    for name, requests in together.items():
        say(
            f"{name} counts {requests} requests of further streams together, which may be of "
            f"{stream}, too: it tells {STREAMS_MAX} streams apart"
        )
    total = sum(row["price"] for row in rows)
    say(f"{sum(row['requests'] for row in rows)} requests, {total:.6f} {settings.prices.currency}")
    left_out = [kind for kind in SERVICES if kind not in known.values()]
    if left_out and not service:
        say(
            f"Not asked, and not in the sum: {', '.join(left_out)}. Their addresses are not in the "
            "settings: name all processes, those that were asked too, each with --service HOST:PORT"
        )


@app.command("what-if")
@command
def what_if(
    *,
    per_day: Annotated[str, typer.Option(help="What is appended a day, as in 100GB.")],
    ledger: Annotated[str, typer.Option(help="How long ledgers are.")] = "1GB",
    block: Annotated[str, typer.Option(help="The block size, which is a part's.")] = "64MiB",
    read_size: Annotated[str, typer.Option("--range", help="Bytes of one ranged GET.")] = "1MiB",
    reads: Annotated[
        float, typer.Option(min=0, max=AMOUNT_MAX, help="How often all is read from tier 2.")
    ] = 1.0,
    kept_days: Annotated[
        float, typer.Option(min=0, max=AMOUNT_MAX, help="How long it is kept.")
    ] = 30.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what a month would cost, with these sizes.

    Prices, how much of a copy is read back before the local one goes, and how often scrubs run,
    are those of the settings. Left out are manifests, attributes, and requests sent again.
    """
    from tierlog.cli.policy import parse_size
    from tierlog.model.prices import GB, Scrubs, Workload, predict, stored_bytes

    settings = load()
    prices, paced = prices_of(settings), settings.scheduler
    workload = Workload(
        bytes_per_day=parse_size(per_day),
        ledger_bytes=positive(parse_size(ledger), "--ledger"),
        block_bytes=positive(parse_size(block), "--block"),
        range_bytes=positive(parse_size(read_size), "--range"),
        reads=reads,
        kept_days=kept_days,
        read_back=settings.s3.read_back,
        scrubs=Scrubs.every(
            interval_s=paced.scrub_interval_s,
            deep_interval_s=paced.scrub_deep_interval_s,
            bytes_per_s=paced.scrub_bytes_per_s,
            deep_s_max=paced.scrub_deep_s_max,
        ),
    )
    currency = settings.prices.currency
    rows: list[dict[str, Any]] = [
        {
            "cause": one.cause,
            "operation": one.operation,
            "requests_per_month": round(one.requests),
            "price_per_month": prices.of_requests(
                one.operation, one.requests, received=one.received
            ),
            "currency": currency,
        }
        for one in predict(workload)
    ]
    rows.append(
        {
            "cause": "storage",
            "operation": f"{size_text(stored_bytes(workload))} kept",
            "requests_per_month": 0,
            "price_per_month": stored_bytes(workload) / GB * prices.stored_per_gb_month,
            "currency": currency,
        }
    )
    print_rows(rows, WHAT_IF_COLUMNS, output)
    total = sum(row["price_per_month"] for row in rows)
    say(f"{total:.2f} {currency} a month; not in it: {LEFT_OUT}")


def prices_of(settings: "Settings") -> "Prices":
    """Return the price list of the settings."""
    from tierlog.model.prices import Prices

    found = settings.prices
    return Prices(
        write_per_1000=found.write_per_1000,
        read_per_1000=found.read_per_1000,
        received_per_gb=found.received_per_gb,
        stored_per_gb_month=found.stored_per_gb_month,
    )


def positive(value: int, option: str) -> int:
    """Return a size, or refuse one of nothing."""
    if value <= 0:
        raise RefusedError(f"{option} is {value} bytes", remedy="Give a size above 0")
    return value


def _known(settings: "Settings") -> dict[str, str]:
    """Return where services serve HTTP, and of what kind each is.

    That is all that ``tierlog up`` started, else those in the settings.
    """
    from tierlog.client.endpoints import FILE_NAME, read_endpoints_file

    written = read_endpoints_file(settings.state_dir / FILE_NAME)
    if written is not None:
        return {
            addresses["http"]: kind
            for name, addresses in sorted(written.services.items())
            for kind in SERVICES
            if name.startswith(kind) and "http" in addresses
        }
    client = settings.client
    given = {client.reader_http_address: "reader", client.scheduler_http_address: "scheduler"}
    given.pop("", None)
    if not given:
        raise RefusedError(
            "no services are known", remedy="Start them with: tierlog up; or give --service"
        )
    return given


async def _rows(
    addresses: list[str], prices: "Prices", security: "SecuritySettings"
) -> list[dict[str, Any]]:
    from tierlog.wiring.costs import fetch_costs

    rows: list[dict[str, Any]] = []
    for address in addresses:
        found = await fetch_costs(address, timeout_s=TIMEOUT_S, security=security)
        rows += [
            {
                "service": f"{found.service} {address}",
                **one.model_dump(),
                "price": prices.of_requests(
                    one.operation, one.requests, received=one.bytes_received
                ),
            }
            for one in found.costs
        ]
    return rows


def _of_stream(
    rows: list[dict[str, Any]], stream: str | None
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the rows of a stream, and what services count that may be of it, too."""
    from tierlog.ports.spending import OTHER_STREAMS

    if stream is None:
        return rows, {}
    own = [row for row in rows if row["stream"] == stream]
    # Whoever tells it apart counts all of it by name.
    named, together = {row["service"] for row in own}, dict[str, int]()
    for row in rows:
        if row["stream"] == OTHER_STREAMS and row["service"] not in named:
            together[row["service"]] = together.get(row["service"], 0) + row["requests"]
    return own, together
