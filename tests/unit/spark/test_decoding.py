"""Entries taken apart in bulk are what they are one by one, whatever they look like."""

import random
import subprocess
import sys
import tracemalloc
import zlib
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

from tierlog.format.entry import (
    AttributeUpdate,
    Codec,
    StructuredEvent,
    Verb,
    decode_entry,
    encode_entry,
)
from tierlog.format.frame import pack_entries
from tierlog.model.errors import CorruptError
from tierlog_spark import decoding
from tierlog_spark.batches import ROWS_MAX, record_batches
from tierlog_spark.columns import TYPES, Table
from tierlog_spark.decoding import events_in, raw_events
from tierlog_spark.headers import plain_headers

SCHEMA = pa.schema(
    [
        pa.field("stream", pa.string()),
        pa.field("ledger_id", pa.int64()),
        pa.field("entry_id", pa.int64()),
        pa.field("event_index", pa.int32()),
        pa.field("publish_time", pa.timestamp("us", tz="UTC")),
        pa.field("writer_id", pa.string()),
        pa.field("event_number", pa.int64()),
        pa.field("event_time", pa.timestamp("us", tz="UTC")),
        pa.field("key", pa.binary()),
        pa.field("properties", pa.map_(pa.string(), pa.string())),
        pa.field("payload", pa.binary()),
    ]
)
WRITERS = [UUID(int=number) for number in (1, 2**127)]


def unzip(data, length_max):
    found = zlib.decompress(data)
    assert len(found) <= length_max
    return found


UNZIP = {Codec.ZSTD: unzip}


def rows_of(entries, *, raw=False, verify=True, first=0, schema=SCHEMA):
    frames, offsets = pack_entries(entries, first)
    view = memoryview(frames)
    found = (
        [raw_events(view, offsets, first)]
        if raw
        else events_in(view, offsets, first, verify=verify, decompressors=UNZIP)
    )
    return [
        row
        for events in found
        for batch in record_batches(events, schema, stream="s", ledger_id=7)
        for row in batch.to_pylist()
    ]


def expected(entries, first=0):
    """The same, by the code that clients read with."""
    rows = []
    for entry_id, data in enumerate(entries, first):
        entry = decode_entry(data)
        header = entry.header
        for index, event in enumerate(entry.structured_events(UNZIP)):
            known = header.writer_id is not None
            rows.append(
                {
                    "stream": "s",
                    "ledger_id": 7,
                    "entry_id": entry_id,
                    "event_index": index,
                    "publish_time": header.publish_time_ms,
                    "writer_id": str(header.writer_id) if known else None,
                    "event_number": header.event_number - header.event_count + 1 + index
                    if known
                    else None,
                    "event_time": event.event_time_ms,
                    "key": event.key,
                    "properties": dict(event.properties) or None,
                    "payload": event.payload,
                }
            )
    return rows


def plain(row):
    """A row with times as ms, and no properties where there are none."""
    times = {
        name: None if row[name] is None else round(row[name].timestamp() * 1000)
        for name in ("publish_time", "event_time")
    }
    return {**row, **times, "properties": dict(row["properties"] or ()) or None}


def some_entry(rng: random.Random, number: int, *, zipped: bool = False) -> bytes:
    count = rng.choice([0, 1, 1, 1, 2, 3, 40, 300])
    size = rng.choice([0, 1, 13, 200])
    even = rng.random() < 0.5
    payloads = [rng.randbytes(size if even else rng.randrange(size + 1)) for _ in range(count)]
    structured = rng.random() < 0.2
    events = [
        StructuredEvent(
            payload=one,
            key=rng.choice([None, b"", b"k"]),
            event_time_ms=rng.choice([None, 0, 5, 1_700_000_000_000]),
            properties=rng.choice([{}, {"a": "b"}]),
        )
        if structured
        else one
        for one in payloads
    ]
    updates = [AttributeUpdate(key=UUID(int=3), verb=Verb.REPLACE, value=1)]
    return encode_entry(
        events,
        publish_time_ms=rng.choice([0, 127, 128, 1_700_000_000_000 + number]),
        writer_id=rng.choice([None, *WRITERS]),
        event_number=rng.choice([0, 5, 127, 128, 2**40, 2**62]) + number,
        attribute_updates=updates if rng.random() < 0.1 else (),
        codec=Codec.ZSTD if zipped else Codec.NONE,
        compress=zlib.compress if zipped else None,
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("verify", [True, False])
def test_in_bulk_is_as_one_by_one(seed, verify, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(decoding, "TOGETHER_MIN", rng.choice([1, 5, 64]))
    entries = [some_entry(rng, number) for number in range(rng.choice([1, 5, 60]))]
    first = rng.choice([0, 9, 2**33])
    found = [plain(row) for row in rows_of(entries, verify=verify, first=first)]
    assert found == expected(entries, first)


@pytest.mark.parametrize("seed", range(30))
def test_compressed_in_bulk_is_as_one_by_one(seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(decoding, "TOGETHER_MIN", rng.choice([1, 5, 64]))
    monkeypatch.setattr(decoding, "UNPACKED_BYTES_MAX", rng.choice([1, 700, 9000, 2**25]))
    share = rng.choice([0.5, 1])
    entries = [
        some_entry(rng, number, zipped=rng.random() < share)
        for number in range(rng.choice([1, 5, 60]))
    ]
    first = rng.choice([0, 9, 2**33])
    found = [plain(row) for row in rows_of(entries, verify=True, first=first)]
    assert found == expected(entries, first)


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("entry_count", [1, 64])
@pytest.mark.parametrize("even", [False, True])
def test_small_events_take_no_more_memory_than_large_ones(
    structured, entry_count, even, monkeypatch
):
    limit = 128 * 1024
    monkeypatch.setattr(decoding, "UNPACKED_BYTES_MAX", limit)
    payloads = [b"x" * (20 if even else 19 + number % 3) for number in range(8 * limit // 24)]
    size = len(payloads) // entry_count
    entries = [
        encode_entry(
            [StructuredEvent(payload=one) if structured else one for one in payloads[at:][:size]],
            publish_time_ms=1,
            codec=Codec.ZSTD,
            compress=zlib.compress,
        )
        for at in range(0, len(payloads) - size + 1, size)
    ]
    frames, offsets = pack_entries(entries, 0)
    count, view = size * len(entries), memoryview(frames)
    del payloads, entries
    tracemalloc.start()
    try:
        for one in events_in(view, offsets, 0, verify=True, decompressors=UNZIP):
            count -= len(one.starts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 0
    # One large entry is decompressed as a whole, by this library in a buffer that grows; what is
    # made of its events comes in steps.
    assert peak < (24 if entry_count == 1 else 5) * limit


@pytest.mark.parametrize("neighbours", [0, 3])
@pytest.mark.parametrize("wrong", [0, 8, 10, 2**32 - 1])
def test_compressed_events_that_do_not_fill_their_entry_are_told(wrong, neighbours):
    def lengthen(raw):
        return zlib.compress(raw[:-13] + wrong.to_bytes(4, "big") + raw[-9:])

    good, bad = (
        encode_entry([b"a" * 9] * 5, publish_time_ms=1, codec=Codec.ZSTD, compress=compress)
        for compress in (zlib.compress, lengthen)
    )
    with pytest.raises(CorruptError, match="fill") as caught:
        rows_of([good] * neighbours + [bad])
    assert caught.value.details["entry_id"] == str(neighbours)


def test_most_entries_are_read_without_a_look_at_each(monkeypatch):
    entries = [
        encode_entry(
            [b"x" * 200] * 3,
            publish_time_ms=1_700_000_000_000 + number,
            writer_id=WRITERS[0],
            event_number=3 * number,
        )
        for number in range(2000)
    ]
    monkeypatch.setattr(decoding, "decode_entry", lambda _: pytest.fail("one by one"))
    monkeypatch.setattr(decoding, "_walk", lambda *_: pytest.fail("event by event"))
    assert len(rows_of(entries, verify=False)) == 6000


def test_headers_of_many_layouts_end_in_time():
    rng = random.Random(1)
    entries = [
        encode_entry(
            [b"x"] * rng.randrange(1, 200),
            publish_time_ms=1 << rng.randrange(44),
            event_number=1 << rng.randrange(60),
        )
        for _ in range(500)
    ]
    frames, offsets = pack_entries(entries)
    starts = offsets.astype(np.int64) + 12
    lens = np.fromiter(map(len, entries), np.int64)
    assert 0 < int(plain_headers(memoryview(frames), starts, lens).plain.sum()) < 500
    assert [plain(row) for row in rows_of(entries)] == expected(entries)


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_is_found_where_nothing_else_vouches(seed):
    rng = random.Random(seed)
    entries = [some_entry(rng, number) for number in range(4)]
    which = rng.randrange(4)
    damaged = bytearray(entries[which])
    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    entries[which] = bytes(damaged)
    with pytest.raises(CorruptError) as caught:
        rows_of(entries)
    assert caught.value.details["entry_id"] == str(which)


@pytest.mark.parametrize("data", [b"", b"no header", b"TE\x01\x00" + b"\xff" * 20, b"x" * 100])
def test_entries_without_an_append_header_are_refused(data):
    good = encode_entry([b"good"], publish_time_ms=1)
    with pytest.raises(CorruptError) as caught:
        rows_of([good, data])
    assert caught.value.details["entry_id"] == "1"


@pytest.mark.parametrize("together_min", [1, 5, 64])
@pytest.mark.parametrize("seed", range(10))
def test_events_that_do_not_fill_their_entry_are_told_even_where_grains_vouch(
    seed, together_min, monkeypatch
):
    monkeypatch.setattr(decoding, "TOGETHER_MIN", together_min)
    rng = random.Random(seed)
    entries = []
    for _ in range(10):
        payloads = [rng.randbytes(rng.randrange(1, 50)) for _ in range(rng.randrange(2, 9))]
        entries.append(encode_entry(payloads, publish_time_ms=1))
    which = rng.randrange(10)
    entry = decode_entry(entries[which])
    at = len(entries[which]) - len(entry.packed)
    for _ in range(rng.randrange(entry.header.event_count)):
        at += 4 + int.from_bytes(entries[which][at : at + 4], "big")
    length = int.from_bytes(entries[which][at : at + 4], "big")
    wrong = rng.choice([0, length - 1, length + 1, 60, 10**6, 2**32 - 1])
    if wrong == length:
        wrong += 1
    damaged = bytearray(entries[which])
    damaged[at : at + 4] = wrong.to_bytes(4, "big")
    entries[which] = bytes(damaged)
    with pytest.raises(CorruptError, match="fill") as caught:
        rows_of(entries, verify=False)
    assert caught.value.details["entry_id"] == str(which)


def test_absurd_times_become_the_last_that_spark_has():
    entries = [encode_entry([b""], publish_time_ms=2**62)]
    (row,) = rows_of(entries)
    assert row["publish_time"].year == 9999


def test_raw_entries_are_rows_as_they_are():
    entries = [b"", b"one", b"x" * 5000]
    rows = rows_of(entries, raw=True, first=4)
    assert [row["payload"] for row in rows] == entries
    assert [row["entry_id"] for row in rows] == [4, 5, 6]
    assert {row["publish_time"] for row in rows} == {None}
    assert {row["event_number"] for row in rows} == {None}


def test_only_wanted_columns_are_made_and_batches_are_bounded():
    entries = [encode_entry([b""] * (ROWS_MAX + 7), publish_time_ms=1)]
    frames, offsets = pack_entries(entries)
    schema = pa.schema([pa.field("event_index", pa.int32())])
    (events,) = events_in(memoryview(frames), offsets, 0, verify=True)
    batches = list(record_batches(events, schema, stream="s", ledger_id=7))
    assert [batch.num_rows for batch in batches] == [ROWS_MAX, 7]
    assert batches[1].to_pylist()[-1] == {"event_index": ROWS_MAX + 6}


def test_each_column_of_the_table_is_made():
    assert SCHEMA.names == list(TYPES[Table.EVENTS])


WITHOUT_PANDAS = """
import sys
from tests.unit.spark.test_decoding import SCHEMA, WRITERS
from tierlog.format.entry import encode_entry
from tierlog.format.frame import pack_entries
from tierlog_spark.batches import record_batches
from tierlog_spark.decoding import events_in

entries = [
    encode_entry([b"a", b"bc"], publish_time_ms=5, writer_id=writer, event_number=9)
    for writer in (*WRITERS, None)
]
frames, offsets = pack_entries(entries)
(events,) = events_in(memoryview(frames), offsets, 0, verify=True)
(batch,) = record_batches(events, SCHEMA, stream="s", ledger_id=7)
print(batch.num_rows, "pandas" in sys.modules)
"""


def test_plain_events_become_batches_without_pandas():
    """A fresh worker of Spark would take over a second to import what nothing of it is used."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PANDAS], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("6 False\n", "")
