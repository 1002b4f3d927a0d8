"""Attributes of many streams that wait for a checkpoint, in the memory of one process.

Must hold: their sum is bounded whatever tier 2 does, also while they are replayed; nobody takes
all that is left; and where tier 2 is within reach, nobody waits for long.
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
import contextlib
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM
from tests.unit.streams.attribute_world import AttributeCluster, key_of, send
from tests.unit.streams.test_owners import running
from tierlog.adapters.memory.faults import no_faults
from tierlog.model.attributes import AttributeKey, Checkpoint
from tierlog.model.errors import CorruptError, Reason, RetryableError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Position
from tierlog_ingest.streams.attributes.room import Room
from tierlog_ingest.streams.attributes.state import AttributeState

OTHER = StreamName("other")
WRITERS = [UUID(int=(number + 1) << 100) for number in range(60)]


class WatchedRoom(Room):
    """Remembers the most that ever waited for a flush."""

    most = 0

    def note_unflushed(self, one, count):
        super().note_unflushed(one, count)
        self.most = max(self.most, self.unflushed)


def room_of(unflushed_max):
    return WatchedRoom(1000, unflushed_max=unflushed_max)


def no_flush():
    faults = no_faults()
    faults.outages.add("attributes.flush")
    return faults


def filled(state, count):
    """Have attributes of a state change until it is full, or so many wait; return how many do."""
    for number in range(count):
        if state.is_full:
            break
        state.change({AttributeKey(number.to_bytes(16)): 1}, 1)
        state.sent(Position(LedgerId(1), EntryId(number)), 10)
    return state.unflushed_count


def test_each_stream_leaves_as_much_as_it_has_to_others():
    room = room_of(12)
    one, other, third = (
        AttributeState(Checkpoint(), created_ms=0, capacity=10, room=room) for _ in range(3)
    )
    assert [filled(state, 20) for state in (one, other, third)] == [6, 3, 2]
    assert (room.unflushed, room.left) == (11, 1)
    assert not one.is_full_itself
    # What is flushed makes room, and what is gone.
    one.confirm(Position(LedgerId(1), EntryId(5)))
    one.finish_flush(Checkpoint(through=one.begin_flush().through))
    assert room.left == 7
    assert not other.is_full
    del third
    assert room.left == 9
    # Alone it has no more than is its own.
    alone = AttributeState(Checkpoint(), created_ms=0, capacity=3, room=room)
    assert filled(alone, 20) == 3
    assert alone.is_full_itself


def test_those_who_hold_most_flush_before_there_is_no_room_left():
    room, asked = room_of(64), []

    def state(name, *, begins=True):
        def flush_soon():
            asked.append(name)
            return begins

        return AttributeState(
            Checkpoint(), created_ms=0, capacity=64, room=room, flush_soon=flush_soon
        )

    states = {"some": state("some"), "most": state("most", begins=False), "few": state("few")}
    for name, count in (("few", 5), ("some", 10)):
        filled(states[name], count)
    filled(states["most"], 16)
    assert asked == []
    # From half of it on; who is at it already counts for nothing.
    one_more, another, third = map(state, ("one more", "another", "third"))
    filled(one_more, 1)
    assert asked == ["most", "some", "few", "one more"]
    # Then for each eighth that came since.
    asked.clear()
    filled(another, 7)
    assert asked == []
    filled(third, 1)
    assert asked == ["most", "some"]


async def write(cluster, stream, writers):
    """Write a ledger of an event a writer, of which no checkpoint is made."""
    owners = cluster.owners(faults=no_flush())
    async with running(owners, drain=False):
        for writer in writers:
            await send(owners, stream, writer, 1)
        await owners.seal(stream)


@contextlib.asynccontextmanager
async def restarted(cluster, unflushed_max, faults=None, opened=None):
    """Give what owns streams after a crash, in little room, and the room; note what it reads."""
    room = room_of(unflushed_max)
    open_ledger = cluster.opening([] if opened is None else opened)
    owners = cluster.owners(faults=faults, room=room, open_ledger=open_ledger)
    async with running(owners, drain=False):
        yield owners, room


def values(writers, number=1):
    return {key_of(writer): number for writer in writers}


def test_what_waits_in_all_streams_stops_new_attributes_and_says_why():
    async def main():
        cluster = AttributeCluster()
        await (await cluster.start()).streams.create(OTHER)
        faults = no_flush()
        async with restarted(cluster, 12, faults) as (owners, room):
            for writer in WRITERS[:6]:
                await send(owners, STREAM, writer, 1)
            for writer in WRITERS[:3]:
                await send(owners, OTHER, writer, 1)
            for stream in (STREAM, OTHER):
                with pytest.raises(RetryableError, match="of the streams of this node") as caught:
                    await send(owners, stream, WRITERS[7], 1)
                assert caught.value.reason is Reason.RESOURCE_EXHAUSTED
                assert caught.value.details == {"budget": "owner.attributes.unflushed_all_max"}
                assert "ingest.owner.attributes.unflushed_all_max" in caught.value.remedy
            # Who is known goes on.
            await send(owners, OTHER, WRITERS[0], 2)
            await asyncio.sleep(10)
            with pytest.raises(RetryableError, match="could not reach its server"):
                await send(owners, STREAM, WRITERS[7], 1)
            faults.outages.clear()
            await asyncio.sleep(10)
            for writer in WRITERS[7:20]:
                await send(owners, STREAM, writer, 1)
                await asyncio.sleep(1)
        assert room.most <= 12

    run_virtual(main())


def test_what_one_stream_may_have_and_a_damaged_index_are_named():
    async def main():
        cluster = AttributeCluster(cached_max=3)
        await cluster.start()
        owners = cluster.owners(faults=no_flush())
        async with running(owners, drain=False):
            for writer in WRITERS[:3]:
                await send(owners, STREAM, writer, 1)
            (owner,) = owners._owners.values()
            owner._keeper._care.is_suspect = True
            why = "of this stream wait .* the attribute index is being looked into"
            with pytest.raises(RetryableError, match=why) as caught:
                await send(owners, STREAM, WRITERS[3], 1)
            assert caught.value.details == {"budget": "owner.attributes.cached_max"}

    run_virtual(main())


def test_streams_that_have_few_do_not_wait_for_the_time_of_many_checkpoints():
    async def main():
        cluster = AttributeCluster(checkpoint_interval_s=3600)
        catalog = await cluster.start()
        names = [StreamName(f"s{number}") for number in range(10)]
        for name in names:
            await catalog.streams.create(name)
        async with restarted(cluster, 32) as (owners, room):
            for writer in WRITERS[:20]:
                for name in names:
                    await send(owners, name, writer, 1)
                    await asyncio.sleep(0.1)
        assert room.most < 32

    run_virtual(main())


def test_a_rebuild_of_more_than_there_is_room_for_makes_checkpoints_on_its_way():
    async def main():
        cluster = AttributeCluster()
        await cluster.start()
        await write(cluster, STREAM, WRITERS)
        async with restarted(cluster, 25) as (owners, room):
            keys = [key_of(writer) for writer in WRITERS]
            assert (await owners.get_attributes(STREAM, keys)).values == values(WRITERS)
            assert room.most <= 25
            assert cluster.index.flushes == 2
            await send(owners, STREAM, WRITERS[0], 2)
            # A crash now begins behind what was published.
        async with restarted(cluster, 25, no_flush()) as (owners, room):
            keys = [key_of(writer) for writer in WRITERS]
            wanted = values(WRITERS) | values(WRITERS[:1], 2)
            assert (await owners.get_attributes(STREAM, keys)).values == wanted
            assert room.most <= 25

    run_virtual(main())


def test_without_tier_2_a_rebuild_waits_for_room_and_lets_others_have_it():
    async def main():
        cluster, faults, opened = AttributeCluster(), no_flush(), []
        await (await cluster.start()).streams.create(OTHER)
        await write(cluster, STREAM, WRITERS)
        await write(cluster, OTHER, WRITERS[:30])
        async with restarted(cluster, 80, faults, opened) as (owners, room):
            first = await owners.get_attributes(OTHER, [key_of(WRITERS[0])])
            assert first.values == values(WRITERS[:1])
            asked = asyncio.create_task(owners.get_attributes(STREAM, [key_of(WRITERS[50])]))
            with pytest.raises(RetryableError, match=r"no room for more attributes: .* could not"):
                await send(owners, STREAM, WRITERS[0], 2)
            await asyncio.sleep(600)
            assert not asked.done()
            # What it had is let go, so that others may change what is new to them.
            assert room.unflushed == 30
            # Until there is more room, nothing is read again.
            assert opened.count(0) == 1
            await send(owners, OTHER, WRITERS[40], 1)
            faults.outages.clear()
            assert (await asked).values == values(WRITERS[50:51])
            await send(owners, STREAM, WRITERS[0], 2)
        assert room.most <= 80

    run_virtual(main())


def test_a_rebuild_that_wants_all_the_room_goes_on_once_tier_2_is_there_again():
    async def main():
        cluster, faults = AttributeCluster(), no_flush()
        await cluster.start()
        await write(cluster, STREAM, WRITERS)
        async with restarted(cluster, 25, faults) as (owners, room):
            asked = asyncio.create_task(owners.get_attributes(STREAM, [key_of(WRITERS[50])]))
            await asyncio.sleep(600)
            assert not asked.done()
            assert room.most == 25
            faults.outages.clear()
            assert (await asked).values == values(WRITERS[50:51])

    run_virtual(main())


def test_a_loss_that_is_accepted_is_none_of_what_has_no_room():
    async def main():
        cluster, faults = AttributeCluster(), no_flush()
        catalog = await cluster.start()
        await write(cluster, STREAM, WRITERS)
        stream = await catalog.streams.get(STREAM)
        await catalog.attributes.declare(stream)
        await catalog.attributes.accept_loss(stream, by="admin")
        async with restarted(cluster, 25, faults) as (owners, _):
            asked = asyncio.create_task(owners.get_attributes(STREAM, [key_of(WRITERS[50])]))
            await asyncio.sleep(60)
            cluster.nodes["n1"].down = True
            await asyncio.sleep(1)
            cluster.nodes["n1"].down = False
            faults.outages.clear()
            assert (await asked).values == values(WRITERS[50:51])
        assert (await catalog.attributes.get(STREAM)).given_up == ()

    run_virtual(main())


def test_a_rebuild_that_meets_a_damaged_page_on_its_way_has_it_mended(monkeypatch):
    async def main():
        cluster = AttributeCluster()
        await cluster.start()
        await write(cluster, STREAM, WRITERS)
        damage = [CorruptError("a page is damaged", remedy="Rebuild it")]
        flush = cluster.index.flush

        def flush_later(*args, **kwargs):
            if damage:
                raise damage.pop()
            return flush(*args, **kwargs)

        monkeypatch.setattr(cluster.index, "flush", flush_later)
        async with restarted(cluster, 25) as (owners, room):
            keys = [key_of(writer) for writer in WRITERS]
            assert (await owners.get_attributes(STREAM, keys)).values == values(WRITERS)
            assert room.most <= 25

    run_virtual(main())
