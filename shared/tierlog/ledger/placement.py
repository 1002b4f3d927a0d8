"""Which nodes hold a ledger (seeds/003, "Ensembles"; protocols.md section 1). Pure.

Owns the choice of an ensemble and of one node in place of another. Does not own what an ensemble
change does to a ledger (``ensemble_change``).

Invariants of a chosen ensemble:
    * Each of its nodes is there once, and is live, writable and not draining, unless it stands
      in for one that is missing; of these there are at most ``placeholders_max``.
    * No host is there twice while another host has a node to give.
    * Any ``zone_count`` neighbours lie in different zones while the zones are of equal size, so
      that a write set, which is a row of neighbours, spreads over zones.
    * A node with far less free space than the rest comes after all others that are as good.
    * The same nodes and seed give the same ensemble.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from statistics import median_low
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
    excluded: Collection[NodeId] = frozenset(),
    known: Iterable[NodeId] = (),
    placeholders_max: int = 0,
) -> tuple[NodeId, ...]:
    """Choose ``ensemble_size`` of ``nodes``, the preferred one among them if it can serve.

    Where too few can, up to ``placeholders_max`` others stand in: first those that are ``known``
    and not live, then those that are live and can't serve now. A write quorum minus the ack
    quorum of them leaves an ack quorum of every write set.
    Raises UNAVAILABLE, which names what is missing, or READ_ONLY when only disk space is.
    """
    live = _by_id(nodes)
    left = [node for node in live if _can_serve(node, excluded)]
    missing = ensemble_size - len(left)
    standing_in: list[NodeInfo] = []
    if missing > 0:
        standing_in = _placeholders(live, known, left, seed)[:missing]
        if missing > min(placeholders_max, len(standing_in)):
            raise _too_few(live, excluded, ensemble_size=ensemble_size, writable=len(left))
    return _spread([left, standing_in], ensemble_size, seed, preferred)


def choose_replacement(
    nodes: Iterable[NodeInfo],
    ensemble: Sequence[NodeId],
    at: int,
    *,
    write_quorum: int,
    seed: bytes,
    excluded: Collection[NodeId] = frozenset(),
) -> NodeId | None:
    """Choose a node for place ``at`` of ``ensemble``; None: no other node can serve.

    It lies in another zone than those that share write sets with it, if there is such a node.
    """
    live = _by_id(nodes)
    barred = {*ensemble, *excluded}
    candidates = [node for node in live if _can_serve(node, barred)]
    if not candidates:
        return None
    info = {node.node_id: node for node in live}
    size = len(ensemble)
    others = [
        (min(step, size - step), info[ensemble[(at + step) % size]])
        for step in range(1, size)
        if ensemble[(at + step) % size] in info
    ]
    hosts = Counter(_host(node) for _, node in others)
    zones = Counter(node.zone for _, node in others)
    near = Counter(node.zone for distance, node in others if distance < write_quorum)
    short = _short_of_space(candidates)

    def badness(node: NodeInfo) -> tuple[int, int, int, bool, bytes]:
        return (
            hosts[_host(node)],
            near[node.zone],
            zones[node.zone],
            short[node.node_id],
            _rank(seed, node.node_id),
        )

    return min(candidates, key=badness).node_id


def _by_id(nodes: Iterable[NodeInfo]) -> list[NodeInfo]:
    live = sorted(nodes, key=lambda node: node.node_id)
    assert len({node.node_id for node in live}) == len(live)
    return live


def _can_serve(node: NodeInfo, excluded: Collection[NodeId]) -> bool:
    return not node.read_only and not node.draining and node.node_id not in excluded


def _placeholders(
    live: Sequence[NodeInfo], known: Iterable[NodeId], able: Sequence[NodeInfo], seed: bytes
) -> list[NodeInfo]:
    """Return who may stand in, the likeliest to serve soon, and to be kept, first."""
    seen = {node.node_id for node in live}
    able_ids = {node.node_id for node in able}
    gone = [
        NodeInfo(node_id=node_id, wire_address="", grpc_address="", http_address="")
        for node_id in sorted(set(known) - seen)
    ]
    unable = [node for node in live if node.node_id not in able_ids]
    return sorted(
        [*gone, *unable],
        key=lambda node: (
            node.draining,
            node.read_only,
            node.node_id in seen,
            _rank(seed, node.node_id),
        ),
    )


def _spread(
    classes: Sequence[list[NodeInfo]], ensemble_size: int, seed: bytes, preferred: NodeId | None
) -> tuple[NodeId, ...]:
    """Take from the first class as long as it lasts, then from the next."""
    short = _short_of_space(classes[0])
    zone_order: dict[str, int] = {}
    zone_uses: Counter[str] = Counter()
    host_uses: Counter[str] = Counter()
    chosen: list[NodeId] = []

    def badness(node: NodeInfo) -> tuple[int, int, int, bool, bool, bytes]:
        return (
            host_uses[_host(node)],
            zone_uses[node.zone],
            # Zones come in the same order in each round: neighbours then differ.
            zone_order.get(node.zone, _NEW_ZONE),
            short.get(node.node_id, False),
            node.node_id != preferred,
            _rank(seed, node.node_id),
        )

    for left in classes:
        while left and len(chosen) < ensemble_size:
            best = min(left, key=badness)
            left.remove(best)
            zone_order.setdefault(best.zone, len(zone_order))
            zone_uses[best.zone] += 1
            host_uses[_host(best)] += 1
            chosen.append(best.node_id)
    return tuple(chosen)


def _short_of_space(nodes: Sequence[NodeInfo]) -> Mapping[NodeId, bool]:
    """Tell of each node whether it has less than half of what is usual; 0 free: not told."""
    told = [node.free_bytes for node in nodes if node.free_bytes > 0]
    usual = median_low(told) if told else 0
    return {node.node_id: 0 < 2 * node.free_bytes < usual for node in nodes}


def _rank(seed: bytes, node_id: NodeId) -> bytes:
    return blake2b(node_id.encode(), key=seed[:64], digest_size=8).digest()


def _host(node: NodeInfo) -> str:
    return node.wire_address.rpartition(":")[0]


def _too_few(
    live: Sequence[NodeInfo], excluded: Collection[NodeId], *, ensemble_size: int, writable: int
) -> RetryableError:
    read_only = [node.node_id for node in live if node.read_only]
    draining = [node.node_id for node in live if node.draining]
    failed = [node.node_id for node in live if node.node_id in excluded]
    only_full = bool(read_only) and writable + len(read_only) >= ensemble_size
    return RetryableError(
        f"an ensemble of {ensemble_size} needs {ensemble_size - writable} more storage node(s): "
        f"{len(live)} live, {len(read_only)} read-only, {len(draining)} draining, "
        f"{len(failed)} failed just now",
        reason=Reason.READ_ONLY if only_full else None,
        remedy="Start more ingest nodes, or free disk on the read-only ones",
        details={
            "ensemble_size": str(ensemble_size),
            "writable": str(writable),
            "read_only": ",".join(read_only),
            "draining": ",".join(draining),
            "failed": ",".join(failed),
        },
    )
