"""Following up to a position, also by another name for where it begins, and while nothing comes."""

import asyncio

import pytest

from tests.unit.reader.asgi import AsgiClient
from tests.unit.reader.test_pages import ENTRIES, URL, served, two_tiers
from tests.unit.reader.world import on_virtual_time

HEADERS = {"Accept": "text/event-stream"}


@pytest.mark.parametrize(("start", "count"), [("first:3", 12), ("first:15", 0), ("earliest", 15)])
def test_who_follows_up_to_the_beginning_of_a_ledger_is_done_there(start, count):
    @on_virtual_time
    async def main():
        world, first, second = await two_tiers(ENTRIES)
        async with served(world) as (client, shares), asyncio.timeout(60):
            slow = AsgiClient(client.app, piece_s=0.1)
            params = {"from": start.replace("first", str(first)), "to": f"{second}:0"}
            followed = await slow.get(f"{URL}/entries", params=params, headers=HEADERS)
            assert followed.text.count("data: ") == count
            assert "event: error" not in followed.text
            assert shares.used_bytes == 0

    main()


@on_virtual_time
async def test_who_follows_up_to_what_lies_before_the_first_entry_is_done_at_once():
    world, first, second = await two_tiers(ENTRIES)
    async with served(world) as (client, _), asyncio.timeout(60):
        slow = AsgiClient(client.app, piece_s=0.1)
        params = {"from": "earliest", "to": f"{first}:0"}
        followed = await slow.get(f"{URL}/entries", params=params, headers=HEADERS)
        assert "data: " not in followed.text
        page = await client.get(
            f"{URL}/entries", params={"from": f"{first}:15", "to": f"{second}:0"}
        )
        assert (page.status_code, page.headers["Tierlog-Next"]) == (204, f"{second}:0")


@on_virtual_time
async def test_who_follows_is_sent_comments_while_nothing_comes():
    world, _, second = await two_tiers(ENTRIES)
    async with served(world) as (client, _):
        params = {"from": f"{second}:15", "limit": 1}
        following = asyncio.ensure_future(
            client.get(f"{URL}/entries", params=params, headers=HEADERS)
        )
        await asyncio.sleep(25)
        await world.write(second, ENTRIES[:1], first=15)
        answer = await following
    assert answer.text.startswith("retry: 1000\n\n" + 2 * ": nothing yet\n\n" + "id: ")
    assert answer.text.count("data: ") == 1


@on_virtual_time
async def test_who_follows_is_not_sent_comments_without_a_pause_where_no_read_may_wait():
    world, _, second = await two_tiers(ENTRIES)
    async with served(world, wait_ms_max=0) as (client, _):
        slow = AsgiClient(client.app, piece_s=0.1)
        params = {"from": f"{second}:15", "limit": 1}
        following = asyncio.ensure_future(
            slow.get(f"{URL}/entries", params=params, headers=HEADERS)
        )
        await asyncio.sleep(25)
        await world.write(second, ENTRIES[:1], first=15)
        answer = await following
    assert 20 <= answer.text.count(": nothing yet\n\n") <= 25
    assert answer.text.count("data: ") == 1
