"""The journal's bytes (protocols.md section 2): torn tails are cut, corruption is reported.

"A bad record below a position known to be synced is corruption: the node answers UNKNOWN, not
NO_SUCH_ENTRY. A bad record above it is a torn tail and is cut."
"""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.node_kit import CrashingNode, make_run, opened, outcome, read_all
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.model.errors import CorruptError, Reason, RetryableError
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId
from tierlog_ingest.storage.journal_format import (
    ALIGNMENT,
    GroupHeader,
    JournalPosition,
    Kind,
    SegmentHeader,
    align,
    decode_base,
    decode_ledger_id,
    decode_record,
    encode_base,
    encode_ledger_id,
    encode_record,
)
from tierlog_ingest.storage.node_state import IntervalSet, NodeState, decode_state, encode_state

GROUPS = 4


def test_golden_headers():
    segment = SegmentHeader(segment_id=2, generation=3, synced=JournalPosition(1, 4096))
    packed = segment.pack()
    assert len(packed) == ALIGNMENT
    assert packed[:40] == bytes.fromhex(
        "544c4a53 00000001"  # magic, version
        "0000000000000002 0000000000000003"  # segment id, generation
        "0000000000000001 0000000000001000"  # synced segment, synced offset
    )
    assert packed[44:] == bytes(ALIGNMENT - 44)
    assert SegmentHeader.unpack(packed) == segment
    group = GroupHeader(records_len=5, record_count=1, synced=JournalPosition(2, 8192))
    assert group.pack(segment.salt)[:28] == bytes.fromhex(
        "544c4a47 00000005 0000000000000002 0000000000002000 00000001"
    )
    record = b"".join(encode_record(Kind.FENCE, [encode_ledger_id(7)], segment.salt))
    assert record[:4] == bytes.fromhex("00000008")
    assert record[8:] == bytes.fromhex("02 000000 0000000000000007")
    assert encode_base(1, 2) == bytes.fromhex("0000000000000001 0000000000000002")
    assert decode_base(encode_base(1, 2)) == (1, 2)


@given(st.binary(max_size=300), st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.data())
def test_records(payload, kind, salt, data):
    encoded = memoryview(b"".join(encode_record(kind, [payload[:7], payload[7:]], salt)))
    assert decode_record(encoded, 0, salt) == (kind, payload)
    assert decode_record(encoded, 0, salt ^ 1) is None, "a record of an older generation"
    cut = data.draw(st.integers(0, len(encoded) - 1))
    assert decode_record(encoded[:cut], 0, salt) is None
    flipped = bytearray(encoded)
    at = data.draw(st.integers(0, len(encoded) - 1))
    flipped[at] ^= data.draw(st.integers(1, 255))
    padding = 9 <= at < 12  # zeros that nothing reads
    assert padding or decode_record(memoryview(flipped), 0, salt) is None


def test_alignment_and_ids():
    assert [align(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert decode_ledger_id(encode_ledger_id(2**40)) == 2**40


@given(st.lists(st.integers(0, 60)))
def test_interval_set(numbers):
    intervals, plain = IntervalSet(), set()
    for number in numbers:
        intervals.add(number)
        plain.add(number)
        assert [n in intervals for n in range(62)] == [n in plain for n in range(62)]
    found = intervals.intervals()
    assert all(a <= b for a, b in found)
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(found))
    state = NodeState(mark_segment=3, limbo_ceiling=-1, fences=(1, 5), freed=found)
    assert decode_state(encode_state(state)) == state


def written(*, idle=False, pad=700):
    """Return a disk whose journal has four groups of one run each, and nothing else has them."""

    async def write():
        disk = MemoryDisk(random.Random(1))
        crashing = CrashingNode(disk, 1)

        async def work(node):
            for first in range(GROUPS):
                await node.add(make_run(1, first, size=pad))
            if idle:
                await asyncio.sleep(1)
            crashing.crashed.set()

        await crashing.live(work)
        return disk

    return run_virtual(write())


def journal_path(disk):
    (path,) = [one for one in disk.paths() if one.startswith("journal/")]
    return path


async def look(disk):
    """Return what a node says of each entry, and whether it found damage."""
    async with opened(disk) as node:
        damaged = bool(node.damages)
        answers = []
        for first in range(GROUPS):
            found = await outcome(read_all(node, 1, first, bytes_max=1))
            if isinstance(found, list):
                assert found == [make_run(1, first, size=700)], "never other bytes"
                answers.append("there")
            else:
                answers.append(found.reason.value)
        never = await outcome(read_all(node, 1, GROUPS, bytes_max=1))
        assert never.reason is (Reason.UNKNOWN if damaged else Reason.NO_SUCH_ENTRY)
    return answers, damaged


def variant(disk, data):
    copy = MemoryDisk(random.Random(2))
    for path in disk.paths():
        copy.make_directory(path.rpartition("/")[0])
        copy.write_whole(path, disk.read_whole(path))
    copy.write_whole(journal_path(disk), data)
    return copy


def group_offsets(data):
    return [at for at in range(0, len(data), ALIGNMENT) if data[at : at + 4] == b"TLJG"]


def test_a_tail_torn_at_any_byte_is_cut():
    disk = written()
    data = disk.read_whole(journal_path(disk))
    offsets = group_offsets(data)
    assert len(offsets) == GROUPS
    for cut in [*range(offsets[-1], offsets[-1] + 60), *range(offsets[-1] + 60, len(data), 31)]:
        answers, damaged = run_virtual(look(variant(disk, data[:cut])))
        assert answers == ["there"] * 3 + ["NO_SUCH_ENTRY"]
        assert not damaged


def test_a_flip_in_the_last_group_without_its_marker_is_taken_for_a_torn_tail():
    """The one window left, as documented."""
    disk = written()
    data = bytearray(disk.read_whole(journal_path(disk)))
    data[group_offsets(data)[-1] + 100] ^= 1
    answers, damaged = run_virtual(look(variant(disk, bytes(data))))
    assert answers == ["there"] * 3 + ["NO_SUCH_ENTRY"]
    assert not damaged


def test_a_flip_below_what_is_known_to_be_synced_is_reported():
    disk = written(idle=True)
    data = disk.read_whole(journal_path(disk))
    offsets = group_offsets(data)
    assert len(offsets) == GROUPS + 1, "the idle marker"
    for number in range(GROUPS):
        start = offsets[number]
        group_len = 32 + int.from_bytes(data[start + 4 : start + 8], "big")
        for at in [*range(start, start + 64), *range(start + 64, start + group_len, 41)]:
            flipped = bytearray(data)
            flipped[at] ^= 0x10
            answers, damaged = run_virtual(look(variant(disk, bytes(flipped))))
            if not damaged:
                assert answers == ["there"] * GROUPS, at  # a zero that nothing reads
                continue
            assert "NO_SUCH_ENTRY" not in answers
            others = answers[:number] + answers[number + 1 :]
            # The first group holds BASE too; without it the file is taken as it is.
            assert others == ["there"] * (GROUPS - 1)


def test_synced_groups_that_are_missing_are_reported():
    disk = written(idle=True)
    data = disk.read_whole(journal_path(disk))
    marker = group_offsets(data)[-1]
    for at in (marker - ALIGNMENT, marker):
        # The marker is kept, what it names is not there: zeros, as of a lost write.
        zeroed = data[:at] + bytes(marker - at) + data[marker:]
        answers, damaged = run_virtual(look(variant(disk, zeroed)))
        assert damaged is (at != marker)
        assert "NO_SUCH_ENTRY" not in answers
    for header_byte in (0, 9, 17, 33, 41):
        flipped = bytearray(data)
        flipped[header_byte] ^= 1
        answers, damaged = run_virtual(look(variant(disk, bytes(flipped))))
        assert damaged
        assert set(answers) <= {"UNKNOWN", "there"}


def test_a_missing_segment_is_reported():
    disk = written(idle=True)
    data = disk.read_whole(journal_path(disk))
    copy = variant(disk, data)

    async def check():
        await copy.mount().remove(journal_path(disk))
        return await look(copy)

    answers, damaged = run_virtual(check())
    assert damaged
    assert answers == ["UNKNOWN"] * GROUPS


def test_a_newer_version_is_refused():
    segment = SegmentHeader(segment_id=2, generation=3, synced=JournalPosition(1, 4096))
    data = bytearray(segment.pack())
    with pytest.raises(CorruptError):
        SegmentHeader.unpack(bytes(data[:100]))
    data[7] = 9
    with pytest.raises(CorruptError):
        SegmentHeader.unpack(bytes(data))


def test_limbo_ends_for_ledgers_made_after_it():
    disk = written(idle=True)
    data = bytearray(disk.read_whole(journal_path(disk)))
    data[group_offsets(data)[1] + 100] ^= 1
    copy = variant(disk, bytes(data))

    async def check():
        async with opened(copy) as node:
            assert isinstance(await outcome(read_all(node, 50)), RetryableError)
            assert node.limbo_unlimited
            node.limit_limbo(LedgerId(40))
            assert not node.limbo_unlimited
            assert (await outcome(read_all(node, 50))).reason is Reason.NO_SUCH_ENTRY
            assert (await outcome(read_all(node, 40))).reason is Reason.UNKNOWN
            await node.add(make_run(60, 0))
        async with opened(copy) as node:
            assert not node.damages
            assert (await outcome(read_all(node, 60, EntryId(1)))).reason is Reason.NO_SUCH_ENTRY
            assert (await outcome(read_all(node, 1, EntryId(1)))).reason is Reason.UNKNOWN

    run_virtual(check())
    assert INT64_MAX > 60
