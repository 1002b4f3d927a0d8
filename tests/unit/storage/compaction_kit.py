"""A node that is no more than entry logs, an index and ``state``: what compaction works on.

Its journal is a list in the test, which survives every crash; everything else is on memory disks.
"""

from __future__ import annotations

import asyncio
import json
import random

from tests.unit.storage.node_kit import make_run
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import Faults
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.adapters.memory.ids import SeededIds
from tierlog.format.run import Run
from tierlog.model.errors import CorruptError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.ports.files import DiskFailedError
from tierlog_ingest.storage.compaction.compaction import Compactor
from tierlog_ingest.storage.compaction.compaction_plan import Rule, Rules
from tierlog_ingest.storage.compaction.compaction_ports import Rebuilds
from tierlog_ingest.storage.compaction.throttle import TokenBucket
from tierlog_ingest.storage.entrylog.entry_log import EntryLogs, Location, LogLength
from tierlog_ingest.storage.index.index_format import pack_slot, unpack_slot
from tierlog_ingest.storage.index.ledger_cache import LedgerCache
from tierlog_ingest.storage.priorities import DiskGate
from tierlog_ingest.storage.space import SpaceLimits, SpaceWatch

NEVER = Rules(
    minor=Rule(threshold=0.2, interval_s=10**9), major=Rule(threshold=0.8, interval_s=10**9)
)


class Store:
    """What survives: disks, and what the journal would hold."""

    def __init__(self, seed=1, *, directories=2, capacity_bytes=2**40):
        self.disks = [
            MemoryDisk(random.Random(f"{seed}/{at}"), capacity_bytes=capacity_bytes)
            for at in range(directories)
        ]
        self.runs: dict[int, list[Run]] = {}
        self.journal: list[Run] = []
        self.freed: set[int] = set()

    def fill(self, ledgers, *, runs, size=60):
        """Runs of many ledgers, interleaved."""
        for _ in range(runs):
            for ledger_id in ledgers:
                written = self.runs.setdefault(ledger_id, [])
                run = make_run(ledger_id, 3 * len(written), count=3, size=size)
                written.append(run)
                self.journal.append(run)

    @property
    def used_bytes(self):
        return sum(disk.used_bytes for disk in self.disks)

    def crash(self, *, power_lost=True):
        for disk in self.disks:
            disk.crash(power_lost=power_lost)


class MiniNode:
    """``compaction_ports.Node`` over real logs and a real index."""

    def __init__(self, store, *, faults=None, log_bytes_max=4000, rules=NEVER, limits=None, **how):
        self.store = store
        self.faults = faults
        self.dirs = [disk.mount(faults) for disk in store.disks]
        ids = SeededIds(random.Random(1))
        self.logs = EntryLogs(self.dirs, ids, log_bytes_max=log_bytes_max, open_files_max=3)
        self.cache = LedgerCache(self.dirs, bytes_max=64 * 4096, open_files_max=4)
        self.rebuilds = Rebuilds()
        self.clock = SimClock()
        limits = limits or SpaceLimits(free_bytes_min=0, free_bytes_resume=0, warn_free_share=0)
        self.space = SpaceWatch(self.dirs, limits)
        self.marking = asyncio.Lock()
        self.unfinished = set()
        self.rules = rules
        self.how = how

    async def open(self):
        state = await self._read_state()
        lengths = [
            [LogLength(*one) for at, *one in state["logs"] if at == directory]
            for directory in range(len(self.dirs))
        ]
        maps = {
            int(log_id): {int(ledger): size for ledger, size in ledgers.items()}
            for log_id, ledgers in state["maps"].items()
        }
        self.marked = state["marked"]
        self.damages = await self.logs.open(lengths, maps)
        self.logs.forget_ledgers(self.store.freed)
        await self.cache.open()
        self.unfinished.update(state["unfinished"])
        bucket = self.how.pop("bucket", None) or TokenBucket(self.clock, bytes_per_s=10**9)
        self.compactor = Compactor(
            self.logs,
            self.cache,
            self,
            self.space,
            rules=self.rules,
            clock=self.clock,
            gate=DiskGate(self.clock, width=2, age_s=0.1),
            bucket=bucket,
            rebuilds=self.rebuilds,
            unsettled=state["unsettled"],
            **self.how,
        )
        self.space.on_low = self.compactor.want
        for ledger_id in sorted(self.store.freed):
            await self.cache.remove(LedgerId(ledger_id))
        await self.mark()
        return self

    async def free(self, ledger_id):
        self.store.freed.add(ledger_id)
        async with self.marking:
            self.logs.forget_ledger(ledger_id)
            await self.cache.remove(LedgerId(ledger_id))

    # compaction_ports.Node

    async def mark(self, begin=None):
        async with self.marking:
            marked = len(self.store.journal)
            await self._flush(self.store.journal[self.marked : marked])
            if begin is not None:
                begin()
            unsettled = set(self.compactor.unsettled)
            await self.logs.sync()
            await self.cache.flush()
            self.marked = marked
            await self._write_state(unsettled)

    async def finish(self, work):
        return await work

    def is_freed(self, ledger_id):
        return ledger_id in self.store.freed

    def has_whole_index(self, ledger_id):
        return ledger_id not in self.unfinished

    async def rebuild_index(self, ledger_id):
        async with self.marking:
            await self._rebuild(ledger_id)

    async def _rebuild(self, ledger_id):
        with self.rebuilds.one():
            self.unfinished.add(ledger_id)
            await self.cache.flush()
            await self._write_state(set())
            if ledger_id in self.cache:
                await self.cache.discard(ledger_id)
            for log_id in self.logs.logs_of(ledger_id):
                async for window in self.logs.scan(log_id, ledger_id=ledger_id):
                    for offset, run in window:
                        await self._put(run, Location(log_id, offset, len(run.encoded)))
            if ledger_id in self.cache:
                self.cache.complete(ledger_id)
            self.unfinished.discard(ledger_id)

    async def _flush(self, runs):
        """In small portions, so that the ledgers' runs lie interleaved."""
        for start in range(0, len(runs), 10):
            await self._flush_some(runs[start : start + 10])

    async def _flush_some(self, runs):
        taken = sorted(
            (run for run in runs if run.header.ledger_id not in self.store.freed),
            key=lambda run: (run.header.ledger_id, run.first_entry_id),
        )
        placed = zip(taken, await self.logs.append(taken, writer="flush"), strict=True)
        for run, location in placed:
            try:
                await self._put(run, location)
            except CorruptError:
                await self._rebuild(run.header.ledger_id)

    async def _put(self, run, location):
        placement = (run.first_entry_id, run.header.count, pack_slot(*location))
        lac = run.header.last_add_confirmed
        await self.cache.put(run.header.ledger_id, [placement], last_add_confirmed=lac, create_in=0)

    async def _write_state(self, unsettled):
        state = {
            "marked": self.marked,
            "logs": [(at, *one) for at in range(len(self.dirs)) for one in self.logs.lengths(at)],
            "maps": {log_id: dict(one) for log_id, one in self.logs.open_maps().items()},
            "unsettled": sorted(unsettled | self.compactor.unsettled),
            "unfinished": sorted(self.unfinished),
        }
        file = await self.dirs[0].open("state.new", create=True)
        data = json.dumps(state).encode()
        await file.truncate(0)
        await file.write_and_sync(0, [data])
        await file.close()
        await self.dirs[0].rename("state.new", "state")
        await self.dirs[0].sync_directory("")

    async def _read_state(self):
        try:
            file = await self.dirs[0].open("state")
        except FileNotFoundError:
            return {"marked": 0, "logs": [], "maps": {}, "unsettled": [], "unfinished": []}
        data = await file.read(0, await file.size())
        await file.close()
        return json.loads(data)

    # Checks

    async def read(self, ledger_id, entry_id):
        """Return the run that the index finds for an entry; None: no slot."""
        ledger = LedgerId(ledger_id)
        if ledger in self.unfinished:
            await self.rebuild_index(ledger)
        try:
            [slot] = (await self.cache.slots(ledger, EntryId(entry_id), 1)).tolist()
        except CorruptError:
            await self.rebuild_index(ledger)
            [slot] = (await self.cache.slots(ledger, EntryId(entry_id), 1)).tolist()
        if not slot:
            return None
        data = await self.logs.read(*unpack_slot(slot))
        return Run.decode(memoryview(data)[: Run.encoded_len(data, len_max=len(data))])

    async def check(self):
        """Every entry of every ledger that was not freed reads as it was written."""
        assert self.damages == []
        for ledger_id, runs in self.store.runs.items():
            if ledger_id in self.store.freed:
                continue
            for run in runs:
                for entry_id in range(run.first_entry_id, run.last_entry_id + 1):
                    assert await self.read(ledger_id, entry_id) == run, (ledger_id, entry_id)

    async def check_no_copies(self):
        """No run of a ledger that was not freed lies in two places."""
        seen = set()
        for info in self.logs.logs():
            async for window in self.logs.scan(info.log_id):
                for _, run in window:
                    if run.header.ledger_id not in self.store.freed:
                        assert run.header not in seen, (info.log_id, run)
                        seen.add(run.header)

    def live_bytes(self):
        return sum(
            len(run.encoded)
            for ledger_id, runs in self.store.runs.items()
            if ledger_id not in self.store.freed
            for run in runs
        )


async def life(store, work, *, crash_at=None, seed=0, **how):
    """Open a node and do ``work(node)``; crash at a step of its disks. Tells whether it crashed."""
    faults = Faults(random.Random(seed))
    faults.crash_at_step = crash_at
    crashed = asyncio.Event()
    faults.on_crash = crashed.set

    async def live():
        node = await MiniNode(store, faults=faults, **how).open()
        await work(node)

    living = asyncio.ensure_future(live())
    ending = asyncio.ensure_future(crashed.wait())
    await asyncio.wait([living, ending], return_when=asyncio.FIRST_COMPLETED)
    store.crash(power_lost=seed % 4 != 3)
    living.cancel()
    ending.cancel()
    try:
        await living
    except asyncio.CancelledError:
        pass
    except (TierlogError, DiskFailedError):
        if not crashed.is_set():
            raise
    return crashed.is_set()
