"""What a leader knows is what the metadata says, and is read again only where it changed."""

import asyncio
from collections.abc import Callable
from typing import TypeVar
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.gates import OpenGate
from tests.unit.offload.world import World
from tests.unit.scheduler.manifests_kit import store_of
from tierlog.adapters.memory.faults import Faults
from tierlog.catalog import ledgers
from tierlog.model.errors import RetryableError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import OffloadState
from tierlog.model.policy import NO_LEVELS, Policy
from tierlog.model.stream import Stream
from tierlog_scheduler.manifests import BucketManifests
from tierlog_scheduler.mirror import Mirror

T = TypeVar("T")

NAMES = [StreamName(f"shop.s{number}") for number in range(20)]


def mirror(world: World, given: Faults | None = None, *, reread_s: float = 1e9) -> Mirror:
    catalog = world.catalog(given)
    return Mirror(catalog, OpenGate(), streams_in_flight_max=4, reread_s=reread_s)


async def filled(world: World, count: int = 3) -> dict[StreamName, Stream]:
    claimed = {name: await world.stream(name) for name in NAMES}
    for name in NAMES:
        for _ in range(count):
            await world.seal(claimed[name], [b"x"])
    return claimed


async def check_same(world: World, known: Mirror) -> None:
    """Compare with the metadata."""
    catalog = world.catalog()
    assert sorted(known.streams) == await catalog.streams.names()
    for name, one in known.items():
        snapshot = await catalog.streams.snapshot(name)
        assert one.snapshot == snapshot
        assert one.policy == snapshot.policy
        for view in one.views:
            context = await catalog.contexts.get(view.listed.ledger_id)
            assert view.context is not None
            assert context is not None
            assert (view.context.state, view.context.uuid) == (context.state, context.uuid)
            assert view.context.abandoned == context.abandoned


async def whole(known: Mirror) -> bool:
    return known.is_whole


def test_reads_are_proportional_to_what_changed():
    async def main():
        world = World()
        claimed = await filled(world)
        known = mirror(world)
        await known.refresh(0)
        assert known.reads == 20 * (1 + 3)
        await check_same(world, known)

        async def reads_of_refresh() -> int:
            before = known.reads
            await known.refresh(10)
            await check_same(world, known)
            return known.reads - before

        assert await reads_of_refresh() == 0
        # A ledger more: its stream, and its context.
        await world.seal(claimed[NAMES[3]], [b"y"])
        assert await reads_of_refresh() == 2
        # An attempt: that context alone.
        ledger_id = known.streams[NAMES[5]].views[1].listed.ledger_id
        uuid = UUID(int=5)
        location = world.offloader().location(ledger_id, uuid)
        await world.catalog().contexts.begin_attempt(
            ledger_id, uuid=uuid, location=location, worker="w"
        )
        assert await reads_of_refresh() == 1
        view = known.streams[NAMES[5]].views[1]
        assert view.context is not None
        assert view.context.state is OffloadState.OFFLOADING
        # A level: no stream is read for it.
        await world.catalog().policies.set_level("shop", Policy(offload_time_ms=5))
        assert await reads_of_refresh() == 0
        policy = known.streams[NAMES[0]].policy
        assert policy is not None
        assert policy.offload_time_ms == 5
        # A stream more, and one less.
        await world.stream(StreamName("more"))
        assert await reads_of_refresh() == 1
        gone = await world.catalog().retention.begin_stream_deletion(StreamName("more"))
        await world.catalog().retention.remove_stream(gone.name, gone.incarnation)
        await reads_of_refresh()
        assert StreamName("more") not in known.streams

    run_virtual(main())


def test_pages_of_a_long_list_are_read_once(monkeypatch):
    monkeypatch.setattr(ledgers, "TAIL_LEDGERS_MAX", 6)
    monkeypatch.setattr(ledgers, "PAGE_LEDGERS", 4)

    async def main():
        world = World()
        claimed = await world.stream()
        ids = [await world.seal(claimed, [b"x"]) for _ in range(20)]
        given = Faults(world.rng)
        known = mirror(world, given)
        await known.refresh(0)
        pages = len((await world.catalog().streams.get(claimed.name)).pages)
        assert pages >= 3
        for taken in (1, 4, 5):
            await world.catalog().retention.begin_trim(
                claimed.name, claimed.incarnation, ids[:taken], grounds=await world.grounds()
            )
            await known.refresh(10)
            await check_same(world, known)
        await world.seal(claimed, [b"y"])
        given.calls = []
        await known.refresh(10)
        assert given.calls.count("metadata.get") == 0
        assert given.calls.count("metadata.watch") == 2
        await check_same(world, known)

    run_virtual(main())


def test_a_lost_connection_makes_everything_read_again():
    async def main():
        world = World()
        await filled(world)
        known = mirror(world)
        await known.refresh(0)
        before = known.reads
        store = known._catalog.store
        store.expire_session()  # type: ignore[attr-defined]
        await known.refresh(10)
        assert known.reads - before == 20 * (1 + 3)
        await check_same(world, known)

    run_virtual(main())


def test_a_stream_that_cannot_be_read_waits_and_holds_up_nobody():
    async def main():
        world = World()
        claimed = await filled(world)
        given = Faults(world.rng)
        known = mirror(world, given)
        await known.refresh(0)
        assert await whole(known)
        for name in NAMES[:2]:
            await world.seal(claimed[name], [b"y"])
        given.outages = {"metadata.watch"}
        await known.refresh(10)
        assert not await whole(known)
        assert {name for name, _ in known.items()} == set(NAMES[2:])
        given.outages = set()
        await known.refresh(10)
        await check_same(world, known)

    run_virtual(main())


class Noting(OpenGate):
    """A gate that has to be looked at anew, once."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    async def look(self, name: StreamName, *, compare: bool = False) -> bool:
        del compare
        self.looks += 1
        return self.looks == 1


class FewWatches(Faults):
    """A store that is gone after so many watches of a pass."""

    left = 0

    async def call(self, name: str, effect: Callable[[], T], *, changes: bool) -> T:
        self.left -= name == "metadata.watch"
        if self.left < 0:
            raise RetryableError("the store is gone", remedy="Try again later")
        return await super().call(name, effect, changes=changes)


def test_a_long_stream_is_read_to_its_end_though_each_pass_is_cut_off():
    async def main():
        world = World()
        claimed = await world.stream()
        ids = [await world.seal(claimed, [b"x"]) for _ in range(12)]
        given, gate = FewWatches(world.rng), Noting()
        known = Mirror(world.catalog(given), gate, streams_in_flight_max=4, reread_s=1e9)
        passes = 0
        while not (known.streams and known.is_whole) and passes < 2 * len(ids):
            assert gate.recorded == []
            given.left, passes = 3, passes + 1  # the list's own, and two contexts'
            await known.refresh(1)
        assert 4 < passes < 9
        assert known.reads == len(ids) + passes, "what was read is not read again"
        assert gate.recorded == [(claimed.name, frozenset(ids))], "nor kept from the manifest"
        given.left = 100
        await check_same(world, known)
        await known.refresh(1)
        assert known.reads == len(ids) + passes

    run_virtual(main())


@pytest.mark.parametrize("interval_s", [1.0, 10.0, 400.0])
def test_a_change_that_no_watch_told_is_found_by_the_slow_round(interval_s):
    async def main():
        world = World()
        claimed = await filled(world)
        known = mirror(world, reread_s=100.0)
        await known.refresh(0)
        for one in known.streams.values():
            # Watches that are never set.
            one.changed = asyncio.Event()
            one.watches = {key: asyncio.Event() for key in one.watches}
        await world.seal(claimed[NAMES[7]], [b"y"])
        before = known.reads
        for _ in range(round(100 / interval_s) + 1):
            await known.refresh(interval_s)
        await check_same(world, known)
        rounds = max(1, 1 + interval_s / 100)
        assert known.reads - before <= rounds * (20 * 4 + 2) + 8

    run_virtual(main())


def test_levels_that_contradict_a_stream_stop_that_stream_alone():
    async def main():
        world = World()
        await filled(world, 1)
        known = mirror(world)
        await known.refresh(0)
        one = known.streams[NAMES[0]]
        # As if an older version had written it.
        stream = one.snapshot.stream
        object.__setattr__(stream, "policy", Policy(offload_time_ms=9))
        await world.catalog().policies.set_level("shop", Policy(retention_time_ms=9))
        await known.refresh(10)
        assert {name for name, _ in known.items()} == set(NAMES[1:])

    run_virtual(main())


def test_nothing_is_known_before_the_first_look():
    async def main():
        world = World()
        await filled(world, 1)
        known = mirror(world)
        assert list(known.items()) == []
        await known.refresh(0)
        assert known.listed() == set(world.ledgers)
        known.forget()
        assert list(known.items()) == []
        assert known.listed() == set[LedgerId]()
        assert known._levels == NO_LEVELS

    run_virtual(main())


@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_kept_of_a_stream_that_is_gone(late: bool):
    async def main():
        world = World()
        catalog, name = world.catalog(), NAMES[0]

        async def remove() -> None:
            stream = await catalog.streams.get(name)
            await catalog.retention.begin_stream_deletion(name)
            await catalog.retention.remove_stream(name, stream.incarnation)

        class Late(BucketManifests):
            """Looks at a stream that was removed since the names were read."""

            async def look(self, name: StreamName, *, compare: bool = False) -> bool:
                await remove()
                return await super().look(name, compare=compare)

        await world.stream(name)
        gate = (Late if late else BucketManifests)(store_of(world), catalog)
        gate.begin_term()
        known = Mirror(catalog, gate, streams_in_flight_max=4, reread_s=1e9)
        await known.refresh(0)
        if not late:
            assert repr(gate) == "<BucketManifests known=1 stopped=0>"
            await remove()
            await known.refresh(10)
        assert known.streams == {}
        assert repr(gate) == "<BucketManifests known=0 stopped=0>"
        assert not any(gate.stopped_streams().values()), "nobody looks at it again"

    run_virtual(main())
