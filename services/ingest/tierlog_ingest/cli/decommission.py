"""``tierlog node decommission``: empty a storage node for good, while the cluster serves."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierlog.cli.cluster import with_catalog
from tierlog.cli.output import Output, OutputOption, print_one, say
from tierlog.cli.session import Quiet, Timeout, command, load
from tierlog.model.errors import RetryableError

if TYPE_CHECKING:
    from tierlog.catalog import Catalog
    from tierlog.model.ids import NodeId
    from tierlog_ingest.replication.decommission import Progress


@command
def decommission(
    node: Annotated[str, typer.Argument(help="The storage node's id.")],
    *,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Until it holds nothing any more.")
    ] = True,
    timeout_s: Timeout = 3600.0,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Let it serve on, as if nothing had been asked.")
    ] = False,
    quiet: Quiet = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Move all that a storage node holds to others, then remove its identity.

    A live node is waited for until it says that it holds nothing. One that is gone for good can't
    be asked: it ends when no ledger names it, and what its disk holds is not known. Its id is
    never used again. Without --wait what it holds moves all the same; the command again ends it.
    It can be called off until no ledger names the node.
    """
    from tierlog.model.ids import node_id

    name = node_id(node)

    async def work(catalog: "Catalog") -> dict[str, Any]:
        if cancel:
            return await _call_off(catalog, name, quiet=quiet)
        if not wait:
            begun = await catalog.draining.begin(name)
            return {"node_id": name, "state": "draining", "since_ms": begun.since_ms}
        return await _wait(catalog, name, timeout_s, quiet=quiet)

    print_one(with_catalog(work), output)


async def _call_off(catalog: "Catalog", node: "NodeId", *, quiet: bool) -> dict[str, Any]:
    """Let a node serve on; whether it does is told as ``tierlog cluster nodes`` does."""
    from tierlog.client.cluster import node_state

    await catalog.draining.cancel(node)
    info = (await catalog.nodes.live()).get(node)
    state = node_state(info, await catalog.draining.get(node))
    if info is None:
        say("The node is not registered: start it, or it will count as lost.", quiet=quiet)
    return {"node_id": node, "state": state, "registered": info is not None}


async def _wait(catalog: "Catalog", node: str, timeout_s: float, *, quiet: bool) -> dict[str, Any]:
    from tierlog.model.ids import NodeId
    from tierlog.wiring.security import calling_of
    from tierlog.wiring.tier1 import open_storage_controls
    from tierlog_ingest.replication.decommission import decommission as empty

    last: list[Progress] = []

    def tell(progress: "Progress") -> None:
        if [progress] != last:
            last[:] = [progress]
            say(_text(progress), quiet=quiet)

    try:
        calling = calling_of(load().security)
        async with (
            asyncio.timeout(timeout_s),
            open_storage_controls(catalog, calling=calling) as nodes,
        ):
            done = await empty(catalog, nodes, NodeId(node), tell=tell)
    except TimeoutError:
        raise RetryableError(
            f"node {node} is not empty after {timeout_s:g} s: "
            f"{_text(last[0]) if last else 'some ledgers are left'}",
            remedy="It goes on; look at: tierlog cluster underreplicated; then the same again",
        ) from None
    if not done.said_empty:
        say("The node is gone and was not asked: what its disk holds is not known.", quiet=quiet)
    return {
        "node_id": node,
        "state": "decommissioned",
        "decommissioned_ms": done.done_ms,
        "holds": "nothing" if done.said_empty else "unknown",
    }


def _text(progress: "Progress") -> str:
    trouble = f": {progress.trouble}" if progress.trouble else ""
    if not progress.ledgers_left:
        return f"no ledger names it{trouble}"
    left = f"{progress.ledgers_left} ledgers are left, the first {progress.first_left}"
    if progress.retired:
        return f"{left}; their copies were moved, and the node frees its own{trouble}"
    return f"{left}{trouble}"
