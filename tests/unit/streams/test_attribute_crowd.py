"""Attributes of many streams that wait for a checkpoint, in the memory of one process.

Must hold: their sum is bounded whatever tier 2 does; nothing of them is let go for it; and where
tier 2 is within reach, who has most makes a checkpoint early and nobody waits for long.
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM
from tests.unit.streams.attribute_world import AttributeCluster, key_of, send
from tests.unit.streams.test_owners import running
from tierlog.adapters.memory.attributes import MemoryAttributes
from tierlog.adapters.memory.faults import no_faults
from tierlog.model.errors import Reason, RetryableError
from tierlog.model.ids import StreamName
from tierlog_ingest.streams.attributes.crowd import Crowd

OTHER = StreamName("other")
WRITERS = [UUID(int=(number + 1) << 100) for number in range(60)]


@dataclass(eq=False)
class Member:
    """A stream of which so many attributes wait."""

    name: StreamName
    unflushed: int
    is_full: bool = False
    flushes: list[int] = field(default_factory=list)

    def crowd(self, *, is_full):
        self.is_full = is_full

    def flush_soon(self):
        self.flushes.append(self.unflushed)


def looked(*sizes, limit=100):
    """Return who is full, and who flushes, among streams with so many each."""
    crowd = Crowd(limit)
    members = [Member(StreamName(f"s{number}"), size) for number, size in enumerate(sizes)]
    for one in members:
        crowd.join(one)
    crowd.look()
    full = [one.is_full for one in members]
    return full, [bool(one.flushes) for one in members]


def test_who_has_most_flushes_early_and_leaves_room_to_the_others():
    assert looked(30, 20) == ([False] * 2, [False] * 2), "half of it is nobody's matter"
    assert looked(10, 40, 10) == ([False] * 3, [False, True, False]), "20 are left then"
    # 20 are left: those with most take no more until they have fewer, or the others.
    assert looked(30, 30, 10, 10) == ([True, True, True, False], [True, True, True, False])
    assert looked(60, 40, 0) == ([True] * 3, [True, True, False]), "nothing is left"
    assert looked(*[1] * 120) == ([True] * 120, [True] * 120)
    assert sum(looked(*[1] * 70)[1]) == 20, "nobody is full"


def test_what_was_flushed_lets_all_go_on_and_who_left_does_not_count():
    crowd = Crowd(100)
    one, other = Member(STREAM, 90), Member(OTHER, 20)
    crowd.join(one)
    crowd.join(other)
    crowd.look()
    assert (one.is_full, other.is_full) == (True, True)
    one.unflushed = 5
    crowd.look()
    assert (one.is_full, other.is_full) == (False, False)
    one.unflushed = 90
    crowd.leave(one)
    crowd.look()
    assert other.is_full is False
    crowd.join(one)
    del one
    crowd.look()
    assert other.is_full is False


def test_what_waits_of_all_streams_is_bounded_while_tier_2_is_away_and_nothing_of_it_is_lost():
    async def main():
        cluster = AttributeCluster(unflushed_all_max=20)
        await (await cluster.start()).streams.create(OTHER)
        faults = no_faults()
        faults.outages.add("attributes.flush")
        owners = cluster.owners(faults=faults)
        written, refused = {STREAM: [], OTHER: []}, []
        async with running(owners, drain=False):
            for writer in WRITERS:
                for stream, ours in written.items():
                    try:
                        await send(owners, stream, writer, 1)
                        ours.append(writer)
                    except RetryableError as error:
                        refused.append(error)
                await asyncio.sleep(0.2)
            assert all(error.reason is Reason.RESOURCE_EXHAUSTED for error in refused)
            assert {error.details["budget"] for error in refused} == {
                "owner.attributes.unflushed_all_max"
            }
            # A second's appends at most come on top.
            assert 20 <= sum(map(len, written.values())) <= 20 + 2 * 6
            # Those who are known go on.
            for stream, writers in written.items():
                for writer in writers:
                    await send(owners, stream, writer, 2)
            faults.outages.clear()
            await asyncio.sleep(10)
            for stream in written:
                await send(owners, stream, WRITERS[-1], 1)
                await asyncio.sleep(2)
        again = cluster.owners("n1")
        async with running(again):
            for stream, writers in written.items():
                found = await again.get_attributes(stream, [key_of(one) for one in writers])
                assert found.values == {key_of(one): 2 for one in writers}

    run_virtual(main())


def test_a_checkpoint_is_made_before_anybody_has_to_wait():
    async def main():
        cluster = AttributeCluster(unflushed_all_max=40, checkpoint_interval_s=10_000)
        await (await cluster.start()).streams.create(OTHER)
        owners = cluster.owners()
        async with running(owners, drain=False):
            await send(owners, OTHER, WRITERS[0], 1)
            for writer in WRITERS:
                await send(owners, STREAM, writer, 1)
                await asyncio.sleep(0.2)
            assert cluster.index.flushes >= 2
            assert set(cluster.index.newest) != set(), "the stream with most has one"
            await send(owners, OTHER, WRITERS[1], 1)

    run_virtual(main())


def test_a_start_replays_what_waited_and_goes_on_whatever_the_limit():
    async def main():
        cluster = AttributeCluster()
        catalog = await cluster.start()
        faults = no_faults()
        faults.outages.add("attributes.flush")
        owners = cluster.owners(faults=faults)
        async with running(owners, drain=False):
            for writer in WRITERS[:30]:
                await send(owners, STREAM, writer, 1)
        cluster.settings = cluster.settings.model_copy(update={"unflushed_all_max": 10})
        again = cluster.owners(catalog=catalog, faults=faults)
        async with running(again, drain=False):
            await send(again, STREAM, WRITERS[0], 2)
            await asyncio.sleep(1.1)
            with pytest.raises(RetryableError) as caught:
                await send(again, STREAM, WRITERS[40], 1)
            assert "unflushed_all_max" in str(caught.value.details)
            faults.outages.clear()
            await asyncio.sleep(10)
            await send(again, STREAM, WRITERS[40], 1)
            found = await again.get_attributes(STREAM, [key_of(one) for one in WRITERS[:30]])
            assert found.values == {key_of(one): 1 for one in WRITERS[1:30]} | {
                key_of(WRITERS[0]): 2
            }

    run_virtual(main())


class WithoutCheckpoints(MemoryAttributes):
    """Indexes of which one stream's takes none: it is damaged, say, and an admin is waited for."""

    def flush(self, claimed, base, **named):
        if claimed.name == STREAM:
            raise RetryableError("the index is damaged", remedy="Accept the loss")
        return super().flush(claimed, base, **named)


def test_who_can_make_no_checkpoint_keeps_nobody_else_waiting():
    async def main():
        # Those of the other stream would come after hours by themselves.
        cluster = AttributeCluster(unflushed_all_max=40, checkpoint_interval_s=10_000)
        cluster.index = WithoutCheckpoints()
        await (await cluster.start()).streams.create(OTHER)
        owners, refused = cluster.owners(), 0
        async with running(owners, drain=False):
            for writer in WRITERS:
                with suppress(RetryableError):
                    await send(owners, STREAM, writer, 1)
                await asyncio.sleep(0.3)
            for writer in WRITERS:
                async with asyncio.timeout(5):
                    while True:
                        with suppress(RetryableError):
                            await send(owners, OTHER, writer, 1)
                            break
                        refused += 1
                        await asyncio.sleep(1)
                await asyncio.sleep(0.1)
        assert refused, "what waits is bounded"

    run_virtual(main())
