"""The memory twins keep the contracts of streams, reads and administration."""

import contextlib

import pytest

from tests.contracts.admin_suite import AdminContract
from tests.contracts.reads_suite import ReadsContract
from tests.contracts.services import Services
from tests.contracts.streams_suite import StreamsContract
from tierlog.adapters.memory.admin import MemoryAdministration
from tierlog.adapters.memory.reads import MemoryReads
from tierlog.adapters.memory.streams import (
    MemoryAppendChannel,
    MemoryStreamControl,
    MemoryStreams,
)
from tierlog.model.ids import StreamName


@pytest.fixture
def stream():
    return StreamName("contract")


@pytest.fixture
def services():
    streams = MemoryStreams()

    async def connect(stream, tasks):
        return MemoryAppendChannel(streams)

    @contextlib.asynccontextmanager
    async def give_away(stream, node_id):
        streams.stream(stream).owner = node_id
        yield

    @contextlib.asynccontextmanager
    async def open_services():
        yield Services(
            control=MemoryStreamControl(streams),
            reads=MemoryReads(streams),
            admin=MemoryAdministration(streams),
            connect=connect,
            give_away=give_away,
        )

    return open_services


class TestMemoryStreams(StreamsContract):
    pass


class TestMemoryReads(ReadsContract):
    pass


class TestMemoryAdministration(AdminContract):
    pass
