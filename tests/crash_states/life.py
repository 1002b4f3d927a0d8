"""Lives of a storage node whose every call of the disk is recorded, and what it answered.

Owns: how a node is opened here (the one place that knows its constructor), the settings that make
everything happen soon, and the workloads. Does not own what must hold afterwards (``checker``).

Marks in a recording:
    asked (key, run)     stored key       an add, and its answer; the key is (ledger, first entry)
    fence_asked ledger   fenced ledger
    free_asked ledger    freed ledger
    seen key             a read brought this run
    absent key           a recovery read said NO_SUCH_ENTRY of it
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.crash_states.checker import LEDGERS, read_ledger
from tests.crash_states.recorder import Recording, recorded_ram
from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.node_kit import make_run, outcome
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.ids import SeededIds
from tierlog.format.run import Run
from tierlog.model.errors import TierlogError
from tierlog.model.ids import LedgerId
from tierlog.ports.files import Files
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.node import StorageNode

ROOTS = ("d0", "d1", "d2")
"""The folders of a node's data directories: the first has the journal; logs and indexes, too, when
there are no others."""
VIRTUAL_S_MAX = 10_000
TINY = StorageSettings(
    journal_segment_bytes=24 * 1024,
    journal_spares_max=1,
    group_bytes_max=8 * 1024,
    write_buffer_bytes_max=12 * 1024,
    entry_log_bytes_max=16 * 1024,
    ledger_cache_bytes_max=8 * 4096,
    open_files_max=4,
    free_bytes_min=0,
    free_bytes_resume=0,
    checkpoint_interval_s=5,
    checkpoint_journal_bytes=32 * 1024,
    minor_compaction_interval_s=4,
    major_compaction_interval_s=9,
    read_bytes=4096,
    gc_interval_s=3,
    gc_quarantine_s=1,
)
ENTRY_SIZES = (0, 10, 300, 600, 1500, 3000)


async def open_node(
    folders: Sequence[Files], seed: int = 1, settings: StorageSettings = TINY
) -> StorageNode:
    """Open the node over its data directories."""
    ids = SeededIds(random.Random(seed))
    return await StorageNode.open(
        folders[0], ids, settings, clock=SimClock(), ledger_dirs=folders[1:]
    )


@asynccontextmanager
async def running(node: StorageNode, *, in_order: bool = True) -> AsyncIterator[StorageNode]:
    """Run a node; end it in order, or at once as a kill does."""
    stop = asyncio.Event()
    life = asyncio.get_running_loop().create_task(node.run(stop))
    try:
        await asyncio.sleep(0)
        yield node
        if in_order:
            stop.set()
            await life
    finally:
        if not life.done():
            life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await life


class Client:
    """Asks the node for things, and marks what it answers."""

    def __init__(
        self, recording: Recording, rng: random.Random, *, first_entry_id: int = 0
    ) -> None:
        self._recording = recording
        self._rng = rng
        self._next = dict.fromkeys(LEDGERS, first_entry_id)
        self._sent: dict[tuple[int, int], Run] = {}
        self._fenced: set[int] = set()

    def ask_add(
        self,
        node: StorageNode,
        ledger_id: int,
        *,
        size: int | None = None,
        count: int | None = None,
        skip: int = 0,
    ) -> Any:
        """Send a run, mostly a new one, ``skip`` entries on; return what the node gives back."""
        again = [key for key in self._sent if key[0] == ledger_id]
        if again and self._rng.random() < 0.1:
            run = self._sent[self._rng.choice(again)]
        else:
            size = self._rng.choice(ENTRY_SIZES) if size is None else size
            count = self._rng.randint(1, 3) if count is None else count
            first = self._next[ledger_id] + skip
            run = make_run(ledger_id, first, count=count, size=size)
            self._next[ledger_id] = first + count
        return self._send(node, run)

    def _send(self, node: StorageNode, run: Run) -> Any:
        ledger_id = run.header.ledger_id
        key = ledger_id, run.first_entry_id
        self._sent[key] = run
        self._recording.mark("asked", (key, run))
        answer = node.add(run, recovery=ledger_id in self._fenced)
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(lambda done: self._note(key, done))
        return answer

    async def add(self, node: StorageNode, ledger_id: int, **how: int) -> None:
        """Send a run and wait for the answer."""
        await outcome(self.ask_add(node, ledger_id, **how))

    async def fence(self, node: StorageNode, ledger_id: int) -> None:
        """Fence a ledger."""
        self._fenced.add(ledger_id)
        self._recording.mark("fence_asked", ledger_id)
        if not isinstance(await outcome(node.fence(LedgerId(ledger_id))), TierlogError):
            self._recording.mark("fenced", ledger_id)

    async def free(self, node: StorageNode, ledger_id: int) -> None:
        """Free a ledger."""
        self._recording.mark("free_asked", ledger_id)
        if not isinstance(await outcome(node.free(LedgerId(ledger_id))), TierlogError):
            self._recording.mark("freed", ledger_id)

    async def fill_gap(self, node: StorageNode, ledger_id: int) -> None:
        """Send a run into the first large gap of a fenced ledger, as recovery does."""
        ends = sorted(
            (key[1], run.last_entry_id) for key, run in self._sent.items() if key[0] == ledger_id
        )
        behind = [0, *(last + 1 for _, last in ends)]
        gaps = [at for at, (first, _) in zip(behind, ends, strict=False) if first - at >= 30]
        if gaps:
            await outcome(self._send(node, make_run(ledger_id, gaps[0], count=30, size=4)))

    def fenced_before(self, ledger_id: int) -> None:
        """Only recovery adds to this ledger from now on."""
        self._fenced.add(ledger_id)

    def _note(self, key: tuple[int, int], done: asyncio.Future[None]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._recording.mark("stored", key)


async def mixed(
    node: StorageNode, client: Client, rng: random.Random, *, steps: int, pause_s: float = 6.0
) -> None:
    """Do a bit of everything, much of it at the same time."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(steps):
            draw = rng.random()
            ledger_id = rng.choice(LEDGERS)
            if draw < 0.70:
                tasks.create_task(client.add(node, ledger_id))
            elif draw < 0.80:
                tasks.create_task(outcome(node.checkpoint()))
            elif draw < 0.84:
                tasks.create_task(client.fence(node, ledger_id))
            elif draw < 0.86:
                tasks.create_task(client.free(node, ledger_id))
            else:
                await asyncio.sleep(rng.choice((0, 0.0015, 0.1, pause_s)))


async def one_by_one(node: StorageNode, client: Client) -> None:
    """Few steps, each alone, so that every state at every cut can be looked at."""
    await client.add(node, 1, size=300)
    await client.add(node, 2, size=10)
    await client.fence(node, 2)
    await asyncio.sleep(0.1)
    await node.checkpoint()
    await client.add(node, 1, size=600)
    await client.add(node, 3, size=1500)
    await client.free(node, 3)
    await node.checkpoint()
    await client.add(node, 2, size=10)


async def bulk(
    node: StorageNode, client: Client, rng: random.Random, *, steps: int, pause_s: float = 3.0
) -> None:
    """Fill segments and logs: roll-over, recycling, and compaction of what was freed."""
    for step in range(steps):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(client.add(node, rng.choice(LEDGERS), size=3000))
        if step in {steps // 3, 2 * steps // 3}:
            await client.free(node, rng.choice(LEDGERS))
        await asyncio.sleep(rng.choice((0, 0.0015, pause_s)))


async def scattered(node: StorageNode, client: Client, rng: random.Random, *, steps: int) -> None:
    """Many small entries with gaps between, and the gaps filled later: several pages of index."""
    for ledger_id in LEDGERS[:2]:
        await client.fence(node, ledger_id)
    for step in range(steps):
        async with asyncio.TaskGroup() as tasks:
            for ledger_id in LEDGERS:
                count, skip = rng.choice((1, 30, 120)), rng.choice((0, 0, 100))
                tasks.create_task(client.add(node, ledger_id, size=4, count=count, skip=skip))
        if step % 4 == 3:
            await client.fill_gap(node, rng.choice(LEDGERS[:2]))
            await outcome(node.checkpoint())
        await asyncio.sleep(rng.choice((0, 0.0015, 0.1)))


def record_first_life(
    kind: str, seed: int, *, steps: int = 40, roots: Sequence[str] = ROOTS[:1]
) -> Recording:
    """Return the log of a node's first life, with an orderly end."""
    recording, rng = Recording(), random.Random(f"{kind}/{seed}")

    async def live() -> None:
        client = Client(recording, rng)
        async with running(await open_node(recorded_ram(recording, roots), seed)) as node:
            if kind == "one_by_one":
                await one_by_one(node, client)
            elif kind == "bulk":
                await bulk(node, client, rng, steps=steps)
            elif kind == "scattered":
                await scattered(node, client, rng, steps=steps // 2)
            else:
                await mixed(node, client, rng, steps=steps)

    run_virtual(live(), until_s=VIRTUAL_S_MAX)
    return recording


def record_next_life(
    files: dict[str, bytes],
    directories: frozenset[str],
    known: dict[tuple[int, int], Run],
    seed: int,
    *,
    roots: Sequence[str] = ROOTS[:1],
) -> Recording:
    """Return the log of a life that begins with a crash's disk: replay, reads, and some adds."""
    recording, rng = Recording(files, directories), random.Random(seed)
    beyond = max((run.last_entry_id + 1 for run in known.values()), default=0)

    async def live() -> None:
        client = Client(recording, rng, first_entry_id=beyond)
        async with running(await open_node(recorded_ram(recording, roots), seed)) as node:
            for ledger_id in LEDGERS:
                recording.mark("fence_asked", ledger_id)
                seen = await read_ledger(node, ledger_id, known)
                if not seen.gone:
                    recording.mark("fenced", ledger_id)
                for key in seen.runs:
                    recording.mark("seen", key)
                for key in seen.absent:
                    recording.mark("absent", key)
            for ledger_id in LEDGERS:
                client.fenced_before(ledger_id)
            await mixed(node, client, rng, steps=8)

    run_virtual(live(), until_s=VIRTUAL_S_MAX)
    return recording
