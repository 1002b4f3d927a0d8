"""``tierlog restore``: a cluster's metadata anew, from its bucket alone."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import typer

from tierlog.cli.objects import load_s3
from tierlog.cli.output import (
    Output,
    OutputOption,
    print_json,
    print_rows,
    say,
    size_text,
    time_text,
)
from tierlog.cli.session import command
from tierlog.model.errors import RefusedError

if TYPE_CHECKING:
    from tierlog.offload.restore import Finding, RestorePlan, StreamPlan
    from tierlog.ports.spending import CostMeter

STREAM_COLUMNS: Final = {
    "stream": None,
    "ledgers": None,
    "entries": None,
    "bytes": size_text,
    "partitions": None,
    "manifest_written_ms": time_text,
}
FINDING_COLUMNS: Final = {
    "verdict": None,
    "stream": None,
    "ledger_id": None,
    "entries": None,
    "cause": None,
}
LEDGER_ID_MARGIN: Final = 1_000_000


@command
def restore(
    source: Annotated[str, typer.Option("--from", help="s3://BUCKET or s3://BUCKET/PREFIX.")],
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read and check the bucket; change nothing.")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(help="Which cluster's id, where the bucket has several.")
    ] = None,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Go on without ledgers amid streams that were never offloaded, and though what "
            "writers appended is not known.",
        ),
    ] = False,
    accept_damage: Annotated[
        bool,
        typer.Option("--accept-damage", help="Go on though objects are missing or damaged."),
    ] = False,
    ledger_id_margin: Annotated[
        int, typer.Option(min=0, help="New ids begin so far above the highest one seen.")
    ] = LEDGER_ID_MARGIN,
    output: OutputOption = Output.TABLE,
) -> None:
    """Rebuild streams, ledgers and policies in an EMPTY ZooKeeper, from the bucket alone.

    No service may run. Interrupted, it is run again; done, running it again changes nothing.
    """
    from tierlog.ports.spending import CostMeter

    bucket, prefix = _place(source)
    cluster_id, meter = _cluster_id(cluster), CostMeter()
    plan = asyncio.run(
        _restore(
            bucket,
            prefix,
            cluster_id=cluster_id,
            margin=ledger_id_margin,
            accepted=None if dry_run else (accept_loss, accept_damage),
            meter=meter,
        )
    )
    document = document_of(plan, applied=not dry_run) | meter.totals
    if output is Output.TABLE:
        print_rows(document["streams"], STREAM_COLUMNS, output, title="streams")
        if document["findings"]:
            print_rows(document["findings"], FINDING_COLUMNS, output, title="not as it was")
        done = "would be" if dry_run else "is"
        say(
            f"cluster {plan.cluster.cluster_id} {done} restored; new ledgers begin with id "
            f"{plan.cluster.ledger_id_base}"
        )
        say(
            f"{document['requests_sent']} requests, "
            f"{size_text(document['bytes_received'])} received"
        )
        if not dry_run:
            say(
                "scrubs by schedule repair nothing until you ask for one that does: "
                "tierlog scrub --repair"
            )
    else:
        print_json(document, indent=output is Output.JSON)
    if dry_run:
        plan.check(accept_loss=accept_loss, accept_damage=accept_damage)


def _place(source: str) -> tuple[str, str]:
    bucket, _, prefix = source.removeprefix("s3://").partition("/")
    if not source.startswith("s3://") or not bucket:
        raise RefusedError(f"{source!r} names no bucket", remedy="Write s3://BUCKET/PREFIX")
    return bucket, prefix.strip("/")


def _cluster_id(text: str | None) -> UUID | None:
    try:
        return None if text is None else UUID(text)
    except ValueError as error:
        raise RefusedError(
            f"{text!r} is not a cluster's id", remedy="Write a UUID; see --dry-run"
        ) from error


async def _restore(
    bucket: str,
    prefix: str,
    *,
    cluster_id: UUID | None,
    margin: int,
    accepted: tuple[bool, bool] | None,
    meter: "CostMeter",
) -> "RestorePlan":
    """Plan, and apply what was accepted; None: plan alone."""
    from tierlog.wiring.restore import open_restore_catalog, open_restorer

    settings = load_s3()
    async with open_restorer(
        settings, bucket, prefix, ledger_id_margin=margin, meter=meter
    ) as restorer:
        plan = await restorer.plan(cluster_id)
        if accepted is None:
            return plan
        accept_loss, accept_damage = accepted
        plan.check(accept_loss=accept_loss, accept_damage=accept_damage)
        async with open_restore_catalog(_with_zookeeper(settings)) as catalog:
            await restorer.apply(plan, catalog)
        return plan


def _with_zookeeper(settings: Any) -> Any:  # noqa: ANN401 - settings are imported late
    from tierlog.client.endpoints import with_zookeeper

    return with_zookeeper(settings)


def document_of(plan: "RestorePlan", *, applied: bool) -> dict[str, Any]:
    """Return a plan, or what became of it, as JSON."""
    return {
        "cluster_id": str(plan.cluster.cluster_id),
        "applied": applied,
        "ledger_id_seen": plan.ledger_id_seen,
        "ledger_id_base": plan.cluster.ledger_id_base,
        "namespaces_with_policies": sorted(plan.levels.namespaces),
        "streams": [_stream_row(one) for one in plan.streams],
        "findings": [_finding_row(one) for one in plan.findings],
    }


def _stream_row(plan: "StreamPlan") -> dict[str, Any]:
    return {
        "stream": plan.head.stream,
        "incarnation": str(plan.head.incarnation),
        "ledgers": len(plan.ledgers),
        "entries": plan.entries,
        "bytes": plan.length,
        "partitions": plan.head.partitions,
        "attributes_through": _through(plan),
        "manifest_written_ms": plan.written_ms,
    }


def _through(plan: "StreamPlan") -> str | None:
    """Return as of which entry writers' state comes back; entries behind it are added to it."""
    through = plan.attributes.newest.through if plan.attributes is not None else None
    return None if through is None else str(through)


def _finding_row(finding: "Finding") -> dict[str, Any]:
    return {
        "verdict": finding.verdict.value,
        "stream": finding.stream,
        "ledger_id": finding.ledger_id,
        "entries": finding.entries,
        "in_the_middle": finding.in_the_middle,
        "cause": finding.cause,
    }
