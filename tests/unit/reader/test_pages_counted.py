"""What is counted as served is what was served, and not what was read for it."""

from tests.unit.compression.test_compressed_events import packed
from tests.unit.reader.test_pages import ENTRIES, URL, served, two_tiers
from tests.unit.reader.world import on_virtual_time
from tierlog.format.entry import Codec
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog_reader import metrics
from tierlog_reader.documents import OCTETS
from tierlog_reader.places import Tier
from tierlog_reader.served import ROOM_BYTES_MIN


def counted():
    """Return entries and bytes by tier, and the bytes that stand below GETs a megabyte."""
    found = {}
    for counter in (metrics.ENTRIES, metrics.BYTES):
        for tier in ("tier1", "tier2"):
            found[counter._name, tier] = counter.labels(tier)._value.get()
    return {**found, "served": metrics._served[Tier.TIER2]}


async def grown(pages):
    before = counted()
    await pages
    return [now - was for now, was in zip(counted().values(), before.values(), strict=True)]


@on_virtual_time
async def test_entries_of_a_page_that_was_cut_are_counted_once():
    entry = packed(Codec.ZSTD, [bytes(30_000)])
    world, _, second = await two_tiers([entry] * 20)
    octets, size = {"Accept": OCTETS}, 10 * (FRAME_HEADER_LEN + len(entry))
    async with served(world) as (client, _):

        async def pages():
            token, answer = "earliest", None
            while answer is None or answer.status_code == 200:
                asked = {"from": token, "bytes_max": ROOM_BYTES_MIN}
                answer = await client.get(f"{URL}/entries", params=asked, headers=octets)
                token = answer.headers["Tierlog-Next"]
            assert token == f"{second}:10"

        assert await grown(pages()) == [10, 10, size, size, size]
        following = {"Accept": "text/event-stream"}
        params = {"from": "earliest", "to": f"{second}:10"}
        followed = client.get(f"{URL}/entries", params=params, headers=following)
        assert await grown(followed) == [10, 10, size, size, size]


@on_virtual_time
async def test_entries_before_the_end_that_was_asked_for_are_counted_alone():
    world, first, _ = await two_tiers(ENTRIES)
    async with served(world) as (client, _):
        asked = {"from": f"{first}:3", "to": f"{first}:5"}
        assert (await grown(client.get(f"{URL}/entries", params=asked)))[:2] == [0, 2]
