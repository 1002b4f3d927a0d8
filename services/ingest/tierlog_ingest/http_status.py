"""What people and tools ask a node over HTTP: its state, its streams, who owns one."""

from typing import Any, Protocol

from fastapi import FastAPI
from pydantic import BaseModel

from tierlog.model.ids import LedgerId, StreamName, stream_name
from tierlog.ports.streams import OwnerInfo
from tierlog_ingest.streams.owners import Owners


class Node(Protocol):
    """What the routes need of a node."""

    @property
    def owners(self) -> Owners:
        """The owned streams."""
        ...

    def statistics(self) -> dict[str, object]:
        """Return the node's state."""
        ...

    async def find_owner(self, stream: StreamName) -> OwnerInfo:
        """Return the stream's owner."""
        ...


class StatusBody(BaseModel):
    """A node's state. Streams, recoveries and storage are what each says of itself."""

    node_id: str
    cluster_id: str | None
    ready: bool
    registered: bool
    streams: list[dict[str, Any]]
    recovering: dict[str, Any]
    storage: dict[str, float]
    damages: list[str]
    gc_alarm: str | None


class OwnerBody(BaseModel):
    """Who may append to a stream now, and where."""

    stream: str
    node_id: str
    wire_address: str
    grpc_address: str
    http_address: str
    owner_epoch: int
    cluster_id: str


class SealedBody(BaseModel):
    """The ledger that was sealed; none when nothing was open."""

    stream: str
    ledger_id: LedgerId | None


def add_routes(app: FastAPI, node: Node) -> None:
    """Add the node's routes to ``app``."""

    @app.get("/v1/status")
    async def status() -> StatusBody:
        """Return the node's state: streams, open ledgers, recoveries, storage."""
        return StatusBody.model_validate(node.statistics())

    @app.get("/v1/streams/{stream}/owner")
    async def owner(stream: str) -> OwnerBody:
        """Return who owns the stream; where nobody alive does, this node claims it first."""
        name = stream_name(stream)
        found = await node.find_owner(name)
        return OwnerBody(
            stream=name,
            node_id=found.node_id,
            wire_address=found.wire_address,
            grpc_address=found.grpc_address,
            http_address=found.http_address,
            owner_epoch=found.owner_epoch,
            cluster_id=str(found.cluster_id),
        )

    @app.post("/v1/streams/{stream}/seal")
    async def seal(stream: str) -> SealedBody:
        """Close the stream's open ledger, so that everything before now can be offloaded."""
        name = stream_name(stream)
        return SealedBody(stream=name, ledger_id=await node.owners.seal(name))
