"""What no checkpoint needs goes, what one needs never does, and what is missing is told.

Must hold: whoever reads what the record, or the newest manifest, names finds it, whatever a sweep,
a flush and a leader do at the same time, and in whatever order.
"""

import asyncio
import random
from dataclasses import replace
from functools import partial
from uuid import uuid5

import pytest

from tests.contracts.attributes_suite import all_of, at, key_of
from tests.simulation.virtual_loop import run_virtual
from tests.unit.attributes.test_store import OFFLOADING
from tests.unit.attributes.world import SAFETY_MS, IndexWorld, Process
from tests.unit.catalog.world import backup_of, put_back
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.format.attribute_objects import attribute_key, attribute_metadata, attributes_folder
from tierlog.model.attribute_record import record_of
from tierlog.model.attributes import AttributeKey, Checkpoint
from tierlog.model.errors import TierlogError
from tierlog.model.ids import StreamName
from tierlog.model.manifest import head_of
from tierlog.model.scrub import FindingKind
from tierlog.model.stream import Stream, StreamLifecycle
from tierlog.offload.attribute_sweep import Swept, UnneededSeen
from tierlog_scheduler.clocks import Timekeeper


async def free(length: int) -> None:
    del length


async def sweep(
    world: IndexWorld, stream: Stream, *, delete: bool = True, deep: bool = False
) -> Swept:
    sweeper = world.process().sweeper
    return await sweeper.run(stream.name, stream.incarnation, delete=delete, pay=free, deep=deep)


def later(world: IndexWorld) -> None:
    world.clock.advance(2 * SAFETY_MS / 1000)


async def grown(
    world: IndexWorld, count: int, *, ledgers: int = 1, keys: int = 600, each: int = 6
) -> tuple[Stream, list[tuple[Checkpoint, dict[AttributeKey, int]]]]:
    """Return a stream, and its checkpoints with what each must read as."""
    stream, index = await world.stream(policy=OFFLOADING), world.index()
    rng, base = random.Random(9), await index.load(stream)
    values: dict[AttributeKey, int] = {}
    made = []
    for number in range(count):
        changes = {key_of(rng.randrange(keys)): number for _ in range(each if number else 600)}
        values = values | changes
        base = await index.flush(
            stream,
            base,
            changes=changes,
            core={},
            through=at(number * ledgers // count, number),
        )
        made.append((base, values))
    return stream, made


async def write_manifest(process: Process, stream: Stream, checkpoint: Checkpoint | None) -> None:
    known = await process.manifests.newest(stream.name, stream.incarnation)
    named = None
    if checkpoint is not None:
        named = record_of(stream.incarnation, checkpoint, generation=checkpoint.generation)
    head = head_of(stream, [], known.head, attributes=named)
    await process.manifests.write(known, head, put={})


@pytest.mark.covers("E37", "E39")
async def test_what_no_root_needs_goes_and_the_rest_stays() -> None:
    world = IndexWorld(page_bytes=256, chunk_objects_max=4)
    stream, made = await grown(world, 40, ledgers=8, keys=200, each=15)
    record = await world.process().catalog.attributes.get(stream.name)
    assert record is not None
    assert len(record.ends) == 7
    before = len(world.keys_in_bucket())
    assert (await sweep(world, stream)).too_young > 0
    assert len(world.keys_in_bucket()) == before
    later(world)
    looked = await sweep(world, stream, delete=False)
    assert (looked.unneeded > 5, looked.deleted, looked.findings) == (True, 0, [])
    assert len(world.keys_in_bucket()) == before
    swept = await sweep(world, stream)
    assert swept.deleted == swept.unneeded == looked.unneeded
    assert len(world.keys_in_bucket()) == before - swept.deleted
    assert (await sweep(world, stream)).unneeded == 0
    by_place = {one.through: values for one, values in made}
    for kept in record.roots:
        assert kept.through is not None
        found = await all_of(world.index(), record.checkpoint_of(kept))
        assert found == by_place[kept.through]
    # The owner goes on from what it has, a generation later.
    base, values = made[-1]
    base = await world.index().flush(
        stream, base, changes={key_of(0): 1}, core={}, through=at(9, 0)
    )
    assert await all_of(world.index(), base) == {**values, key_of(0): 1}
    assert base.generation == 1


HOUR_S = 3600


class Leader:
    """Sweeps, and remembers what it saw unneeded, by progress that it is given."""

    def __init__(self, world: IndexWorld) -> None:
        self.seen, self.sweeper = UnneededSeen(), world.process().sweeper
        self.time = Timekeeper(world.clock)

    async def sweep(self, stream: Stream) -> Swept:
        ages = partial(self.seen.look, stream.name, self.time.now().progress_ms)
        return await self.sweeper.run(
            stream.name, stream.incarnation, delete=True, pay=free, ages=ages
        )


@pytest.mark.parametrize("jump_s", [5 * HOUR_S, -5 * HOUR_S])
@pytest.mark.parametrize("first", [True, False], ids=["before any look", "after the first look"])
async def test_a_jump_of_five_hours_hastens_no_deletion_and_holds_none_up(first, jump_s) -> None:
    world = IndexWorld(page_bytes=256, chunk_objects_max=4)
    stream, _ = await grown(world, 30, keys=200, each=60)
    leader, before = Leader(world), world.keys_in_bucket()
    if not first:
        await leader.sweep(stream)
    world.clock.jump_wall(jump_s)
    swept = await leader.sweep(stream)
    assert swept.deleted == 0
    assert swept.too_young > 5
    world.clock.advance(SAFETY_MS / 2 / 1000)
    assert (await leader.sweep(stream)).deleted == 0
    assert world.keys_in_bucket() == before
    world.clock.advance(SAFETY_MS / 1000)
    assert (await leader.sweep(stream)).deleted == swept.too_young
    # The next leader knows nothing of it, however old the objects are by the wall clock.
    other, _ = await grown(world, 30, keys=200, each=60)
    later(world)
    assert (await Leader(world).sweep(other)).deleted == 0


def test_what_was_seen_is_bounded_and_what_found_no_room_comes_later() -> None:
    seen, one, other = UnneededSeen(limit=3), StreamName("one"), StreamName("other")
    assert seen.look(one, 10, ["b", "c"]) == {"b": 0, "c": 0}
    assert seen.look(other, 20, ["x", "y"]) == {"x": 0}
    assert seen.look(one, 30, ["a", "b", "c"]) == {"b": 20, "c": 20}, "who waits is not pushed out"
    assert seen.look(one, 40, ["a", "c"]) == {"c": 30, "a": 0}
    assert seen.look(one, 50, ["b", "c"]) == {"c": 40, "b": 0}, "needed meanwhile: it waits anew"
    seen.clear(but={one})
    assert seen.look(other, 60, ["x"]) == {"x": 0}
    seen.clear()
    assert seen.look(one, 70, ["a", "b", "c", "d"]) == {"a": 0, "b": 0, "c": 0}


async def test_what_only_the_manifest_names_stays_until_a_newer_one_is_written() -> None:
    world = IndexWorld(page_bytes=256, chunk_objects_max=4)
    stream, made = await grown(world, 30, keys=200, each=60)
    named, values = made[20]
    process = world.process()
    await write_manifest(process, stream, named)
    later(world)
    assert (await sweep(world, stream)).deleted > 0
    assert await all_of(world.index(), named) == values
    with pytest.raises(TierlogError):
        await world.index().get(made[0][0], list(values))
    await write_manifest(process, stream, made[-1][0])
    assert (await sweep(world, stream)).deleted > 0
    with pytest.raises(TierlogError):
        await world.index().get(named, list(values))
    assert await all_of(world.index(), made[-1][0]) == made[-1][1]


async def test_a_list_that_cant_be_read_stops_every_deletion() -> None:
    world = IndexWorld(page_bytes=256, chunk_objects_max=4)
    stream, made = await grown(world, 30)
    later(world)
    (chunk, *_) = made[-1][0].chunks
    world.bucket.damage(chunk.key, 60)
    before = world.keys_in_bucket()
    swept = await sweep(world, stream)
    assert swept.unneeded > 0
    assert chunk.key in swept.kept
    assert world.keys_in_bucket() == before


async def test_another_clusters_objects_stay() -> None:
    world = IndexWorld()
    stream, _ = await grown(world, 1)
    folder = attributes_folder("", stream.name, stream.incarnation)
    other = uuid5(world.cluster_id, "other")
    metadata = attribute_metadata(is_list=False, stream=stream.name, cluster_id=other)
    key = attribute_key(folder, start=999, owner_epoch=1, suffix=other)
    await world.process().objects.put(key, b"x", metadata=metadata)
    later(world)
    swept = await sweep(world, stream)
    assert (swept.deleted, swept.foreign) == (0, 1)
    assert key in world.keys_in_bucket()


async def test_what_is_needed_and_missing_or_damaged_is_told() -> None:
    world = IndexWorld(page_bytes=256, chunk_objects_max=4)
    stream, made = await grown(world, 30)
    newest = made[-1][0]
    assert (await sweep(world, stream, deep=True)).findings == []
    gone, short, flipped = newest.objects[-1], newest.chunks[0].key, newest.objects[0]
    assert flipped != gone, "several are named inline"
    world.bucket.damage(flipped.key, 3)
    assert (await sweep(world, stream)).findings == [], "only a deep look reads them"
    (found,) = (await sweep(world, stream, deep=True)).findings
    assert (found.kind, found.key) == (FindingKind.DAMAGED_DATA, flipped.key)
    del world.bucket.objects[gone.key]
    (found,) = (await sweep(world, stream)).findings
    assert (found.kind, found.key) == (FindingKind.MISSING_OBJECT, gone.key)
    assert "attribute index" in found.cause
    del world.bucket.objects[short]
    kinds = {one.key: one.kind for one in (await sweep(world, stream)).findings}
    assert kinds[short] is FindingKind.MISSING_OBJECT


async def test_metadata_that_do_not_know_the_stream_delete_nothing_of_it() -> None:
    world = IndexWorld(page_bytes=256, chunk_objects_max=4)
    process = world.process()
    await process.catalog.streams.ensure_roots()
    before = backup_of(world.metadata)
    stream, made = await grown(world, 3)
    await write_manifest(process, stream, None)
    there, now = world.keys_in_bucket(), backup_of(world.metadata)
    later(world)
    put_back(world.metadata, before)
    swept = await sweep(world, stream)
    assert (swept.unneeded, swept.deleted) == (swept.objects, 0)
    assert stream.name in swept.kept
    assert world.keys_in_bucket() == there
    put_back(world.metadata, now)
    assert await all_of(world.index(), made[-1][0]) == made[-1][1]
    # The last word of a manifest, which outlives its stream.
    await write_manifest(process, replace(stream, lifecycle=StreamLifecycle.DELETING), None)
    put_back(world.metadata, before)
    assert (await sweep(world, stream)).deleted == swept.objects


async def test_a_stream_that_goes_takes_its_index_with_it() -> None:
    world = IndexWorld(page_bytes=256, chunk_objects_max=4)
    stream, _ = await grown(world, 20)
    other, _ = await grown(world, 1)
    sweeper = world.process().sweeper
    assert await sweeper.remove(stream.name, stream.incarnation, at_most=7) == 7
    assert await sweeper.remove(stream.name, stream.incarnation, at_most=1000) > 12
    (left,) = world.keys_in_bucket()
    assert other.name in left


def test_flushes_and_sweeps_at_once_lose_nothing() -> None:
    async def main() -> None:
        swept = again = 0
        for seed in range(25):
            one = await raced(seed)
            swept, again = swept + one[0], again + one[1]
        assert swept > 100, "sweeps took something"
        assert again > 3, "and met flushes under way"

    run_virtual(main(), until_s=100_000)


async def raced(seed: int) -> tuple[int, int]:
    """Let an owner flush while sweeps with no patience at all go on; return what came of it."""
    world = IndexWorld(page_bytes=256, chunk_objects_max=3)
    stream, rng = await world.stream(policy=OFFLOADING), random.Random(seed)
    owner = world.process(Faults(rng, rates=FaultRates(delay_s_max=0.05)))
    sweeping = world.process(Faults(rng, rates=FaultRates(delay_s_max=0.05)))
    sweeping.sweeper._safety_ms = 0
    stop, deleted = asyncio.Event(), 0

    async def sweeps() -> None:
        nonlocal deleted
        while not stop.is_set():
            await asyncio.sleep(rng.uniform(0, 0.5))
            swept = await sweeping.sweeper.run(
                stream.name, stream.incarnation, delete=True, pay=free
            )
            assert not swept.findings
            deleted += swept.deleted

    values: dict[AttributeKey, int] = {}
    async with asyncio.TaskGroup() as group:
        group.create_task(sweeps())
        base = await owner.index.load(stream)
        for number in range(12):
            changes = {key_of(rng.randrange(60)): number for _ in range(6)}
            values |= changes
            base = await owner.index.flush(
                stream, base, changes=changes, core={}, through=at(number // 4, number)
            )
            assert await all_of(world.index(), base) == values
        stop.set()
    published = {one.key for one in base.objects}
    written = [key for key in world.keys_in_bucket() if not key.endswith(".list")]
    assert published <= set(written)
    record = await world.process().catalog.attributes.get(stream.name)
    assert record is not None
    for kept in record.roots:
        await all_of(world.index(), record.checkpoint_of(kept))
    return deleted, record.generation
