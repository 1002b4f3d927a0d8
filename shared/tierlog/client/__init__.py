"""The public library: write to streams, read them from anywhere, look after them.

``open_client`` for programs with an event loop, ``SyncClient`` for all others. Errors are those
of ``tierlog.model.errors``; an append whose outcome is unknown is read back before it is told.
"""

from tierlog.client.batches import Event
from tierlog.client.client import Client, open_client
from tierlog.client.endpoints import Endpoints, EndpointsFile, find_endpoints
from tierlog.client.reading import ReadEntry, ReadEvent, StreamReader
from tierlog.client.sync import SyncClient, SyncWriter
from tierlog.client.writer import StreamWriter
from tierlog.format.entry import StructuredEvent
from tierlog.model.position import Edge, Position

__all__ = [
    "Client",
    "Edge",
    "Endpoints",
    "EndpointsFile",
    "Event",
    "Position",
    "ReadEntry",
    "ReadEvent",
    "StreamReader",
    "StreamWriter",
    "StructuredEvent",
    "SyncClient",
    "SyncWriter",
    "find_endpoints",
    "open_client",
]
