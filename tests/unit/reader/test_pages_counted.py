"""What is counted as served is what was served, and not what was read for it."""

import pytest

from tests.unit.compression.test_compressed_events import packed
from tests.unit.reader.test_grpc_follow import follow, serving
from tests.unit.reader.test_pages import ENTRIES, URL, served, two_tiers
from tests.unit.reader.world import STREAM, on_virtual_time
from tierlog.format.entry import Codec
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.proto.v1 import reader_pb2 as pb
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


@on_virtual_time
async def test_runs_are_counted_by_the_tier_that_they_came_from():
    world, first, second = await two_tiers(ENTRIES)
    async with served(world) as (client, _):
        for ledger, tier in ((first, "tier2"), (second, "tier1")):
            before = counted()
            answer = await client.get(f"{URL}/runs", params={"from": f"{ledger}:0"})
            count, size = int(answer.headers["Tierlog-Entry-Count"]), len(answer.content)
            assert answer.headers["Tierlog-Tier"] == tier
            before[metrics.ENTRIES._name, tier] += count
            before[metrics.BYTES._name, tier] += size
            before["served"] += size * (tier == "tier2")
            assert counted() == before


PLAIN = [b"%05d" % number for number in range(1000)]


async def _read(stub):
    answer = await stub.Read(pb.ReadRequest(stream=STREAM, entries_max=10))
    assert [one.data for one in answer.entries] == PLAIN[:10]


async def _followed(stub, *, count, **named):
    pieces = [one async for one in stub.Follow(follow(**named))]
    assert [one.data for piece in pieces for one in piece.entries] == PLAIN[:count]


@pytest.mark.parametrize("count", [0, 7, 1000])
async def test_over_grpc_what_was_sent_counts_and_not_what_was_read_behind_the_end(count):
    async with serving(PLAIN, send_s_max=30) as (stub, _):
        assert (await grown(_read(stub)))[:3] == [10, 0, 10 * (FRAME_HEADER_LEN + 5)]
        first = (await stub.Read(pb.ReadRequest(stream=STREAM, entries_max=1))).entries[0].position
        until = pb.PositionRecord(ledger_id=first.ledger_id, entry_id=count)
        served = await grown(_followed(stub, count=count, until=until))
        assert served[:3] == [count, 0, count * (FRAME_HEADER_LEN + 5)]
