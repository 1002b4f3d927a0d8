"""A signed run, byte for byte, by hand from the table of ``tierlog.format.run``.

The code was computed by ``openssl dgst -sha256 -mac HMAC`` and the checksum bit by bit from its
polynomial, not by this repository's code. Never regenerate these bytes from the code.
"""

import hashlib
from typing import Any, Final

import pytest

from tierlog.format.authentication import LedgerKey
from tierlog.format.frame import pack_entries
from tierlog.format.run import Run, build_run, cut_runs, take_runs
from tierlog.model.errors import CorruptError

pytestmark = pytest.mark.covers("D08")

SECRET = bytes(range(32))
KEY = LedgerKey("k1", SECRET)
HEADER = bytes.fromhex(
    "544c524e 01 01 0070"  # 0  magic "TLRN", version, flags: signed, header_len 112
    "00000002 0000001d"  #   8  count 2, frames_len 29
    "0000000000000009"  #   16  ledger_id 9
    "0000000000000004"  #   24  first_entry_id 4
    "0000000000000003"  #   32  last_add_confirmed 3
    "0000000000000002"  #   40  owner_epoch 2
    "0000018bcfe56800"  #   48  publish_ms_min
    "0000018bcfe56801"  #   56  publish_ms_max
    "0000000000000064"  #   64  ledger_len 100
    "00000000 ea96fa9d"  #  72  zeros, crc32c
)
CODE = bytes.fromhex(
    "d9db11dcfa84b8fc506ce987701087e2"  # 80  hmac
    "52d5eb3c02c3c4ca43fed7e392e20bec"
)
BODY = bytes.fromhex(
    "00000000 00000010"  #                112  offsets of the frames
    "00000004 0000000000000004 31323334"  # entry 4, "1234"
    "00000001 0000000000000005 58"  #       entry 5, "X"
)
RUN = HEADER + CODE + BODY
FIELDS: Final[dict[str, Any]] = {
    "ledger_id": 9,
    "first_entry_id": 4,
    "last_add_confirmed": 3,
    "owner_epoch": 2,
    "publish_ms_min": 0x18BCFE56800,
    "publish_ms_max": 0x18BCFE56801,
}


@pytest.mark.covers("D04", "D05", "D06", "D07")
def test_a_signed_run_is_written_so():
    [run] = cut_runs(
        *pack_entries([b"1234", b"X"]), **FIELDS, stripe_entries=100, length_before=95, key=KEY
    )
    assert bytes(run.encoded) == RUN
    built = build_run(*pack_entries([b"1234", b"X"], 4), **FIELDS, ledger_len=100, key=KEY)
    assert bytes(built.encoded) == RUN


@pytest.mark.covers("D04", "D05", "D06", "D07")
def test_a_signed_run_is_read_so():
    runs = [Run.decode(RUN), *take_runs(RUN + RUN).runs]
    assert len(runs) == 3
    for run in runs:
        assert run.is_signed
        assert (run.header.ledger_id, run.first_entry_id, run.last_entry_id) == (9, 4, 5)
        assert [bytes(entry) for entry in run.entries()] == [b"1234", b"X"]
        run.check_mac(KEY)


def test_the_code_is_the_hmac_of_rfc_2104():
    """Two hashes by hand: the code covers header, offsets and frames, not the checksum."""
    padded = SECRET.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(one ^ 0x36 for one in padded) + HEADER[:76] + BODY).digest()
    assert hashlib.sha256(bytes(one ^ 0x5C for one in padded) + inner).digest() == CODE


def test_another_key_is_told():
    with pytest.raises(CorruptError, match="not signed with key k2"):
        Run.decode(RUN).check_mac(LedgerKey("k2", bytes(32)))
