"""Signed runs: whoever lacks the key changes nothing unnoticed, right checksums or not.

The code is computed here with the standard library's one-shot function over the bytes that the
table names, and shares nothing with the code under test.
"""

import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.format.authentication import SECRET_LEN_MIN, LedgerKey
from tierlog.format.checksum import crc32c
from tierlog.format.frame import pack_entries
from tierlog.format.run import (
    FLAG_HMAC,
    RUN_HEADER_LEN,
    SIGNED_HEADER_LEN,
    Run,
    cut_runs,
    take_runs,
)
from tierlog.model.errors import CorruptError, RefusedError

pytestmark = pytest.mark.covers("D08")

SECRET = b"a secret of thirty-two bytes, or more"
KEY = LedgerKey("k1", SECRET)
entry_datas = st.binary(max_size=40)
batches = st.lists(entry_datas, min_size=1, max_size=12)


def signed_runs(entries, *, run_bytes_max=1 << 16, key=KEY, length_before=0):
    return cut_runs(
        *pack_entries(entries),
        ledger_id=7,
        first_entry_id=100,
        last_add_confirmed=99,
        owner_epoch=1,
        publish_ms_min=5,
        publish_ms_max=15,
        run_bytes_max=run_bytes_max,
        stripe_entries=10**6,
        length_before=length_before,
        key=key,
    )


def with_checksum(raw):
    """Whoever changes a run on purpose computes its checksum anew."""
    struct.pack_into(">I", raw, 76, crc32c(bytes(raw[:76] + raw[80:])))
    return raw


def refused(raw):
    """Whether a reader with the key refuses the run."""
    try:
        Run.decode(bytes(raw)).check_mac(KEY)
    except CorruptError:
        return True
    return False


@given(batches, st.integers(1, 200))
def test_the_code_covers_all_other_fields(entries, run_bytes_max):
    runs = signed_runs(entries, run_bytes_max=run_bytes_max)
    taken = take_runs(b"".join(run.encoded for run in runs))
    assert taken.runs == runs
    for run in taken.runs:
        raw = bytes(run.encoded)
        assert raw[5] == FLAG_HMAC
        assert int.from_bytes(raw[6:8], "big") == SIGNED_HEADER_LEN
        assert raw[80:112] == hmac.digest(SECRET, raw[:76] + raw[112:], "sha256")
        assert raw[76:80] == crc32c(raw[:76] + raw[80:]).to_bytes(4, "big")
        run.check_mac(KEY)
    assert [bytes(one) for run in taken.runs for one in run.entries()] == entries


def test_every_flipped_bit_is_found_though_the_checksum_was_made_anew():
    [run] = signed_runs([b"one", b"", b"three" * 3])
    raw = bytes(run.encoded)
    assert not refused(raw)
    for at in range(len(raw)):
        for bit in range(8):
            changed = bytearray(raw)
            changed[at] ^= 1 << bit
            assert refused(changed), f"bit {bit} of byte {at}"
            if not 76 <= at < 80:
                assert refused(with_checksum(changed)), f"bit {bit} of byte {at}"


@given(batches, st.data())
def test_any_change_that_is_a_run_by_itself_is_found_by_the_code_alone(entries, data):
    """The fields that structure says nothing about: only the code stands between."""
    [run] = signed_runs(entries, length_before=10**6)
    raw = bytearray(run.encoded)
    starts = (run.offsets + (SIGNED_HEADER_LEN + 4 * len(entries))).tolist()
    datas = [
        at
        for start, end in zip(starts, [*starts[1:], len(raw)], strict=True)
        for at in range(start + 12, end)
    ]
    low_bytes = [23, 39, 47, 63, 70]  # ledger, LAC, epoch, publish time, length: small changes
    at = data.draw(st.sampled_from([*low_bytes, *range(80, 112), *datas]))
    raw[at] ^= 1 << data.draw(st.integers(0, 2))
    changed = Run.decode(bytes(with_checksum(raw)))  # a good run to whoever has no key
    with pytest.raises(CorruptError, match="not signed with key k1"):
        changed.check_mac(KEY)


@given(batches)
def test_a_run_whose_code_was_taken_off_is_not_taken_for_an_unsigned_one(entries):
    [run] = signed_runs(entries)
    raw = bytearray(run.encoded[:RUN_HEADER_LEN]) + run.encoded[SIGNED_HEADER_LEN:]
    raw[5:8] = bytes([0, 0, RUN_HEADER_LEN])
    stripped = Run.decode(bytes(with_checksum(raw)))
    assert list(stripped.entries()) == entries
    with pytest.raises(CorruptError, match="is not signed"):
        stripped.check_mac(KEY)


@given(batches, st.data())
def test_a_code_of_another_run_or_key_is_refused(entries, data):
    [run] = signed_runs(entries)
    [other] = signed_runs([*entries[:-1], entries[-1] + b"x"])
    [foreign] = signed_runs(entries, key=LedgerKey("k1", bytes(SECRET_LEN_MIN)))
    raw = bytearray(run.encoded)
    for one in (other, foreign):
        raw[80:112] = one.encoded[80:112]
        assert refused(with_checksum(raw))
    cut = data.draw(st.integers(0, len(raw) - 1))
    assert refused(run.encoded[:cut])


@given(st.binary(max_size=SECRET_LEN_MIN - 1))
def test_short_secrets_are_refused_and_no_secret_is_told(secret):
    with pytest.raises(RefusedError) as caught:
        LedgerKey("k1", secret)
    assert f"{len(secret)} bytes" in str(caught.value)
    assert repr(LedgerKey("k1", SECRET)) == "<LedgerKey k1>"
