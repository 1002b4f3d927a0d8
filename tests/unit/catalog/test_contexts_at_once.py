"""Many at one ledger's context, whose answers are lost every so often: it never contradicts itself.

Must hold (protocols.md section 3): what is abandoned, whose objects are deleted, is nothing else
too: neither the newest attempt, nor the complete copy, nor the one that is to replace it.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.catalog.world import COPY, Process, World, location
from tierlog.adapters.memory.faults import FaultRates
from tierlog.model.errors import TierlogError
from tierlog.model.ids import LedgerId
from tierlog.model.offload import READABLE_IN_TIER2, OffloadContext, OffloadState

RATES = FaultRates(reply_lost=0.35, request_lost=0.1, delay_s_max=0.05)
STEPS = 25


def check(context: OffloadContext) -> None:
    """Check what each state implies."""
    abandoned = [one.uuid for one in context.abandoned]
    assert len(set(abandoned)) == len(abandoned)
    assert context.uuid not in abandoned
    if context.repair is not None:
        assert context.repair.uuid not in {context.uuid, *abandoned}
    assert (context.repair is not None) == (context.state is OffloadState.REPAIRING)
    assert context.complete == (context.state in READABLE_IN_TIER2)


class Somebody:
    """A worker, a scrub and a leader in one, which does whatever it likes."""

    def __init__(self, process: Process, ledger_id: LedgerId, rng: random.Random) -> None:
        self._process = process
        self._contexts = process.catalog.contexts
        self._ledger_id = ledger_id
        self._rng = rng
        self._mine = [process.ids.uuid()]

    async def live(self) -> None:
        for _ in range(STEPS):
            try:
                found = await self._contexts.get(self._ledger_id)
                assert found is not None
                check(found)
                await self._do(found)
            except TierlogError:
                pass
            await asyncio.sleep(self._rng.random() * 0.05)

    async def _do(self, found: OffloadContext) -> None:
        contexts, fresh, mine = self._contexts, self._process.ids.uuid(), self._mine[-1]
        newest = found.uuid or mine
        left = self._rng.choice(found.abandoned) if found.abandoned else None
        place = location(fresh, self._ledger_id)

        async def tier1() -> OffloadContext:
            begun = await contexts.begin_tier1_deletion(self._ledger_id, uuid=newest)
            return await self._process.catalog.ledgers.delete_tier1(self._ledger_id, begun)

        def change(name: str, **how: object) -> Callable[[], Awaitable[OffloadContext]]:
            return lambda: getattr(contexts, name)(self._ledger_id, **how)

        begins: Mapping[str, object] = {"uuid": fresh, "location": place, "worker": "w"}
        ways = [
            change("begin_attempt", **begins),
            change("begin_attempt", **begins),
            change("complete_attempt", uuid=mine, copy=COPY),
            change("give_up_attempt", uuid=newest),
            change("begin_repair", damaged=newest, **begins),
            change("complete_repair", uuid=mine, copy=COPY),
            change("give_up_repair", uuid=mine, error="e"),
            change("doubt", uuid=newest, cause="c"),
            tier1,
        ]
        if left is not None:
            swept: UUID = left.uuid
            name = contexts.strike_off if left.swept_ms else contexts.mark_swept
            ways += [lambda: name(self._ledger_id, swept)] * 2
        self._mine.append(fresh if self._rng.random() < 0.5 else mine)
        await self._rng.choice(ways)()


@pytest.mark.parametrize("seed", range(12))
def test_what_is_abandoned_is_nothing_else(seed):
    async def main() -> None:
        world, rng = World(), random.Random(seed)
        owner, claimed = await world.owner()
        ledger_id = await world.closed_ledger(owner, claimed)
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                process = world.process()
                process.faults.rates = RATES
                group.create_task(Somebody(process, ledger_id, rng).live())
        last = await owner.catalog.contexts.get(ledger_id)
        assert last is not None
        check(last)

    run_virtual(main(), until_s=10_000)
