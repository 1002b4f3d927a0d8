"""What the reader service must do (ports/reads.py), in memory or as a process.

A module that runs the suite subclasses ``ReadsContract`` and gives two fixtures: ``services``, a
function that opens the ports of one and the same cluster; and ``stream``, a name of its own.
"""

import asyncio

import pytest

from tests.contracts.services import READ_BYTES, WAIT_S, Open, refused
from tierlog.format.frame import pack_entries
from tierlog.model.errors import Reason
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Edge, Position

FIRST, SECOND = [b"0", b"1", b"2"], [b"3", b"4"]


def at(ledger_id: int, entry_id: int) -> Position:
    return Position(LedgerId(ledger_id), EntryId(entry_id))


def framed(entries: list[bytes], first_entry_id: int = 0) -> bytes:
    return bytes(pack_entries(entries, first_entry_id)[0])


class ReadsContract:
    async def test_an_answer_is_frames_of_one_ledger_and_where_to_go_on(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            first, second = await on.fill(stream, FIRST, SECOND)
            one = await on.reads.read(stream, Edge.EARLIEST, bytes_max=READ_BYTES)
            assert (one.ledger_id, one.first_entry_id, one.count) == (first, 0, 3)
            assert bytes(one.frames) == framed(FIRST)
            assert (one.resume, one.raw, one.tier) == (at(first, 3), True, "tier1")
            two = await on.reads.read(stream, one.resume, bytes_max=READ_BYTES)
            assert (two.ledger_id, two.first_entry_id, two.count) == (second, 0, 2)
            assert bytes(two.frames) == framed(SECOND)
            assert two.resume == at(second, 2)

    async def test_any_entry_can_be_the_first_one_and_each_end_leads_on(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            first, second = await on.fill(stream, FIRST, SECOND)
            read = on.reads.read
            one = await read(stream, at(first, 1), bytes_max=READ_BYTES)
            assert (one.first_entry_id, bytes(one.frames)) == (1, framed(FIRST[1:], 1))
            for where in (at(first, 3), at(second, 0)):
                assert (await read(stream, where, bytes_max=READ_BYTES)).ledger_id == second
            for end in (at(second, 2), Edge.LATEST):
                last = await read(stream, end, bytes_max=READ_BYTES)
                assert (last.count, len(last.frames), last.resume) == (0, 0, at(second, 2))

    async def test_entries_max_is_kept(self, services: Open, stream: StreamName):
        async with services() as on:
            (ledger,) = await on.fill(stream, FIRST)
            where: Position | Edge = Edge.EARLIEST
            for number, entry in enumerate(FIRST):
                one = await on.reads.read(stream, where, bytes_max=READ_BYTES, entries_max=1)
                assert bytes(one.frames) == framed([entry], number)
                where = one.resume
                assert where == at(ledger, number + 1)
            many = await on.reads.read(stream, at(ledger, 0), bytes_max=READ_BYTES, entries_max=2)
            assert many.count == 2

    async def test_bytes_max_cuts_but_never_to_nothing(self, services: Open, stream: StreamName):
        entries = [b"%d" % number * 100_000 for number in range(6)]
        async with services() as on:
            await on.fill(stream, entries)
            where: Position | Edge = Edge.EARLIEST
            found, answers = bytearray(), 0
            while True:
                one = await on.reads.read(stream, where, bytes_max=1)
                if one.count == 0:
                    break
                found += one.frames
                where, answers = one.resume, answers + 1
            assert found == framed(entries)
            assert answers > 1

    async def test_an_empty_stream_has_bounds_and_nothing_else(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            await on.create(stream)
            assert await on.reads.bounds(stream) == (Edge.EARLIEST, Edge.EARLIEST)
            for edge in Edge:
                one = await on.reads.read(stream, edge, bytes_max=READ_BYTES)
                assert (one.count, one.resume) == (0, Edge.EARLIEST)

    async def test_bounds_are_the_first_entry_and_behind_the_last_one(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            first, second = await on.fill(stream, FIRST, SECOND)
            assert await on.reads.bounds(stream) == (at(first, 0), at(second, 2))
            (more,) = await on.append(stream, [b"5"])
            await on.read_all(stream, 6)
            assert await on.reads.bounds(stream) == (at(first, 0), at(more.ledger_id, 1))

    async def test_at_the_tail_a_read_waits_as_long_as_it_was_asked(
        self, services: Open, stream: StreamName
    ):
        loop = asyncio.get_running_loop()
        async with services() as on:
            (ledger,) = await on.fill(stream, FIRST)
            began_s = loop.time()
            one = await on.reads.read(stream, Edge.LATEST, bytes_max=READ_BYTES, wait_s=0.4)
            assert (one.count, one.resume) == (0, at(ledger, 3))
            assert 0.35 < loop.time() - began_s < WAIT_S

    @pytest.mark.parametrize("place", ["empty", "sealed", "open"])
    async def test_a_waiting_read_gets_what_comes(
        self, services: Open, stream: StreamName, place: str
    ):
        async with services() as on:
            await on.create(stream)
            if place != "empty":
                await on.append(stream, FIRST)
                await on.read_all(stream, 3)
            if place == "sealed":
                await on.control.seal(stream)
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(
                    on.reads.read(stream, Edge.LATEST, bytes_max=READ_BYTES, wait_s=WAIT_S)
                )
                await asyncio.sleep(0.3)
                assert not waiting.done()
                (put,) = await on.append(stream, [b"new"])
            one = waiting.result()
            assert (one.ledger_id, one.first_entry_id) == (put.ledger_id, put.first_entry_id)
            assert bytes(one.frames) == framed([b"new"], put.first_entry_id)

    async def test_what_is_nowhere_is_told_apart(self, services: Open, stream: StreamName):
        async with services() as on:
            await on.fill(StreamName(f"{stream}.before"), [b"x"])
            first, second = await on.fill(stream, FIRST, SECOND)
            (more,) = await on.append(stream, [b"5"])
            await on.read_all(stream, 6)
            for where, reason in (
                (at(first - 1, 0), Reason.TRIMMED),
                (at(first, 4), Reason.NO_SUCH_ENTRY),
                (at(second, 9), Reason.NO_SUCH_ENTRY),
                (at(more.ledger_id, 2), Reason.NOT_YET),
                (at(more.ledger_id + 1_000_000, 0), Reason.LEDGER_NOT_FOUND),
            ):
                with refused(reason):
                    await on.reads.read(stream, where, bytes_max=READ_BYTES)

    async def test_a_stream_that_is_not_there_is_told(self, services: Open, stream: StreamName):
        async with services() as on:
            with refused(Reason.STREAM_NOT_FOUND):
                await on.reads.read(stream, Edge.EARLIEST, bytes_max=READ_BYTES)
            with refused(Reason.STREAM_NOT_FOUND):
                await on.reads.bounds(stream)
