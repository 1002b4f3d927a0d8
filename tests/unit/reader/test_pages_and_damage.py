"""Pages of entries give what they have before a place that can't be read, and then tell it."""

import asyncio
import json

import pytest

from tests.unit.reader.test_pages import ENTRIES, URL, served
from tests.unit.reader.world import ReaderWorld, on_virtual_time
from tierlog.model.ids import EntryId
from tierlog_reader.documents import ARROW, NDJSON, OCTETS


async def first_of_two_is_good(damage):
    """Two ledgers; of the second nothing, or only a changed copy, is left."""
    world = ReaderWorld()
    await world.start()
    first, second = await world.sealed(ENTRIES[:10]), await world.sealed(ENTRIES[10:])
    if damage == "changed":
        await world.offloaded(second)
        await world.gone_locally(second)
        context = await world.context(second)
        assert context.location is not None
        world.bucket.damage(context.location.data_key, 150)
    else:
        del world.node.runs[second]
    return world, first


@pytest.mark.parametrize("damage", ["lost", "changed"])
def test_a_page_ends_before_what_can_not_be_read_and_the_next_one_tells_it(damage):
    @on_virtual_time
    async def main():
        world, first = await first_of_two_is_good(damage)
        async with served(world) as (client, shares):
            page = await client.get(f"{URL}/entries", params={"from": f"{first}:2"})
            assert page.status_code == 200
            lines = [json.loads(line)["position"] for line in page.text.splitlines()]
            assert lines == [f"{first}:{number}" for number in range(2, 10)]
            assert page.headers["Tierlog-Next"] == f"{first}:10"
            told = await client.get(f"{URL}/entries", params={"from": f"{first}:10"})
            assert told.status_code >= 500
            assert told.json()["remedy"]
            assert shares.used_bytes == 0

    main()


@pytest.mark.parametrize("damage", ["lost", "changed"])
def test_who_follows_has_all_before_what_can_not_be_read(damage):
    @on_virtual_time
    async def main():
        world, first = await first_of_two_is_good(damage)
        async with served(world) as (client, shares):
            headers = {"Accept": "text/event-stream"}
            followed = await client.get(f"{URL}/entries", headers=headers)
            before, _, told = followed.text.partition("event: error")
            assert before.count("data: ") == 10
            assert f"id: {first}:10\n" in before
            assert told
            assert shares.used_bytes == 0

    main()


async def tenth_is_bad(bad):
    """One ledger with an entry that can't be decoded between good ones."""
    world = ReaderWorld()
    await world.start()
    return world, await world.sealed([*ENTRIES[:10], bad, *ENTRIES[11:20]])


BAD = [b"no append header, but frames and checksums are right", b"\xff" * 80]


@pytest.mark.parametrize("bad", BAD, ids=["text", "bytes"])
@pytest.mark.parametrize("kind", [NDJSON, OCTETS, ARROW])
def test_a_page_ends_before_an_entry_that_can_not_be_decoded(kind, bad):
    @on_virtual_time
    async def main():
        world, ledger = await tenth_is_bad(bad)
        async with served(world) as (client, shares):
            headers = {"Accept": kind}
            page = await client.get(
                f"{URL}/entries", params={"from": f"{ledger}:2"}, headers=headers
            )
            assert page.status_code == 200
            assert page.headers["Tierlog-Entry-Count"] == "8"
            assert page.headers["Tierlog-Next"] == f"{ledger}:10"
            told = await client.get(
                f"{URL}/entries", params={"from": f"{ledger}:10"}, headers=headers
            )
            assert told.status_code >= 400
            assert told.json()["details"]["position"] == f"{ledger}:10"
            after = await client.get(
                f"{URL}/entries", params={"from": f"{ledger}:11"}, headers=headers
            )
            assert after.headers["Tierlog-Entry-Count"] == "9"
            assert shares.used_bytes == 0

    main()


@pytest.mark.parametrize("bad", BAD, ids=["text", "bytes"])
def test_who_follows_has_all_before_an_entry_that_can_not_be_decoded(bad):
    @on_virtual_time
    async def main():
        world, ledger = await tenth_is_bad(bad)
        async with served(world) as (client, shares):
            headers = {"Accept": "text/event-stream"}
            followed = await client.get(f"{URL}/entries", headers=headers)
            before, _, told = followed.text.partition("event: error")
            assert before.count("data: ") == 10
            assert f"id: {ledger}:10\n" in before
            assert told
            assert shares.used_bytes == 0

    main()


@pytest.mark.parametrize("count", [0, 3])
def test_who_follows_from_latest_is_told_at_once_where_that_is(count):
    @on_virtual_time
    async def main():
        world = ReaderWorld()
        await world.start()
        ledger = await world.opened(ENTRIES[:count])
        async with served(world) as (client, _), asyncio.TaskGroup() as group:
            headers, params = {"Accept": "text/event-stream"}, {"from": "latest", "limit": 2}
            following = group.create_task(
                client.get(f"{URL}/entries", params=params, headers=headers)
            )
            await asyncio.sleep(15)
            await world.write(ledger, ENTRIES[count : count + 2], first=count)
            told = [one for one in (await following).text.splitlines() if one.startswith("id: ")]
        where = f"{ledger}:{count}" if count else "earliest"
        assert told == [f"id: {where}", f"id: {ledger}:{count + 1}", f"id: {ledger}:{count + 2}"]

    main()


@on_virtual_time
async def test_latest_is_told_at_once_though_the_owner_is_gone_and_nobody_knows_what_is_confirmed():
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened(ENTRIES[:5], lac=2)
    async with served(world) as (client, _), asyncio.TaskGroup() as group:
        headers, params = {"Accept": "text/event-stream"}, {"from": "latest", "limit": 2}
        following = group.create_task(client.get(f"{URL}/entries", params=params, headers=headers))
        await asyncio.sleep(15)
        world.node.confirm(ledger, EntryId(4))
        told = [one for one in (await following).text.splitlines() if one.startswith("id: ")]
    assert told == [f"id: {ledger}:{entry}" for entry in (3, 4, 5)]
