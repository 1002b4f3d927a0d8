"""Who may append to a stream, decided from its metadata and the live nodes. Pure.

The wished owner of a stream is the first live node by rendezvous hash of its name: the nodes need
no word with each other to agree, and a node that goes moves its own streams only. A wish and a
registration save moves and prove nothing: safety is the claim's epoch and the fence (ADR-0016).

Invariants:
    * A claim stands while its node is live and within reach; a draining one releases its own.
    * A draining node is nobody's wish. It claims only what no other node can own, and nothing
      once it hands over.
    * Of the same live nodes everybody wishes the same one.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import NodeId, StreamName
from tierlog.model.node import NodeInfo
from tierlog.model.partitions import is_partitioned
from tierlog.model.stream import Stream, StreamLifecycle


@dataclass(frozen=True, slots=True)
class Mine:
    """The stream is for this node to claim."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another node owns the stream, or is to: if it is within reach."""

    info: NodeInfo


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The stream is this node's, which drains and is about to release its claim."""


@dataclass(frozen=True, slots=True)
class Nobody:
    """No node that could own the stream is live and within reach."""


Verdict = Mine | Elsewhere | HandedOver | Nobody


def by_wish(name: StreamName, nodes: Mapping[NodeId, NodeInfo]) -> list[NodeInfo]:
    """Return the nodes that may own a stream, the wished one first, read-only ones last."""
    able = [info for info in nodes.values() if not info.draining]
    return sorted(able, key=lambda info: (info.read_only, _weight(name, info.node_id)))


def _weight(name: StreamName, node_id: NodeId) -> bytes:
    # Neither name has a zero byte, so that no two pairs read the same.
    return hashlib.blake2b(f"{name}\0{node_id}".encode(), digest_size=8).digest()


def decide(
    stream: Stream,
    own: NodeId,
    nodes: Mapping[NodeId, NodeInfo],
    *,
    away: Collection[NodeId] = (),
    draining: bool = False,
) -> Verdict:
    """Decide who is to own the stream, as ``own`` sees it.

    ``nodes`` are the live ones, ``away`` those of them that did not answer this node just now, and
    ``draining`` tells whether this node drains. Raises STREAM_NOT_FOUND for one being deleted (but
    for one with an open ledger: somebody must recover and close it, and no other is opened then),
    and PARTITIONED for one whose entries are in its partitions.
    """
    is_open = bool(stream.ledgers) and not stream.ledgers[-1].closed
    if stream.lifecycle is StreamLifecycle.DELETING and not is_open:
        raise RefusedError(
            f"stream {stream.name} is being deleted",
            reason=Reason.STREAM_NOT_FOUND,
            remedy="Wait until it is gone to use its name again",
            details={"stream": stream.name},
        )
    if stream.partitions:
        raise is_partitioned(stream.name, stream.partitions)
    if stream.owner is not None:
        node_id = stream.owner.node_id
        if node_id == own:
            # A claim of this very node, maybe from before its restart.
            return HandedOver() if draining else Mine()
        info = nodes.get(node_id)
        if info is not None and node_id not in away:
            # Draining or not: it knows whether it has anything to finish, and then names the next.
            return Elsewhere(info)
    for info in by_wish(stream.name, nodes):
        if info.node_id == own:
            if not draining:
                return Mine()
        elif info.node_id not in away:
            return Elsewhere(info)
    # A node that is being emptied serves for as long as no other can.
    return Mine() if own in nodes and not draining else Nobody()


def is_orphan(stream: Stream, nodes: Mapping[NodeId, NodeInfo]) -> bool:
    """Tell whether a ledger of the stream is not closed, and no live node is to close it."""
    left_open = bool(stream.ledgers) and not stream.ledgers[-1].closed
    return left_open and (stream.owner is None or stream.owner.node_id not in nodes)


def not_owner(stream: Stream, info: NodeInfo | None) -> RetryableError:
    """Say who owns the stream, or is to own it, with the addresses where it is reached."""
    owner = stream.owner.node_id if stream.owner is not None else None
    named = info.node_id if info is not None else owner
    details = {"stream": stream.name, "owner_epoch": str(stream.owner_epoch)}
    if named is not None:
        details["owner"] = named
    if info is not None:
        details |= {
            "wire_address": info.wire_address,
            "grpc_address": info.grpc_address,
            "http_address": info.http_address,
        }
    if named == owner:
        message = f"stream {stream.name} is owned by {owner or 'nobody'}"
    else:
        message = f"stream {stream.name} has no owner that answers, {named} is to own it"
    return RetryableError(
        message, reason=Reason.NOT_OWNER, remedy="Append to its owner", details=details
    )


def no_owner_yet(stream: Stream, verdict: HandedOver | Nobody) -> RetryableError:
    """Say why nobody can be named."""
    if isinstance(verdict, HandedOver):
        return RetryableError(
            f"stream {stream.name} is being given up by its owner, which drains",
            remedy="Nothing was appended; find the owner again in a moment",
            details={"stream": stream.name},
            retry_after_s=0.1,
        )
    return RetryableError(
        f"no node that could own stream {stream.name} is live and within reach",
        remedy="Start an ingest node; or wait until one has registered",
        details={"stream": stream.name},
        retry_after_s=1.0,
    )


def going_away(name: StreamName) -> RetryableError:
    """Say that an owner takes nothing more."""
    return RetryableError(
        f"this node gives up stream {name}: it shuts down",
        remedy="Nothing was appended; find the owner again and retry",
    )
