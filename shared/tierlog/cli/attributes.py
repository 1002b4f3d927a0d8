"""``tierlog attributes …``: what a stream keeps besides its events, by key."""

from collections.abc import Iterable
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import typer

from tierlog.cli.output import Output, OutputOption, print_one, print_rows
from tierlog.cli.session import command, load
from tierlog.model.attributes import VALUE_MAX, VALUE_MIN
from tierlog.model.core_attributes import CORE_NAMES
from tierlog.model.errors import RefusedError

if TYPE_CHECKING:
    from tierlog.client import AttributeUpdate
    from tierlog.client.attribute_rebuild import Losses
    from tierlog.model.attribute_record import GivenUp, LostKeys

app = typer.Typer(
    no_args_is_help=True, help="Attributes of streams: writers' numbers, and values of your own."
)

NAMES: Final = {name: UUID(bytes=bytes(key)) for key, name in CORE_NAMES.items()}
NAME_OF: Final = {key: name for name, key in NAMES.items()}
COLUMNS: Final = {"key": None, "name": None, "value": None}
LOST_COLUMNS: Final = {
    "ledger_id": None,
    "first_entry_id": None,
    "last_entry_id": None,
    "entries": None,
    "through": None,
    "first_key": None,
    "last_key": None,
}


class VerbName(StrEnum):
    """What an update does, as the command line says it."""

    REPLACE = "replace"
    REPLACE_IF_GREATER = "replace-if-greater"
    REPLACE_IF_EQUALS = "replace-if-equals"
    REPLACE_IF_ABSENT = "replace-if-absent"
    ACCUMULATE = "accumulate"


Stream = Annotated[str, typer.Argument(help="The stream, or a partition.")]


@app.command("get")
@command
def get(
    stream: Stream,
    keys: Annotated[
        list[str],
        typer.Argument(help="UUIDs, such as writers' ids; names such as event-count."),
    ],
    *,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the values of attributes as of the last confirmed entry; one not there has none.

    Core attributes have names: event-count and creation-time; scale-policy-type (0: the stream does
    not scale by itself), scale-policy-rate and scale-policy-segments-min; roll-over-bytes,
    roll-over-entries and roll-over-age-ms as the policy has them now; index-root-offset (-1: there
    is no index yet) and index-root-length.
    """
    from tierlog.client import SyncClient

    wanted = [key_of(one) for one in keys]
    with SyncClient(load()) as client:
        found = client.get_attributes(stream, wanted)
    print_rows([_row(key, found.get(key)) for key in wanted], COLUMNS, output)


@app.command("list")
@command
def list_attributes(
    stream: Stream,
    *,
    first: Annotated[str | None, typer.Option("--from", help="Begin with this key.")] = None,
    last: Annotated[str | None, typer.Option("--to", help="End with this key.")] = None,
    limit: Annotated[int | None, typer.Option("-n", min=0, help="At most that many.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List a stream's attributes by key: core ones by name, its own, and those of its writers."""
    from tierlog.client import SyncClient
    from tierlog.client.attributes import FIRST, LAST

    with SyncClient(load()) as client:
        found = client.list_attributes(
            stream,
            first=key_of(first) if first is not None else FIRST,
            last=key_of(last) if last is not None else LAST,
        )
        rows = [_row(key, value) for key, value in islice(found, limit)]
    print_rows(rows, COLUMNS, output)


@app.command("set")
@command
def set_attributes(
    stream: Annotated[str, typer.Argument(help="The stream; made if there is none.")],
    pairs: Annotated[list[str], typer.Argument(metavar="KEY=VALUE…", help="UUIDs and numbers.")],
    *,
    verb: Annotated[VerbName, typer.Option(help="What is done.")] = VerbName.REPLACE,
    expected: Annotated[
        int | None,
        typer.Option(min=VALUE_MIN, max=VALUE_MAX, help="For replace-if-equals: what is there."),
    ] = None,
    if_after: Annotated[
        str | None, typer.Option(help="Only if the last entry is LEDGER:ENTRY; earliest: none is.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Update attributes, all of them or none, in one entry without events.

    replace-if-greater wants a value that is there. accumulate adds, to nothing as to 0.
    """
    from tierlog.client import SyncClient
    from tierlog.model.position import parse_position

    if (expected is not None) != (verb is VerbName.REPLACE_IF_EQUALS):
        raise RefusedError(
            "--expected and --verb replace-if-equals belong together", remedy="Give both, or none"
        )
    updates = updates_of(pairs, verb, expected or 0)
    after = parse_position(if_after) if if_after is not None else None
    with SyncClient(load()) as client:
        place = client.update_attributes(stream, updates, after=after)
    print_one({"stream": stream, "updated": len(updates), "position": str(place)}, output)


@app.command("rebuild")
@command
def rebuild(
    stream: Stream,
    *,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="What neither tier gives never comes back: go on without it."
        ),
    ] = False,
    wait_s: Annotated[
        float, typer.Option(min=0, help="So long it may take until the stream goes on.")
    ] = 60.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let a stream go on whose attributes can't be rebuilt, and list what was given up for that.

    An owner reads the entries behind the newest checkpoint first. One that neither tier gives is
    given up once nobody gave it for ten seconds, and only with --accept-loss; without it nothing
    is done. What those entries changed is not counted, and writers that retry them append twice.
    So are keys whose page of the attribute index is damaged, as of an entry (through), where that
    can't be made of entries: of those keys only what the entries say that are there is kept.
    """
    import asyncio
    import getpass

    from tierlog.client import attribute_rebuild as rebuilding
    from tierlog.client import open_client
    from tierlog.client.cluster import open_cluster

    async def run() -> "Losses":
        settings = load()
        async with open_cluster(settings) as catalog, open_client(settings) as client:
            attributes = client.attributes(stream)
            if not accept_loss:
                return await rebuilding.given_up(catalog, attributes)
            by = getpass.getuser()
            return await rebuilding.accept_loss(catalog, attributes, by=by, wait_s=wait_s)

    rows = [_lost_row(one) for one in asyncio.run(run())]
    print_rows(rows, LOST_COLUMNS, output)


def _lost_row(lost: "GivenUp | LostKeys") -> dict[str, Any]:
    from tierlog.model.attribute_record import GivenUp

    row: dict[str, Any] = dict.fromkeys(LOST_COLUMNS)
    if isinstance(lost, GivenUp):
        ledger_id, first, last = lost
        row |= {"ledger_id": ledger_id, "first_entry_id": first, "last_entry_id": last}
        row["entries"] = last - first + 1
    else:
        row["through"] = str(lost.through)
        row["first_key"] = str(UUID(bytes=bytes(lost.keys.first)))
        row["last_key"] = str(UUID(bytes=bytes(lost.keys.last)))
    return row


def updates_of(pairs: Iterable[str], verb: VerbName, expected: int) -> "list[AttributeUpdate]":
    """Read ``KEY=VALUE`` pairs, or raise ``RefusedError``."""
    from tierlog.client import AttributeUpdate, Verb
    from tierlog.client.attributes import check_settable

    updates = []
    for pair in pairs:
        key_text, equals, value_text = pair.partition("=")
        key = key_of(key_text)
        check_settable(key)
        try:
            value = int(value_text)
        except ValueError:
            value = VALUE_MAX + 1
        if not equals or not VALUE_MIN <= value <= VALUE_MAX:
            raise RefusedError(
                f"{pair[:80]!r} has no value of 64 bits",
                remedy="Give KEY=VALUE, the value a whole number",
            )
        updates.append(
            AttributeUpdate(key=key, verb=Verb[verb.name], value=value, expected=expected)
        )
    return updates


def key_of(text: str) -> UUID:
    """Read a key, or raise ``RefusedError``."""
    if text in NAMES:
        return NAMES[text]
    try:
        return UUID(text)
    except ValueError as error:
        raise RefusedError(
            f"{text[:80]!r} is no attribute's key",
            remedy=f"Give a UUID, or one of {', '.join(NAMES)}",
        ) from error


def _row(key: UUID, value: int | None) -> dict[str, Any]:
    return {"key": str(key), "name": NAME_OF.get(key), "value": value}
