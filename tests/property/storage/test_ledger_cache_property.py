"""Whatever is put, written out, flushed, lost and rebuilt: the cache answers as a dict would.

Tiny pools and few headers, so that every call may have to make room; pages of the real size, and
entry ids around their edges. After a power cut the answer is what was flushed, what was put since,
or an error that the node can repair.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierlog.adapters.memory.files import MemoryDisk
from tierlog.model.errors import CorruptError
from tierlog_ingest.storage.index import index_writer
from tierlog_ingest.storage.index.index_format import PAGE_LEN, SLOTS_PER_PAGE, pack_slot
from tierlog_ingest.storage.index.ledger_cache import LedgerCache

LEDGERS = st.sampled_from([1, 2, 3, 257, 513])
PAGES = 6
ENTRIES = st.builds(
    lambda page, at: max(0, page * SLOTS_PER_PAGE + at),
    st.integers(0, PAGES - 1),
    st.integers(-2, 2) | st.integers(0, SLOTS_PER_PAGE - 1),
)
COUNTS = st.integers(1, 5) | st.sampled_from(
    [SLOTS_PER_PAGE, SLOTS_PER_PAGE + 3, 2 * SLOTS_PER_PAGE]
)
SLOTS = st.integers(1, 4).map(lambda n: pack_slot(1, n * 100, 100))


class Index:
    """What a ledger's index should say."""

    def __init__(self):
        self.slots: dict[int, int] = {}
        self.confirmed = -1
        self.exists = False

    def copy(self):
        twin = Index()
        twin.slots, twin.confirmed, twin.exists = dict(self.slots), self.confirmed, self.exists
        return twin


class CacheMachine(RuleBasedStateMachine):
    """Several ledgers over two disks."""

    @initialize(
        seed=st.integers(0, 2**20),
        pages=st.integers(1, 4),
        headers=st.integers(1, 3),
        batch_min=st.sampled_from([1, 2, 100]),
    )
    def begin(self, seed, pages, headers, batch_min):
        self.batch_min, index_writer._BATCH_MIN = index_writer._BATCH_MIN, batch_min  # type: ignore[misc]
        self.loop = asyncio.new_event_loop()
        self.disks = [MemoryDisk(random.Random(seed + n)) for n in range(2)]
        self.sizes = pages, headers
        self.model: dict[int, Index] = {}
        self.flushed: dict[int, Index] = {}
        self.since: list[tuple[Any, ...]] = []
        self.open()

    def open(self):
        pages, headers = self.sizes
        self.cache: Any = LedgerCache(
            [disk.mount() for disk in self.disks],
            bytes_max=pages * PAGE_LEN,
            open_files_max=2,
            headers_max=headers,
        )
        self.run(self.cache.open())

    def run(self, work):
        return self.loop.run_until_complete(work)

    def index(self, ledger):
        return self.model.setdefault(ledger, Index())

    def put_in_model(self, ledger, placements, confirmed):
        index = self.index(ledger)
        for first, count, slot in placements:
            index.slots.update(dict.fromkeys(range(first, first + count), slot))
        index.confirmed = max(index.confirmed, confirmed)
        index.exists = True

    def put_in_cache(self, ledger, placements, confirmed):
        work = self.cache.put(
            ledger, placements, last_add_confirmed=confirmed, create_in=ledger % 2
        )
        try:
            self.run(work)
        except CorruptError:
            self.rebuild(ledger)

    @rule(
        ledger=LEDGERS,
        placements=st.lists(st.tuples(ENTRIES, COUNTS, SLOTS), max_size=4),
        confirmed=st.integers(-1, 9),
    )
    def put(self, ledger, placements, confirmed):
        self.since.append(("put", ledger, placements, confirmed))
        self.put_in_model(ledger, placements, confirmed)
        self.put_in_cache(ledger, placements, confirmed)

    @rule(
        puts=st.lists(
            st.tuples(LEDGERS, st.tuples(ENTRIES, COUNTS, SLOTS)),
            min_size=2,
            max_size=6,
            unique_by=lambda one: one[0],
        ),
        flush=st.booleans(),
    )
    def put_at_once(self, puts, flush):
        for ledger, placement in puts:
            self.since.append(("put", ledger, [placement], -1))
            self.put_in_model(ledger, [placement], -1)

        async def put_all():
            async with asyncio.TaskGroup() as tasks:
                for ledger, placement in puts:
                    tasks.create_task(self.put_one(ledger, placement))
                    tasks.create_task(self.read_one(ledger, placement[0]))
                if flush:
                    tasks.create_task(self.cache.flush())

        self.torn: set[int] = set()
        self.run(put_all())
        for ledger in self.torn:
            self.rebuild(ledger)

    async def put_one(self, ledger, placement):
        try:
            await self.cache.put(ledger, [placement], last_add_confirmed=-1, create_in=ledger % 2)
        except CorruptError:
            self.torn.add(ledger)

    async def read_one(self, ledger, entry):
        try:
            await self.cache.slots(ledger, entry, 3)
        except CorruptError:
            self.torn.add(ledger)

    @rule(ledger=LEDGERS, first=ENTRIES, count=COUNTS, old=SLOTS, new=SLOTS)
    def replace(self, ledger, first, count, old, new):
        self.since.append(("replace", ledger, first, count, old, new))
        expected = self.replace_in_model(ledger, first, count, old, new)
        try:
            found = self.run(self.cache.replace(ledger, first, count, old, new))
        except CorruptError:
            self.rebuild(ledger)
        else:
            assert found == expected

    def replace_again(self, ledger, *what):
        """Replace after a crash, which may have kept that it was done: the answer may differ."""
        self.since.append(("replace", ledger, *what))
        self.replace_in_model(ledger, *what)
        try:
            self.run(self.cache.replace(ledger, *what))
        except CorruptError:
            self.rebuild(ledger)

    def replace_in_model(self, ledger, first, count, old, new):
        slots = self.model[ledger].slots if ledger in self.model else {}
        found = [entry for entry in range(first, first + count) if slots.get(entry) == old]
        slots.update(dict.fromkeys(found, new))
        return bool(found)

    @rule(ledger=LEDGERS, first=ENTRIES, count=COUNTS)
    def read(self, ledger, first, count):
        try:
            found = self.run(self.cache.slots(ledger, first, count)).tolist()
        except CorruptError:
            self.rebuild(ledger)
            found = self.run(self.cache.slots(ledger, first, count)).tolist()
        slots = self.model[ledger].slots if ledger in self.model else {}
        to_end = SLOTS_PER_PAGE - first % SLOTS_PER_PAGE
        assert found == [slots.get(first + n, 0) for n in range(min(count, to_end))]

    @rule(ledger=LEDGERS)
    def header(self, ledger):
        index = self.model.get(ledger)
        try:
            found = self.run(self.cache.header(ledger))
        except CorruptError:
            self.rebuild(ledger)
            found = self.run(self.cache.header(ledger))
        if index is None:
            assert found is None
        else:
            last = max(index.slots, default=-1)
            assert found == (index.confirmed, last, last // SLOTS_PER_PAGE + 1)

    @rule(ledger=LEDGERS)
    def remove(self, ledger):
        self.since.append(("remove", ledger))
        self.model.pop(ledger, None)
        self.run(self.cache.remove(ledger))

    def rebuild(self, ledger):
        """Do what the node does with a damaged index."""
        assert self.crashed, "nothing is torn before a power cut"
        self.run(self.cache.discard(ledger))
        index = self.model.get(ledger)
        if index is None:
            self.run(self.cache.remove(ledger))
            return
        for entry, slot in index.slots.items():
            self.put_in_cache(ledger, [(entry, 1, slot)], -1)
        self.put_in_cache(ledger, [], index.confirmed)
        self.cache.complete(ledger)

    crashed = False

    @rule()
    def flush(self):
        self.run(self.cache.flush())
        self.flushed = {ledger: index.copy() for ledger, index in self.model.items()}
        self.since = []
        assert self.cache.statistics().unsynced_files == 0
        assert self.cache.statistics().dirty_pages == 0

    @rule(power_lost=st.booleans())
    def crash(self, power_lost):
        """Lose what is not durable; the journal brings back what was done since the flush."""
        for disk in self.disks:
            disk.crash(power_lost=power_lost)
        self.crashed = self.crashed or power_lost
        self.open()
        self.model = {ledger: index.copy() for ledger, index in self.flushed.items()}
        for ledger in set(self.cache.ledger_ids()) - set(self.model):
            self.run(self.cache.remove(ledger))
        for ledger in set(self.model) - set(self.cache.ledger_ids()):
            # Removed since; the journal does not say so, the logs still have it.
            del self.model[ledger]
            self.flushed.pop(ledger)
        since, self.since = self.since, []
        for kind, ledger, *what in since:
            if kind == "put":
                self.put(ledger, *what)
            elif kind == "replace":
                self.replace_again(ledger, *what)
            else:
                self.remove(ledger)

    @invariant()
    def counts_reconcile(self):
        if hasattr(self, "cache"):
            self.cache.check()

    def teardown(self):
        if hasattr(self, "loop"):
            self.run(self.cache.close())
            index_writer._BATCH_MIN = self.batch_min  # type: ignore[misc]
            self.loop.close()


TestCache = CacheMachine.TestCase
