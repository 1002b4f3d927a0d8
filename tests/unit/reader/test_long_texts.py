"""Events that JSON writes at several times their length have room for that before they are."""

import json
import subprocess
import sys

import pytest

from tests.unit.compression.test_compressed_events import packed
from tests.unit.reader.test_pages import URL, served
from tests.unit.reader.world import ReaderWorld, on_virtual_time
from tierlog.format.entry import Codec, encode_entry
from tierlog_reader.documents import EVENTS, NDJSON
from tierlog_reader.http_entries import COPIES
from tierlog_reader.memory import COPIES_OF_AN_ANSWER

MB = 10**6
# Control characters take six bytes each, and one character of four bytes makes all of a text wide.
PAYLOADS = {
    "control characters": bytes(4 * MB),
    "quotes": b'"' * (4 * MB),
    "wide": b"x" * (4 * MB - 4) + "\U0001f600".encode(),
}

# In a process of its own: what is freed again shows in nothing but the most that was resident.
RESIDENT = """
import pathlib, re, sys
from tierlog.format.entry import encode_entry
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position
from tierlog_reader.documents import EVENTS, FoundEntry, Unpacking, body_of
from tierlog_reader.http_entries import COPIES, _messages
from tierlog_reader.memory import COPIES_OF_AN_ANSWER
from tierlog_reader.pages import Page

kind, unpacking = sys.argv[1], Unpacking(decompressors={}, events_len_max=2**20)

def most():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s*([0-9]+)", status)[1])

def page_of(data):
    where = Position(LedgerId(1), EntryId(1))
    entries = [FoundEntry(position=where, data=data, tier="tier2", raw=False)]
    return Page(entries=entries, resume=where, raw=False, at_end=True)

def made(page):
    before = most()
    entries = page.entries
    body = list(_messages(page, unpacking)) if kind == EVENTS else body_of(kind, entries, unpacking)
    return page.frames_len + most() - before

made(page_of(encode_entry([b"p"], publish_time_ms=1)))
page = page_of(sys.stdin.buffer.read())
taken = made(page)
counted = COPIES_OF_AN_ANSWER * COPIES[kind] * (page.frames_len + page.objects_len)
print(taken / max(counted, page.text_len(page.frames_len, unpacking)))
"""


@pytest.mark.parametrize("kind", [NDJSON, EVENTS])
@pytest.mark.parametrize(
    ("payload", "events"),
    [("control characters", 1), ("control characters", 4000), ("quotes", 1), ("wide", 1)],
)
def test_a_text_that_is_longer_than_its_payload_takes_no_more_than_its_room(kind, payload, events):
    data, size = PAYLOADS[payload], len(PAYLOADS[payload]) // events
    entry = encode_entry([data[at : at + size] for at in range(0, 4 * MB, size)], publish_time_ms=1)
    grown = subprocess.run(
        [sys.executable, "-c", RESIDENT, kind], input=entry, check=True, capture_output=True
    )
    assert float(grown.stdout) < 1


@pytest.mark.parametrize(
    ("codec", "raw"), [(Codec.NONE, True), (Codec.NONE, False), (Codec.ZSTD, False)]
)
@on_virtual_time
async def test_room_for_a_text_is_there_before_it_is_written(codec, raw):
    payload = bytes(100_000)
    entry = payload if raw else packed(codec, [payload])
    world = ReaderWorld()
    await world.start(raw=raw)
    ledger = await world.opened([entry] * 2)
    async with served(world) as (client, shares):
        answer = await client.get(f"{URL}/entries", params={"from": f"{ledger}:0"})
        lines = [json.loads(line) for line in answer.content.splitlines()]
        assert [one["payload"] for one in lines] == [payload.decode()] * 2
        # As many bytes as they are, and each of them written out and on its way.
        assert shares.most_used_bytes >= (4 + 3 * 5) * 2 * len(payload)
        assert shares.used_bytes == 0
        following = {"Accept": EVENTS}
        params = {"from": f"{ledger}:0", "limit": 2}
        followed = await client.get(f"{URL}/entries", params=params, headers=following)
        assert followed.text.count("data: ") == 2
        assert shares.used_bytes == 0


@on_virtual_time
async def test_a_page_of_plain_texts_has_the_room_that_it_always_had():
    world = ReaderWorld()
    await world.start()
    await world.opened([encode_entry([b"x" * 1000], publish_time_ms=1)] * 100)
    async with served(world) as (client, shares):
        answer = await client.get(f"{URL}/entries", params={"bytes_max": 100_000})
        assert answer.headers["Tierlog-Entry-Count"] == "77"
        assert shares.most_used_bytes == COPIES_OF_AN_ANSWER * COPIES[NDJSON] * 100_000
