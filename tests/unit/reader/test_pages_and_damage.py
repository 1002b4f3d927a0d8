"""Pages of entries give what they have before a place that can't be read, and then tell it."""

import json

import pytest

from tests.unit.reader.test_pages import ENTRIES, URL, served
from tests.unit.reader.world import ReaderWorld, on_virtual_time


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
