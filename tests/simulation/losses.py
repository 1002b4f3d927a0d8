"""Nodes that are lost, slow, wiped and emptied while streams and bare ledgers are written.

``lose_nodes``: at every moment some of it goes wrong: crashes and long absences, disks and networks
that stall, frames that are lost, or come late and behind what was sent again, partitions, expired
sessions, two that recover what a third one writes; power that is lost everywhere; a machine that is
lost for good with its disk, where the rules allow it; a node that is decommissioned. At the end all
is healed, and within a bound of virtual time every closed ledger must have all its copies, byte for
byte, and nobody may still complain about one.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.simulation.bare import LedgerMinding, LedgerWriting
from tests.simulation.copies import lacking
from tests.simulation.model import Model
from tests.simulation.services import IngestProcess, Producer, ReaderProcess, Service
from tests.simulation.steps import Kind, Plan, Result, Steps
from tests.simulation.world import QUORUM_SIZE, SHAKY, STREAM, World
from tierlog.adapters.memory.faults import FaultRates
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.model.policy import HOUR_MS, MINUTE_MS, Policy
from tierlog.runtime.sections import ReplicationSettings
from tierlog_ingest.replication.decommission import Progress, decommission

REST_S_MAX = 2 * 3600.0
EMPTY_S_MAX = 1800.0
NODES_MIN = 4

LOSSES_SIZE = replace(
    QUORUM_SIZE,
    ingests=4,
    workers=0,
    schedulers=0,
    producers=2,
    ledger_writers=2,
    rest_s_max=8.0,
    replication=ReplicationSettings(check_interval_s=900.0, backoff_s_max=60.0),
)
"""Four nodes, three replicas; nothing is offloaded."""


async def lose_nodes(world: World, plan: Plan) -> Result:
    """Write ledgers through all of that."""
    chance = world.servers.rng("scenario")
    await world.start(
        Policy(
            offload_time_ms=HOUR_MS,
            retention_time_ms=1000 * HOUR_MS,
            ledger_entries_max=chance.randint(5, 40),
            ledger_age_ms_max=2 * MINUTE_MS,
        )
    )
    world.send_late(share=0.5, s_max=20.0)
    steps = _Losses(world, chance, plan.focus)
    while world.checker.ledgers_made < plan.ledgers:
        await steps.next()
        world.look()
    await _come_to_rest(world)
    await world.check_all()
    bare, listed = world.checker.bare.counts(), world.checker.model.counts()
    return Result(
        seed=world.seed,
        digest=world.trace.digest,
        ledgers=world.checker.ledgers_made,
        crashes=steps.crashes,
        checks=world.checker.checks,
        appends={fate: count + bare[fate] for fate, count in listed.items()},
        virtual_s=world.now_s(),
        repeated=world.checker.copies.repeated,
        late=world.servers.network.memory.lingered,
    )


class _Losses(Steps):
    """One loss after the other."""

    def kinds(self) -> list[Kind]:
        return [
            (8, self._crash),
            (4, self._be_away),
            (4, self._slow_down),
            (3, self._congest),
            (3, self._lose_frames),
            (4, self._partition),
            (2, self._usurp),
            (2, self._expire_session),
            (1, self._fail_disk),
            (5, self._recover_written),
            (3, self._die_at_ack),
            (3, self._lose_first),
            (2, self._repeat),
            (3, self._wipe),
            (1, self._decommission),
            (2, self._rest),
        ]

    def _node(self) -> IngestProcess:
        node = self._chance.choice(self._world.of(IngestProcess))
        assert isinstance(node, IngestProcess)
        return node

    async def _crash(self) -> None:
        world, chance = self._world, self._chance
        process = self._some(IngestProcess, ReaderProcess, LedgerWriting, LedgerMinding)
        await world.crash_at_step(process, round(2 ** chance.uniform(0, 9)), s_max=60.0)
        self.crashes += 1
        await asyncio.sleep(chance.choice((0.0, 1.0, 8.0)))
        await world.restart(process)
        await world.check_readable()

    async def _expire_session(self) -> None:
        process = self._some(IngestProcess, LedgerWriting, LedgerMinding)
        if process.store is not None:
            self._world.trace.note("session.expired", process=process.name)
            process.store.expire_session()
        await asyncio.sleep(self._chance.uniform(0, 20))

    async def _be_away(self) -> None:
        """Keep one node, or two, down for so long that the auditor may count them as lost."""
        world, chance = self._world, self._chance
        nodes = chance.sample(world.of(IngestProcess), chance.choice((1, 1, 2)))
        for node in nodes:
            node.crash()
            await node.bury()
            self.crashes += 1
            await asyncio.sleep(chance.uniform(0, 10))
        await asyncio.sleep(chance.choice((5.0, 20.0, 45.0, 100.0)))
        for node in nodes:
            await world.restart(node)
        await world.check_readable()

    async def _slow_down(self) -> None:
        """Let one disk stall, or all but two, and perhaps lose the node of another meanwhile."""
        chance, nodes = self._chance, self._world.of(IngestProcess)
        chance.shuffle(nodes)
        slow = nodes[: chance.choice((1, 1, len(nodes) - 2))]
        self._slow(slow, chance.choice((0.3, 2.0, 8.0)))
        if chance.random() < 0.3 and slow[0].store is not None:
            slow[0].store.expire_session()
        for _ in range(chance.randint(0, 4)):
            await asyncio.sleep(chance.uniform(0, 6))
            self._world.servers.network.memory.cut(nodes[-1].name)
        await asyncio.sleep(chance.uniform(5, 20))
        self._go_on(slow)

    def _slow(self, nodes: Sequence[Service], delay_s_max: float) -> None:
        for node in nodes:
            self._world.trace.note("node.slow", process=node.name, delay_s_max=delay_s_max)
            node.faults.rates_by_prefix["files."] = FaultRates(delay_s_max=delay_s_max)

    def _go_on(self, nodes: Sequence[Service]) -> None:
        for node in nodes:
            node.faults.rates_by_prefix["files."] = SHAKY["files."]

    async def _congest(self) -> None:
        """Delay what travels, some of it by seconds; within a connection the order stays.

        In a storm frames are lost too.
        """
        memory, chance = self._world.servers.network.memory, self._chance
        before, share = memory.latency_s, chance.choice((0.02, 0.2))
        loses, lost = memory.loses, chance.choice((0.0, 0.05))

        def latency_s() -> float:
            return before() + (chance.uniform(0, 3.0) if chance.random() < share else 0.0)

        self._world.trace.note("network.congested", share=share, lost=lost)
        memory.loses = lambda *_: chance.random() < lost
        memory.latency_s = latency_s
        await asyncio.sleep(chance.uniform(5, 30))
        memory.latency_s, memory.loses = before, loses

    async def _lose_frames(self) -> None:
        """Lose frames now and then: each is the end of its connection, with others on their way."""
        memory, chance = self._world.servers.network.memory, self._chance
        self._world.trace.note("network.lossy")
        before, memory.loses = memory.loses, lambda *_: chance.random() < 0.03
        latency_s = memory.latency_s
        memory.latency_s = lambda: latency_s() + chance.choice((0.0, 0.0, 0.0, 0.5))
        await asyncio.sleep(chance.uniform(5, 40))
        memory.loses, memory.latency_s = before, latency_s

    async def _recover_written(self) -> None:
        """Have two at once recover a ledger that is being written."""
        world, chance = self._world, self._chance
        for _ in range(50):
            written = [one for one in world.of(LedgerWriting) if isinstance(one, LedgerWriting)]
            ledger_ids = [one.writing for one in written if one.writing is not None]
            if ledger_ids:
                break
            await asyncio.sleep(0.3)
        else:
            return
        await asyncio.sleep(chance.uniform(0, 8))
        ledger_id = chance.choice(ledger_ids)
        world.trace.note("bare.usurped", ledger=ledger_id)
        for process in world.of(LedgerMinding):
            assert isinstance(process, LedgerMinding)
            process.wanted.append(ledger_id)
        if chance.random() < 0.3:
            await world.crash_at_step(
                self._some(LedgerMinding), round(2 ** chance.uniform(0, 6)), s_max=10.0
            )
        await asyncio.sleep(chance.uniform(0, 10))
        for process in world.of(LedgerMinding):
            if not process.running:
                await process.bury()
                await world.restart(process)

    async def _die_at_ack(self) -> None:
        """Lose a writer as its client is told: what it confirmed, no node knows to be so.

        One node lags behind meanwhile, so that it lacks what the others have.
        """
        world, chance = self._world, self._chance
        laggard = self._node()
        self._slow([laggard], 5.0)
        await asyncio.sleep(chance.uniform(0, 6))
        told = world.checker.told = asyncio.get_running_loop().create_future()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60.0):
                ledger_id = await told
                writer = world.processes[world.checker.writer_of(ledger_id)]
                writer.crash()
                self.crashes += 1
                await writer.bury()
                for process in world.of(LedgerMinding):
                    assert isinstance(process, LedgerMinding)
                    if not isinstance(writer, IngestProcess):
                        process.wanted.append(LedgerId(ledger_id))
                await asyncio.sleep(chance.choice((0.0, 3.0, 10.0)))
                await world.restart(writer)
        world.checker.told = None
        self._go_on([laggard])
        await world.check_readable()

    async def _lose_first(self) -> None:
        """Lose the one node that has acknowledged an entry, while most others lag behind."""
        world, chance, nodes = self._world, self._chance, self._world.of(IngestProcess)
        chance.shuffle(nodes)
        self._slow(nodes[2:], 3.0)
        await asyncio.sleep(chance.uniform(0, 3))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60.0):
                name = await world.checker.copies.first_of([one.name for one in nodes[:2]])
                await asyncio.sleep(0.02)
                first = world.processes[name]
                first.crash()
                self.crashes += 1
                await first.bury()
                await asyncio.sleep(chance.choice((1.0, 5.0, 15.0)))
                await world.restart(first)
        self._go_on(nodes[2:])
        await world.check_readable()

    async def _repeat(self) -> None:
        """Have adds come twice, and then lose all power, as a writer's client is told.

        The connections to slow nodes are cut: what was on its way arrives late, and is sent again
        as soon as they are reached again, while the first of both is not durable yet. One node
        is fast, and stays away longest: the others must have what stands.
        """
        world, chance, nodes = self._world, self._chance, self._world.of(IngestProcess)
        chance.shuffle(nodes)
        *slow, fast = nodes
        memory = world.servers.network.memory
        lingers, memory.lingers = memory.lingers, lambda *_: chance.uniform(0, 1.0)
        self._slow(slow, 8.0)
        for _ in range(chance.randint(1, 4)):
            await asyncio.sleep(chance.uniform(0.5, 3))
            for node in slow:
                memory.cut(node.name)
        told = world.checker.told = asyncio.get_running_loop().create_future()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30.0):
                writer = world.processes[world.checker.writer_of(await told)]
                lost = dict.fromkeys([writer, *nodes])
                for node in lost:
                    node.crash()
                    self.crashes += 1
                for node in lost:
                    await node.bury()
                self._go_on(slow)
                for node in lost:
                    if node is not fast:
                        node.start()
                await asyncio.sleep(chance.choice((5.0, 15.0)))
                fast.start()
                for node in lost:
                    await world.await_ready(node)
        world.checker.told = None
        memory.lingers = lingers
        self._go_on(slow)
        await world.check_readable()

    async def _wipe(self) -> None:
        """Lose a machine with its disk, if that is no more than the replicas stand for."""
        world, node = self._world, self._node()
        if not _is_spare(world, node.name):
            return
        world.trace.note("node.lost", process=node.name)
        await world.lose_node(node)
        await asyncio.sleep(self._chance.choice((0.0, 10.0, 60.0)))
        await world.add_node()
        await world.check_readable()

    def _troubles(self) -> list[Any]:
        """Return what may happen to a node that is to go, and leaves its process alive."""
        return [
            self._congest,
            self._lose_frames,
            self._expire_session,
            self._slow_down,
            self._partition,
            self._rest,
        ]

    async def _decommission(self) -> None:
        """Empty a node while others write, and end it when it holds nothing."""
        world, node = self._world, self._node()
        await world.add_node()
        world.trace.note("node.emptying", process=node.name)
        said: list[Progress] = []
        troubled = self._chance.random() < 0.5
        async with asyncio.TaskGroup() as tasks:
            ending = decommission(
                world.admin_catalog,
                world.admin_nodes,
                NodeId(node.name),
                tell=said.append,
                interval_s=5.0,
            )
            emptying = tasks.create_task(ending)
            if troubled:
                for act in self._chance.sample(self._troubles(), 3):
                    await act()
            await asyncio.wait({emptying}, timeout=EMPTY_S_MAX)
            emptying.cancel()
        if emptying.cancelled():
            world.checker.complain("c", f"{node.name} is not emptied: {said[-1:]}")
        elif emptying.result().said_empty:
            await self._check_empty(node)
        elif not troubled:
            world.checker.complain("c", f"{node.name} was not asked: {said[-1:]}")
        named = [
            ledger_id
            for ledger_id, metadata in world.checker.all_ledgers().items()
            if any(node.name in segment.ensemble for segment in metadata.segments)
        ]
        if named:
            world.checker.complain("h", f"{node.name} is to go, but {named} name it")
        await world.lose_node(node)
        await world.check_readable()

    async def _check_empty(self, node: IngestProcess) -> None:
        """Check that a node which said so holds nothing; what came late since, it frees as well."""
        held: Sequence[LedgerId] = ()
        for _ in range(10):
            if node.storage is None or not (held := await node.storage.list_ledgers()):
                return
            await asyncio.sleep(3.0)
        self._world.checker.complain("c", f"{node.name} holds {held}, and said: nothing")


def _is_spare(world: World, name: str) -> bool:
    """Tell whether nothing is lost with a node, nor waits for it for ever."""
    there = {one.name for one in world.of(IngestProcess) if one.name != name}
    if len(there) < NODES_MIN - 1:
        return False
    return all(
        _is_whole_without(world, ledger_id, metadata, name, there)
        for ledger_id, metadata in world.checker.all_ledgers().items()
    )


def _is_whole_without(
    world: World, ledger_id: int, metadata: LedgerMetadata, name: str, there: set[str]
) -> bool:
    last: int = metadata.last_entry_id
    if metadata.state is not LedgerState.CLOSED:
        if not there.union({name}).issuperset(metadata.segments[-1].ensemble):
            return False
        last = world.checker.model_of(metadata).shown_ends.get(ledger_id, -1)
    return all(
        world.checker.copies.holders((ledger_id, entry_id))
        .intersection(metadata.write_set(EntryId(entry_id)))
        .intersection(there)
        for entry_id in range(last + 1)
    )


async def _come_to_rest(world: World) -> None:
    """End all faults and all appends; wait until every ledger is closed and whole."""
    world.heal()
    for process in world.of(Producer, LedgerWriting):
        assert isinstance(process, Producer | LedgerWriting)
        process.enough.set()
    end_s = world.now_s() + REST_S_MAX
    while (left := await _unsettled(world)) and world.now_s() < end_s:
        await asyncio.sleep(30.0)
        world.look()
    if left:
        world.checker.complain("c", f"{REST_S_MAX} s after the last fault there is left: {left}")
    world.look()
    _check_bare(world)


async def _unsettled(world: World) -> list[str]:
    """Return what keeps the world from being at rest."""
    nodes = [one for one in world.of(IngestProcess) if isinstance(one, IngestProcess)]
    # Ledgers that may stand open for ever: without an entry, or of the stream that is kept.
    open_ones = set().union(*(one.empty_ledgers() for one in nodes))
    open_ones |= {one.ledger_id for one in world.checker.contexts() if one.stream != STREAM}
    ledgers = world.checker.all_ledgers()
    left = [
        f"{ledger_id} {metadata.state.name}"
        for ledger_id, metadata in ledgers.items()
        if metadata.state is not LedgerState.CLOSED and ledger_id not in open_ones
    ]
    left += world.appending()
    queue = await world.admin_catalog.underreplicated.list()
    left += [
        f"{one.ledger_id} lacks copies: {one.reasons} {one.last_error}"
        for one in queue
        # A complaint about a ledger that stands open is kept until its writer closes it.
        if one.ledger_id not in open_ones
    ]
    if left:
        return left[:10]
    serving = {
        NodeId(one.name): one.storage for one in nodes if one.running and one.storage is not None
    }
    for ledger_id, metadata in ledgers.items():
        if metadata.state is LedgerState.CLOSED:
            left += await lacking(LedgerId(ledger_id), metadata, serving, world.checker.copies)
    return left[:10]


def _check_bare(world: World) -> None:
    """Check that every entry of every bare ledger is one that was appended there."""
    checker = world.checker
    there: set[tuple[int, int]] = set()
    for ledger_id, metadata in checker.all_ledgers().items():
        if not metadata.is_bare:
            continue
        for entry_id in range(metadata.last_entry_id + 1):
            data = checker.copies.data((ledger_id, entry_id))
            if data is not None:
                checker.bare.seen((ledger_id, entry_id), data, "a bare ledger")
                there.add((ledger_id, entry_id))
    model: Model = checker.bare
    model.check_order()
    lost = sorted(
        one for one in model.acked_positions() if one not in there and one[0] not in checker.deleted
    )
    if lost:
        checker.complain("d", f"acknowledged, but not to be read: {lost[:10]}")
    world.look()
