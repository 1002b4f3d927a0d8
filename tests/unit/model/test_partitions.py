"""ADR-0016, "Partitions": names are Pulsar's, and a key's partition is a hash of its bytes."""

import hashlib
from collections import Counter
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.partitions import (
    PARTITIONS_MAX,
    count_told,
    is_partitioned,
    partition_names,
    partition_of,
)
from tierlog.model.stream import ListedLedger, Stream

ORDERS = StreamName("orders")


def test_partitions_have_pulsars_names():
    assert partition_names(ORDERS, 3) == [f"orders-partition-{index}" for index in range(3)]


@pytest.mark.parametrize("count", [-1, 0, PARTITIONS_MAX + 1])
def test_a_count_out_of_bounds_is_refused(count):
    with pytest.raises(RefusedError, match="1 to 1024"):
        partition_names(ORDERS, count)


def test_a_name_that_leaves_no_room_is_refused():
    with pytest.raises(RefusedError, match="not allowed"):
        partition_names(StreamName("x" * 120), 2)


@pytest.mark.parametrize(
    ("key", "head"),
    [
        # The first eight bytes of SHA-256, as any other tool prints them.
        (b"", 0xE3B0C44298FC1C14),
        (b"abc", 0xBA7816BF8F01CFEA),
        (b"\x00", 0x6E340B9CFFB37A98),
    ],
)
def test_a_keys_partition_is_the_same_for_ever(key, head):
    assert hashlib.sha256(key).hexdigest()[:16] == f"{head:016x}"
    for count in (1, 2, 3, 7, 1000):
        assert partition_of(key, count) == head % count


@given(st.binary(max_size=40), st.integers(1, PARTITIONS_MAX))
def test_a_partition_is_one_of_them(key, count):
    assert 0 <= partition_of(key, count) < count


def test_keys_spread_evenly():
    found = Counter(partition_of(b"user-%06d" % number, 8) for number in range(8000))
    assert len(found) == 8
    assert max(found.values()) < 1.15 * min(found.values())


def test_the_error_says_how_many():
    error = is_partitioned(ORDERS, 4)
    assert count_told(error) == 4
    assert error.reason is Reason.PARTITIONED
    assert "orders-partition-3" in error.remedy


@pytest.mark.parametrize(
    "error",
    [
        RefusedError("x", details={"partitions": "4"}),
        RefusedError("x", reason=Reason.PARTITIONED),
        RefusedError("x", reason=Reason.PARTITIONED, details={"partitions": "0"}),
        RefusedError("x", reason=Reason.PARTITIONED, details={"partitions": "-4"}),
    ],
)
def test_another_error_says_nothing_of_partitions(error):
    assert count_told(error) is None


def test_a_stream_has_partitions_or_ledgers():
    ledger = ListedLedger(ledger_id=LedgerId(1), opened_ms=0, block_size=1, owner_epoch=1)
    plain = Stream(name=ORDERS, incarnation=UUID(int=1), created_ms=0, ledgers=(ledger,))
    with pytest.raises(AssertionError, match="in the partitions"):
        replace(plain, partitions=2)
    assert replace(plain, ledgers=(), partitions=2).partitions == 2
