"""Who may append to a stream, decided from its metadata and the live nodes. Pure."""

from collections.abc import Mapping

from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import NodeId
from tierlog.model.node import NodeInfo
from tierlog.model.stream import Stream, StreamLifecycle


def refusal_to_claim(
    stream: Stream, own: NodeId, live: Mapping[NodeId, NodeInfo]
) -> TierlogError | None:
    """Return why this node must not claim the stream; None: it may.

    It may when nobody owns the stream, when its owner is not live, or when the owner is this very
    node: a claim from before its restart.
    """
    if stream.lifecycle is StreamLifecycle.DELETING:
        return RefusedError(
            f"stream {stream.name} is being deleted",
            reason=Reason.STREAM_NOT_FOUND,
            remedy="Wait until it is gone to use its name again",
            details={"stream": stream.name},
        )
    if stream.owner is None or stream.owner.node_id == own:
        return None
    info = live.get(stream.owner.node_id)
    return None if info is None else not_owner(stream, info)


def not_owner(stream: Stream, info: NodeInfo | None) -> RetryableError:
    """Say who owns the stream, with the addresses where it is reached."""
    owner = stream.owner
    details = {"stream": stream.name, "owner_epoch": str(stream.owner_epoch)}
    if owner is not None:
        details["owner"] = owner.node_id
    if info is not None:
        details |= {
            "wire_address": info.wire_address,
            "grpc_address": info.grpc_address,
            "http_address": info.http_address,
        }
    return RetryableError(
        f"stream {stream.name} is owned by {owner.node_id if owner else 'nobody'}",
        reason=Reason.NOT_OWNER,
        remedy="Append to its owner",
        details=details,
    )
