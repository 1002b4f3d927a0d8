"""Entry logs under any damage: what is handed out was written, what is missing is reported."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.log_kit import State, new_logs, opened_logs, read_run, runs_of
from tests.unit.storage.node_kit import make_run
from tierlog.adapters.memory.files import MemoryDisk
from tierlog_ingest.storage.entrylog.entry_log import log_path

sizes = st.sampled_from([0, 1, 30, 400, 4000, 4096 - 96, 9000])
writes = st.lists(st.tuples(st.integers(1, 3), sizes), min_size=1, max_size=25)
flips = st.tuples(st.just("flip"), st.floats(0, 0.999), st.integers(1, 255))
cuts = st.tuples(st.just("cut"), st.floats(0, 0.999), st.just(0))
zeros = st.tuples(st.just("zeros"), st.floats(0, 0.999), st.integers(1, 9000))
moves = st.tuples(st.just("move"), st.floats(0, 0.999), st.integers(0, 40000))
damages = st.lists(flips | cuts | zeros | moves, max_size=3)


def damaged(data: bytes, what: str, where: float, how: int) -> bytes:
    at, changed = int(where * len(data)), bytearray(data)
    if what == "flip":
        changed[at] ^= how
    elif what == "cut":
        del changed[at:]
    elif what == "zeros":
        end = min(at + how, len(data))
        changed[at:end] = bytes(end - at)
    else:
        piece = data[how % len(data) :][:4096]
        changed[at : at + len(piece)] = piece[: len(changed) - at]
    return bytes(changed)


async def check(runs, sealed, changes):
    disk = MemoryDisk(random.Random(1))
    logs = await new_logs(disk.mount(), log_bytes_max=2**20)
    places = await logs.append(runs, writer="flush")
    if sealed:
        await logs.seal("flush")
    await logs.sync()
    state, path = State.of(logs), log_path(1)
    whole = data = disk.read_whole(path)
    for change in changes:
        data = damaged(data, *change) if data else data
    disk.write_whole(path, data)
    logs, found_damages = await opened_logs(state, disk.mount(), log_bytes_max=2**20)
    found = await runs_of(logs, 1)
    assert all(run in runs for run in found)
    lost = [
        run for run, place in zip(runs, places, strict=True) if await read_run(logs, place) != run
    ]
    if data[: len(whole)] == whole:
        assert (found, found_damages, logs.damaged_logs) == (runs, [], {})
    else:
        assert found_damages or logs.damaged_logs
    assert not lost or logs.damaged_logs
    for ledger_id in (1, 2, 3):
        again, _ = await opened_logs(state, disk.mount(), log_bytes_max=2**20)
        own = [run for run in runs if run.header.ledger_id == ledger_id]
        found = await runs_of(again, 1, ledger_id)
        assert all(run in own for run in found)
        assert found == own or again.damaged_logs


@settings(max_examples=60)
@given(writes, st.booleans(), damages)
def test_any_damage(written, sealed, changes):
    firsts = {1: 0, 2: 0, 3: 0}
    runs = []
    for ledger_id, size in written:
        runs.append(make_run(ledger_id, firsts[ledger_id], size=size))
        firsts[ledger_id] += 1
    run_virtual(check(runs, sealed, changes))
