"""What needs more parts than S3 takes is refused before anything is begun in the bucket."""

from dataclasses import replace
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import CLUSTER, SMALL_RANGES, ListHandle, World, metadata_of
from tierlog.model.errors import RefusedError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.offload.blocks import (
    PART_NUMBER_MAX,
    DataObjectLayout,
    SingleObjectLayout,
    check_offloadable,
)
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.single_driver import SingleObjectOffloader

LEDGER = LedgerId(7)
BLOCK = 200
SETTINGS = Tier2Settings(bucket="b", cluster_id=CLUSTER, ranges=SMALL_RANGES)


@pytest.mark.parametrize(
    ("layout", "blocks"), [(DataObjectLayout(), 10_000), (SingleObjectLayout(), 9_999)]
)
def test_the_last_part_that_s3_takes_is_the_last_one_let_through(layout, blocks):
    content = blocks * (BLOCK - layout.beside_block)
    count = blocks * 2
    full = replace(
        metadata_of([], block_size=BLOCK),
        last_entry_id=EntryId(count - 1),
        length=content - layout.beside_entry * count,
    )
    check_offloadable(LEDGER, full, layout)
    for one in (
        replace(full, length=full.length + 1),
        replace(full, last_entry_id=EntryId(count)),
    ):
        with pytest.raises(RefusedError, match=f"needs {PART_NUMBER_MAX + 1} parts or more"):
            check_offloadable(LEDGER, one, layout)


@pytest.mark.parametrize(
    ("driver", "layout"),
    [(BlockOffloader, DataObjectLayout()), (SingleObjectOffloader, SingleObjectLayout())],
)
def test_nothing_is_begun_for_a_ledger_of_too_many_parts(driver, layout):
    async def main():
        world = World()
        entries = [bytes(BLOCK - layout.beside_block - layout.beside_entry)] * (PART_NUMBER_MAX + 1)
        handle = ListHandle(LEDGER, entries, metadata_of(entries, block_size=BLOCK))
        offloader = driver(world.bucket.connect(), SETTINGS)
        with pytest.raises(RefusedError, match="parts or more") as caught:
            await offloader.offload(handle, UUID(int=1), {})
        assert "larger blocks" in caught.value.remedy
        assert not world.bucket.uploads
        assert not world.bucket.objects

    run_virtual(main())
