"""What the owners of one process are made of, and how far each may be."""

from dataclasses import dataclass
from enum import Enum

from tierlog.catalog import Catalog
from tierlog.format.run import RUN_FRAMES_LEN_MAX
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.keys import NO_KEYS, LedgerKeys
from tierlog.ledger.recovery import Recovery
from tierlog.model.ids import NodeId
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.storage_node import StorageNodeClient
from tierlog.ports.tracing import NO_TRACER, Tracer
from tierlog.runtime.settings import OwnerSettings
from tierlog_ingest.streams.appends import QueueBudget
from tierlog_ingest.streams.attributes.keeper import AttributeParts
from tierlog_ingest.streams.claims import Answers, registration_is_enough


class OwnerState(Enum):
    """How far an owner is."""

    CLAIMING = "claiming"
    RECOVERING = "recovering"
    SERVING = "serving"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerParts:
    """What every owner of a process shares."""

    node_id: NodeId
    catalog: Catalog
    nodes: NodeDirectory[StorageNodeClient]
    recovery: Recovery
    clock: Clock
    ids: Ids
    settings: OwnerSettings
    budget: QueueBudget
    keys: LedgerKeys = NO_KEYS
    answers: Answers = registration_is_enough
    attributes: AttributeParts | None = None
    """None: conditional appends are refused."""
    entry_len_max: int = RUN_FRAMES_LEN_MAX
    """What one frame of the wire takes to another storage node, in a run of its own."""
    tracer: Tracer = NO_TRACER
