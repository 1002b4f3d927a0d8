"""Exactly-once appends while everything else goes wrong: rule k (see ``once_writers``).

``write_once``: several writers append through crashes at random steps, lost and late answers,
partitions, expired sessions, owners that don't know yet that they are none, roll-overs, and an
index of attributes that is away or forgets to answer. At the end all is healed; then the stream
and its attributes are compared with what the writers were told.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from tests.simulation.once_writers import ONCE_STREAM, TOTAL, OnceWriter
from tests.simulation.services import KEYS, IngestProcess
from tests.simulation.steps import Kind, Plan, Result, Steps
from tests.simulation.world import QUORUM_SIZE, SHAKY, World
from tierlog.adapters.memory.faults import FaultRates
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.attributes import CREATION_TIME, AttributeKey
from tierlog.model.core_attributes import DERIVED
from tierlog.model.errors import TierlogError
from tierlog.model.ids import EntryId
from tierlog.model.policy import MINUTE_MS, Policy
from tierlog.ports.streams import FIRST_KEY, LAST_KEY
from tierlog.runtime.sections import AttributeSettings
from tierlog_ingest.streams.owners import Owners

T = TypeVar("T")

REST_S_MAX = 1800.0

ONCE_SIZE = replace(
    QUORUM_SIZE,
    workers=0,
    schedulers=0,
    readers=0,
    producers=0,
    once_writers=4,
    rest_s_max=8.0,
    owner=QUORUM_SIZE.owner.model_copy(
        update={
            # So little that checkpoints, and fetches of what went from memory, are many.
            "attributes": AttributeSettings(
                cached_max=4, checkpoint_updates=9, checkpoint_interval_s=20.0
            )
        }
    ),
)


async def write_once(world: World, plan: Plan) -> Result:
    """Write through all of that; ``plan.ledgers`` tens of events."""
    chance = world.servers.rng("scenario")
    await world.start(Policy())
    await world.admin_catalog.streams.create(
        ONCE_STREAM,
        policy=Policy(ledger_entries_max=chance.randint(3, 30), ledger_age_ms_max=2 * MINUTE_MS),
    )
    world.send_late(share=0.5, s_max=20.0)
    steps = _Troubles(world, chance, plan.focus)
    while sum(world.once.acked.values()) < 10 * plan.ledgers:
        await steps.next()
        world.look()
    await _come_to_rest(world)
    entries = await _read(world)
    made = world.once.check(entries)
    found = await _attributes(world)
    found = {key: found[key] for key in found if key not in DERIVED | {CREATION_TIME}}
    if found != made:
        world.once.complain(f"the attributes are {found}, the entries make {made}")
    if found.get(AttributeKey(TOTAL.bytes)) != len(entries):
        world.once.complain(f"{len(entries)} entries were counted as {found}")
    world.look()
    return Result(
        seed=world.seed,
        digest=world.trace.digest,
        ledgers=len(entries),
        crashes=steps.crashes,
        checks=world.checker.checks,
        appends={"acknowledged": sum(world.once.acked.values()), "repeats": world.once.repeats},
        virtual_s=world.now_s(),
        late=world.servers.network.memory.lingered,
    )


class _Troubles(Steps):
    def kinds(self) -> list[Kind]:
        return [
            (10, self._crash),
            (1, self._stop),
            (3, self._expire_session),
            (2, self._usurp),
            (4, self._strand_owner),
            (3, self._lose_unconfirmed),
            (1, self._fail_disk),
            (2, self._outage),
            (4, self._partition),
            (3, self._lose_answers),
            (3, self._rest),
        ]

    async def _lose_answers(self) -> None:
        """Cut writers off again and again, right behind what they sent."""
        await self._cut_writers(self._chance.randint(2, 12))

    async def _cut_writers(self, count: int) -> None:
        chance, memory = self._chance, self._world.servers.network.memory
        for _ in range(count):
            writer = chance.choice(self._world.of(OnceWriter))
            self._world.trace.note("writer.cut", process=writer.name)
            memory.cut(writer.name)
            await asyncio.sleep(chance.uniform(0, 2))

    async def _strand_owner(self) -> None:
        """Keep the stream's owner from the other nodes, maybe from the metadata too.

        Writers reach it, again and again: nothing new is confirmed, and what is only there may
        vanish with it, or it is deposed and does not know.
        """
        world, chance = self._world, self._chance
        owner, others = await self._owner_and_others()
        memory, name = world.servers.network.memory, owner.name
        pairs = {(name, other.name) for other in others} | {(one.name, name) for one in others}
        world.trace.note("owner.stranded", process=name)
        memory.unreachable.update(pairs)
        memory.cut(name)
        is_deposed = chance.random() < 0.6
        if is_deposed:
            owner.faults.outages.add("metadata.")
            if owner.store is not None:
                owner.store.expire_session()
        await self._cut_writers(chance.randint(4, 20))
        if chance.random() < 0.5:
            owner.crash()
            await owner.bury()
            self.crashes += 1
            await asyncio.sleep(chance.uniform(0, 10))
        owner.faults.outages.discard("metadata.")
        memory.unreachable.difference_update(pairs)
        if not owner.running:
            await world.restart(owner)

    async def _owner_and_others(self) -> tuple[IngestProcess, list[IngestProcess]]:
        world = self._world
        stream = await world.admin_catalog.streams.get(ONCE_STREAM)
        nodes = [one for one in world.of(IngestProcess) if isinstance(one, IngestProcess)]
        name = stream.owner.node_id if stream.owner is not None else nodes[0].name
        (owner,) = [one for one in nodes if one.name == name]
        return owner, [one for one in nodes if one is not owner]

    async def _lose_unconfirmed(self) -> None:
        """Have entries on their owner alone, sent again by their writers, and lose them all.

        Or let the owner find out by itself that nobody confirms them.
        """
        world, chance = self._world, self._chance
        owner, others = await self._owner_and_others()
        world.trace.note("owner.alone", process=owner.name)
        for node in others:
            node.faults.rates_by_prefix["files."] = FaultRates(delay_s_max=60.0)
        await asyncio.sleep(chance.uniform(0.5, 3))
        for writer in world.of(OnceWriter):
            world.servers.network.memory.cut(writer.name)
        if chance.random() < 0.4:
            await asyncio.sleep(chance.uniform(10, 20))
            for node in others:
                node.faults.rates_by_prefix["files."] = SHAKY["files."]
            return
        await asyncio.sleep(chance.uniform(1, 4))
        for node in (owner, *others):
            node.crash()
            await node.bury()
            self.crashes += 1
        for node in others:
            await world.restart(node)
        await asyncio.sleep(chance.uniform(0, 12))
        await world.restart(owner)

    async def _rest(self) -> None:
        await asyncio.sleep(self._chance.uniform(2, 20))


async def _come_to_rest(world: World) -> None:
    world.heal()
    for process in world.of(OnceWriter):
        assert isinstance(process, OnceWriter)
        process.enough.set()
    end_s = world.now_s() + REST_S_MAX
    while (left := world.appending()) and world.now_s() < end_s:
        await asyncio.sleep(5.0)
        world.look()
    if left:
        world.once.complain(f"{REST_S_MAX} s after the last fault there is left: {left}")
    world.look()


async def _of_owner(world: World, ask: Callable[[Owners], Awaitable[T]]) -> T:
    """Ask whichever node owns the stream."""
    error: TierlogError | None = None
    for _ in range(100):
        for process in world.of(IngestProcess):
            assert isinstance(process, IngestProcess)
            if process.node is None or process.node.info is None:
                continue
            owners = process.node.owners

            async def asked(owners: Owners = owners) -> T | TierlogError:
                try:
                    return await ask(owners)
                except TierlogError as caught:
                    return caught

            answer: T | TierlogError = await process.spawn(asked())
            if not isinstance(answer, TierlogError):
                return answer
            error = answer
        await asyncio.sleep(3.0)
    raise AssertionError(f"nobody owns the stream: {error}")


async def _attributes(world: World) -> dict[AttributeKey, int]:
    found = await _of_owner(
        world, lambda owners: owners.list_attributes(ONCE_STREAM, FIRST_KEY, LAST_KEY, 1000)
    )
    return dict(found.values)


async def _read(world: World) -> list[bytes]:
    """Seal the stream, and return all its entries."""
    await _of_owner(world, lambda owners: owners.seal(ONCE_STREAM))
    entries: list[bytes] = []
    for listed in (await world.admin_catalog.streams.snapshot(ONCE_STREAM)).ledgers:
        metadata = world.checker.ledger(listed.ledger_id)
        assert metadata is not None
        assert listed.closed
        handle = Tier1ReadHandle(listed.ledger_id, metadata, world.admin_nodes, keys=KEYS)
        async for runs in handle.read_runs(EntryId(0), listed.last_entry_id):
            entries += [bytes(entry) for run in runs for entry in run.entries()]
    return entries
