"""What a reader told to be before the end is read, or it is said that it can't be.

The node that knew of it may go right then, and the others know less. Nor does a read that was given
its end stop short of it while there is more.
"""

# Ids are plain numbers and names here.
# mypy: disable-error-code="arg-type,index"

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM, SmallCluster
from tests.unit.ledger.test_recovery import left_behind
from tierlog.client.reading import StreamReader
from tierlog.model.errors import Reason, RetryableError
from tierlog.model.position import Position
from tierlog.ports.reads import FramesAnswer
from tierlog.proto.v1 import reader_pb2 as pb
from tierlog_reader.chunk import Budget
from tierlog_reader.grpc_server import ReaderServicer
from tierlog_reader.limits import ReadLimits
from tierlog_reader.seek import TimeSeek
from tierlog_reader.served import ServedReads
from tierlog_reader.shares import Shares
from tierlog_reader.source import StreamSource
from tierlog_reader.tier1 import StorageNodeTier
from tierlog_reader.views import Views


class Reads:
    """A reader's answers, without a connection; the node that knew the end goes in between."""

    def __init__(self, source, node):
        self._source = source
        self._node = node
        self._asked = False

    async def bounds(self, stream):
        found = await self._source.bounds(stream)
        self._node.down |= not self._asked
        self._asked = True
        return found

    async def read(self, stream, where, *, bytes_max, entries_max=None, wait_s=0.0):
        budget = Budget(entries_max=entries_max or 1000, bytes_max=bytes_max, wait_s=wait_s)
        answer = await self._source.read(stream, where, budget)
        if answer.chunk is None:
            return FramesAnswer(resume=answer.resume)
        chunk = answer.chunk
        return FramesAnswer(
            resume=answer.resume,
            ledger_id=chunk.ledger_id,
            first_entry_id=chunk.first_entry_id,
            count=chunk.count,
            frames=memoryview(b"".join(chunk.frames)),
            raw=True,
        )


@pytest.mark.parametrize("until", [None, 2, 9])
@pytest.mark.parametrize(("known", "comes_back"), [(-1, True), (-1, False), (0, True), (0, False)])
def test_a_read_never_ends_short_of_the_end_that_it_was_told(known, comes_back, until):
    async def main():
        cluster = SmallCluster(3)
        names = ["n1", "n2", "n3"]
        where = [((0, (b"a",), -1), names), ((1, (b"b",), known), names)]
        catalog, _, ledger_id, _ = await left_behind(cluster, quorums=(3, 3, 2), where=where)
        cluster.nodes["n1"].confirm(ledger_id, 1)
        views = Views(catalog, age_s_max=0.5, entries_max=10)
        source = StreamSource(views, StorageNodeTier(views, cluster.directory(catalog)), None)
        reads, end = Reads(source, cluster.nodes["n1"]), None
        if until is not None:
            await reads.bounds(STREAM)
            end = Position(ledger_id, until)
        reader = StreamReader(STREAM, reads, until=end, retry_s_max=20)
        found: list[bytes] = []

        async def read_all():
            async for entry in reader.entries():
                found.append(bytes(entry.data))  # noqa: PERF401 - what came before an error counts

        reading = asyncio.create_task(read_all())
        await asyncio.sleep(10)
        assert not reading.done()
        if comes_back:
            cluster.nodes["n1"].down = False
            await reading
            assert found == [b"a", b"b"]
            return
        with pytest.raises(RetryableError) as caught:
            await reading
        assert caught.value.reason is Reason.UNKNOWN
        assert found == [b"a", b"b"][: known + 1]

    run_virtual(main())


class Call:
    """What a servicer asks of a call."""

    def peer(self):
        return "ipv4:127.0.0.1:1"

    def add_done_callback(self, callback):
        """Nobody ends it early."""


@pytest.mark.parametrize("goes", [True, False])
def test_a_call_that_stops_at_the_end_does_not_take_for_it_what_those_who_are_left_know(goes):
    async def main():
        cluster = SmallCluster(3)
        names = ["n1", "n2", "n3"]
        where = [((0, (b"a",), -1), names), ((1, (b"b",), 0), names)]
        catalog, _, ledger_id, _ = await left_behind(cluster, quorums=(3, 3, 2), where=where)
        cluster.nodes["n1"].confirm(ledger_id, 1)
        views = Views(catalog, age_s_max=0.5, entries_max=10)
        source = StreamSource(views, StorageNodeTier(views, cluster.directory(catalog)), None)
        reads = ServedReads(source, Shares(2**26, wait_s_max=5))
        limits = ReadLimits(response_bytes_max=2**20, wait_ms_max=30_000)
        servicer = ReaderServicer(reads, TimeSeek(reads), limits)
        request = pb.FollowRequest(stream=STREAM, stop_at_end=True, entries_max=10, bytes_max=1)
        found: list[bytes] = []

        async def follow():
            async for piece in servicer.Follow(request, Call()):
                found.extend(one.data for one in pb.ReadResponse.FromString(piece).entries)
                cluster.nodes["n1"].down |= goes

        if not goes:
            await follow()
            assert found == [b"a", b"b"]
            return
        with pytest.raises(RetryableError) as caught:
            await follow()
        assert (found, caught.value.reason) == ([b"a"], Reason.UNKNOWN)

    run_virtual(main())
