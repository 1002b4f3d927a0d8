"""An attempt that stands among the abandoned, and is the ledger's all the same, is not deleted.

No change makes one so (``tierlog.model.offload``); metadata of a release before may have it.
"""

from dataclasses import replace
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import World
from tests.unit.scheduler.test_scheduler import ENTRIES, check_readable, scheduler
from tierlog.model.ids import LedgerId
from tierlog.model.offload import AbandonedAttempt, OffloadContext, OffloadState
from tierlog.model.policy import Policy

OTHER = UUID(int=7)


async def abandon_too(world: World, ledger_id: LedgerId, uuid: UUID, swept_ms: int) -> None:
    place = world.offloader().location(ledger_id, uuid)
    left = AbandonedAttempt(uuid=uuid, location=place, abandoned_ms=1, swept_ms=swept_ms)

    def plan(context: OffloadContext) -> OffloadContext:
        return replace(context, abandoned=(*context.abandoned, left))

    await world.catalog().contexts.change(
        ledger_id, plan, applied=lambda context: context.swept_at(uuid) is not None
    )


@pytest.mark.parametrize("swept_ms", [0, 1])
@pytest.mark.parametrize("repairs", [False, True])
def test_what_is_the_ledgers_is_not_swept_whatever_stands_beside_it(repairs, swept_ms):
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0))
        ledger_id = await world.seal(claimed, ENTRIES)
        await world.worker().handle(world.request(claimed, ledger_id))
        own = (await world.context(ledger_id)).uuid
        assert own is not None
        if repairs:
            metadata = await world.catalog().ledgers.get(ledger_id)
            assert metadata is not None
            offloader = world.offloader()
            await world.catalog().contexts.begin_repair(
                ledger_id,
                damaged=own,
                uuid=OTHER,
                location=offloader.location(ledger_id, OTHER),
                worker="w",
            )
            await offloader.offload(world.open_ledger(ledger_id, metadata), OTHER, {})
        before = set(world.bucket.objects)
        await abandon_too(world, ledger_id, OTHER if repairs else own, swept_ms)
        leader = scheduler(world)
        await leader.begin()
        for _ in range(2):
            await leader.run_pass()
            world.clock.advance(3600)
        context = await world.context(ledger_id)
        assert context.abandoned == ()
        assert (context.state is OffloadState.REPAIRING) is repairs
        assert set(world.bucket.objects) == before
        await check_readable(world)

    run_virtual(main())
