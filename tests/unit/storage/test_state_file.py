"""The node's state: "over several directories the minimum; it never goes back" (protocols.md 2)."""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.node_kit import CrashingNode, make_run, open_node, read_all, reading_error
from tests.unit.storage.node_kit import running as running_node
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.format.checksum import crc32c
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import LedgerId
from tierlog_ingest.storage.entrylog.entry_log import LogLength
from tierlog_ingest.storage.entrylog.ledger_map import LedgerMap
from tierlog_ingest.storage.intervals import IntervalSet
from tierlog_ingest.storage.journal.format import JournalPosition
from tierlog_ingest.storage.seen_ids import NOTHING_SEEN, SeenIds
from tierlog_ingest.storage.state_file import (
    NodeState,
    decode_state,
    encode_state,
    read_states,
    write_states,
)

STATE = NodeState(
    generation=7,
    mark=JournalPosition(3, 8192),
    limbo_ceiling=-1,
    fences=(4, 9),
    freed=((1, 3), (6, 6)),
    doubtful=(11,),
    unfinished=(12, 13),
    logs=((LogLength(1, 5000, True),), (LogLength(2, 600, False),)),
    maps={2: LedgerMap({9: 100, 4: 50})},
    unsettled_logs=frozenset({1}),
    seen_ids=SeenIds(next_id=70, tally=8, trusted_to=50, behind_at=60),
)


def same(left: NodeState, right: NodeState) -> bool:
    maps = [{log: dict(one) for log, one in state.maps.items()} for state in (left, right)]
    fields = NodeState.__slots__
    others = [one for one in fields if one != "maps"]
    return maps[0] == maps[1] and all(getattr(left, one) == getattr(right, one) for one in others)


def golden(version: int, seen: bytes) -> bytes:
    expected = b"".join(
        [
            b"TLND" + struct.pack(">I", version),
            struct.pack(">qqqq", 7, 3, 8192, -1),
            struct.pack(">II", 1, 2),  # the second of two directories
            struct.pack(">IIIIII", 2, 2, 1, 2, 2, 2),
            seen,
            struct.pack(">qq", 4, 9),
            struct.pack(">qqqq", 1, 3, 6, 6),
            struct.pack(">q", 11),
            struct.pack(">qq", 12, 13),
            struct.pack(">IIqq", 0, 1 | 2, 1, 5000),
            struct.pack(">IIqq", 1, 0, 2, 600),
            struct.pack(">qqq", 2, 4, 50),
            struct.pack(">qqq", 2, 9, 100),
        ]
    )
    return expected + struct.pack(">I", crc32c(expected))


def test_golden_bytes():
    expected = golden(3, struct.pack(">qqqq", 70, 8, 50, 60))
    assert encode_state(STATE, directory=1, directory_count=2) == expected
    found = decode_state(expected, log_directories=2)
    assert (found.directory, found.directory_count) == (1, 2)
    assert same(found.state, STATE)


def test_what_was_written_before_ids_were_kept_is_read():
    found = decode_state(golden(2, b""), log_directories=2).state
    assert same(found, replace(STATE, seen_ids=NOTHING_SEEN))
    cut = golden(2, b"")[:72]
    cut = cut[:7] + b"\x03" + cut[8:]  # as long as version 2's header, and says 3
    with pytest.raises(CorruptError):
        decode_state(cut + struct.pack(">I", crc32c(cut)), log_directories=2)


def test_every_flip_and_every_cut_is_found():
    data = encode_state(STATE, directory=0, directory_count=2)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        for bad in (bytes(flipped), data[:at]):
            with pytest.raises(CorruptError):
                decode_state(bad, log_directories=2)
    newer = bytearray(data[:-4])
    newer[7] = 9
    with pytest.raises(RefusedError):
        decode_state(bytes(newer) + struct.pack(">I", crc32c(newer)), log_directories=2)


@given(st.lists(st.integers(0, 60)))
def test_interval_set(numbers):
    found = IntervalSet()
    for number in numbers:
        found.add(number)
    assert {one for one in range(-1, 62) if one in found} == set(numbers)
    bounds = found.intervals()
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(bounds))
    assert IntervalSet(bounds).intervals() == bounds


def disks(count=2):
    return [MemoryDisk(random.Random(number)) for number in range(count)]


def mounted(all_disks):
    return [disk.mount() for disk in all_disks]


@pytest.mark.covers("D35")
def test_the_oldest_holds():
    async def check():
        both = disks()
        await write_states(mounted(both), STATE)
        older = NodeState(generation=6, mark=JournalPosition(2, 4096), logs=((), ()), maps={})
        both[1].write_whole("state", encode_state(older, directory=1, directory_count=2))
        found, damages = await read_states(mounted(both), log_directories=2)
        assert found is not None
        assert found.mark == (2, 4096)
        assert damages == []

    run_virtual(check(), until_s=10)


def test_one_directory_without_its_state_is_a_damage_and_all_without_are_a_new_node():
    async def check():
        both = disks()
        await write_states(mounted(both), STATE)
        for bad in (b"", b"x" * 100, None):
            broken = MemoryDisk(random.Random(5))
            if bad is not None:
                broken.write_whole("state", bad)
            found, damages = await read_states(mounted([both[0], broken]), log_directories=2)
            assert found is not None
            assert same(found, STATE)
            assert len(damages) == 1
        assert await read_states(mounted(disks()), log_directories=2) == (None, [])
        for at in range(2):
            both[at].write_whole("state", b"x" * 100)
        with pytest.raises(CorruptError):
            await read_states(mounted(both), log_directories=2)

    run_virtual(check(), until_s=10)


def test_directories_in_another_order_or_fewer_are_refused():
    async def check():
        both = disks()
        await write_states(mounted(both), STATE)
        with pytest.raises(RefusedError):
            await read_states(mounted(both)[::-1], log_directories=2)
        with pytest.raises(RefusedError):
            await read_states(mounted(both)[:1], log_directories=1)

    run_virtual(check(), until_s=10)


def journal_damaged(disk):
    path = next(one for one in disk.paths() if one.endswith(".journal"))
    data = bytearray(disk.read_whole(path))
    data[4096 + 100] ^= 1
    disk.write_whole(path, bytes(data))


def test_limbo_ends_for_ledgers_made_after_it():
    """What a damaged journal may have held is UNKNOWN, for ledgers that there were then."""

    async def check():
        disk = MemoryDisk(random.Random(1))
        crashing = CrashingNode(disk, 1)

        async def work(node):
            await node.add(make_run(1, 0))
            await node.add(make_run(1, 1))
            await asyncio.sleep(1)  # then the idle marker proves both
            crashing.crashed.set()

        await crashing.live(work)
        journal_damaged(disk)
        node = await open_node(disk.mount())
        assert node.damages
        assert node.limbo_unlimited
        async with running_node(node):
            assert (await reading_error(node, 1, 0)).reason is Reason.UNKNOWN
            assert (await reading_error(node, 50, 0)).reason is Reason.UNKNOWN
            assert (await node.last_add_confirmed(LedgerId(1))).doubtful
            node.limit_limbo(LedgerId(7))
            assert not node.limbo_unlimited
            assert (await reading_error(node, 50, 0)).reason is Reason.NO_SUCH_ENTRY
            assert (await reading_error(node, 7, 0)).reason is Reason.UNKNOWN
            assert await node.last_add_confirmed(LedgerId(7)) == (-1, -1, True)
            await node.add(make_run(51, 0))
            assert len(await read_all(node, 51)) == 1
            assert await node.last_add_confirmed(LedgerId(51)) == (-1, 0, False)
        node = await open_node(disk.mount())
        assert node.damages == []
        async with running_node(node):
            assert (await reading_error(node, 1, 0)).reason is Reason.UNKNOWN
            assert len(await read_all(node, 51)) == 1

    run_virtual(check(), until_s=1000)
