"""Pages of an attribute index that can't be read: a stream goes on, and loses nothing it need not.

Must hold: what entries tell is made of them, with nobody's help; elsewhere those who want what is
damaged are told what to do, and what an admin then accepts is on record.
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM, draft
from tests.unit.streams.attribute_world import KEY, AttributeCluster, entry, key_of, plus, send
from tests.unit.streams.test_owner_attribute_troubles import trim
from tests.unit.streams.test_owners import running
from tierlog.adapters.memory.faults import no_faults
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.attributes.objects import IndexObjects
from tierlog.attributes.page_cache import PageCache
from tierlog.attributes.store import Tier2AttributeIndex
from tierlog.attributes.update import Shape
from tierlog.format.attribute_changes import change_in_stream
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.attributes import EVENT_COUNT
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.policy import Policy
from tierlog.ports.streams import FIRST_KEY, LAST_KEY
from tierlog_ingest.streams.attributes import mending

WRITERS = [UUID(int=(number + 1) << 100) for number in range(30)]
KEYS = [*map(key_of, WRITERS), key_of(KEY)]


class DamagedCluster(AttributeCluster):
    """Its index lies in a bucket, in small pages of which none is kept in memory."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.bucket = MemoryObjects(self.clock)
        self.index = self

    def connect(self, faults):
        objects = self.bucket.connect(faults)
        return Tier2AttributeIndex(
            self.catalog().attributes,
            IndexObjects(objects, cluster_id=UUID(int=1), ids=self.ids),
            PageCache(limit_bytes=0),
            shape=Shape(page_bytes=256),
        )

    async def record(self):
        return await self.catalog().attributes.get(STREAM)

    async def write(self, *batches, flushed=True, drain=True):
        """Write a ledger a batch: an event each of some writers, who count at a key, too."""
        faults = no_faults()
        if not flushed:
            faults.outages.add("objects.put")
        owners = self.owners(faults=faults)
        async with running(owners, drain=drain):
            for batch in batches:
                for writer, number in batch:
                    await send(owners, STREAM, writer, number, updates=(plus(1),))
                await owners.seal(STREAM)
                await asyncio.sleep(1)

    def opening(self, opened, trouble):
        """Return what opens ledgers, notes which ones, and has the trouble that a dict names."""
        catalog = self.catalog()
        directory = self.directory(catalog)

        async def open_ledger(ledger_id):
            opened.append(ledger_id)
            if ledger_id in trouble:
                raise trouble[ledger_id]
            return Tier1ReadHandle(ledger_id, await catalog.ledgers.get(ledger_id), directory)

        return open_ledger

    def damage(self, key, *offsets):
        for offset in offsets:
            self.bucket.damage(key, offset)

    def damage_all(self):
        for key, (info, _) in list(self.bucket.objects.items()):
            self.damage(key, *range(0, info.size, 50))


def first_events(writers=WRITERS):
    return [(writer, 1) for writer in writers]


def second_events(writers):
    return [(writer, 2) for writer in writers]


async def answered(ask, limit_s=60):
    """Ask again what may be asked again, as a client does."""
    async with asyncio.timeout(limit_s):
        while True:
            try:
                return await ask()
            except RetryableError:
                await asyncio.sleep(0.2)


async def values_of(owners):
    found = await answered(lambda: owners.list_attributes(STREAM, FIRST_KEY, LAST_KEY, 1000))
    return dict(found.values)


def expected(numbers, count):
    events = sum(numbers.values())
    found = {key_of(writer): number for writer, number in numbers.items()}
    return {**found, key_of(KEY): count, EVENT_COUNT: events}


def but_core(values):
    return {key: value for key, value in values.items() if key in KEYS or key == EVENT_COUNT}


ONCE = dict.fromkeys(WRITERS, 1)


def test_a_rebuild_that_needs_a_damaged_page_makes_the_index_of_the_entries():
    async def main():
        cluster = DamagedCluster()
        catalog = await cluster.start()
        await cluster.write(first_events())
        await cluster.write(second_events(WRITERS[:1]), flushed=False, drain=False)
        before = await cluster.record()
        cluster.damage_all()
        owners = cluster.owners()
        async with running(owners):
            found = await answered(lambda: owners.get_attributes(STREAM, KEYS))
            wanted = expected(ONCE | {WRITERS[0]: 2}, 31)
            assert {**found.values, EVENT_COUNT: 31} == wanted
            assert but_core(await values_of(owners)) == wanted
            await send(owners, STREAM, WRITERS[0], 3)
        record = await catalog.attributes.get(STREAM)
        assert record.newest.root.start >= before.newest.root.end
        assert (record.lost_keys, record.loss_accepted) == ((), "")

    run_virtual(main())


@pytest.mark.parametrize("who", ["a fetch", "a flush", "a reader"])
def test_an_owner_that_meets_a_damaged_page_goes_on(who):
    async def main():
        cluster = DamagedCluster()
        await cluster.start()
        await cluster.write(first_events())
        before = await cluster.record()
        owners = cluster.owners()
        async with running(owners):
            # The ledger that is open then has entries that a checkpoint covers.
            await send(owners, STREAM, WRITERS[0], 2)
            (owner,) = owners._owners.values()
            await owner._keeper.flush_now()
            cluster.damage_all()
            numbers = ONCE | {WRITERS[0]: 2}
            if who == "a fetch":
                await answered(lambda: send(owners, STREAM, WRITERS[7], 2))
                numbers[WRITERS[7]] = 2
            elif who == "a flush":
                await owners.submit(STREAM, draft(entry(WRITERS[8], 2)))
                numbers[WRITERS[8]] = 2
                await owners.seal(STREAM)
                await asyncio.sleep(10)
                assert str((await cluster.record()).newest.through) == "1:1"
            assert but_core(await values_of(owners)) == expected(numbers, 30)
            await send(owners, STREAM, WRITERS[9], 2)
        record = await cluster.record()
        assert record.newest.root.start >= before.newest.root.end
        assert record.newest.through > before.newest.through
        assert record.lost_keys == ()

    run_virtual(main())


def test_a_former_checkpoint_whose_index_is_whole_needs_only_the_entries_behind_it():
    async def main():
        cluster = DamagedCluster()
        await cluster.start(policy=Policy(offload_time_ms=1000))
        # Keys between those that were written: other leaves than those of the last checkpoint.
        await cluster.write(first_events(), second_events(WRITERS[:3]), second_events(WRITERS[-3:]))
        record = await cluster.record()
        assert len(record.ends) == 2
        cluster.nodes["n1"].damaged |= {(LedgerId(0), EntryId(one)) for one in range(30)}
        cluster.damage(record.objects[-1].key, *range(0, record.objects[-1].length, 50))
        owners = cluster.owners()
        async with running(owners):
            twice = dict.fromkeys((*WRITERS[:3], *WRITERS[-3:]), 2)
            assert but_core(await values_of(owners)) == expected(ONCE | twice, 36)
            record = await cluster.record()
            assert [one.through.ledger_id for one in record.ends] == [0, 1]
            assert record.lost_keys == ()

    run_virtual(main())


async def three_ledgers(cluster, *behind):
    """Write three ledgers with a checkpoint each, and more behind them; damage all checkpoints."""
    catalog = await cluster.start(policy=Policy(offload_time_ms=1000))
    await cluster.write(first_events(), second_events(WRITERS[:15]), second_events(WRITERS[15:]))
    if behind:
        await cluster.write(*behind, flushed=False, drain=False)
    cluster.damage_all()
    return catalog


TWICE = expected(dict.fromkeys(WRITERS, 2), 60)
AWAY = RetryableError("it is away", remedy="Ask again")


@pytest.mark.parametrize("who", ["a flush", "a rebuild"])
def test_mending_goes_on_where_it_was_after_a_hiccup(who):
    async def main():
        cluster, opened, trouble = DamagedCluster(), [], {LedgerId(2): AWAY}
        # A rebuild wants the sum at the key, of the damaged index.
        behind = [[(WRITERS[0], 3)]] if who == "a rebuild" else []
        await three_ledgers(cluster, *behind)
        numbers = dict.fromkeys(WRITERS, 2) | dict(*behind)
        owners = cluster.owners(open_ledger=cluster.opening(opened, trouble))
        async with running(owners):
            asked = asyncio.create_task(values_of(owners))
            await asyncio.sleep(20)
            assert not asked.done()
            trouble.clear()
            events = sum(numbers.values())
            assert but_core(await asked) == expected(numbers, events)
        assert (opened.count(0), opened.count(1)) == (1, 1)

    run_virtual(main())


def test_a_damaged_index_is_not_read_again_each_second_while_nodes_are_away(monkeypatch):
    reads, salvage = [], Tier2AttributeIndex.salvage

    async def noting(self, checkpoint):
        reads.append(checkpoint)
        return await salvage(self, checkpoint)

    monkeypatch.setattr(Tier2AttributeIndex, "salvage", noting)

    async def main():
        cluster, opened, trouble = DamagedCluster(), [], {LedgerId(2): AWAY}
        await three_ledgers(cluster)
        owners = cluster.owners(open_ledger=cluster.opening(opened, trouble))
        async with running(owners):
            with pytest.raises(TimeoutError):
                await values_of(owners)
            await asyncio.sleep(540)
            assert 50 < len(reads) < 200
            trouble.clear()
            assert but_core(await values_of(owners)) == TWICE

    run_virtual(main())


def test_what_was_counted_is_not_kept_for_the_next_try_where_it_is_much(monkeypatch):
    monkeypatch.setattr(mending, "COUNTED_KEPT_MAX", 1)

    async def main():
        cluster, opened, trouble = DamagedCluster(), [], {LedgerId(2): AWAY}
        await three_ledgers(cluster)
        owners = cluster.owners(open_ledger=cluster.opening(opened, trouble))
        async with running(owners):
            asked = asyncio.create_task(values_of(owners))
            await asyncio.sleep(40)
            assert opened.count(0) > 5
            trouble.clear()
            numbers = dict.fromkeys(WRITERS, 2)
            assert but_core(await asked) == expected(numbers, sum(numbers.values()))

    run_virtual(main())


def test_damaged_entries_are_asked_for_each_minute_and_those_before_them_once():
    async def main():
        damage = CorruptError("the data object is damaged", remedy="Repair the copy")
        cluster, opened, trouble = DamagedCluster(), [], {LedgerId(2): damage}
        catalog = await three_ledgers(cluster)
        owners = cluster.owners(open_ledger=cluster.opening(opened, trouble))
        async with running(owners):
            with pytest.raises(CorruptError):
                await values_of(owners)
            await asyncio.sleep(600)
            assert (opened.count(0), opened.count(1)) == (1, 1)
            assert opened.count(2) > 5
            # A loss that is accepted then is one at once: nothing is read again for that, either.
            stream = await catalog.streams.get(STREAM)
            await catalog.attributes.accept_loss(stream, by="admin")
            await asyncio.sleep(2)
            assert but_core(await values_of(owners)) == {EVENT_COUNT: 60}
        assert (opened.count(0), opened.count(1)) == (1, 1)
        assert (await cluster.record()).lost_keys

    run_virtual(main())


def test_entries_before_a_damaged_one_of_the_same_run_are_counted_once_however_often_it_is_met(
    monkeypatch,
):
    entries = [entry(writer, 1, updates=(plus(1),)) for writer in WRITERS]
    damaged, read = {entries[20]}, change_in_stream

    def damaged_on_its_way(data):
        if bytes(data) in damaged:
            raise CorruptError("its checksum is wrong", remedy="Repair the copy")
        return read(data)

    monkeypatch.setattr(mending, "change_in_stream", damaged_on_its_way)

    async def main():
        cluster = DamagedCluster()
        await cluster.start()
        owners = cluster.owners()
        async with running(owners):
            sent = [owners.submit(STREAM, draft(one)) for one in entries]
            await asyncio.wait(sent)
            (runs,) = cluster.nodes["n1"].runs.values()
            assert len(runs) < 10, "there is more than one entry in a run"
            await owners.seal(STREAM)
            await asyncio.sleep(1)
        cluster.damage_all()
        owners = cluster.owners()
        async with running(owners):
            with pytest.raises(CorruptError):
                await values_of(owners)
            damaged.clear()
            await asyncio.sleep(120)
            assert but_core(await values_of(owners)) == expected(ONCE, 30)

    run_virtual(main())


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_loss_that_is_accepted_ends_the_wait_for_nodes_but_not_for_a_copy(has_copy):
    async def main():
        cluster, opened, trouble = DamagedCluster(), [], {LedgerId(2): AWAY}
        catalog = await three_ledgers(cluster)

        async def open_copy(ledger_id):
            if has_copy:
                raise AWAY
            raise RefusedError("no copy", reason=Reason.LEDGER_NOT_FOUND, remedy="Ask the nodes")

        open_ledger = cluster.opening(opened, trouble)
        owners = cluster.owners(open_ledger=open_ledger, open_copy=open_copy)
        async with running(owners):
            asked = asyncio.create_task(answered(lambda: values_of(owners), 7200))
            await asyncio.sleep(20)
            stream = await catalog.streams.get(STREAM)
            await catalog.attributes.accept_loss(stream, by="admin")
            await asyncio.sleep(5)
            assert not asked.done()
            await asyncio.sleep(30)
            assert asked.done() is not has_copy
            trouble.clear()
            assert but_core(await asked) == (TWICE if has_copy else {EVENT_COUNT: 60})
        assert bool((await cluster.record()).lost_keys) is not has_copy

    run_virtual(main())


async def goes_on(owners, values):
    """Append as a writer whose number can be read, while another one waits; return the writer."""
    known = next(writer for writer in WRITERS if key_of(writer) in values)
    gone = next(writer for writer in WRITERS if key_of(writer) not in values)
    stuck = send(owners, STREAM, gone, 2)
    await asyncio.sleep(0.5)
    await send(owners, STREAM, known, 2 if known not in WRITERS[:15] else 3)
    with pytest.raises(RetryableError):
        await stuck
    return known


def test_what_nothing_tells_is_lost_only_once_an_admin_accepts_it_and_is_on_record():
    async def main():
        cluster = DamagedCluster()
        catalog = await cluster.start()
        await cluster.write(first_events(), second_events(WRITERS[:15]))
        await trim(catalog, 0)
        record = await cluster.record()
        one = record.objects[-1]
        # The first leaf, and another one.
        cluster.damage(one.key, 40, 300)
        owners = cluster.owners()
        async with running(owners):
            index = cluster.connect(no_faults())
            salvaged = await index.salvage(record.checkpoint)
            assert salvaged.lost
            with pytest.raises(CorruptError) as caught:
                await values_of(owners)
            assert f"tierlog attributes rebuild {STREAM} --accept-loss" in caught.value.remedy
            known = await goes_on(owners, salvaged.values)
            assert (await cluster.record()).newest == record.newest
            stream = await catalog.streams.get(STREAM)
            await catalog.attributes.accept_loss(stream, by="admin")
            await asyncio.sleep(5)
            found = await values_of(owners)
            last = await cluster.record()
        assert last.lost_keys == tuple((record.newest.through, one) for one in salvaged.lost)
        for number, writer in enumerate(WRITERS):
            key = key_of(writer)
            is_lost = any(first <= key <= end for first, end in salvaged.lost)
            wanted = 2 if number < 15 else 1
            if writer == known:
                wanted += 1
            elif is_lost and number >= 15:
                # Its only event was trimmed.
                wanted = None
            assert found.get(key) == wanted, number
        # The next checkpoint ends the consent, and the record stays.
        after = await cluster.record()
        assert (after.loss_accepted, after.lost_keys) == ("", last.lost_keys)

    run_virtual(main())


def test_objects_that_come_back_end_the_damage():
    async def main():
        cluster = DamagedCluster()
        catalog = await cluster.start()
        await cluster.write(first_events(), second_events(WRITERS[:15]))
        await trim(catalog, 0)
        record, whole = await cluster.record(), dict(cluster.bucket.objects)
        cluster.damage_all()
        owners = cluster.owners()
        async with running(owners):
            with pytest.raises(CorruptError):
                await values_of(owners)
            cluster.bucket.objects.update(whole)
            twice = dict.fromkeys(WRITERS[:15], 2)
            await asyncio.sleep(120)
            assert but_core(await values_of(owners)) == expected(ONCE | twice, 45)
            assert (await cluster.record()).newest == record.newest

    run_virtual(main())
