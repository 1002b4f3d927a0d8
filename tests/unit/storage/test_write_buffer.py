"""The write buffer: what readers find at once, and what a flush takes.

"The entry log buffers entries in memory and commits them in batches" (checklist D31).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.storage.node_kit import make_run
from tierlog.model.errors import CorruptError
from tierlog_ingest.storage.write_buffer import RUN_OVERHEAD, WriteBuffer


def filled(*runs):
    buffer = WriteBuffer()
    for seq, run in enumerate(runs):
        assert buffer.add(run, seq)
    return buffer


def test_finding():
    runs = [make_run(1, 0, count=3), make_run(1, 10, count=5), make_run(2, 7)]
    buffer = filled(*runs)
    assert buffer.ledger_ids() == {1, 2}
    assert len(buffer) == 3
    for entry_id, expected in [(0, 0), (2, 0), (3, None), (9, None), (10, 1), (14, 1), (15, None)]:
        assert buffer.find(1, entry_id) is (None if expected is None else runs[expected])
    assert buffer.find(3, 0) is None
    after = [buffer.first_after(1, entry_id) for entry_id in (-1, 0, 1, 2, 5, 9, 10, 13, 14, 99)]
    assert after == [0, 1, 2, 10, 10, 10, 11, 14, None, None]
    assert buffer.first_after(3, 0) is None
    assert [buffer.last_entry_id(ledger) for ledger in (1, 2, 3)] == [14, 7, -1]
    assert "ledgers=2 runs=3" in repr(buffer)


@pytest.mark.covers("D09")
def test_the_same_run_again_and_another_in_its_place():
    run = make_run(1, 5, count=5)
    buffer = filled(make_run(1, 0), run)
    before = buffer.bytes
    assert not buffer.add(make_run(1, 5, count=5), 7)
    for other in (
        make_run(1, 5, count=5, lac=0),
        make_run(1, 5, count=4),
        make_run(1, 9),
        make_run(1, 2, count=4),
        make_run(1, 4, count=9),
    ):
        with pytest.raises(CorruptError, match="differ from those"):
            buffer.add(other, 8)
    assert buffer.bytes == before
    assert buffer.snapshot(10) == [make_run(1, 0), run]
    assert buffer.add(make_run(1, 2, count=3), 9), "it fits between"


@pytest.mark.covers("D31")
def test_a_flush_takes_what_is_durable_sorted_and_it_stays_findable():
    runs = [make_run(ledger, first) for first in (5, 0, 9) for ledger in (2, 1)]
    buffer = filled(*runs)
    assert buffer.snapshot(-1) == []
    taken = buffer.snapshot(3)
    assert [(run.header.ledger_id, run.first_entry_id) for run in taken] == [
        *[(1, 0), (1, 5)],
        *[(2, 0), (2, 5)],
    ]
    assert buffer.find(1, 0) is taken[0]
    assert buffer.add(make_run(1, 20), 6)
    buffer.drop(taken)
    assert buffer.find(1, 0) is None
    assert len(buffer) == 3
    buffer.drop(taken)
    buffer.drop(buffer.snapshot(100))
    assert (len(buffer), buffer.bytes, buffer.ledger_ids()) == (0, 0, set())


def test_a_run_that_came_anew_is_not_dropped_for_the_old_one():
    buffer = filled(make_run(1, 0))
    taken = buffer.snapshot(0)
    buffer.forget_ledger(1)
    assert buffer.add(make_run(1, 0), 1)
    buffer.drop(taken)
    assert buffer.find(1, 0) is not None


def test_what_was_not_stored_is_taken_back():
    buffer = filled(*(make_run(1 + n % 2, n) for n in range(10)))
    buffer.roll_back(4)
    assert buffer.snapshot(100) == [make_run(1 + n % 2, n) for n in (0, 2, 1, 3)]
    assert buffer.bytes == sum(len(run.encoded) + RUN_OVERHEAD for run in buffer.snapshot(100))
    buffer.roll_back(0)
    assert (len(buffer), buffer.bytes) == (0, 0)


def test_forgetting_a_ledger():
    buffer = filled(make_run(1, 0), make_run(2, 0))
    buffer.forget_ledger(1)
    buffer.forget_ledger(7)
    assert buffer.ledger_ids() == {2}
    buffer.forget_ledger(2)
    assert buffer.bytes == 0


def test_the_overhead_of_a_run_is_no_less_than_said():
    """What ``bytes`` leaves out would be memory without a limit."""
    import tracemalloc

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        buffer = WriteBuffer()
        for ledger in range(2000):
            buffer.add(make_run(ledger, 0, size=10), 0)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * buffer.bytes < used < 1.25 * buffer.bytes
    assert isinstance(buffer.snapshot(0)[0].offsets, np.ndarray)
