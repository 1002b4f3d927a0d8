"""What may go wrong in a run, one thing at a time; a scenario says which, and how often."""

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import Any

from tests.simulation.services import (
    IngestProcess,
    Producer,
    ReaderProcess,
    SchedulerProcess,
    Service,
    WorkerProcess,
)
from tests.simulation.world import DEFAULT_SIZE, Size, World
from tierlog.adapters.memory.faults import FaultRates
from tierlog.model.offload import OffloadState

CLOCK_JUMP_S_MAX = 5 * 3600.0

Kind = tuple[int, Any]
"""How often, and what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much happens in a run."""

    ledgers: int = 100
    size: Size = DEFAULT_SIZE
    scenario: str = "offload_many"
    """Its name in ``SCENARIOS``."""
    focus: str = ""
    """What goes wrong far more often than the rest: a step's name, as ``stall``."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended that broke no rule."""

    seed: int
    digest: str
    ledgers: int
    crashes: int
    checks: int
    appends: dict[str, int]
    virtual_s: float
    repeated: int = 0
    """Adds of what a node had already."""
    late: int = 0
    """Frames that arrived after their connection was given up."""


class Steps:
    """One thing after the other that goes wrong."""

    def __init__(self, world: World, chance: random.Random, focus: str) -> None:
        self.crashes = 0
        self._focus = f"_{focus}"
        self._world = world
        self._chance = chance

    async def next(self) -> None:
        """Do one of them."""
        kinds = self.kinds()
        weights = [weight + 100 * (act.__name__ == self._focus) for weight, act in kinds]
        (_, act), *_ = self._chance.choices(kinds, weights)
        await act()

    def kinds(self) -> list[Kind]:
        """Return what there is, and how often it is to happen."""
        return [
            (10, self._crash),
            (1, self._stop),
            (2, self._expire_session),
            (2, self._stall),
            (2, self._usurp),
            (1, self._fill_disk),
            (1, self._fail_disk),
            (2, self._jump_clock),
            (2, self._outage),
            (2, self._partition),
            (1, self._forget_queue),
            (2, self._rest),
        ]

    def _some(self, *kinds: type[Service]) -> Service:
        return self._chance.choice(self._world.of(*kinds))

    async def _crash(self) -> None:
        world, chance = self._world, self._chance
        process = self._some(
            IngestProcess, IngestProcess, WorkerProcess, SchedulerProcess, ReaderProcess
        )
        # Few steps hit what just began, many get far into it.
        steps = round(2 ** chance.uniform(0, 9))
        await world.crash_at_step(process, steps, s_max=60.0)
        self.crashes += 1
        await asyncio.sleep(chance.choice((0.0, 1.0, 8.0, 40.0)))
        await world.restart(process)
        await world.check_readable()

    async def _stop(self) -> None:
        process = self._some(IngestProcess, WorkerProcess, SchedulerProcess)
        await self._world.stop(process)
        await self._world.restart(process)

    async def _expire_session(self) -> None:
        process = self._some(IngestProcess, WorkerProcess, SchedulerProcess)
        if process.store is not None:
            self._world.trace.note("session.expired", process=process.name)
            process.store.expire_session()
        await asyncio.sleep(self._chance.uniform(0, 20))

    async def _stall(self) -> None:
        """Let a worker crawl in the middle of an attempt, so long that others take over.

        It loses its session and its place in the group, but goes on in its own time.
        """
        chance, worker = self._chance, self._some(WorkerProcess)
        begun = {one.uuid for one in self._world.checker.contexts()}
        for _ in range(300):
            fresh = [
                one.last_worker
                for one in self._world.checker.contexts()
                if one.state is OffloadState.OFFLOADING and one.uuid not in begun
            ]
            if fresh:
                worker = self._world.processes[fresh[0]]
                break
            await asyncio.sleep(0.3)
        assert isinstance(worker, WorkerProcess)
        await asyncio.sleep(chance.uniform(0, 5))
        if not worker.running:
            return
        server = chance.choice(("objects.", "metadata."))
        self._world.trace.note("worker.stalled", process=worker.name, server=server)
        rates = worker.faults.rates_by_prefix
        before, rates[server] = rates[server], FaultRates(delay_s_max=60.0)
        if worker.store is not None:
            worker.store.expire_session()
        worker.leave_group()
        await asyncio.sleep(chance.uniform(30, 120))
        rates[server] = before
        worker.join_group()

    async def _usurp(self) -> None:
        """Let the metadata take a node for dead that still serves: two may think they own."""
        world, chance = self._world, self._chance
        node = chance.choice(world.of(IngestProcess))
        producer = chance.choice(world.of(Producer))
        memory = world.servers.network.memory
        world.trace.note("node.usurped", process=node.name, producer=producer.name)
        node.faults.outages.add("metadata.")
        if node.store is not None:
            node.store.expire_session()
        memory.unreachable.add((producer.name, node.name))
        memory.cut(producer.name)
        await asyncio.sleep(chance.uniform(2, 40))
        node.faults.outages.discard("metadata.")
        await asyncio.sleep(chance.uniform(2, 30))
        memory.unreachable.discard((producer.name, node.name))

    async def _fill_disk(self) -> None:
        """Leave a node no space for a while."""
        node = self._chance.choice(self._world.of(IngestProcess))
        assert isinstance(node, IngestProcess)
        self._world.trace.note("disk.full", process=node.name)
        before = node.disk.capacity_bytes
        node.disk.capacity_bytes = node.disk.used_bytes + self._chance.randint(0, 3000)
        await asyncio.sleep(self._chance.uniform(5, 40))
        node.disk.capacity_bytes = before

    async def _fail_disk(self) -> None:
        """Let a disk refuse to sync: its process must end, and acknowledge nothing more."""
        world, node = self._world, self._chance.choice(self._world.of(IngestProcess))
        assert isinstance(node, IngestProcess)
        world.trace.note("disk.failing", process=node.name)
        node.disk.fail_syncs = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30.0):
                await node.crashed.wait()
        node.crash()
        await node.bury()
        node.disk.fail_syncs = False
        world.look()
        await world.restart(node)
        await world.check_readable()

    async def _jump_clock(self) -> None:
        process = self._some(IngestProcess, WorkerProcess, SchedulerProcess)
        jumps = 0.0, CLOCK_JUMP_S_MAX, -CLOCK_JUMP_S_MAX, self._chance.uniform(-600, 600)
        process.clock.set_wall(self._chance.choice(jumps))
        skew_s = process.clock.skew_s
        self._world.trace.note("clock.set", process=process.name, skew_s=round(skew_s))
        await asyncio.sleep(self._chance.uniform(0, 20))

    async def _outage(self) -> None:
        """Take a server away from one process, or from all."""
        world, chance = self._world, self._chance
        server = chance.choice(("metadata.", "objects.", "events."))
        everyone = list(world.processes.values())
        struck = everyone if chance.random() < 0.3 else [chance.choice(everyone)]
        struck = [one for one in struck if not isinstance(one, Producer)]
        world.trace.note("server.gone", server=server, struck=[one.name for one in struck])
        for one in struck:
            one.faults.outages.add(server)
        await asyncio.sleep(chance.uniform(1, 45))
        for one in struck:
            one.faults.outages.discard(server)
        world.trace.note("server.back", server=server)

    async def _partition(self) -> None:
        """Cut the connections of a node, and keep someone from reaching it for a while."""
        world, chance = self._world, self._chance
        node = chance.choice(world.of(IngestProcess))
        other = chance.choice([one for one in world.processes.values() if one is not node])
        memory = world.servers.network.memory
        pairs = {(node.name, other.name), (other.name, node.name)}
        world.trace.note("network.parted", pair=(node.name, other.name))
        memory.cut(node.name)
        memory.unreachable.update(pairs)
        await asyncio.sleep(chance.uniform(1, 30))
        memory.unreachable.difference_update(pairs)

    async def _forget_queue(self) -> None:
        self._world.trace.note("queue.wiped")
        self._world.servers.queue.wipe()
        await asyncio.sleep(self._chance.uniform(0, 20))

    async def _rest(self) -> None:
        await asyncio.sleep(self._chance.uniform(10, 60))
