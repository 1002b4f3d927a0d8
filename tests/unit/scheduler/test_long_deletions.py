"""Copies that take long to read back hold up one stream's local deletions, and nothing else.

Must hold: another stream's ledger is asked for while they go on; all local copies go in the end,
also behind some whose copies can't be read.
"""

import asyncio
from collections.abc import Collection

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import TOPICS, World
from tests.unit.scheduler.test_scheduler import ENTRIES, LIMITS, scheduler
from tierlog.model.errors import RetryableError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.policy import Policy
from tierlog.offload.driver import BlockOffloader
from tierlog.offload.messages import parse_request
from tierlog_scheduler.scheduler import DELETIONS_S_MAX

LARGE, SMALL = StreamName("large"), StreamName("small")
LEDGERS = 10
READ_S = 20.0


class SlowWorld(World):
    """A world in which a copy takes long to be verified; some may never be readable."""

    unreadable: Collection[LedgerId] = ()

    def offloader(self, *given, **settings) -> BlockOffloader:
        made = super().offloader(*given, **settings)
        verify = made.verify

        async def slowly(ledger_id, *rest, **how):
            await asyncio.sleep(READ_S)
            if ledger_id in self.unreadable:
                raise RetryableError("the store takes its time")
            await verify(ledger_id, *rest, **how)

        setattr(made, "verify", slowly)  # noqa: B010
        return made


async def due(world: World) -> list[LedgerId]:
    """Make a stream whose local copies are all to go at once."""
    lasting = Policy(offload_time_ms=0, deletion_lag_ms=0, read_back="full")
    claimed = await world.stream(LARGE, lasting)
    found = [await world.seal(claimed, ENTRIES) for _ in range(LEDGERS)]
    for ledger_id in found:
        await world.worker().handle(world.request(claimed, ledger_id))
    return found


def asked_for(world: World) -> list[StreamName]:
    return [parse_request(one).stream for one in world.queue.events(TOPICS.requested)]


def test_other_streams_are_asked_for_meanwhile():
    async def main():
        world = SlowWorld()
        await due(world)
        claimed = await world.stream(SMALL, Policy(offload_time_ms=0))
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(scheduler(world).run(stop))
            await asyncio.sleep(READ_S / 2)
            await world.seal(claimed, ENTRIES)
            await asyncio.sleep(DELETIONS_S_MAX + 2 * READ_S + LIMITS.interval_s)
            assert SMALL in asked_for(world)
            stop.set()

    run_virtual(main())


@pytest.mark.parametrize("unreadable", [(), (0, 1), (LEDGERS - 1,)])
def test_all_local_copies_go_in_the_end(unreadable):
    async def main():
        world = SlowWorld()
        ledgers = await due(world)
        world.unreadable = [ledgers[number] for number in unreadable]
        leader = scheduler(world)
        await leader.begin()
        for _ in range(2 * LEDGERS):
            await leader.run_pass()
            assert leader.pass_s <= DELETIONS_S_MAX + READ_S + 1
        catalog = world.catalog()
        left = [one for one in ledgers if await catalog.ledgers.get(one) is not None]
        assert left == world.unreadable

    run_virtual(main(), until_s=10_000)
