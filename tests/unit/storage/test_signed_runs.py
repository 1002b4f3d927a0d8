"""Signed runs on a storage node, which knows no key: kept whole, and damage in them still found."""

from __future__ import annotations

import random

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.log_kit import make_logs, new_logs, runs_of
from tests.unit.storage.node_kit import opened, read_all
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.format.authentication import LedgerKey
from tierlog.format.frame import pack_entries
from tierlog.format.run import SIGNED_HEADER_LEN, build_run
from tierlog_ingest.storage.entrylog.entry_log import LogLength, log_path
from tierlog_ingest.storage.entrylog.entry_log_format import LOG_HEADER_LEN

pytestmark = pytest.mark.covers("D08", "D24")

KEY = LedgerKey("k1", bytes(32))


def signed(ledger_id, first, *, key=KEY, size=200):
    entry = random.Random(f"{ledger_id}/{first}").randbytes(size)
    return build_run(
        *pack_entries([entry], first), ledger_id=ledger_id, first_entry_id=first, key=key
    )


def mixed(count=30):
    """Runs of a ledger with a key and of one without, in turn."""
    return [signed(1 + n % 2, n // 2, key=KEY if n % 2 else None) for n in range(count)]


def test_signed_runs_come_out_as_they_went_in_before_and_after_a_restart():
    async def main():
        disk, runs = MemoryDisk(random.Random(1)), mixed()
        for crashed in (False, True):
            async with opened(disk) as node:
                if not crashed:
                    for answer in [node.add(run) for run in runs]:
                        await answer
                for ledger_id in (1, 2):
                    found = await read_all(node, ledger_id)
                    assert found == [run for run in runs if run.header.ledger_id == ledger_id]
                for run in await read_all(node, 2):
                    run.check_mac(KEY)
                assert not any(run.is_signed for run in await read_all(node, 1))

    run_virtual(main())


async def test_an_entry_log_is_scanned_past_damage_in_signed_runs():
    disk, runs = MemoryDisk(random.Random(1)), mixed()
    logs = await new_logs(disk.mount(), log_bytes_max=1 << 20)
    places = await logs.append(runs, writer="flush")
    await logs.seal("flush")
    await logs.sync()
    whole = disk.read_whole(log_path(1))
    length = LOG_HEADER_LEN + sum(len(run.encoded) for run in runs)
    hit = next(n for n, run in enumerate(runs) if run.is_signed and n > 5)
    inside = (5, 30, 77, 80, SIGNED_HEADER_LEN - 1, SIGNED_HEADER_LEN, len(runs[hit].encoded) - 1)
    for at in inside:
        damaged = bytearray(whole)
        damaged[places[hit].offset + at] ^= 1
        disk.write_whole(log_path(1), bytes(damaged))
        again = make_logs(disk.mount())
        assert await again.open([[LogLength(1, length, True)]], {}) == []
        assert await runs_of(again, 1) == [*runs[:hit], *runs[hit + 1 :]], f"byte {at}"
        others = [run for run in runs if run.header.ledger_id == 1]
        assert await runs_of(again, 1, ledger_id=1) == others, f"byte {at}"
