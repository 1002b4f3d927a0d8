"""A page holds no more room than it needs for as long as its client takes it (adr/0030)."""

import asyncio

import pytest

from tests.unit.reader.asgi import AsgiClient
from tests.unit.reader.test_pages import ENTRIES, URL, served, two_tiers
from tests.unit.reader.world import on_virtual_time
from tierlog_reader.documents import ARROW, NDJSON, OCTETS


@pytest.mark.parametrize("kind", [NDJSON, OCTETS, ARROW])
def test_small_pages_of_clients_that_take_nothing_leave_room_for_those_of_others(kind):
    @on_virtual_time
    async def main():
        world, *_ = await two_tiers(ENTRIES)
        asked = {"params": {"limit": 5}, "headers": {"Accept": kind}}
        async with (
            served(world, room_bytes=4_000_000, send_s_max=10) as (quick, shares),
            asyncio.TaskGroup() as group,
        ):
            loop = asyncio.get_running_loop()
            for number in range(20):
                stuck = AsgiClient(quick.app, piece_s=1000.0, host=f"stuck {number}")
                group.create_task(stuck.get(f"{URL}/entries", **asked))
            await asyncio.sleep(1)
            assert shares.used_bytes > 0
            begun_s = loop.time()
            assert (await quick.get(f"{URL}/entries", **asked)).status_code == 200
            assert loop.time() - begun_s < 0.5
        assert shares.used_bytes == 0

    main()
