"""The tail from memory: one subscription for all who follow, never past the LAC, never a gap."""

import asyncio
import contextlib
import itertools
import random

import pytest
from structlog.testing import capture_logs

from tests.unit.reader.test_source import numbered
from tests.unit.reader.world import N1, STREAM, ReaderWorld, at, budget, on_virtual_time, payloads
from tierlog.adapters.memory.storage_node import MemoryStorageNode
from tierlog.format.frame import pack_entries
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Edge
from tierlog.model.stream import ListedLedger
from tierlog_reader.cache.layout import Layout
from tierlog_reader.cache.manager import Asks
from tierlog_reader.cache.store import StreamingCache
from tierlog_reader.cached_ranges import CachedRanges
from tierlog_reader.chunk import Answer, Chunk
from tierlog_reader.places import Tier
from tierlog_reader.read_index import ReadIndex
from tierlog_reader.tail import (
    HELD_BYTES,
    NOTE_BYTES,
    NOTE_EACH_BYTES,
    NOTES_MAX_FIRST,
    WALK_BYTES,
    TailMemory,
)

# What keeps bytes in the cache must not see which one it is.
pytestmark = pytest.mark.usefixtures("both_caches")

MIB = 1024 * 1024
A, B, C = numbered(0, 30), numbered(100, 20), numbered(200, 10)


def tails_of(size: int = 2 * MIB, **named) -> CachedRanges:
    return CachedRanges(StreamingCache(size, **named), objects_max=10)


class CountedNode(MemoryStorageNode):
    """Counts the reads that come, and how many wait at once."""

    def __init__(self, node_id):
        super().__init__(node_id)
        self.reads = self.waiting = self.most_waiting = 0

    async def read(self, *where, **named):
        self.reads += 1
        self.waiting += 1
        self.most_waiting = max(self.waiting, self.most_waiting)
        try:
            async for runs in super().read(*where, **named):
                yield runs
        finally:
            self.waiting -= 1


async def closed(world, ledger, entries):
    """Close a ledger that was written while it was open."""
    world.ledgers[ledger] = list(entries)
    await world.catalog().ledgers.close(
        world.claimed,
        ledger,
        last_entry_id=EntryId(len(entries) - 1),
        length=sum(map(len, entries)),
    )


async def counted_world() -> tuple[ReaderWorld, CountedNode]:
    world, node = ReaderWorld(), CountedNode(N1)
    world.node = node
    await world.start()
    return world, node


async def followed(source, where, until: bytes, *, size: int = 100_000):
    """Follow until an entry comes; return all payloads, and the tiers that they came from."""
    found: list[bytes] = []
    tiers: list[Tier] = []
    while not found or found[-1] != until:
        answer = await source.read(STREAM, where, budget(wait_s=30, size=size))
        if answer.chunk is not None:
            found += payloads(answer)
            tiers += [answer.chunk.tier] * answer.chunk.count
        where = answer.resume
    return found, tiers


@pytest.mark.covers("C03", "C06", "C07")
@on_virtual_time
async def test_a_hundred_followers_cost_one_read_of_tier_1_and_are_served_from_memory():
    world, node = await counted_world()
    ledger = await world.opened(A)
    async with world.reader(tails=tails_of()) as source, asyncio.TaskGroup() as group:
        tasks = [group.create_task(followed(source, at(ledger, len(A)), B[-1])) for _ in range(100)]
        await asyncio.sleep(3)
        before, node.most_waiting = node.reads, 0
        for number, entry in enumerate(B):
            await world.write(ledger, [entry], first=len(A) + number)
            await asyncio.sleep(0.7)
        reads = node.reads - before
        assert node.most_waiting == 1
        # One for each entry that came by itself, and one each second that nothing did.
        assert len(B) // 2 <= reads <= 3 * len(B), reads
    for task in tasks:
        found, tiers = task.result()
        assert found == B
        assert set(tiers) == {Tier.MEMORY}


@pytest.mark.covers("C02", "C05", "C07")
@on_virtual_time
async def test_what_was_followed_is_read_from_memory_whichever_tier_has_it_by_then():
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened()
    async with world.reader(tails=tails_of()) as source, asyncio.TaskGroup() as group:
        task = group.create_task(followed(source, Edge.EARLIEST, A[-1]))
        await asyncio.sleep(1)
        for number, entry in enumerate(A):
            await world.write(ledger, [entry], first=number)
            await asyncio.sleep(0.1)
        await task
        await closed(world, ledger, A)
        await world.offloaded(ledger)
        await world.gone_locally(ledger)
        world.bucket.objects.clear()
        await asyncio.sleep(1)
        # Neither tier could answer: the bytes are in the reader's memory, from any entry on.
        for number in range(len(A)):
            answer = await source.read(STREAM, at(ledger, number), budget())
            assert answer.chunk.tier is Tier.MEMORY
            assert payloads(answer) == A[number:]
            few = await source.read(STREAM, at(ledger, number), budget(entries=2))
            assert payloads(few) == A[number : number + 2]
            one = await source.read(STREAM, at(ledger, number), budget(size=1))
            assert payloads(one) == A[number : number + 1]


@pytest.mark.covers("C06", "C07")
@on_virtual_time
async def test_the_lac_is_never_passed():
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened(A)
    async with world.reader(tails=tails_of()) as source, asyncio.TaskGroup() as group:
        where = at(ledger, len(A))
        reading = group.create_task(source.read(STREAM, where, budget(wait_s=60)))
        await asyncio.sleep(2)
        # Stored and not confirmed: seven are there, three may be read.
        await world.write(ledger, B[:7], first=len(A), lac=len(A) + 2)
        answer = await reading
        got = payloads(answer)
        while answer.resume != at(ledger, len(A) + 3):
            answer = await source.read(STREAM, answer.resume, budget(wait_s=1))
            got += payloads(answer)
        assert got == B[:3]
        empty = await source.read(STREAM, answer.resume, budget(wait_s=5))
        assert empty.chunk is None
        world.node.confirm(ledger, EntryId(len(A) + 6))
        found, _ = await followed(source, answer.resume, B[6])
        assert found == B[3:7]


@on_virtual_time
async def test_a_position_beyond_the_end_is_told_and_followers_at_the_end_go_on():
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened(A)
    async with world.reader(tails=tails_of()) as source, asyncio.TaskGroup() as group:
        beyond = group.create_task(
            _reason_of(source.read(STREAM, at(ledger, 1000), budget(wait_s=3)))
        )
        await asyncio.sleep(0.5)
        following = group.create_task(followed(source, at(ledger, len(A)), B[-1]))
        await asyncio.sleep(4)
        assert beyond.result() is Reason.NOT_YET
        second = group.create_task(
            _reason_of(source.read(STREAM, at(ledger, 1000), budget(wait_s=3)))
        )
        await asyncio.sleep(4)
        assert second.result() is Reason.NOT_YET
        await world.write(ledger, B, first=len(A))
        assert (await following)[0] == B


async def _reason_of(reading):
    try:
        await reading
    except (RefusedError, RetryableError) as error:
        return error.reason
    return None


@pytest.mark.covers("C15", "C36")
@pytest.mark.parametrize("cache_bytes", [32 * 1024, 4 * 1024])
def test_a_cache_that_is_too_small_for_the_tail_is_no_gap_and_no_error(cache_bytes):
    on_virtual_time(_too_small_a_cache)(cache_bytes)


async def _too_small_a_cache(cache_bytes):
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened()
    tails = tails_of(cache_bytes, layout=Layout(64, 8))
    slow_bytes = 2000
    async with world.reader(tails=tails) as source, asyncio.TaskGroup() as group:
        entries = numbered(0, 400, size=400)
        fast = group.create_task(followed(source, Edge.EARLIEST, entries[-1]))
        slow = group.create_task(followed(source, Edge.EARLIEST, entries[-1], size=slow_bytes))
        for first in range(0, len(entries), 20):
            await world.write(ledger, entries[first : first + 20], first=first)
            assert tails.store.used_bytes <= tails.store.bytes_max
            await asyncio.sleep(0.05)
    assert fast.result()[0] == slow.result()[0] == entries
    assert (tails.manager.refusals["tail"] > 0) == (cache_bytes < 32 * 1024)


@pytest.mark.covers("C02", "C07")
@pytest.mark.parametrize("seed", range(6))
def test_followers_from_the_first_entry_see_each_once_while_ledgers_roll_move_and_go(seed):
    @on_virtual_time
    async def test():
        chance = random.Random(seed)
        world = ReaderWorld()
        await world.start()
        entries = numbered(0, 240)
        tails = tails_of(2 * MIB) if seed % 2 else tails_of(16 * 1024, layout=Layout(64, 8))
        async with world.reader(tails=tails) as source, asyncio.TaskGroup() as group:
            readers = [
                group.create_task(followed(source, Edge.EARLIEST, entries[-1], size=size))
                for size in (100_000, 400, 90)
            ]
            await _written_rolled_and_moved(world, entries, chance)
        for reader in readers:
            assert reader.result()[0] == entries

    test()


async def _written_rolled_and_moved(world, entries, chance):
    """Append, close ledgers, copy them and delete the local copies, at moments of chance."""
    left: list[LedgerId] = []
    for part in range(0, len(entries), 40):
        ledger = await world.opened()
        for number in range(40):
            await world.write(ledger, [entries[part + number]], first=number)
            await asyncio.sleep(chance.choice([0, 0.001, 0.2]))
            if left and chance.random() < 0.1:
                moved = left.pop(0)
                await world.offloaded(moved)
                await asyncio.sleep(chance.random())
                await world.gone_locally(moved)
        await closed(world, ledger, entries[part : part + 40])
        left.append(ledger)
    for moved in left:
        await world.offloaded(moved)
        await world.gone_locally(moved)


@on_virtual_time
async def test_a_subscription_ends_when_nobody_asks_and_what_it_took_counts_as_used():
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened(A)
    tails = tails_of()
    async with world.reader(tails=tails) as source:
        tail = source._memory
        before = tails.manager.used_bytes
        assert (await source.read(STREAM, at(ledger, len(A)), budget(wait_s=1))).chunk is None
        assert tail.subscriptions == 1
        await world.write(ledger, B, first=len(A))
        found, tiers = await followed(source, at(ledger, len(A)), B[-1])
        assert (found, set(tiers)) == (B, {Tier.MEMORY})
        assert tails.manager.used_bytes > before + sum(map(len, B))
        await asyncio.sleep(20)
        assert tail.subscriptions == 0
        # It goes on where it ended, from whoever waits next.
        assert (await source.read(STREAM, at(ledger, 50), budget(wait_s=1))).chunk is None
        assert tail.subscriptions == 1
        assert payloads(await source.read(STREAM, at(ledger, len(A)), budget())) == B
    assert tails.manager.owners_bytes == 0
    assert tails.store.entries == 0


@on_virtual_time
async def test_who_follows_again_does_not_wait_for_all_that_came_while_nobody_did():
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened(A)
    async with world.reader(tails=tails_of()) as source, asyncio.TaskGroup() as group:
        tail = source._memory
        following = group.create_task(followed(source, at(ledger, len(A)), B[-1]))
        await asyncio.sleep(1)
        await world.write(ledger, B, first=len(A))
        await following
        await asyncio.sleep(20)
        taken = tail.bytes_taken
        assert (taken > 0, tail.subscriptions) == (True, 0)
        await world.write(ledger, C, first=len(A + B))
        end = at(ledger, len(A + B + C))
        assert (await source.read(STREAM, end, budget(wait_s=1))).chunk is None
        assert (tail.bytes_taken, tail.subscriptions) == (taken, 1)


class PromptNode(MemoryStorageNode):
    """Answers who waits as soon as there is something."""

    async def _wait_for(self, ledger_id, entry_id, wait_s):
        deadline_s = asyncio.get_running_loop().time() + wait_s
        while entry_id > self.lacs.get(ledger_id, -1):
            if asyncio.get_running_loop().time() >= deadline_s:
                break
            await asyncio.sleep(0.001)
        await super()._wait_for(ledger_id, entry_id, 0)


@on_virtual_time
async def test_what_comes_is_given_without_another_look_at_the_metadata():
    world = ReaderWorld()
    world.node = PromptNode(N1)
    await world.start()
    ledger = await world.opened(A)
    async with world.reader(tails=tails_of()) as source, asyncio.TaskGroup() as group:
        where = at(ledger, len(A))
        await source.read(STREAM, where, budget(wait_s=1))
        reading = group.create_task(source.read(STREAM, where, budget(wait_s=30)))
        await asyncio.sleep(0.1)
        looks = []
        look = source._views.stream

        async def counted(name, *, fresh=False):
            looks.append(fresh)
            return await look(name, fresh=fresh)

        source._views.stream = counted
        await world.write(ledger, B, first=len(A))
        assert payloads(await reading)[0] == B[0]
        assert True not in looks


def listed(ledger_id: int) -> ListedLedger:
    return ListedLedger(ledger_id=LedgerId(ledger_id), opened_ms=0, block_size=1, owner_epoch=1)


class EndlessTier:
    """Tier 1 in which nothing ever comes; notes what is asked of it."""

    def __init__(self):
        self.asked: list[int] = []

    async def read(self, ledger, first_entry_id, budget):
        self.asked.append(budget.bytes_max)
        await asyncio.sleep(budget.wait_s)
        raise RetryableError("nothing yet", reason=Reason.NOT_YET, remedy="wait")


@pytest.mark.covers("C36")
@on_virtual_time
async def test_what_tails_take_of_pythons_heap_makes_others_go_and_never_passes_the_limit():
    memory = tails_of()
    manager = memory.manager
    other, filled = ReadIndex(memory.store, manager), 0
    while not manager.evictions:
        other.fill(filled, bytes(4096), Asks.TAIL)
        filled += 4096
    assert manager.used_bytes > memory.store.bytes_max - HELD_BYTES
    async with TailMemory(EndlessTier(), memory.store, manager).run() as tail:
        for one in range(30):
            tail.follow(listed(one), EntryId(0))
            assert manager.overflow_bytes == 0
        assert tail.subscriptions == 30
        assert manager.owners_bytes == 30 * HELD_BYTES


@on_virtual_time
async def test_where_nothing_has_room_a_follower_reads_tier_1_and_misses_nothing():
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened(A)
    memory = tails_of()
    manager = memory.manager
    async with world.reader(tails=memory) as source, asyncio.TaskGroup() as group:
        manager.promised_bytes = memory.store.bytes_max - manager.used_bytes - HELD_BYTES + 1
        task = group.create_task(followed(source, at(ledger, len(A)), B[-1]))
        for number, entry in enumerate(B[:-1]):
            await asyncio.sleep(0.4)
            await world.write(ledger, [entry], first=len(A) + number)
        assert (manager.owners_bytes, manager.overflow_bytes) == (0, 0)
        # With room for what comes, but none for a note of it beside, it is not kept either.
        manager.promised_bytes = 0
        await asyncio.sleep(3)
        assert source._memory.subscriptions == 1
        left = manager._cost(1000) + NOTE_BYTES - 1
        manager.promised_bytes = memory.store.bytes_max - manager.used_bytes - left
        await world.write(ledger, B[-1:], first=len(A) + len(B) - 1)
        found, tiers = await task
        assert (found, set(tiers)) == (B, {Tier.TIER1})
        assert (manager.owners_bytes, manager.overflow_bytes) == (HELD_BYTES, 0)


class BuggyTier:
    """Tier 1 that gives a few entries, then meets a bug once, then goes on."""

    def __init__(self, entries):
        self.entries = list(entries)
        self.bugs_left = 1

    async def read(self, ledger, first_entry_id, budget):
        if first_entry_id == len(self.entries) // 2 and self.bugs_left:
            self.bugs_left -= 1
            raise KeyError("a bug")
        pieces = [[one] for one in self.entries[first_entry_id:]]
        return await PiecesTier(pieces).read(ledger, first_entry_id, budget)


@on_virtual_time
async def test_a_bug_that_a_subscription_meets_is_told_and_ends_nothing_else():
    memory, entries = tails_of(), numbered(0, 10)
    listed = ListedLedger(ledger_id=LedgerId(1), opened_ms=0, block_size=1, owner_epoch=1)
    async with TailMemory(BuggyTier(entries), memory.store, memory.manager).run() as tail:
        with capture_logs() as logs:
            tail.follow(listed, EntryId(0))
            assert not await tail.wait(LedgerId(1), EntryId(5), 10)
        assert [one["log_level"] for one in logs if one["event"] == "unexpected_error"] == ["error"]
        assert tail.subscriptions == 0
        assert tail.get(LedgerId(1), EntryId(0), budget()) is None
        assert memory.manager.owners_bytes == HELD_BYTES
        # Whoever asks next begins it again.
        tail.follow(listed, EntryId(5))
        assert await tail.wait(LedgerId(1), EntryId(9), 10)
        assert got(tail, 5, budget())[0][0] == entries[5]


class PiecesTier:
    """Tier 1 in which pieces of a few entries come, one at a time."""

    def __init__(self, pieces):
        self.left = list(pieces)

    async def read(self, ledger, first_entry_id, budget):
        if not self.left:
            await asyncio.sleep(budget.wait_s)
            raise RetryableError("nothing yet", reason=Reason.NOT_YET, remedy="wait")
        entries = self.left.pop(0)
        frames, _ = pack_entries(entries, first_entry_id)
        return Chunk(
            ledger_id=ledger.ledger_id,
            first_entry_id=first_entry_id,
            count=len(entries),
            frames=(bytes(frames),),
            tier=Tier.TIER1,
        )


@contextlib.asynccontextmanager
async def taken(pieces, memory):
    """Give the tail once it has taken all pieces, and what it has of their ledger."""
    tier1 = PiecesTier(pieces)
    async with TailMemory(tier1, memory.store, memory.manager).run() as tail:
        tail.follow(
            ListedLedger(ledger_id=LedgerId(1), opened_ms=0, block_size=1, owner_epoch=1),
            EntryId(0),
        )
        while tier1.left:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        yield tail, tail._held[LedgerId(1)]


def got(tail, first, wanted):
    """Return payloads from an entry on, and the bytes that the answer keeps in memory."""
    chunk = tail.get(LedgerId(1), EntryId(first), wanted)
    frames = b"".join(chunk.frames)
    found = payloads(Answer(chunk=chunk, resume=chunk.end))
    return found, len(frames), sum(memoryview(memoryview(one).obj).nbytes for one in chunk.frames)


@on_virtual_time
async def test_within_a_tail_of_small_appends_an_answer_costs_what_it_gives():
    entries = numbered(0, 5000, size=1000)
    async with taken([[one] for one in entries], tails_of(16 * MIB)) as (tail, held):
        gaps = [after - before for before, after in itertools.pairwise(held.offsets)]
        assert max(gaps) < NOTE_EACH_BYTES + 1100, "no more than that is walked"
        for first in (0, 1, 700, 2499, 4990):
            found, length, alive = got(tail, first, budget(entries=5, size=100_000))
            assert found == entries[first : first + 5]
            assert alive <= 2 * length
            found, length, alive = got(tail, first, budget(entries=5000, size=300_000))
            assert found == entries[first : first + len(found)]
            assert len(found) == min(5000 - first, 300_000 // (length // len(found)))
            assert alive <= 2 * length


@on_virtual_time
async def test_entries_longer_than_a_step_of_the_walk_are_passed():
    entries = [b"a" * 10, b"b" * 3 * WALK_BYTES, b"c" * WALK_BYTES, b"d" * 20, b"e" * 30]
    async with taken([entries], tails_of(16 * MIB)) as (tail, _):
        for first in range(len(entries)):
            found, _, _ = got(tail, first, budget(entries=1))
            assert found == entries[first : first + 1]


@on_virtual_time
async def test_notes_of_bytes_that_went_go_too():
    memory = tails_of(2 * MIB)
    entries = numbered(0, 2000, size=8000)
    async with taken([[one] for one in entries], memory) as (tail, held):
        assert len(held.starts) <= NOTES_MAX_FIRST
        assert memory.manager.owners_bytes == HELD_BYTES + NOTE_BYTES * len(held.starts)
        assert tail.get(LedgerId(1), EntryId(0), budget()) is None
        assert got(tail, 1990, budget(entries=3))[0] == entries[1990:1993]
