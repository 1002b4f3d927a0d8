"""Whoever waits, for the next answer or for metadata, holds nothing of the one before.

Its room was given back: what it still had would be memory that nobody counts.
"""

import asyncio
import contextlib
import sys
import tracemalloc
import weakref
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.reader.test_pages import UNPACKING, stamped
from tests.unit.reader.test_source import numbered
from tests.unit.reader.test_tail import tails_of
from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, on_virtual_time, payloads
from tierlog.format.entry import encode_entry
from tierlog.model.errors import RetryableError
from tierlog.model.position import Edge
from tierlog.proto.v1 import reader_pb2 as pb
from tierlog_reader import http_entries, seek
from tierlog_reader.documents import EVENTS
from tierlog_reader.explain import explain
from tierlog_reader.grpc_server import ReaderServicer
from tierlog_reader.http_entries import EntryPages
from tierlog_reader.limits import ReadLimits
from tierlog_reader.seek import TimeSeek
from tierlog_reader.sending import HeldStream
from tierlog_reader.served import ServedReads
from tierlog_reader.shares import Shares

LIMITS = ReadLimits(response_bytes_max=8 * 1024 * 1024, wait_ms_max=30_000)


class Frames(bytearray):
    """Frames that can be asked whether anybody has them."""


class WatchedSource:
    """A source that is asked for nothing while somebody has an answer that it gave."""

    def __init__(self, source):
        self._source = source
        self._given = []
        self.reads = 0
        self.before_read = lambda: None

    def __getattr__(self, name):
        return getattr(self._source, name)

    def check(self):
        assert [one for one in self._given if one() is not None] == []

    async def read(self, stream, where, budget):
        self.reads += 1
        self.check()
        self.before_read()
        answer = await self._source.read(stream, where, budget)
        if answer.chunk is None:
            return answer
        frames = Frames(b"".join(answer.chunk.frames))
        self._given.append(weakref.ref(frames))
        return replace(answer, chunk=replace(answer.chunk, frames=(frames,)))

    async def why(self, *named):
        self.check()
        return await self._source.why(*named)


@contextlib.asynccontextmanager
async def watched(world):
    async with world.reader(tails=tails_of()) as source:
        watching: Any = WatchedSource(source)
        reads = ServedReads(watching, Shares(64 * 1024 * 1024, wait_s_max=5))
        yield watching, reads, TimeSeek(reads)


class Context:
    """A call that nobody ends."""

    def peer(self):
        return "ipv4:10.0.0.1:1"

    def add_done_callback(self, _):
        """Nothing comes of it."""


@on_virtual_time
async def test_who_follows_over_grpc_holds_nothing_while_it_waits():
    world = ReaderWorld()
    await world.start(raw=True)
    await world.opened(numbered(0, 3, size=300))
    async with watched(world) as (source, reads, times):
        pieces: list[bytes] = []
        context: Any = Context()
        alone = sys.getrefcount([bytes(1000)][0]) + 1  # the list has it, still

        def check_pieces():
            assert [sys.getrefcount(one) for one in pieces] == [alone + 1] * len(pieces)

        source.before_read = check_pieces
        request = pb.FollowRequest(stream=STREAM, bytes_max=1, stop_at_end=True)
        call = ReaderServicer(reads, times, LIMITS).Follow(request, context)
        with contextlib.suppress(StopAsyncIteration):
            while True:
                pieces.append(await anext(call))
                source.check()  # and while the last piece of an answer is sent
        assert (len(pieces), source.reads) == (3, 4)


@on_virtual_time
async def test_who_follows_over_http_holds_nothing_while_it_waits():
    size = 1_000_000
    world = ReaderWorld()
    await world.start()
    entries = [encode_entry([bytes([65 + n]) * size], publish_time_ms=1) for n in range(2)]
    ledger = await world.opened(entries)
    async with watched(world) as (source, reads, times):
        pages = EntryPages(reads, times, LIMITS, replace(UNPACKING, events_len_max=2 * size))
        budget = LIMITS.budget(entries_max=2, bytes_max=1, wait_ms=0)
        end = at(ledger, 2)
        wish = http_entries._Wish(("c", STREAM), STREAM, at(ledger, 0), end, budget, lambda: None)
        held, sent = [], 0

        async def send(message):
            nonlocal sent
            sent += len(message.get("body", b""))

        source.before_read = lambda: held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.start()
        try:
            stream = HeldStream(pages.follow(wish), send_s_max=30.0, media_type=EVENTS)
            await stream.stream_response(send)
        finally:
            tracemalloc.stop()
    assert sent > 2 * size
    assert max(held) - held[0] < size // 2


@on_virtual_time
async def test_a_search_for_a_time_holds_nothing_of_the_step_before(monkeypatch):
    monkeypatch.setattr(seek, "STEP_ENTRIES", 5)
    world = ReaderWorld()
    await world.start()
    old = [stamped(number, 1_000_000) for number in range(40)]
    ledger = await world.opened([*old, stamped(40, 3_000_000)], times=(1_000_000, 3_000_000))
    async with watched(world) as (source, _, times):
        assert await times.position_at(STREAM, 3_000_000) == at(ledger, 40)
        assert source.reads > 5


@on_virtual_time
async def test_a_search_by_halves_holds_nothing_of_the_step_before():
    world = ReaderWorld()
    await world.start()
    entries = [stamped(number, 1_000_000 + number) for number in range(40)]
    ledger = await world.opened(entries)
    async with watched(world) as (source, _, times):
        found = await times._by_headers(
            STREAM, (await source.snapshot(STREAM)).ledgers[0], 1_000_017
        )
        assert (ledger, found) == (ledger, 17)
        assert source.reads >= 4


@on_virtual_time
async def test_a_read_that_is_explained_holds_nothing_while_the_reason_is_looked_up():
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened([stamped(number, 1_000_000 + number) for number in range(3)])
    async with watched(world) as (_, reads, times):
        budget = LIMITS.budget(entries_max=2, bytes_max=100_000, wait_ms=0)
        told = await explain(reads, times, ("c", STREAM), STREAM, at(ledger, 0), budget)
    assert (told.first, told.entries, told.tier) == (f"{ledger}:0", 2, "tier1")
    assert told.bytes > 2 * len(stamped(0, 1))
    assert (told.asked, told.next) == (f"{ledger}:0", f"{ledger}:2")
    assert told.tier_reason == "the ledger is open"


@pytest.mark.parametrize("entry", [2, 7])
def test_who_waits_for_an_entry_of_later_holds_no_room(entry):
    @on_virtual_time
    async def test():
        world = ReaderWorld()
        await world.start()
        ledger = await world.opened([b"0", b"1"])
        async with world.reader(tails=tails_of()) as source:
            shares = Shares(10**7, wait_s_max=5)
            served = ServedReads(source, shares)
            read = asyncio.create_task(
                served.read("c", STREAM, at(ledger, entry), budget(size=10**6, wait_s=8))
            )
            await asyncio.sleep(2)
            held = []
            for _ in range(20):
                held.append(shares.used_bytes)
                await asyncio.sleep(0.11)
            # It takes some for as long as it asks.
            assert held.count(0) > 15
            read.cancel()
            await asyncio.wait([read])

    test()


@pytest.mark.parametrize("closed", [True, False])
@on_virtual_time
async def test_a_few_entries_of_a_run_do_not_keep_all_of_it(closed):
    """Room for an answer is for its frames: a client that is slow holds no more."""
    world = ReaderWorld()
    await world.start()
    entries = numbered(0, 500, size=100)
    make = world.sealed if closed else world.opened
    ledger = await make(entries, run_bytes_max=64 * 1024)
    async with world.reader() as source:
        for first, count in ((0, 1), (200, 3), (499, 1), (0, 500)):
            answer = await source.read(STREAM, at(ledger, first), budget(entries=count))
            assert payloads(answer) == entries[first : first + count]
            assert answer.chunk is not None
            (frames,) = answer.chunk.frames
            with memoryview(frames) as view, memoryview(view.obj) as kept:
                assert kept.nbytes <= 2 * view.nbytes


@on_virtual_time
async def test_who_is_told_an_error_holds_nothing():
    world = ReaderWorld()
    await world.start()
    ledger = await world.sealed(numbered(0, 10))
    async with world.reader() as source:
        shares = Shares(64 * 1024 * 1024, wait_s_max=5)
        world.node.down = True
        with pytest.raises(RetryableError):
            await ServedReads(source, shares).read("a", STREAM, at(ledger, 0), budget())
        assert shares.most_used_bytes > 0
        assert shares.used_bytes == 0


@on_virtual_time
async def test_who_goes_while_ledgers_are_listed_for_it_holds_nothing():
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened(numbered(0, 10))
    async with world.reader() as source:
        shares = Shares(64 * 1024 * 1024, wait_s_max=5)
        world.node.read_delay_s = 10
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await ServedReads(source, shares).ledgers("a", STREAM, ledger, count_max=5)
        assert shares.most_used_bytes > 0
        assert shares.used_bytes == 0


@on_virtual_time
async def test_who_waits_where_all_was_trimmed_since_the_last_look_holds_nothing():
    world = ReaderWorld()
    await world.start()
    ledger = await world.sealed(numbered(0, 10))
    async with world.reader(age_s=1000) as source:
        await source.snapshot(STREAM)
        retention, incarnation = world.catalog().retention, world.claimed.incarnation
        await retention.begin_trim(STREAM, incarnation, [ledger], grounds=await world.grounds())
        await retention.drop_tier1(ledger)
        await retention.finish_trim(STREAM, incarnation, ledger)
        del world.node.runs[ledger]
        shares = Shares(64 * 1024 * 1024, wait_s_max=5)
        wanted = budget(wait_s=10)
        reading = asyncio.create_task(
            ServedReads(source, shares).read("a", STREAM, Edge.EARLIEST, wanted)
        )
        await asyncio.sleep(5)
        assert shares.most_used_bytes > 0, "there was something to read"
        assert shares.used_bytes == 0
        answer, _ = await reading
        assert (answer.chunk, answer.resume) == (None, at(ledger, 10))
