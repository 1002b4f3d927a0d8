"""``tierlog dlq …``: offload requests that kept failing, and asking for them again."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from tierlog.cli.output import Output, OutputOption, print_one, print_rows, say, time_text
from tierlog.cli.session import command
from tierlog.cli.stream import with_client
from tierlog.model.errors import RefusedError

app = typer.Typer(no_args_is_help=True, help="Dead letters: requests that kept failing.")

WAITING: Final = "waiting"
STATES: Final = (WAITING, "replayed", "dismissed")

COLUMNS: Final = {
    "place": None,
    "state": None,
    "stored_ms": time_text,
    "stream": None,
    "ledger_id": None,
    "attempts": None,
    "reason": None,
    "error": None,
}

Place = Annotated[str, typer.Argument(help="PARTITION:OFFSET, as list shows it.")]
OneStream = Annotated[str | None, typer.Option("--stream", help="Only of this stream.")]


@app.command("list")
@command
def list_letters(
    *,
    all_states: Annotated[
        bool, typer.Option("--all", help="Also what was replayed or dismissed.")
    ] = False,
    stream: OneStream = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the dead letters that wait for someone, newest first."""
    name = _name(stream)
    state = None if all_states else WAITING

    found = with_client(lambda client: client.dead_letters.listing(state=state, stream=name))
    print_rows(found["dead_letters"], COLUMNS, output)
    if left_off := found["left_off"]:
        say(f"{left_off} older ones are not shown: restrict with --stream, or replay some first")


@app.command("show")
@command
def show(place: Place, *, output: OutputOption = Output.TABLE) -> None:
    """Show a dead letter: its error, its headers, and what it asked for."""
    _check(place)
    print_one(_shown(with_client(lambda client: client.dead_letters.get(place)), output), output)


@app.command("replay")
@command
def replay(
    place: Annotated[str | None, typer.Argument(help="PARTITION:OFFSET, as list shows it.")] = None,
    *,
    all_waiting: Annotated[
        bool, typer.Option("--all", help="All that wait, or those of --stream or --reason.")
    ] = False,
    stream: OneStream = None,
    reason: Annotated[str | None, typer.Option(help="Only those that failed so.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Ask again for what a dead letter asked for; again and again is legal."""
    if (place is None) != all_waiting or (place is not None and (stream or reason)):
        raise RefusedError(
            "say which: one place, or --all",
            remedy="As: tierlog dlq replay 0:17; or: tierlog dlq replay --all --stream orders",
        )
    if place is not None:
        _check(place)
        one = with_client(lambda client: client.dead_letters.replay(place))
        print_one(_shown(one, output), output)
        return
    name = _name(stream)
    done = with_client(
        lambda client: client.dead_letters.replay_waiting(stream=name, reason=reason)
    )
    for one in done["refused"]:
        say(f"{one['place']}: {one['cause']}", quiet=output is not Output.TABLE)
    print_one(done, output)
    if done["left"]:
        say(f"{done['left']} more wait, newer ones: run it again")


@app.command("dismiss")
@command
def dismiss(place: Place, *, output: OutputOption = Output.TABLE) -> None:
    """Note that a dead letter needs nothing any more; it stays until its time is over."""
    _check(place)
    done = with_client(lambda client: client.dead_letters.dismiss(place))
    print_one(_shown(done, output), output)


def _check(place: str) -> None:
    from tierlog.offload.dead_letters import parse_place

    parse_place(place)


def _name(stream: str | None) -> Any:  # noqa: ANN401 - a checked name
    from tierlog.model.ids import stream_name

    return stream_name(stream) if stream is not None else None


def _shown(letter: Mapping[str, Any], output: Output) -> Mapping[str, Any]:
    if output is not Output.TABLE:
        return letter
    return {
        name: time_text(value) if name.endswith("_ms") else value for name, value in letter.items()
    }
