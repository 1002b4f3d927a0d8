"""What a damaged or incomplete copy in tier 2 says is something that can be done."""

import re

import pytest
from typer.main import get_command

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.test_tier2_reader import LEDGER, UUID_1, copied
from tests.unit.offload.world import World, entries_of
from tierlog.cli.scrub import app
from tierlog.model.errors import CorruptError, RefusedError

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
