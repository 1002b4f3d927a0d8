"""How large ledgers may become so that each fits one object of tier 2, however it is cut."""

from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierlog.format.block import BLOCK_HEADER_LEN, entry_len_max
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import INT64_MAX, StreamName
from tierlog.model.policy import (
    BLOCK_SIZE_MAX,
    BLOCK_SIZE_MIN,
    CLUSTER_DEFAULT,
    MIB,
    NO_LEVELS,
    OBJECT_BLOCKS_MAX,
    Policy,
    PolicyLevels,
    ledger_bytes_highest,
)
from tierlog_ingest.streams.rollover import LedgerLimits

STREAM = StreamName("shop.paid")
BLOCK = 1000
LARGEST = entry_len_max(BLOCK)


def blocks_of(bytes_max: int, entries_max: int, pattern: list[int], block_size: int = BLOCK) -> int:
    """Return how many blocks a ledger has that is full, of entries as long as the pattern says."""
    blocks, room, length = 0, 0, 0
    for count, size in enumerate(cycle(pattern)):
        if length >= bytes_max or count == entries_max:
            return blocks
        # The last one in may fill a block.
        last = entry_len_max(block_size) if length + size >= bytes_max else size
        length += last
        if room < last + FRAME_HEADER_LEN:
            blocks, room = blocks + 1, block_size - BLOCK_HEADER_LEN
        room -= last + FRAME_HEADER_LEN
    raise AssertionError("a pattern has no end")


@settings(max_examples=30, deadline=None)
@given(
    entries_max=st.sampled_from([5_000, 50_000, 200_000, INT64_MAX]),
    pattern=st.lists(st.integers(1, LARGEST), min_size=1, max_size=4),
)
def test_no_ledger_within_its_bounds_has_more_blocks_than_an_object(entries_max, pattern):
    highest = ledger_bytes_highest(BLOCK, entries_max)
    assert blocks_of(highest, entries_max, pattern) <= OBJECT_BLOCKS_MAX


def test_the_worst_ledger_within_its_bounds_just_fits():
    # Each entry is a byte too long to share a block with another one.
    block_size, entries_max = 1_000_000, 10_000
    size = (block_size - BLOCK_HEADER_LEN) // 2 - FRAME_HEADER_LEN + 1
    highest = ledger_bytes_highest(block_size, entries_max)
    found = blocks_of(highest, entries_max, [size], block_size)
    assert OBJECT_BLOCKS_MAX - 2 <= found <= OBJECT_BLOCKS_MAX


def test_entries_of_a_byte_leave_half_the_blocks_for_padding_that_they_do_not_need():
    found = blocks_of(ledger_bytes_highest(BLOCK, INT64_MAX), INT64_MAX, [1])
    assert found == pytest.approx(OBJECT_BLOCKS_MAX / 2, rel=0.02)


@pytest.mark.parametrize("block_size", [BLOCK_SIZE_MIN, 64 * MIB, BLOCK_SIZE_MAX])
def test_the_default_size_of_ledgers_holds_whatever_else_is_said(block_size):
    NO_LEVELS.check(STREAM, Policy(block_size=block_size, ledger_entries_max=INT64_MAX))
    NO_LEVELS.check(STREAM, Policy(ledger_bytes_max=4 * 10**9, ledger_entries_max=2**62))


def refused(own: Policy, levels: PolicyLevels = NO_LEVELS) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        levels.check(STREAM, own)
    assert caught.value.reason is Reason.POLICY_INVALID
    assert caught.value.details["bound"] == "ledger_bytes_max"
    return caught.value


def test_a_ledger_that_may_need_too_many_parts_is_refused_at_its_very_bound():
    own = Policy(ledger_bytes_max=2**40, block_size=BLOCK_SIZE_MIN)
    error = refused(own)
    assert "parts" in error.message
    assert "block_size" in error.remedy
    entries_max = CLUSTER_DEFAULT.ledger_entries_max
    assert entries_max is not None
    highest = ledger_bytes_highest(BLOCK_SIZE_MIN, entries_max)
    assert str(highest) in error.message
    NO_LEVELS.check(STREAM, Policy(ledger_bytes_max=highest, block_size=BLOCK_SIZE_MIN))
    refused(Policy(ledger_bytes_max=highest + 1, block_size=BLOCK_SIZE_MIN))
    assert refused(Policy(ledger_bytes_max=INT64_MAX)).remedy == error.remedy


def test_levels_are_taken_together():
    large = Policy(ledger_bytes_max=2**40)
    levels = NO_LEVELS.with_level(None, Policy(block_size=512 * MIB, ledger_bytes_max=2**40))
    refused(Policy(block_size=BLOCK_SIZE_MIN), levels)
    for namespace in ("shop", None):
        with pytest.raises(RefusedError):
            NO_LEVELS.with_level(namespace, large)
    with pytest.raises(RefusedError) as caught:
        NO_LEVELS.with_level(
            "shop", Policy(block_size=5 * MIB, ledger_bytes_max=10**10)
        ).with_level(None, Policy(ledger_entries_max=10**10))
    assert caught.value.details["below"] == "namespace shop"


def test_what_was_stored_before_is_read_and_its_ledgers_are_full_in_time():
    stored = PolicyLevels(cluster=Policy(ledger_bytes_max=2**40))
    found = stored.effective(STREAM, Policy())
    assert found.ledger_bytes_max == 2**40
    # It says nothing of that itself, and is not to blame.
    stored.check(STREAM, Policy(deletion_lag_ms=5))
    entries_max = found.ledger_entries_max
    assert entries_max is not None
    # The open ledger has the blocks that it was opened with, whatever the policy says now.
    for block_size in (BLOCK_SIZE_MIN, 64 * MIB):
        limits = LedgerLimits.of(found, block_size)
        assert limits.bytes_max == ledger_bytes_highest(block_size, entries_max)
    assert LedgerLimits.of(CLUSTER_DEFAULT, BLOCK_SIZE_MIN).bytes_max == 1024 * MIB
