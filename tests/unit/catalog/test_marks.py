"""The mark of metadata that may have forgotten something: left by many, lifted by who asks.

Each change settles, and who asks lifts the mark that stood then, and none that was left since.
"""

import pytest

from tests.unit.catalog.world import World, on_virtual_time
from tierlog.adapters.memory.faults import Outcome

TROUBLES = [Outcome.REFUSED, Outcome.REQUEST_LOST, Outcome.REPLY_LOST]


@pytest.mark.parametrize("trouble", TROUBLES)
@on_virtual_time
async def test_it_is_left_and_left_anew_and_lifted_whatever_is_lost(trouble):
    process = World().process()
    scrubs, seen = process.catalog.scrubs, list[int]()
    for change in ("metadata.create", "metadata.set", "metadata.set"):
        process.faults.next(change, trouble)
        await scrubs.note_behind()
        mark = await scrubs.mark()
        assert mark is not None
        seen.append(mark)
    assert len(set(seen)) == 3, "each is another one"
    process.faults.next("metadata.delete", trouble)
    assert await scrubs.note_repaired(seen[-1])
    assert await scrubs.mark() is None
    assert await scrubs.note_repaired(seen[-1]), "so it is"


@on_virtual_time
async def test_one_that_was_left_since_stays():
    world = World()
    process, node = world.process(), world.process()
    await process.catalog.nodes.ensure_cluster()
    scrubs = process.catalog.scrubs
    for leave in (
        node.catalog.scrubs.note_behind,
        lambda: node.catalog.nodes.ensure_cluster(ledger_id_base=1000),
    ):
        await scrubs.note_behind()
        mark = await scrubs.mark()
        assert mark is not None
        await leave()
        assert not await scrubs.note_repaired(mark)
        assert await scrubs.is_restored()
