"""What becomes of input: every byte is in an event, a separator, or refused with its place."""

import pytest

from tierlog.cli.inputs import EVENT_BYTES_MAX, EventParser, InputFormat, Keying
from tierlog.model.errors import Reason, RefusedError


def parsed(kind, data, *, piece=None):
    parser = EventParser(kind)
    step = piece or max(1, len(data))
    events: list[bytes] = []
    for start in range(0, len(data), step):
        events += parser.feed(data[start : start + step])
    return events + list(parser.finish())


@pytest.mark.parametrize("piece", [1, 2, 3, 7, None])
@pytest.mark.parametrize(
    ("data", "events"),
    [
        (b"", []),
        (b"one", [b"one"]),
        (b"one\n", [b"one"]),
        (b"one\ntwo", [b"one", b"two"]),
        (b"\n\n", [b"", b""]),
        (b"a\r\nb\n", [b"a\r", b"b"]),
    ],
)
def test_lines(data, events, piece):
    assert parsed(InputFormat.LINES, data, piece=piece) == events


@pytest.mark.parametrize("piece", [1, 5, None])
def test_ndjson_passes_over_empty_lines_and_keeps_the_bytes(piece):
    data = b'{"a": 1}\n\n  \n[2]\n"three"'
    assert parsed(InputFormat.NDJSON, data, piece=piece) == [b'{"a": 1}', b"[2]", b'"three"']


def test_ndjson_names_the_line_that_is_none():
    parser = EventParser(InputFormat.NDJSON)
    taken: list[bytes] = []
    with pytest.raises(RefusedError, match="line 3 is not JSON") as caught:
        taken.extend(parser.feed(b'{}\n\n{"a": \n{}\n'))
    assert "--format lines" in caught.value.remedy


@pytest.mark.parametrize("piece", [1, 3, 4, 5, None])
def test_binary(piece):
    data = b"".join(len(one).to_bytes(4, "big") + one for one in (b"a\nb", b"", b"xyz"))
    assert parsed(InputFormat.BINARY, data, piece=piece) == [b"a\nb", b"", b"xyz"]


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_binary_that_is_cut_is_refused_with_its_place(cut):
    data = b"\0\0\0\3abc" + (b"\0\0\0\3abc")[:cut]
    with pytest.raises(RefusedError, match="inside record 2, which begins at byte 7"):
        parsed(InputFormat.BINARY, data)


def test_an_event_above_the_limit_is_refused_before_it_is_kept():
    with pytest.raises(RefusedError) as caught:
        parsed(InputFormat.BINARY, (EVENT_BYTES_MAX + 1).to_bytes(4, "big"))
    assert caught.value.reason is Reason.TOO_LARGE


def keyed(data, **keying):
    return [(one.key, one.payload) for one in Keying(**keying).keyed(iter(data))]


def test_a_key_stands_before_the_separator():
    found = keyed([b"a\tone", b"\tno key", b"b\tx\ty"], separator=b"\t")
    assert found == [(b"a", b"one"), (b"", b"no key"), (b"b", b"x\ty")]


def test_an_event_without_the_separator_is_refused():
    with pytest.raises(RefusedError, match="alone"):
        keyed([b"alone"], separator=b"\t")


@pytest.mark.parametrize(
    ("event", "key"),
    [
        (b'{"id": "a\xc3\xa9"}', "aé".encode()),
        (b'{"id": 7}', b"7"),
        (b'{"id": true}', b"true"),
        (b'{"id": [1, 2]}', b"[1,2]"),
        (b'{"id": null}', None),
        (b'{"other": 1}', None),
        (b"[1]", None),
    ],
)
def test_a_key_is_a_field_of_the_document_and_the_event_stays_whole(event, key):
    assert keyed([event], field="id") == [(key, event)]


def test_an_event_that_is_no_document_has_no_field():
    with pytest.raises(RefusedError, match="not JSON"):
        keyed([b"{"], field="id")
