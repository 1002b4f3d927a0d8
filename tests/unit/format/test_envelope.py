"""Events on the queue carry CloudEvents attributes and a trace in their headers."""

from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.format.envelope import Envelope, Traceparent, build_headers, parse_headers
from tierlog.model.errors import CorruptError, RefusedError

EVENT = UUID("11111111-2222-3333-4444-555555555555")
TRACE = Traceparent(trace_id=bytes(range(1, 17)), span_id=bytes(range(1, 9)))
ENVELOPE = Envelope(
    event_id=EVENT,
    source="/tierlog/scheduler/node-1",
    event_type="tierlog.offload.requested.v1",
    subject="orders/12",
    time_ms=1_700_000_000_123,
    dataschema="tierlog.v1.OffloadRequest",
    traceparent=TRACE,
)
HEADERS = {
    "ce_specversion": b"1.0",
    "ce_id": b"11111111-2222-3333-4444-555555555555",
    "ce_source": b"/tierlog/scheduler/node-1",
    "ce_type": b"tierlog.offload.requested.v1",
    "ce_subject": b"orders/12",
    "ce_time": b"2023-11-14T22:13:20.123Z",
    "ce_dataschema": b"tierlog.v1.OffloadRequest",
    "content-type": b"application/protobuf",
    "traceparent": b"00-0102030405060708090a0b0c0d0e0f10-0102030405060708-01",
}

texts = st.text(max_size=20)
traces = st.builds(
    Traceparent,
    trace_id=st.binary(min_size=16, max_size=16).filter(any),
    span_id=st.binary(min_size=8, max_size=8).filter(any),
    sampled=st.booleans(),
)


def test_golden_headers() -> None:
    assert build_headers(ENVELOPE) == HEADERS
    assert parse_headers(HEADERS) == ENVELOPE
    assert datetime.fromisoformat(HEADERS["ce_time"].decode()) == datetime.fromtimestamp(
        1_700_000_000.123, UTC
    )


@given(
    st.builds(
        Envelope,
        event_id=st.uuids(),
        source=texts,
        event_type=texts,
        subject=texts,
        time_ms=st.integers(0, 4 * 10**12),
        dataschema=texts,
        traceparent=st.none() | traces,
    )
)
def test_headers_and_back(envelope: Envelope) -> None:
    assert parse_headers(build_headers(envelope)) == envelope


@pytest.mark.parametrize("name", sorted(set(HEADERS) - {"traceparent"}))
def test_a_missing_header_is_named(name: str) -> None:
    headers = {key: value for key, value in HEADERS.items() if key != name}
    with pytest.raises(CorruptError, match=f"{name} is missing"):
        parse_headers(headers)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ce_id", b"twelve"),
        ("ce_id", b"\xff"),
        ("ce_time", b"yesterday"),
        ("ce_time", b"2023-11-14T22:13:20"),
        ("ce_time", b"2023-13-14T22:13:20Z"),
        ("ce_subject", b"x" * 4097),
    ],
)
def test_a_bad_header_is_corrupt(name: str, value: bytes) -> None:
    with pytest.raises(CorruptError, match=name):
        parse_headers({**HEADERS, name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("ce_specversion", b"0.3"), ("content-type", b"application/json")]
)
def test_another_version_is_refused(name: str, value: bytes) -> None:
    with pytest.raises(RefusedError):
        parse_headers({**HEADERS, name: value})


@pytest.mark.parametrize(
    "text",
    [
        b"2023-11-14T22:13:20.123456Z",
        b"2023-11-15T00:13:20.123+02:00",
        b"2023-11-14T22:13:20.1234567Z",
        b"2023-11-14T22:13:20.123999999Z",
        b"2023-11-14t22:13:20.123z",
    ],
)
def test_times_of_other_producers_are_read(text: bytes) -> None:
    """RFC 3339 has any number of digits, and small letters; Java and Go write nine, .NET seven."""
    assert parse_headers({**HEADERS, "ce_time": text}).time_ms == ENVELOPE.time_ms


def test_a_trace_goes_on_in_its_children() -> None:
    root = Traceparent.create(bytes(range(1, 25)))
    child = root.child(b"\x09" * 8)
    assert child.trace_id == root.trace_id
    assert child.span_id == b"\x09" * 8
    assert Traceparent.parse(str(child)) == child


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-" + "0" * 32 + "-0102030405060708-01",
        "00-0102030405060708090a0b0c0d0e0f10-" + "0" * 16 + "-01",
        "01-0102030405060708090a0b0c0d0e0f10-0102030405060708-01",
        "00-0102030405060708090A0B0C0D0E0F10-0102030405060708-01",
    ],
)
def test_a_trace_that_cannot_be_followed_is_none(text: str) -> None:
    assert Traceparent.parse(text) is None
    assert parse_headers({**HEADERS, "traceparent": text.encode()}).traceparent is None
