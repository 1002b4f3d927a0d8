"""A storage node as the cluster knows it. Ensembles name node ids, never addresses."""

from dataclasses import dataclass
from uuid import UUID

from tierlog.model.errors import RetryableError
from tierlog.model.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """What a live node announces of itself; addresses are ``host:port``."""

    node_id: NodeId
    wire_address: str
    grpc_address: str
    http_address: str
    zone: str = ""
    read_only: bool = False
    free_bytes: int = 0
    draining: bool = False
    """It is about to go: nothing new is put on it, and it gives up its streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cookie:
    """A node's identity, in each of its directories and in ZooKeeper; new at every format."""

    cluster_id: UUID
    node_id: NodeId
    instance_id: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The cluster's identity; ``ledger_id_base`` is added to every sequence number."""

    cluster_id: UUID
    created_ms: int
    ledger_id_base: int = 0


def another_cluster(where: str, *, answering: UUID | str, wanted: UUID | str) -> RetryableError:
    """Return what says that an address is not, or no longer, that of a node of this cluster.

    Retryable: who was meant may be elsewhere by now, and others of the cluster may answer.
    """
    return RetryableError(
        f"another cluster answers at {where}: {answering}, and not {wanted}",
        remedy="Try the cluster's other addresses; if each answers so, correct those in the "
        "settings, or begin with a new client if the cluster was made anew",
        details={"cluster_id": str(answering), "wanted_cluster_id": str(wanted)},
    )
