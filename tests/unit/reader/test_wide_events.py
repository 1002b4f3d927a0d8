"""An event with very many properties has room for them before they are made, or is refused."""

import json
import subprocess
import sys
import time

import pytest

from tests.unit.reader.test_pages import UNPACKING, URL, served
from tests.unit.reader.world import ReaderWorld, on_virtual_time
from tierlog.format.entry import StructuredEvent, encode_entry, properties_count
from tierlog.wiring.compression import packing_of
from tierlog_reader.documents import ARROW, EVENTS, NDJSON, OCTETS, PROPERTY_BYTES
from tierlog_reader.http_entries import COPIES

# In a process of its own: what is freed again shows in nothing but the most that was resident.
RESIDENT = """
import pathlib, re, sys
import pyarrow
from tierlog.format.entry import StructuredEvent, encode_entry
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position
from tierlog_reader.documents import EVENTS, FoundEntry, Unpacking, body_of
from tierlog_reader.http_entries import COPIES, _messages
from tierlog_reader.pages import Page

unpacking = Unpacking(decompressors={}, events_len_max=2**23)

def most():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\\s*([0-9]+)", status)[1])

def page_of(data):
    where = Position(LedgerId(1), EntryId(1))
    entries = [FoundEntry(position=where, data=data, tier="tier2", raw=False)]
    return Page(entries=entries, resume=where, raw=False, at_end=True)

def made(page):
    before, kind = most(), sys.argv[1]
    events = kind == EVENTS
    body = list(_messages(page, unpacking)) if events else body_of(kind, page.entries, unpacking)
    return most() - before

made(page_of(encode_entry([StructuredEvent(payload=b"p")], publish_time_ms=1)))
page = page_of(bytes.fromhex(sys.stdin.read()))
taken = made(page)
counted = max(page.frames_len + page.objects_len, 2 * page.properties_len(unpacking))
room = COPIES[sys.argv[1]] * counted
print(taken / room)
"""


def wide(count: int, **how) -> bytes:
    event = StructuredEvent(payload=b"p", properties={f"k{n:05}": "" for n in range(count)})
    return encode_entry([event], publish_time_ms=1, **how)


@pytest.mark.parametrize("kind", [NDJSON, OCTETS, ARROW, EVENTS])
def test_an_event_of_many_properties_takes_no_more_than_its_room(kind):
    grown = subprocess.run(
        [sys.executable, "-c", RESIDENT, kind],
        input=wide(90_000).hex(),
        check=True,
        capture_output=True,
        text=True,
    )
    assert 0.1 < float(grown.stdout) < 1


def test_properties_are_counted_without_being_made():
    event = StructuredEvent(
        payload=b"\x1a" * 300, key=b"\x1a", event_time_ms=-1, properties={"a": "b" * 200, "c": ""}
    ).encode()
    assert properties_count(event, count_max=10) == 2
    assert properties_count(event, count_max=1) == 2
    assert properties_count(event, count_max=0) == 1
    others = b"\x09" + bytes(8) + b"\x0d" + bytes(4) + b"\x9b\x01\x1a\x00\x9c\x01"
    assert properties_count(others + event, count_max=10) == 3, "in a group, counted too"
    assert properties_count(b"\x9a\x80\x00\x00", count_max=10) == 1, "a tag that is too long"
    assert properties_count(event[:-1] + b"\xff", count_max=10) == 2
    assert properties_count(b"", count_max=10) == 0


@pytest.mark.parametrize(
    ("event", "count"),
    [
        (b"\xff" * 200_000, 0),  # a number without an end
        (b"\x08\x01" * 4_000_000, 11),  # as many fields as have room
        (b"\x1a\x00" * 4_000_000, 11),
    ],
)
def test_no_event_takes_long_to_be_counted(event, count):
    begun_s = time.process_time()
    assert properties_count(event, count_max=10) == count
    assert time.process_time() - begun_s < 0.5


@pytest.mark.parametrize("codec", ["none", "zstd"])
@on_virtual_time
async def test_room_for_properties_is_there_before_they_are_made(codec):
    packing = packing_of(codec)
    how = {} if packing is None else {"codec": packing.codec, "compress": packing.compress}
    count = UNPACKING.properties_max
    world = ReaderWorld()
    await world.start()
    ledger = await world.opened([wide(3), wide(count, **how), wide(3), wide(count + 1, **how)])
    async with served(world) as (client, shares):
        answer = await client.get(f"{URL}/entries", params={"from": f"{ledger}:0"})
        lines = [json.loads(line) for line in answer.content.splitlines()]
        assert [len(one["properties"]) for one in lines] == [3, count, 3]
        assert shares.most_used_bytes >= 2 * COPIES[NDJSON] * 2 * PROPERTY_BYTES * count
        # What can't be is told, and where to go on behind it.
        after = await client.get(f"{URL}/entries", params={"from": answer.headers["Tierlog-Next"]})
        assert (after.json()["reason"], answer.headers["Tierlog-Next"]) == (
            "TOO_LARGE",
            f"{ledger}:3",
        )
        assert f"more than {count} properties" in after.json()["detail"]
        assert shares.used_bytes == 0
