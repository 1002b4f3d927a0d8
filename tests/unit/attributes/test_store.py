"""Checkpoints of attributes in tier 2: what lies where, how much is read, and what is verified."""

import asyncio
import random

import pytest

from tests.contracts.attributes_suite import FIRST, LAST, all_of, at, key_of
from tests.simulation.virtual_loop import run_virtual
from tests.unit.attributes.world import SAFETY_MS, IndexWorld, Process
from tierlog.adapters.memory.faults import FaultRates, Faults, Outcome
from tierlog.attributes.page_cache import PAGE_COST, PageCache, PageName
from tierlog.format.attribute_objects import parse_attribute_key
from tierlog.format.attribute_page import LEAF_ENTRY_LEN, Page, new_page, seal
from tierlog.format.attribute_records import encode_attributes
from tierlog.model.attributes import EVENT_COUNT, AttributeKey, Checkpoint, IndexObject
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.model.policy import Policy
from tierlog.model.stream import Stream
from tierlog.ports.spending import Cause

MIB = 1024 * 1024
OFFLOADING = Policy(offload_time_ms=1000)


async def filled(
    world: IndexWorld, count: int, *, policy: Policy | None = None
) -> tuple[Stream, Checkpoint]:
    stream, index = await world.stream(policy=policy), world.index()
    changes = {key_of(number): number for number in range(count)}
    base = await index.load(stream)
    made = await index.flush(stream, base, changes=changes, core={}, through=at(0, 0))
    return stream, made


def gets(process: Process) -> int:
    assert process.faults.calls is not None
    count = sum(name.startswith("objects.get") for name in process.faults.calls)
    process.faults.calls = []
    return count


def reader_of(world: IndexWorld, *, cache_bytes: int = 1 << 24) -> Process:
    process = world.process(Faults(random.Random(1)), cache_bytes=cache_bytes)
    process.faults.calls = []
    return process


@pytest.mark.covers("E24", "E37")
async def test_each_flush_is_one_object_and_its_bytes_are_the_index() -> None:
    world = IndexWorld()
    stream, made = await filled(world, 3000)
    index = world.index()
    next_one = await index.flush(
        stream, made, changes={key_of(5): 1}, core={EVENT_COUNT: 7}, through=at(0, 1)
    )
    keys = world.keys_in_bucket()
    parsed = [parse_attribute_key("", key) for key in keys]
    assert all(one is not None and not one.is_list for one in parsed)
    assert [one.start for one in parsed if one is not None] == [0, made.root.end]
    assert {one.owner_epoch for one in parsed if one is not None} == {stream.owner_epoch}
    for one in next_one.objects:
        info, raw = world.bucket.objects[one.key]
        assert (info.size, info.metadata["role"]) == (one.length, "attributes")
        assert info.metadata["tierlogclusterid"] == str(world.cluster_id)
        assert info.metadata["managedledgername"] == stream.name
        page = raw[-next_one.root.root_length :]
        if one.end == next_one.root.end:
            assert Page(page, next_one.root.root_offset).level > 0
    # Core attributes alone write none.
    await index.flush(stream, next_one, changes={}, core={EVENT_COUNT: 8}, through=at(0, 2))
    assert world.keys_in_bucket() == keys


@pytest.mark.covers("E23", "E36")
async def test_on_a_warm_index_a_lookup_reads_one_page_at_most() -> None:
    world = IndexWorld(page_bytes=1024)
    _, made = await filled(world, 20_000)
    # Room for the index pages and for some leaves.
    process = reader_of(world, cache_bytes=100 * 1024)
    index, rng = process.index, random.Random(3)
    for number in range(0, 20_000, 40):
        await index.get(made, [key_of(number)])
    assert gets(process) > 400
    for _ in range(300):
        number = rng.randrange(20_000)
        assert await index.get(made, [key_of(number)]) == {key_of(number): number}
        assert gets(process) <= 1
    assert process.cache.used_bytes <= process.cache.limit_bytes


@pytest.mark.covers("E23")
async def test_what_was_just_flushed_is_not_read_again() -> None:
    world = IndexWorld()
    stream = await world.stream()
    process = reader_of(world)
    base = await process.index.load(stream)
    for entry in range(20):
        changes = {key_of(number * 50 + entry): entry for number in range(40)}
        base = await process.index.flush(
            stream, base, changes=changes, core={}, through=at(0, entry)
        )
    assert gets(process) == 0


async def test_what_is_read_counts_on_the_stream_though_a_checkpoint_names_none() -> None:
    world = IndexWorld(chunk_objects_max=1)
    stream, made = await filled(world, 3000)
    made = await world.index().flush(
        stream, made, changes={key_of(5): 1}, core={}, through=at(0, 1)
    )
    assert made.chunks, "lists are read, too"
    process = reader_of(world)
    assert await process.index.get(made, [key_of(7)]) == {key_of(7): 7}
    assert len(await all_of(process.index, made)) == 3000
    assert {(one.stream, one.cause) for one in process.meter.amounts} == {
        (stream.name, Cause.ATTRIBUTES)
    }


def test_a_page_is_fetched_once_however_many_ask_at_the_same_time() -> None:
    async def main() -> None:
        world = IndexWorld()
        _, made = await filled(world, 10)
        process = reader_of(world)
        process.faults.rates = FaultRates(delay_s_max=1)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(process.index.get(made, [key_of(3)])) for _ in range(50)]
        assert all(task.result() == {key_of(3): 3} for task in tasks)
        assert gets(process) == 1
        # A fetch that fails is begun again by one of those that waited for it.
        process.cache.limit_bytes = 0
        process.cache._leaves.clear()
        process.faults.next("objects.get_range", Outcome.REFUSED)
        async with asyncio.TaskGroup() as group:
            tried = [group.create_task(_tried(process, made)) for _ in range(5)]
        assert sorted(task.result() for task in tried) == [False, True, True, True, True]
        assert gets(process) == 2

    run_virtual(main(), until_s=100)


async def _tried(process: Process, made: Checkpoint) -> bool:
    try:
        return await process.index.get(made, [key_of(3)]) == {key_of(3): 3}
    except RetryableError:
        return False


def _page(level: int, offset: int, entries: int = 3) -> Page:
    length = 34 if level else LEAF_ENTRY_LEN
    raw = new_page(level, bytes(length * entries))
    seal(raw, offset)
    return Page(bytes(raw), offset)


def test_index_pages_push_leaves_out_and_never_the_other_way_round() -> None:
    leaf, above = _page(0, 0), _page(1, 0)
    cache = PageCache(limit_bytes=3 * (len(above.raw) + PAGE_COST))
    names = [PageName("k", number) for number in range(9)]
    for name in names[:3]:
        assert cache.put(name, leaf)
    assert cache.find(names[0]) is leaf
    assert cache.put(names[3], above)
    assert cache.put(names[4], above)
    # The leaf that was used last stayed longest.
    assert [name.offset for name in names if cache.find(name)] == [0, 3, 4]
    assert cache.put(names[5], above)
    assert not cache.put(names[6], leaf), "no leaf takes the place of an index page"
    assert cache.put(names[7], above)
    assert [name.offset for name in names if cache.find(name)] == [4, 5, 7]
    assert cache.used_bytes == 3 * (len(above.raw) + PAGE_COST)
    assert not PageCache(limit_bytes=10).put(names[0], above)


def test_a_page_that_has_no_room_pushes_nothing_out() -> None:
    small, large, above = _page(0, 0), _page(0, 0, 90), _page(1, 0)
    cache = PageCache(limit_bytes=2 * PAGE_COST + len(small.raw) + len(above.raw))
    names = [PageName("k", number) for number in range(3)]
    assert cache.put(names[0], small)
    assert cache.put(names[1], above)
    assert not cache.put(names[2], large)
    assert [cache.find(name) for name in names] == [small, above, None]
    assert cache.used_bytes == cache.limit_bytes


@pytest.mark.covers("E37", "E38", "E39")
async def test_the_head_goes_with_what_no_root_needs_and_the_record_stays_small() -> None:
    world = IndexWorld(chunk_bytes=20_000, page_bytes=512)
    stream, base = await filled(world, 400)
    index, rng = world.index(), random.Random(5)
    catalog = world.process().catalog.attributes
    values = {key_of(number): number for number in range(400)}
    lengths = []
    for entry in range(1, 300):
        changes = {key_of(rng.randrange(400)): entry for _ in range(20)}
        values |= changes
        base = await index.flush(stream, base, changes=changes, core={}, through=at(0, entry))
        record = await catalog.get(stream.name)
        assert record is not None
        ends = [one.end for one in record.chunks] + [one.end for one in record.objects]
        assert min(ends) > base.root.start, "what lies below the root's start is not named"
        lengths.append(len(encode_attributes(record)))
    assert base.root.start > 200_000
    assert base.chunks
    assert max(lengths) < 6_000, "a chunk is named by its list alone"
    assert await all_of(world.index(), base) == values


async def test_a_chunk_closes_by_its_count_too_and_lists_what_it_holds() -> None:
    world = IndexWorld(chunk_objects_max=3)
    stream, base = await filled(world, 5)
    index = world.index()
    for entry in range(1, 7):
        base = await index.flush(
            stream, base, changes={key_of(entry): 0}, core={}, through=at(0, entry)
        )
    lists = [key for key in world.keys_in_bucket() if key.endswith(".list")]
    # A small index is rewritten whole: what came before is needed by nobody.
    assert (len(base.objects), len(base.chunks), lists) == (1, 0, [])
    wide = IndexWorld(chunk_objects_max=3, page_bytes=256)
    stream, base = await filled(wide, 500)
    for entry in range(1, 12):
        base = await wide.index().flush(
            stream, base, changes={key_of(entry * 40): 0}, core={}, through=at(0, entry)
        )
    assert [one.object_count for one in base.chunks] == [3] * len(base.chunks)
    assert len(base.chunks) >= 3
    assert len(base.objects) < 3
    assert (await all_of(wide.index(), base))[key_of(40)] == 0


async def test_a_damaged_page_is_named_and_nothing_of_it_is_believed() -> None:
    world = IndexWorld()
    _, made = await filled(world, 100)
    (one,) = made.objects
    world.bucket.damage(one.key, 40)
    with pytest.raises(CorruptError, match="is not what was written"):
        await world.index().get(made, [key_of(1)])
    process = world.process()
    with pytest.raises(CorruptError):
        await process.index.get(made, [key_of(1)])
    assert len(process.cache) == 0


async def test_an_object_that_is_gone_is_damage_unless_there_is_a_newer_root() -> None:
    world = IndexWorld()
    stream, made = await filled(world, 100)
    del world.bucket.objects[made.objects[0].key]
    with pytest.raises(CorruptError, match="is not there") as error:
        await world.index().get(made, [key_of(1)])
    assert error.value.details["object"] == made.objects[0].key
    with pytest.raises(CorruptError, match="is not there"):
        await all_of(world.index(), made)
    assert (await world.index().load(stream)) == made


async def test_an_iteration_that_is_overtaken_goes_on_behind_its_last_key() -> None:
    world = IndexWorld(page_bytes=256)
    stream, made = await filled(world, 900)
    process = world.process(cache_bytes=0)
    seen: dict[AttributeKey, int] = {}
    newest = made
    runs = process.index.iterate(made, FIRST, LAST)
    async for run in runs:
        if not seen:
            newest = await world.index().flush(
                stream,
                made,
                changes={key_of(number): -1 for number in range(900)},
                core={},
                through=at(0, 1),
            )
            world.clock.advance(SAFETY_MS / 1000)
            await world.process().sweeper.run(
                stream.name, stream.incarnation, delete=True, pay=_free
            )
            assert made.objects[0].key not in world.bucket.objects
        assert not seen.keys() & dict(run).keys()
        seen |= dict(run)
    assert sorted(seen) == [key_of(number) for number in range(900)]
    assert seen[key_of(899)] == -1
    assert newest.root.count == 900


async def _free(length: int) -> None:
    del length


async def test_a_large_flush_is_written_in_steps_and_published_at_once() -> None:
    world = IndexWorld(page_bytes=256, step_bytes=4096)
    stream, base = await filled(world, 1000)
    assert len(base.objects) >= 1000 * LEAF_ENTRY_LEN // 4096
    changes = {key_of(number): -number for number in range(0, 2000, 3)}
    process, most = world.process(Faults(random.Random(0)), cache_bytes=0), 0
    write = process.index._objects.write

    async def written(claimed: Stream, start: int, data: bytes) -> IndexObject:
        nonlocal most
        most = max(most, len(data))
        assert await all_of(world.index(), await world.index().load(stream)) == before
        return await write(claimed, start, data)

    before = {key_of(number): number for number in range(1000)}
    process.index._objects.write = written  # type: ignore[method-assign]
    made = await process.index.flush(stream, base, changes=changes, core={}, through=at(0, 1))
    assert await all_of(world.index(), made) == {**before, **changes}
    assert most < 5 * 4096
    assert made.root.count == len({**before, **changes})


async def test_a_sweep_between_writing_and_publishing_is_noticed() -> None:
    world = IndexWorld()
    stream, base = await filled(world, 5)
    process = world.process(Faults(random.Random(0)))
    publish, keys = process.catalog.attributes.publish, []

    async def after_a_sweep(claimed, publication):
        (made,) = publication.made
        keys.append(made.key)
        if len(keys) == 1:
            world.clock.advance(2 * SAFETY_MS / 1000)
            sweeper = world.process().sweeper
            swept = await sweeper.run(stream.name, stream.incarnation, delete=True, pay=_free)
            assert swept.deleted == 1
        return await publish(claimed, publication)

    process.catalog.attributes.publish = after_a_sweep  # type: ignore[method-assign]
    made = await process.index.flush(
        stream, base, changes={key_of(1): 9}, core={}, through=at(0, 1)
    )
    assert len(keys) == 2
    assert keys[0] not in world.bucket.objects
    assert await all_of(world.index(), made) == {
        key_of(number): 9 if number == 1 else number for number in range(5)
    }


async def test_without_tier_2_what_needs_none_of_it_goes_on() -> None:
    world = IndexWorld()
    stream = await world.stream()
    process = world.process(Faults(random.Random(0)))
    process.faults.outages.add("objects")
    index = process.index
    base = await index.load(stream)
    assert await index.get(base, [key_of(1)]) == {}, "that there is nothing is known"
    base = await index.flush(stream, base, changes={}, core={EVENT_COUNT: 4}, through=at(0, 0))
    with pytest.raises(RetryableError):
        await index.flush(stream, base, changes={key_of(1): 1}, core={}, through=at(0, 1))
    assert await world.index().load(stream) == base
    process.faults.outages.clear()
    made = await index.flush(stream, base, changes={key_of(1): 1}, core={}, through=at(0, 1))
    assert await all_of(index, made) == {key_of(1): 1}


async def test_before_anything_is_written_the_stream_says_that_there_is_something() -> None:
    world = IndexWorld()
    stream = await world.stream()
    process = world.process(Faults(random.Random(0)))
    process.faults.outages.add("objects")
    with pytest.raises(RetryableError):
        await process.index.flush(
            stream, Checkpoint(), changes={key_of(1): 1}, core={}, through=at(0, 1)
        )
    record = await world.process().catalog.attributes.get(stream.name)
    assert record is not None
    assert record.newest.through is None


async def test_who_claims_a_stream_that_goes_finds_that_it_has_nothing() -> None:
    world = IndexWorld()
    stream = await world.stream()
    catalog = world.process().catalog
    await catalog.retention.begin_stream_deletion(stream.name)
    assert await world.index().load(stream) == Checkpoint()
    assert await catalog.attributes.get(stream.name) is None


async def test_nothing_is_published_for_a_stream_that_goes() -> None:
    world = IndexWorld()
    stream, made = await filled(world, 5)
    catalog = world.process().catalog
    await catalog.retention.begin_stream_deletion(stream.name)
    with pytest.raises(RefusedError) as refused:
        await world.index().flush(stream, made, changes={key_of(1): 1}, core={}, through=at(0, 1))
    assert refused.value.reason is Reason.STREAM_NOT_FOUND
    await catalog.retention.remove_stream(stream.name, stream.incarnation)
    assert await catalog.attributes.get(stream.name) is None


async def test_roots_of_former_ledgers_are_kept_where_copies_are_wanted() -> None:
    for policy, kept in ((OFFLOADING, [0, 1, 2]), (None, [])):
        world = IndexWorld()
        stream, base = await filled(world, 5, policy=policy)
        index = world.index()
        for ledger_id in range(4):
            for entry in range(1, 3):
                base = await index.flush(
                    stream,
                    base,
                    changes={key_of(entry): ledger_id},
                    core={EVENT_COUNT: ledger_id},
                    through=at(ledger_id, entry),
                )
        catalog = world.process().catalog.attributes
        record = await catalog.get(stream.name)
        assert record is not None
        assert [one.through for one in record.ends] == [at(number, 2) for number in kept]
        for one in record.ends:
            values = await all_of(world.index(), record.checkpoint_of(one))
            assert one.through is not None
            assert values[key_of(2)] == one.through.ledger_id
        # Between two of them nothing is kept that neither needs.
        assert len(record.objects) == 1 + len(kept)
        await catalog.drop_ends(stream.name, stream.incarnation, before=at(2, 2))
        record = await catalog.get(stream.name)
        assert record is not None
        assert [one.through for one in record.ends] == [at(2, 2)][: len(kept)]
        assert record.checkpoint == base
