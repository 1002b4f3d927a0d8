"""Lists of ledgers over HTTP: in memory only within their room."""

import asyncio
import json
import tracemalloc
from uuid import UUID

from tests.unit.reader.asgi import AsgiClient
from tests.unit.reader.test_pages import RAW, URL, served
from tests.unit.reader.world import ReaderWorld, on_virtual_time
from tierlog.model.ids import LedgerId
from tierlog.ports.reads import ServedLedger, ServedLedgers
from tierlog_reader.http import listed
from tierlog_reader.served import LEDGER_ROW_BYTES


@on_virtual_time
async def test_a_list_of_ledgers_has_room_before_it_is_made_until_it_was_taken():
    world = ReaderWorld()
    await world.start()
    ledgers = [await world.sealed(RAW) for _ in range(20)]
    async with (
        served(world, room_bytes=10 * LEDGER_ROW_BYTES) as (quick, shares),
        asyncio.TaskGroup() as group,
    ):
        slow = AsgiClient(quick.app, piece_s=3.0, host="slow")
        params = {"from": ledgers[1], "limit": 8}
        taking = group.create_task(slow.get(f"{URL}/ledgers", params=params))
        await asyncio.sleep(1)
        assert shares.used_bytes == 8 * LEDGER_ROW_BYTES
        begun_s = asyncio.get_running_loop().time()
        few = await quick.get(f"{URL}/ledgers", params={"limit": 2})
        assert asyncio.get_running_loop().time() == begun_s, "there is room for few"
        assert [row["ledger_id"] for row in few.json()["ledgers"]] == ledgers[:2]
        more = await quick.get(f"{URL}/ledgers", params={"limit": 3})
        assert asyncio.get_running_loop().time() > begun_s + 1, "more are waited for"
        assert (len(more.json()["ledgers"]), more.json()["next"]) == (3, ledgers[3])
        told = (await taking).json()
        assert [row["ledger_id"] for row in told["ledgers"]] == ledgers[1:9]
        assert (told["next"], told["ledgers"][0]["entries"]) == (ledgers[9], len(RAW))
        async with shares.room("another", 10 * LEDGER_ROW_BYTES):
            refused = await quick.get(f"{URL}/ledgers")
        assert refused.status_code == 429
        assert shares.used_bytes == 0


def test_a_row_of_a_list_of_ledgers_takes_no_more_than_is_counted():
    count = 2000
    tracemalloc.start()
    try:
        rows = [
            ServedLedger(
                ledger_id=LedgerId(10**6 + number),
                entry_count=10**6 + number,
                length=10**9 + number,
                closed=True,
            )
            for number in range(count)
        ]
        body = listed("logs", ServedLedgers(incarnation=UUID(int=1), ledgers=rows))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(json.loads(body)["ledgers"]) == count
    assert 0.7 * LEDGER_ROW_BYTES < most / count <= LEDGER_ROW_BYTES
