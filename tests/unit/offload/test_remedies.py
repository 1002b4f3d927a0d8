"""What a damaged or incomplete copy in tier 2 says is something that can be done."""

import re
from uuid import UUID

import pytest
from typer.main import get_command

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.test_single import driver_of
from tests.unit.offload.test_tier2_reader import LEDGER, UUID_1, copied
from tests.unit.offload.world import World, entries_of
from tierlog.cli.scrub import app
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.offload.verify import ReadBack

ENTRIES = [bytes([number]) * 40 for number in range(30)]
COMMAND = re.compile(r"tierlog scrub((?: --\w+)+)")


def check(remedy: str) -> None:
    """Its command is there, with these options, and nothing is advised that nobody can do."""
    found = COMMAND.search(remedy)
    assert found is not None, remedy
    assert "--repair" in found[1]
    assert "offload the ledger again" not in remedy
    known = {name for one in get_command(app).params for name in one.opts}
    assert set(found[1].split()) <= known


@pytest.mark.parametrize("at", [3, 130, 600])
def test_a_copy_whose_data_are_damaged_names_the_repair(at):
    async def main():
        world = World()
        handle, _, _ = await copied(world, ENTRIES)
        key = handle.location.data_key
        info, raw = world.bucket.objects[key]
        world.bucket.objects[key] = (info, raw[:at] + b"\xff" * 200 + raw[at + 200 :])
        with pytest.raises(CorruptError) as caught:
            await entries_of(handle)
        check(caught.value.remedy)

    run_virtual(main())


def test_a_copy_whose_index_is_damaged_or_gone_names_the_repair():
    async def main():
        world = World()
        _, reading, copy = await copied(world, ENTRIES)
        key = f"{UUID_1}-ledger-7-index"
        info, raw = world.bucket.objects[key]
        world.bucket.objects[key] = (info, b"\xff" * len(raw))
        with pytest.raises(CorruptError) as damaged:
            await reading.read_offloaded(LEDGER, UUID_1, copy=copy)
        check(damaged.value.remedy)
        del world.bucket.objects[key]
        with pytest.raises(RefusedError) as gone:
            await reading.read_offloaded(LEDGER, UUID_1, copy=copy)
        check(gone.value.remedy)

    run_virtual(main())


@pytest.mark.parametrize("single", [False, True])
def test_a_verification_that_finds_damage_names_the_repair(single):
    """The scheduler's comes when the copy is complete: nobody offloads it again."""

    async def main():
        world = World()
        claimed = await world.stream()
        ledger_id = await world.seal(claimed, ENTRIES)
        driver = driver_of(world) if single else world.offloader()
        uuid = UUID(int=9)
        metadata = await world.catalog().ledgers.get(ledger_id)
        assert metadata is not None
        copy = await driver.offload(world.open_ledger(ledger_id, metadata), uuid, {})
        place = driver.location(ledger_id, uuid)
        world.bucket.damage(place.data_key, copy.data_len - 1)
        with pytest.raises(CorruptError) as caught:
            await driver.verify(ledger_id, uuid, place, copy, read_back=ReadBack.FULL)
        check(caught.value.remedy)

    run_virtual(main())
