"""Rows become entries: in order, whole, with the number in the first one alone."""

from datetime import UTC, datetime
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.client.staging import number_update
from tierlog.format.entry import StructuredEvent, decode_entry
from tierlog.model.errors import RefusedError
from tierlog_spark.columns import TYPES, Table
from tierlog_spark.encoding import TAKEN, EntryPacker, check_columns, events_of

JOB = UUID(int=9 << 100)
UPDATE = number_update(JOB, 3)
NOW_MS = 1_790_000_000_000
ROWS = pa.schema(
    [
        ("key", pa.binary()),
        ("event_time", pa.timestamp("us", "Europe/Berlin")),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("payload", pa.string()),
    ]
)


def packed(*batches, entry_bytes=1000):
    packer = EntryPacker(UPDATE, entry_bytes)
    made = [one for batch in batches for one in packer.pack(batch, now_ms=NOW_MS)]
    return [*made, *packer.rest(now_ms=NOW_MS)]


def test_rows_of_all_columns_are_structured_events():
    time = datetime(2026, 11, 1, 12, 0, 0, 1999, tzinfo=UTC)
    batch = pa.RecordBatch.from_pylist(
        [
            {"key": b"k", "event_time": time, "properties": [("a", "b")], "payload": "ä"},
            {"key": None, "event_time": None, "properties": None, "payload": ""},
        ],
        schema=ROWS,
    )
    first, second = events_of(batch)
    assert first == StructuredEvent(
        payload="ä".encode(), key=b"k", event_time_ms=1793534400001, properties={"a": "b"}
    )
    assert second == StructuredEvent(payload=b"")


def test_a_payload_alone_is_a_plain_event():
    batch = pa.RecordBatch.from_pydict({"payload": pa.array([b"a", b"b"])})
    ((data, _),) = packed(events_of(batch))
    entry = decode_entry(data)
    assert not entry.header.structured
    assert [bytes(one) for one in entry.events()] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"payload": None}, "no payload"),
        ({"payload": "x", "properties": [("a", None)]}, "property 'a' of a row has no value"),
    ],
)
def test_a_row_that_is_no_event_is_refused(row, words):
    batch = pa.RecordBatch.from_pylist([row], schema=ROWS)
    with pytest.raises(RefusedError, match=words) as caught:
        list(events_of(batch))
    assert caught.value.remedy


@given(
    st.lists(st.lists(st.binary(max_size=40), max_size=30), max_size=5),
    st.integers(min_value=1, max_value=200),
)
def test_every_row_is_there_once_and_in_order_whatever_the_sizes(batches, entry_bytes):
    made = packed(*batches, entry_bytes=entry_bytes)
    entries = [decode_entry(data) for data, _ in made]
    found = [[bytes(one) for one in entry.events()] for entry in entries]
    assert [one for entry in found for one in entry] == [one for some in batches for one in some]
    assert all(found)
    assert [entry.header.attribute_updates for entry in entries] == [
        () if at else (UPDATE,) for at in range(len(entries))
    ]
    for entry, (_, publish_ms) in zip(entries, made, strict=True):
        assert entry.header.publish_time_ms == publish_ms == NOW_MS
        assert entry.header.writer_id is None
        size = sum(4 + len(bytes(one)) for one in entry.events())
        assert size <= entry_bytes or entry.header.event_count == 1


def test_the_columns_that_are_taken_are_those_of_a_read_that_are_the_applications():
    check_columns([(name, TYPES[Table.EVENTS][name]) for name in TAKEN])
    check_columns([("payload", "string"), ("key", "string")])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([("payload", "binary"), ("ledger_id", "bigint")], "ledger_id is given by the stream"),
        ([("payload", "binary"), ("colour", "string")], "no place for column colour"),
        ([("payload", "int")], "column payload is int"),
        ([("payload", "binary"), ("event_time", "timestamp_ntz")], "event_time is timestamp_ntz"),
        ([("key", "binary")], "no column payload"),
        ([], "no column payload"),
    ],
)
def test_other_columns_are_refused_by_name(columns, words):
    with pytest.raises(RefusedError, match=words) as caught:
        check_columns(columns)
    assert "payload binary or string" in str(caught.value)
