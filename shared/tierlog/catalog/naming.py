"""What a change of metadata must check before it names storage nodes in an ensemble (ADR-0016).

A node that is decommissioned is retired once no ledger names it. Whoever chose it before then, and
was held up, must not name it after: the node frees what it holds.

Owns that check. Does not own retiring (``tierlog.catalog.draining``), which changes the mark of the
node and the version of its cookie in one transaction.

Invariant: a transaction with the operations of ``naming`` never takes effect after one of its
nodes was retired. Where there is a mark, its version is checked. Where there is none, that of the
cookie is, which was read first: a node that was marked and retired between the two reads shows
its mark, one that is retired later has a cookie of another version, or none. A node with neither
is unknown, and can't be marked.
"""

from collections.abc import Collection

from tierlog.format import paths, records
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import NodeId
from tierlog.model.ledger import LedgerMetadata
from tierlog.ports.metadata import Check, MetadataStore, Operation


class NodeRetiredError(RefusedError):
    """Nothing was changed: the node was to be named, and no ledger may name it any more."""

    def __init__(self, node_id: NodeId) -> None:
        super().__init__(
            f"storage node {node_id} is decommissioned, and no ledger can lie on it any more",
            reason=Reason.INVALID_ARGUMENT,
            remedy="Choose another node",
            details={"node_id": node_id},
        )
        self.node_id = node_id


async def naming(store: MetadataStore, nodes: Collection[NodeId]) -> list[Operation]:
    """Return what a transaction that names ``nodes`` must check; raises ``NodeRetiredError``.

    For one round of ``settle``: read anew in each.
    """
    checks: list[Operation] = []
    for node in sorted(nodes):
        cookie = await store.get(paths.cookie_path(node))
        mark = await store.get(paths.draining_path(node))
        if mark is not None and records.decode_draining(mark.data).is_retired:
            raise NodeRetiredError(node)
        if mark is not None:
            checks.append(Check(paths.draining_path(node), mark.version))
        elif cookie is not None:
            checks.append(Check(paths.cookie_path(node), cookie.version))
    return checks


def newly_named(after: LedgerMetadata, before: LedgerMetadata | None = None) -> frozenset[NodeId]:
    """Return the nodes that a ledger is to name, and does not yet; None: there is no ledger yet."""
    known = before.named_nodes if before is not None else frozenset()
    return after.named_nodes - known
