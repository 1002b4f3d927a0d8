"""An admin's consent to a loss of attributes stands until a checkpoint is there, and no longer.

Must hold (protocols.md section 4): it stands for no loss that comes later, whatever becomes of the
answer to it.
"""

import asyncio

from tests.unit.catalog.world import ORDERS, World, on_virtual_time
from tierlog.adapters.memory.faults import Outcome
from tierlog.catalog.attributes import Publication
from tierlog.model.attribute_record import KeptRoot
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position


@on_virtual_time
async def test_one_whose_answer_was_lost_is_not_said_again_behind_the_checkpoint_that_cleared_it():
    world = World()
    owner, claimed = await world.owner()
    record = await owner.catalog.attributes.declare(claimed)
    admin = world.process()
    admin.faults.next("metadata.set", Outcome.REPLY_LOST)
    async with asyncio.TaskGroup() as group:
        group.create_task(admin.catalog.attributes.accept_loss(claimed, by="admin"))
        while not record.loss_accepted:
            found = await owner.catalog.attributes.get(ORDERS)
            assert found is not None
            record = found
        after = KeptRoot(through=Position(LedgerId(0), EntryId(2)))
        publication = Publication(base=record.newest, generation=record.generation, after=after)
        assert not (await owner.catalog.attributes.publish(claimed, publication)).loss_accepted
    last = await owner.catalog.attributes.get(ORDERS)
    assert last is not None
    assert (last.newest, last.loss_accepted) == (after, "")
    # A later loss takes another word.
    again = await admin.catalog.attributes.accept_loss(claimed, by="admin")
    assert again.loss_accepted
