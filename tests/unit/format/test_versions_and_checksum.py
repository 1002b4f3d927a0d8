"""One gate for every format; CRC32C as the world computes it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.format.checksum import crc32c, crc32c_of, from_base64, to_base64
from tierlog.format.versions import GATE, Format, check_version, current
from tierlog.model.errors import CorruptError, RefusedError

# Old values are never reused: a change here must only ever add lines.
NUMBERS = {
    "RUN": 1,
    "APPEND_HEADER": 2,
    "STREAM_RECORD": 3,
    "LEDGER_PAGE": 4,
    "CONTEXT_RECORD": 5,
    "CLUSTER_RECORD": 6,
    "NODE_RECORD": 7,
    "COOKIE": 8,
    "WIRE": 9,
    "DATA_OBJECT": 10,
    "INDEX_OBJECT": 11,
    "SIDE_OBJECT": 12,
    "JOURNAL": 13,
    "LEDGER_FILE": 14,
    "LEDGER_METADATA": 15,
    "MANIFEST": 16,
    "FENCE_FILE": 17,
    "CLOUD_EVENT": 18,
    "PROGRESS_RECORD": 19,
    "ENTRY_LOG": 20,
    "LEDGER_INDEX": 21,
    "UNDERREPLICATED_RECORD": 22,
    "DRAINING_RECORD": 23,
    "AUDIT_RECORD": 24,
}


def test_numbers_of_formats_never_change() -> None:
    found = {one.name: one.value for one in Format}
    assert {name: found[name] for name in NUMBERS} == NUMBERS


@pytest.mark.parametrize("kind", list(Format))
def test_what_is_written_is_read_and_the_rest_is_refused(kind: Format) -> None:
    check_version(kind, current(kind))
    assert 0 not in GATE[kind].readable, "an absent field is no version"
    for unknown in (0, -1, max(GATE[kind].readable) + 1):
        with pytest.raises(RefusedError, match=f"version {unknown}, and this Tierlog reads") as one:
            check_version(kind, unknown)
        assert "Upgrade" in one.value.remedy
        with pytest.raises(CorruptError):
            check_version(kind, unknown, error=CorruptError)


def test_crc32c_is_castagnolis() -> None:
    # RFC 3720, appendix B.4.
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"") == 0


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_the_cut_does_not_matter(parts: list[bytes]) -> None:
    joined = crc32c(b"".join(parts))
    assert crc32c_of(parts) == joined
    assert crc32c_of([memoryview(bytearray(part)) for part in parts]) == joined


@given(st.integers(0, 2**32 - 1))
def test_base64_and_back(crc: int) -> None:
    assert from_base64(to_base64(crc)) == crc


def test_base64_as_s3_writes_it() -> None:
    assert to_base64(0xE3069283) == "4waSgw=="


@pytest.mark.parametrize("text", ["", "4waSgw", "4waSgwA=", "!!!!", "4waS\ngw==", "é"])
def test_what_is_no_checksum_is_refused(text: str) -> None:
    with pytest.raises(CorruptError, match=r"is not base64|is not a CRC32C"):
        from_base64(text)
