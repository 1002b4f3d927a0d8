"""Pages of many small events take no more memory than their room, and are shorter for it."""

import json
import subprocess
import sys

import pytest

from tests.unit.reader.test_pages import URL, served
from tests.unit.reader.world import ReaderWorld, on_virtual_time
from tierlog.format.entry import encode_entry
from tierlog_reader.documents import ARROW, EVENTS, NDJSON, OCTETS
from tierlog_reader.http_entries import COPIES
from tierlog_reader.pages import OBJECT_BYTES

ONE = encode_entry([b"%08d" % number for number in range(500)], publish_time_ms=1)

# In a process of its own: what is freed again shows in nothing but the most that was resident.
RESIDENT = """
import pathlib, re, sys
from tierlog.format.entry import encode_entry
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position
from tierlog_reader.documents import FoundEntry, Unpacking, body_of

status = pathlib.Path("/proc/self/status")

def made(count):
    data = encode_entry([b"x" * 8] * 500, publish_time_ms=1)
    where = Position(LedgerId(1), EntryId(1))
    entries = [FoundEntry(position=where, data=data, tier="tier2", raw=False)] * count
    body = body_of(sys.argv[1], entries, Unpacking(decompressors={}, events_len_max=2**20))
    return int(re.search("VmHWM: *([0-9]+)", status.read_text().replace(chr(9), " "))[1])

before = made(1)
print(1024 * (made(40) - before))
"""


@pytest.mark.parametrize("kind", [NDJSON, OCTETS])
def test_a_body_of_small_events_takes_no_more_than_its_room(kind):
    grown = subprocess.run(
        [sys.executable, "-c", RESIDENT, kind], check=True, capture_output=True, text=True
    )
    assert int(grown.stdout) < COPIES[kind] * 40 * 500 * OBJECT_BYTES


# Properties are many objects each; the entries beside are counted, and measured, apart.
PROPERTIES = """
import pathlib, re, sys
import pyarrow
from tierlog.format.entry import StructuredEvent, encode_entry
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position
from tierlog_reader.documents import EVENTS, FoundEntry, Unpacking, body_of
from tierlog_reader.http_entries import COPIES, _messages
from tierlog_reader.pages import Page

unpacking = Unpacking(decompressors={}, events_len_max=2**20)

def most():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s*([0-9]+)", status)[1])

def made(count):
    event = StructuredEvent(payload=b"p", properties={f"k{n:04}": f"v{n}" for n in range(100)})
    data = encode_entry([event] * count, publish_time_ms=1)
    where = Position(LedgerId(1), EntryId(1))
    entries = [FoundEntry(position=where, data=data, tier="tier2", raw=False)]
    page = Page(entries=entries, resume=where, raw=False, at_end=True)
    before, kind = most(), sys.argv[1]
    body = list(_messages(page, unpacking)) if kind == EVENTS else body_of(kind, entries, unpacking)
    return len(data) + most() - before, COPIES[kind] * (page.frames_len + page.objects_len)

made(1)
taken, room = made(4000)
print(taken / room)
"""


@pytest.mark.parametrize("kind", [NDJSON, OCTETS, ARROW, EVENTS])
def test_a_body_of_events_with_many_properties_takes_no_more_than_its_room(kind):
    grown = subprocess.run(
        [sys.executable, "-c", PROPERTIES, kind], check=True, capture_output=True, text=True
    )
    assert float(grown.stdout) < 1


@pytest.mark.parametrize("kind", [NDJSON, OCTETS])
@on_virtual_time
async def test_pages_of_small_events_are_cut_by_how_many_they_are(kind):
    world = ReaderWorld()
    await world.start()
    await world.opened([ONE] * 12)
    async with served(world) as (client, shares):
        token, counts = "earliest", []
        while True:
            asked = {"from": token, "bytes_max": 200_000}
            answer = await client.get(f"{URL}/entries", params=asked, headers={"Accept": kind})
            assert shares.used_bytes == 0
            token = answer.headers["Tierlog-Next"]
            if answer.status_code == 204:
                break
            counts.append(int(answer.headers["Tierlog-Entry-Count"]))
    # Each has about 6,000 bytes, and 64,000 for what it is made of.
    assert counts == [2] * 6


@on_virtual_time
async def test_one_entry_of_many_small_events_has_room_for_all_of_them():
    events = 5000
    entry = encode_entry([b""] * events, publish_time_ms=1)
    world = ReaderWorld()
    await world.start()
    await world.opened([entry] * 2)
    async with served(world) as (client, shares):
        answer = await client.get(f"{URL}/entries", params={"limit": 1})
        assert len([json.loads(line) for line in answer.text.splitlines()]) == events
    assert shares.most_used_bytes >= COPIES[NDJSON] * OBJECT_BYTES * events
