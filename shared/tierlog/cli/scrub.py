"""``tierlog scrub``: compare the bucket with the metadata, and mend what differs."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierlog.cli.output import Output, OutputOption, print_json, print_one, print_rows, say
from tierlog.cli.session import Quiet, command
from tierlog.cli.stream import with_client
from tierlog.model.errors import RetryableError

if TYPE_CHECKING:
    from tierlog.client import Client

POLL_S: Final = 0.5
EXIT_INCOMPLETE: Final = 5
EXIT_FINDINGS: Final = 6

COLUMNS: Final = {
    "kind": None,
    "stream": None,
    "ledger_id": None,
    "uuid": None,
    "cause": None,
    "repaired": None,
    "remedy": None,
}


@command
def scrub(
    *,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Delete orphans, and copy damaged ledgers anew."),
    ] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read back and compare all data.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait.")] = 3600.0,
    output: OutputOption = Output.TABLE,
    quiet: Quiet = False,
) -> None:
    """Look for objects, uploads and copies in S3 that are not as the metadata say.

    Exits with 6 while anything is wrong, with 5 when not all of it could be looked at. What is
    younger than the safety age, or of another cluster, is counted and left alone.
    """

    async def ask(client: "Client") -> Any:  # noqa: ANN401 - JSON
        begun = await client.scrubs.begin(repair=repair, deep=deep)
        return await _wait(client, begun["scrub_id"], timeout_s, quiet=quiet)

    found = with_client(ask)
    _show(found, output)
    if found["remaining"]:
        raise typer.Exit(EXIT_FINDINGS)
    if not found["clean"]:
        raise typer.Exit(EXIT_INCOMPLETE)


async def _wait(client: "Client", scrub_id: str, timeout_s: float, *, quiet: bool) -> Any:  # noqa: ANN401 - JSON
    said = ""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                found = await client.scrubs.get(scrub_id)
                if found["state"] != "running":
                    return found
                now = _progress(found)
                if now != said:
                    said = now
                    say(now, quiet=quiet)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise RetryableError(
            f"scrub {scrub_id} did not end within {timeout_s:g} s",
            remedy="It goes on; look at GET /v1/scrubs of the scheduler",
        ) from None


def _progress(found: Mapping[str, Any]) -> str:
    phase = found["phase"] or "begins"
    return f"{phase}: {found['objects']} objects, {found['ledgers']} ledgers"


def _show(found: Mapping[str, Any], output: Output) -> None:
    if output is not Output.TABLE:
        print_json(found, indent=output is Output.JSON)
        return
    print_rows([{**one, "repaired": _done(one)} for one in found["findings"]], COLUMNS, output)
    hidden = {"findings", "scrub_id", "phase", "started_ms", "ended_ms"}
    print_one({name: value for name, value in found.items() if name not in hidden}, output)


def _done(finding: Mapping[str, Any]) -> str | None:
    """Return what was done about a finding, or why nothing was."""
    kept = finding["kept"]
    return finding["repaired"] or (f"no: {kept}" if kept else None)
