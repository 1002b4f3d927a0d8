"""A whole cluster on virtual time: servers, processes, chance from one seed, and its checker.

Owns starting, breaking, healing and the checks that need a look at everything. Does not own the
order of what goes wrong: a scenario does.
"""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import structlog

from tests.simulation.bare import LedgerMinding, LedgerWriting
from tests.simulation.checker import Checker
from tests.simulation.once_writers import OnceModel, OnceWriter
from tests.simulation.processes import HostClock, SimProcess, Tasks
from tests.simulation.remote import Network
from tests.simulation.servers import WatchedBucket, WatchedMetadata
from tests.simulation.services import (
    KEYS,
    IngestProcess,
    Producer,
    ReaderProcess,
    SchedulerProcess,
    Servers,
    Service,
    WorkerProcess,
)
from tests.simulation.trace import Trace
from tierlog.adapters.memory.attributes import MemoryAttributes
from tierlog.adapters.memory.cache import MemoryCache
from tierlog.adapters.memory.events import MemoryEvents, QueueRates
from tierlog.adapters.memory.faults import FaultRates
from tierlog.adapters.memory.transport import MemoryNetwork
from tierlog.catalog import Catalog
from tierlog.format.frame import pack_entries
from tierlog.format.run import build_run
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model import policy
from tierlog.model.errors import TierlogError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.ledger import LedgerState
from tierlog.model.policy import Policy
from tierlog.model.position import Edge, Position
from tierlog.model.stream import ListedLedger
from tierlog.ports.storage_node import StorageNodeControl
from tierlog.runtime.sections import ReplicationSettings
from tierlog.runtime.settings import OwnerSettings
from tierlog.wire.connection import Hello, WireClient
from tierlog.wire.messages import ROLE_PRODUCER
from tierlog_reader.chunk import Budget
from tierlog_scheduler.scheduler import SchedulerLimits

STREAM = StreamName("sim.events")
KEPT_STREAM = StreamName("sim.kept")
"""A stream that is never offloaded: nodes take a list without any ledger for a failure."""
BLOCK_SIZE = 600
LEDGER_BYTES_MAX = 10**6
"""As many as 10,000 such blocks hold for sure."""

HEALTHY = FaultRates()
SHAKY = {
    "metadata.": FaultRates(refused=0.01, request_lost=0.01, reply_lost=0.03),
    "objects.": FaultRates(refused=0.02, request_lost=0.01, reply_lost=0.02, delay_s_max=0.3),
    "events.": FaultRates(refused=0.02, reply_lost=0.02, delay_s_max=0.05),
    "rpc.": FaultRates(refused=0.01, reply_lost=0.01, delay_s_max=0.02),
    "cache.": FaultRates(refused=0.1),
    "attributes.": FaultRates(refused=0.05, request_lost=0.02, reply_lost=0.05, delay_s_max=0.3),
    # A disk that fails ends its process, which is one more kind of crash.
    "files.": FaultRates(delay_s_max=0.002),
}
CALM = {name: FaultRates(delay_s_max=rates.delay_s_max) for name, rates in SHAKY.items()}


class ViolationError(AssertionError):
    """A rule was broken; the message says which, and how to see the run again."""


REPLICATION = ReplicationSettings()
OWNER = OwnerSettings(ensemble_size=1, write_quorum=1, ack_quorum=1, append_timeout_s=10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a cluster is, and how its streams are kept."""

    ingests: int = 2
    workers: int = 3
    schedulers: int = 2
    readers: int = 1
    producers: int = 2
    owner: OwnerSettings = OWNER
    replication: ReplicationSettings = REPLICATION
    once_writers: int = 0
    """Writers of one more stream, whose appends are conditional."""
    ledger_writers: int = 0
    """Applications with bare ledgers; two more recover and read those."""
    lag_s: float = 600.0
    rest_s_max: float = 18.0


DEFAULT_SIZE = Size()


QUORUM_SIZE = Size(
    ingests=3,
    owner=OwnerSettings(ensemble_size=3, write_quorum=3, ack_quorum=2, append_timeout_s=10.0),
)
"""Three replicas of each entry, two of which acknowledge."""


SIGNED_SIZE = replace(
    QUORUM_SIZE, owner=QUORUM_SIZE.owner.model_copy(update={"ledger_key_id": "k1"})
)
"""The same, and owners sign what they write."""


class World:
    """Everything there is in a run."""

    def __init__(self, seed: int, size: Size, trace: Trace) -> None:
        self.seed = seed
        self.size = size
        self.trace = trace
        true_clock = HostClock()
        tasks = Tasks()
        metadata, bucket = WatchedMetadata(), WatchedBucket(true_clock)
        self.processes: dict[str, Service] = {}
        self.checker = Checker(
            metadata,
            bucket,
            trace,
            stream=STREAM,
            lag_s=size.lag_s,
        )
        self.once = OnceModel(self.checker.complain)
        self.servers = Servers(
            seed=seed,
            trace=trace,
            tasks=tasks,
            metadata=metadata,
            bucket=bucket,
            queue=MemoryEvents(
                random.Random(f"{seed}/queue"),
                rates=QueueRates(repeated=0.2, lost=0.1, delay_s_max=20.0),
            ),
            network=Network(MemoryNetwork()),
            cache=MemoryCache(true_clock),
            attributes=MemoryAttributes(),
            checker=self.checker,
            stream=STREAM,
        )
        latency = self.servers.rng("network")
        self.servers.network.memory.latency_s = lambda: latency.uniform(0.0001, 0.005)
        metadata.watcher = bucket.watcher = self.checker
        self._add_processes()
        self._administrator = Service("admin", self.servers)
        self._nodes: NodeDirectory[StorageNodeControl] | None = None

    def __repr__(self) -> str:
        return f"<World seed={self.seed} {self.checker!r}>"

    def _add_processes(self) -> None:
        size, servers = self.size, self.servers
        limits = SchedulerLimits(interval_s=30.0, request_again_s=60.0, sweep_again_s=300.0)
        made: list[Service] = [
            *(self._ingest(i + 1) for i in range(size.ingests)),
            *(
                SchedulerProcess(f"s{i + 1}", servers, limits=limits)
                for i in range(size.schedulers)
            ),
            *(WorkerProcess(f"w{i + 1}", servers) for i in range(size.workers)),
            *(ReaderProcess(f"r{i + 1}", servers) for i in range(size.readers)),
            *(
                Producer(f"p{i + 1}", servers, rest_s_max=size.rest_s_max)
                for i in range(size.producers)
            ),
        ]
        made += (
            OnceWriter(f"o{i + 1}", servers, model=self.once, rest_s_max=size.rest_s_max)
            for i in range(size.once_writers)
        )
        if size.ledger_writers:
            made += (
                LedgerWriting(f"l{i + 1}", servers, rest_s_max=size.rest_s_max)
                for i in range(size.ledger_writers)
            )
            made += (LedgerMinding(f"m{i + 1}", servers, written=self._written) for i in range(2))
        self.processes = {one.name: one for one in made}
        self._nodes_made = size.ingests

    def _ingest(self, number: int) -> IngestProcess:
        return IngestProcess(
            f"n{number}",
            self.servers,
            owner=self.size.owner,
            replication=self.size.replication,
        )

    def _written(self) -> set[LedgerId]:
        """Return the bare ledgers whose writers are at work."""
        found = (one.writing for one in self.processes.values() if isinstance(one, LedgerWriting))
        return {one for one in found if one is not None}

    async def add_node(self) -> IngestProcess:
        """Start one more node, with an id and a disk that nobody had before."""
        self._nodes_made += 1
        node = self._ingest(self._nodes_made)
        self.processes[node.name] = node
        node.rates.update(SHAKY)
        node.start()
        await self.await_ready(node)
        return node

    async def lose_node(self, node: IngestProcess) -> None:
        """End a node for good, and its disk with it."""
        node.crash()
        await node.bury()
        del self.processes[node.name]
        self.look()

    def of(self, *kinds: type[Service]) -> list[Service]:
        """Return the processes of these kinds."""
        return [one for one in self.processes.values() if isinstance(one, kinds)]

    def appending(self) -> list[str]:
        """Return who has appends under way, or goes on to append."""
        producers = [one for one in self.processes.values() if isinstance(one, Producer)]
        return [f"{one.name} appends" for one in producers if one.running and one.is_appending]

    # Life

    async def start(self, stream_policy: Policy) -> None:
        """Make the stream, and start every process."""
        catalog = self.admin_catalog = self._administrator.connect()
        self._nodes = self._administrator.nodes(catalog)
        await catalog.nodes.ensure_cluster()
        await catalog.streams.ensure_roots()
        await catalog.streams.create(STREAM, raw=True, policy=stream_policy)
        for process in self.processes.values():
            if not isinstance(process, Producer):
                process.rates.update(SHAKY)
            process.start()
        for process in self.processes.values():
            await self.await_ready(process)
        await self._fill_kept_stream(catalog)

    async def _fill_kept_stream(self, catalog: Catalog) -> None:
        await catalog.streams.create(KEPT_STREAM, raw=True)
        frames, offsets = pack_entries([b"kept"])
        draft = build_run(frames, offsets)
        cluster = await catalog.nodes.ensure_cluster()
        hello = Hello(cluster_id=cluster.cluster_id, role=ROLE_PRODUCER)
        memory = self.servers.network.memory
        tries = itertools.count()
        while not any(one.stream == KEPT_STREAM for one in self.checker.contexts()):
            # Only one of them takes the stream.
            listeners = sorted(memory.listeners)
            address = listeners[next(tries) % len(listeners)]
            with contextlib.suppress(TierlogError):
                async with asyncio.TaskGroup() as tasks:
                    transport = memory.transport("admin")
                    client = await WireClient.connect(transport, address, hello, tasks=tasks)
                    with contextlib.suppress(TierlogError):
                        await client.append(KEPT_STREAM, draft, deadline_s=20.0)
                    await client.close()

    async def await_ready(self, process: SimProcess, *, s_max: float = 300.0) -> None:
        """Wait until a process does its work; it must not take for ever."""
        try:
            async with asyncio.timeout(s_max):
                while not process.ready.is_set():
                    if not process.running:
                        await process.bury()
                        self.look()
                        process.start()
                    await asyncio.sleep(0.5)
        except TimeoutError:
            self.checker.complain("a", f"{process.name} is not ready {s_max} s after its start")
        self.look()

    async def crash_at_step(self, process: SimProcess, steps: int, *, s_max: float) -> None:
        """Crash a process at the ``steps``-th step from now, or after ``s_max`` seconds."""
        process.faults.crash_after(steps)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(s_max):
                await process.crashed.wait()
        process.crash()
        await process.bury()
        self.look()

    async def restart(self, process: SimProcess) -> None:
        """Start a dead process, and wait until it works again."""
        process.start()
        await self.await_ready(process)

    async def stop(self, process: Service) -> None:
        """End a process in order, as SIGTERM does."""
        self.trace.note("process.stopping", process=process.name)
        process.stop.set()
        left_s = 60.0
        while left_s > 0 and self.servers.tasks.alive(process.name):
            await asyncio.sleep(0.5)
            left_s -= 0.5
        process.crash()
        await process.bury()
        self.look()

    def send_late(self, *, share: float, s_max: float) -> None:
        """Let what was sent before a cut, and some calls, arrive late: after they were repeated.

        As a network and clients that connect again do it: the request of a connection that was
        given up comes after what was sent by another one since.
        """
        late = self.servers.rng("late")
        network = self.servers.network

        def late_s(share: float) -> float | None:
            return late.uniform(0, s_max) if late.random() < share else None

        network.memory.lingers = lambda _caller, _called: late_s(share)
        network.late_s = lambda: late_s(share / 25)

    def heal(self) -> None:
        """End all faults; wall clocks are right again."""
        self.trace.note("world.healed")
        memory = self.servers.network.memory
        memory.unreachable.clear()
        memory.lingers = lambda _caller, _called: None
        self.servers.network.late_s = lambda: None
        self.servers.queue.rates = QueueRates()
        for process in self.processes.values():
            process.rates.update(CALM)
            # A running process has a copy of the rates of its start.
            process.faults.rates_by_prefix.update(CALM)
            process.faults.outages.clear()
            process.clock.set_wall(0.0)

    # Looking

    def look(self) -> None:
        """Raise if any rule was broken so far, or a process failed by itself."""
        broken = list(self.checker.violations)
        broken += [f"an error was logged: {line.strip()}" for line in self.trace.errors]
        broken += [
            f"{one.name} failed: {one.failure!r}"
            for one in self.processes.values()
            if one.failure is not None
        ]
        if broken:
            raise ViolationError("\n".join(broken[:20]))

    def now_s(self) -> float:
        """Return true time."""
        return self.trace.now_s()

    async def check_readable(self, *, patience_s: float = 120.0) -> None:
        """Rule a, by reading: every acknowledged entry, from a complete copy or from tier 1."""
        for listed in self.checker.ledgers():
            if listed.ledger_id in self.checker.trims.trimmed:
                continue  # meanwhile
            context = self.checker.context(listed.ledger_id)
            if context is not None and context.complete:
                self.checker.check_copy(context)
            if context is None or not context.complete:
                await self._check_tier1(listed, patience_s)
        self.look()

    async def _check_tier1(self, listed: ListedLedger, patience_s: float) -> None:
        """Read a ledger off its node; wait for one that does not answer."""
        end_s, ledger_id = self.now_s() + patience_s, listed.ledger_id
        while True:
            metadata = self.checker.ledger(ledger_id)
            context = self.checker.context(ledger_id)
            if metadata is None or context is None or context.complete:
                return  # deleted as empty, or its copy became complete meanwhile
            if ledger_id in self.checker.trims.trimmed:
                return  # meanwhile
            if metadata.state is not LedgerState.CLOSED:
                return  # its end is not decided; it is read once it is
            try:
                await self._read_tier1(ledger_id, metadata.last_entry_id)
            except TierlogError as error:
                if self.now_s() > end_s:
                    self.checker.complain("a", f"ledger {ledger_id} can't be read: {error}")
                    return
                await asyncio.sleep(2.0)
            else:
                return

    async def _read_tier1(self, ledger_id: LedgerId, last: EntryId) -> None:
        metadata = self.checker.ledger(ledger_id)
        assert metadata is not None
        assert self._nodes is not None
        handle = Tier1ReadHandle(ledger_id, metadata, self._nodes, keys=KEYS)
        key = KEYS.of(ledger_id, metadata)
        if (key.key_id if key is not None else None) != self.size.owner.ledger_key_id:
            self.checker.complain("a", f"ledger {ledger_id} has {key}, which its owner did not use")
        async for runs in handle.read_runs(EntryId(0), last):
            for run in runs:
                for step, entry in enumerate(run.entries()):
                    at = (int(ledger_id), run.first_entry_id + step)
                    if at[1] <= last:
                        self.checker.model.seen(at, bytes(entry), "tier 1")

    @property
    def admin_nodes(self) -> NodeDirectory[StorageNodeControl]:
        """The nodes as an administrator reaches them."""
        assert self._nodes is not None
        return self._nodes

    async def check_all(self) -> None:
        """Check a run at its end: everything is in tier 2, and reads back in order."""
        checker = self.checker
        checker.check_bucket_at_rest()
        checker.model.check_order()
        read = await self.read_stream()
        wanted = [
            (one.ledger_id, entry_id)
            for one in checker.ledgers()
            for entry_id in range(one.last_entry_id + 1)
        ]
        if read != wanted:
            checker.complain(
                "d", f"{len(read)} entries were read of {len(wanted)}, or not in order"
            )
        acked = {
            one for one in checker.model.acked_positions() if one[0] not in checker.trims.trimmed
        }
        lost = sorted(acked - set(read))
        if lost:
            checker.complain("d", f"acknowledged, but not to be read: {lost[:10]}")
        self.look()

    async def read_stream(self) -> list[tuple[int, int]]:
        """Read the stream from its beginning through a reader of its own."""
        reader = ReaderProcess("auditor", self.servers)
        where: Position | Edge = Edge.EARLIEST
        positions: list[tuple[int, int]] = []
        async with reader.reading(reader.connect()) as source:
            while True:
                budget = Budget(entries_max=100, bytes_max=10_000, wait_s=0.0)
                answer = await source.read(STREAM, where, budget)
                if answer.chunk is None:
                    return positions
                chunk, where = answer.chunk, answer.resume
                positions += [
                    (int(chunk.ledger_id), chunk.first_entry_id + step)
                    for step in range(chunk.count)
                ]


@contextlib.contextmanager
def small_blocks(size: int = BLOCK_SIZE) -> Iterator[None]:
    """Allow blocks that a few entries fill, so that ledgers have several parts."""
    lowest = policy._LOWEST
    before = lowest["block_size"]
    lowest["block_size"] = size
    try:
        yield
    finally:
        lowest["block_size"] = before


@contextlib.contextmanager
def logs_into(trace: Trace) -> Iterator[None]:
    """Have every log event go to the trace and nowhere else."""
    before = structlog.get_config()
    structlog.configure(processors=[trace.log_event], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)
