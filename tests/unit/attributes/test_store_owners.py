"""What an owner's index says first, and what it does with a base that is not the newest any more.

Must hold: from the load on retention knows that there is something to lose; a flush over a base
that moved on is refused as such, whatever was swept of the base meanwhile.
"""

import pytest

from tests.contracts.attributes_suite import all_of, at, key_of
from tests.simulation.virtual_loop import run_virtual
from tests.unit.attributes.world import SAFETY_MS, IndexWorld
from tierlog.attributes.objects import IndexObjectGoneError
from tierlog.model.attribute_record import holds_back
from tierlog.model.errors import Reason, RefusedError


async def free(_: int) -> None:
    """Pay for nothing."""


def test_whoever_loads_as_the_owner_has_retention_wait_for_its_checkpoint() -> None:
    async def main() -> None:
        world = IndexWorld()
        stream, process = await world.stream(), world.process()
        assert await process.catalog.attributes.get(stream.name) is None
        base = await process.index.load(stream)
        assert (base.through, base.root.count) == (None, 0)
        record = await process.catalog.attributes.get(stream.name)
        assert holds_back(record, None, at(0, 3), is_copied=False) is not None
        # Said once: a load that finds something writes nothing.
        process.faults.calls = []
        assert await process.index.load(stream) == base
        assert "metadata.transact" not in process.faults.calls
        # Who is no owner any more says nothing.
        other = await world.stream()
        await world.claim(other)
        with pytest.raises(RefusedError) as caught:
            await process.index.load(other)
        assert caught.value.reason is Reason.FENCED

    run_virtual(main())


def test_a_base_that_moved_on_is_refused_before_its_pages_are_asked_for() -> None:
    async def main() -> None:
        world = IndexWorld(page_bytes=256)
        stream, process = await world.stream(), world.process()
        values = {key_of(number): number for number in range(60)}
        first = await process.index.flush(
            stream, await process.index.load(stream), changes=values, core={}, through=at(0, 0)
        )
        # A flush that nobody waited for: all of the first index is written anew.
        values = dict.fromkeys(values, 1)
        await process.index.flush(stream, first, changes=values, core={}, through=at(0, 1))
        world.clock.advance(2 * SAFETY_MS / 1000)
        swept = await process.sweeper.run(stream.name, stream.incarnation, pay=free, delete=True)
        assert swept.deleted
        late = world.process()
        with pytest.raises(IndexObjectGoneError):
            await late.index.get(first, [key_of(1)])
        with pytest.raises(RefusedError) as caught:
            await late.index.flush(stream, first, changes=values, core={}, through=at(0, 2))
        assert caught.value.reason is Reason.FENCED
        newest = await late.index.load(stream)
        made = await late.index.flush(
            stream, newest, changes={key_of(1): 7}, core={}, through=at(0, 2)
        )
        assert await all_of(late.index, made) == {**values, key_of(1): 7}

    run_virtual(main())
