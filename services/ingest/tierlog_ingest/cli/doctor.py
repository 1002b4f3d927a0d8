"""``tierlog doctor``: whether servers, services and this machine do what Tierlog needs of them."""

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierlog.cli.output import Output, OutputOption, print_rows
from tierlog.cli.session import command, load
from tierlog.model.errors import Reason, RetryableError, TierlogError
from tierlog_ingest.cli.places import mute_logs

if TYPE_CHECKING:
    from tierlog.runtime.settings import IngestSettings

app = typer.Typer(
    invoke_without_command=True,
    help="Check versions, servers, services and disks; exit 5 when a check fails.",
)


class Kind(StrEnum):
    """What is checked."""

    VERSIONS = "versions"
    SERVERS = "servers"
    SERVICES = "services"
    DISK = "disk"


@app.callback()
@command
def doctor(
    *,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Check this data directory alone."),
    ] = None,
    only: Annotated[
        list[Kind] | None, typer.Option("--only", help="Make checks of this kind; often.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check versions, servers, services and disks, each with a remedy; exit 5 when one fails.

    ZooKeeper, Kafka, S3 and Redis are asked as services ask them: the bucket with a probe that goes
    again, the topics without a change. Clocks of the store and of services are compared with this
    machine's. Of a disk fsync is timed, while no node runs on it.
    """
    from tierlog.cli.checks import check_all, cluster_settings

    kinds = set(only or Kind) if directory is None else {Kind.DISK}
    others = [kind.value for kind in kinds if kind is not Kind.DISK]
    settings = cluster_settings() if others else load()
    mute_logs()
    rows = [one.row() for one in asyncio.run(check_all(settings, others))]
    if Kind.DISK in kinds:
        rows += _disks(settings.ingest, directory)
    columns = dict.fromkeys(("check", "result", "value", "remedy"))
    print_rows(rows, columns, output, title="doctor")
    failed = [row for row in rows if row["result"] == "failed"]
    if failed:
        raise RetryableError(
            f"{len(failed)} of {len(rows)} checks failed, the first: {failed[0]['check']}, "
            f"{failed[0]['value']}",
            reason=Reason.UNAVAILABLE,
            remedy=str(failed[0]["remedy"]),
        )


def _disks(ingest: "IngestSettings", directory: Path | None) -> list[dict[str, Any]]:
    from tierlog_ingest.inspection.doctor import examine

    if directory is not None:
        return asyncio.run(examine(directory, ingest.storage))
    rows: list[dict[str, Any]] = []
    for one in (ingest.data_dir, *ingest.ledger_directories):
        if not one.exists():
            rows.append(_unseen(f"{one} is not there", "On a node's machine, name it with --dir"))
            continue
        try:
            rows += asyncio.run(examine(one, ingest.storage))
        except TierlogError as error:
            rows.append(_unseen(error.message, "Of a node that runs, look at its /metrics"))
    return rows


def _unseen(value: str, remedy: str) -> dict[str, Any]:
    return {"check": "directory", "result": "warning", "value": value, "remedy": remedy}
