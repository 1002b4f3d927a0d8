"""Which nodes hold a ledger (seeds/003, "Ensembles"; protocols.md section 1). Pure.

Invariants of a chosen ensemble:
    * Its nodes are live, writable, and each is there once.
    * Any ``zone_count`` neighbours lie in different zones while the zones are of equal size, so
      that a write set, which is a row of neighbours, spreads over zones.
    * The same nodes and seed give the same ensemble.
"""

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

from tierlog.model.errors import Reason, RetryableError
from tierlog.model.ids import NodeId
from tierlog.model.node import NodeInfo

_NEW_ZONE: Final = 1 << 30


def choose_ensemble(
    nodes: Iterable[NodeInfo],
    *,
    ensemble_size: int,
    seed: bytes,
    preferred: NodeId | None = None,
    excluded: frozenset[NodeId] = frozenset(),
) -> tuple[NodeId, ...]:
    """Choose ``ensemble_size`` of ``nodes``, the preferred one among them if it can serve.

    Raises UNAVAILABLE, which names what is missing, or READ_ONLY when only disk space is.
    """
    known = sorted(nodes, key=lambda node: node.node_id)
    assert len({node.node_id for node in known}) == len(known)
    left = [node for node in known if not node.read_only and node.node_id not in excluded]
    if len(left) < ensemble_size:
        raise _too_few(known, excluded, ensemble_size=ensemble_size, writable=len(left))
    rank = {node.node_id: _rank(seed, node.node_id) for node in left}
    zone_order: dict[str, int] = {}
    zone_uses: Counter[str] = Counter()
    host_uses: Counter[str] = Counter()
    chosen: list[NodeId] = []

    def badness(node: NodeInfo) -> tuple[int, int, int, bool, bytes]:
        return (
            zone_uses[node.zone],
            # Zones come in the same order in each round: neighbours then differ.
            zone_order.get(node.zone, _NEW_ZONE),
            host_uses[_host(node)],
            node.node_id != preferred,
            rank[node.node_id],
        )

    while len(chosen) < ensemble_size:
        best = min(left, key=badness)
        left.remove(best)
        zone_order.setdefault(best.zone, len(zone_order))
        zone_uses[best.zone] += 1
        host_uses[_host(best)] += 1
        chosen.append(best.node_id)
    return tuple(chosen)


def _rank(seed: bytes, node_id: NodeId) -> bytes:
    return blake2b(node_id.encode(), key=seed[:64], digest_size=8).digest()


def _host(node: NodeInfo) -> str:
    return node.wire_address.rpartition(":")[0]


def _too_few(
    known: list[NodeInfo], excluded: frozenset[NodeId], *, ensemble_size: int, writable: int
) -> RetryableError:
    read_only = [node.node_id for node in known if node.read_only]
    failed = [node.node_id for node in known if node.node_id in excluded]
    return RetryableError(
        f"an ensemble of {ensemble_size} needs {ensemble_size - writable} more storage node(s): "
        f"{len(known)} live, {len(read_only)} read-only, {len(failed)} failed just now",
        reason=Reason.READ_ONLY if len(known) - len(failed) >= ensemble_size else None,
        remedy="Start more ingest nodes, or free disk on the read-only ones",
        details={
            "ensemble_size": str(ensemble_size),
            "writable": str(writable),
            "read_only": ",".join(read_only),
            "failed": ",".join(failed),
        },
    )
