"""``tierlog node decommission``: empty a storage node for good, while the cluster serves."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierlog.cli.cluster import with_catalog
from tierlog.cli.output import Output, OutputOption, print_one, say
from tierlog.cli.session import Quiet, command
from tierlog.model.errors import RetryableError

if TYPE_CHECKING:
    from tierlog.catalog import Catalog
    from tierlog_ingest.replication.decommission import Progress


@command
def decommission(
    node: Annotated[str, typer.Argument(help="The storage node's id.")],
    *,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Until no ledger is on it any more.")
    ] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait.")] = 3600.0,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Let it serve on, as if nothing had been asked.")
    ] = False,
    quiet: Quiet = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Move all that a storage node holds to others, then remove its identity.

    The node may be live or gone for good. Its id is never used again. Without --wait it is
    emptied all the same; the command again, once it is empty, removes the identity.
    """
    from tierlog.model.ids import node_id

    name = node_id(node)

    async def work(catalog: "Catalog") -> dict[str, Any]:
        if cancel:
            await catalog.draining.cancel(name)
            return {"node_id": name, "state": "serving"}
        if not wait:
            begun = await catalog.draining.begin(name)
            return {"node_id": name, "state": "draining", "since_ms": begun.since_ms}
        return await _wait(catalog, name, timeout_s, quiet=quiet)

    print_one(with_catalog(work), output)


async def _wait(catalog: "Catalog", node: str, timeout_s: float, *, quiet: bool) -> dict[str, Any]:
    from tierlog.model.ids import NodeId
    from tierlog_ingest.replication.decommission import decommission as empty

    last: list[Progress] = []

    def tell(progress: "Progress") -> None:
        if [progress] != last:
            last[:] = [progress]
            trouble = f": {progress.trouble}" if progress.trouble else ""
            say(
                f"{progress.ledgers_left} ledgers left, the first {progress.first_left}{trouble}",
                quiet=quiet,
            )

    try:
        async with asyncio.timeout(timeout_s):
            done = await empty(catalog, NodeId(node), tell=tell)
    except TimeoutError:
        raise RetryableError(
            f"node {node} is not empty after {timeout_s:g} s: "
            f"{last[0].ledgers_left if last else 'some'} ledgers are left",
            remedy="It goes on; look at: tierlog cluster underreplicated; then the same again",
        ) from None
    return {"node_id": node, "state": "decommissioned", "decommissioned_ms": done.done_ms}
