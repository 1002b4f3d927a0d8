"""The public library: write to streams, read them from anywhere, look after them.

``open_client`` for programs with an event loop, ``SyncClient`` for all others. Below streams lie
ledgers, which an application may also write by itself: ``open_ledgers``, ``SyncLedgers``.
Errors are those of ``tierlog.model.errors``; a writer to a stream settles by itself what became of
an append whose answer was lost.
"""

from tierlog.client.attributes import StreamAttributes
from tierlog.client.batches import Event
from tierlog.client.client import Client, open_client
from tierlog.client.endpoints import Endpoints, EndpointsFile, find_endpoints
from tierlog.client.ledger_reader import LedgerEntry, LedgerReader
from tierlog.client.ledger_writer import LedgerAppender
from tierlog.client.ledgers import Ledgers, LedgerShape, open_ledgers
from tierlog.client.partitioned import PartitionedWriter
from tierlog.client.reading import ReadEntry, ReadEvent, StreamReader
from tierlog.client.resuming import WriterState
from tierlog.client.sync import SyncClient, SyncWriter
from tierlog.client.sync_ledgers import SyncLedgerAppender, SyncLedgerReader, SyncLedgers
from tierlog.client.writer import Acked, StreamWriter
from tierlog.format.entry import AttributeUpdate, StructuredEvent, Verb
from tierlog.model.position import Edge, Position

__all__ = [
    "Acked",
    "AttributeUpdate",
    "Client",
    "Edge",
    "Endpoints",
    "EndpointsFile",
    "Event",
    "LedgerAppender",
    "LedgerEntry",
    "LedgerReader",
    "LedgerShape",
    "Ledgers",
    "PartitionedWriter",
    "Position",
    "ReadEntry",
    "ReadEvent",
    "StreamAttributes",
    "StreamReader",
    "StreamWriter",
    "StructuredEvent",
    "SyncClient",
    "SyncLedgerAppender",
    "SyncLedgerReader",
    "SyncLedgers",
    "SyncWriter",
    "Verb",
    "WriterState",
    "find_endpoints",
    "open_client",
    "open_ledgers",
]
