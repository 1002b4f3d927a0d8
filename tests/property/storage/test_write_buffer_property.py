"""The write buffer against a model that is a list of entries."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.unit.storage.node_kit import make_run
from tierlog.format.run import Run
from tierlog.model.errors import CorruptError
from tierlog_ingest.storage.write_buffer import RUN_OVERHEAD, WriteBuffer

ledgers = st.integers(1, 3)


class BufferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = WriteBuffer()
        self.held: list[tuple[int, Run]] = []
        self.seq = 0
        self.durable = -1
        self.taken: list[Run] = []

    @rule(ledger=ledgers, first=st.integers(0, 30), count=st.integers(1, 4), lac=st.integers(-1, 0))
    def add(self, ledger: int, first: int, count: int, lac: int) -> None:
        run = make_run(ledger, first, count=count, size=3, lac=lac)
        entries = set(range(first, first + count))
        meets = [
            other
            for _, other in self.held
            if other.header.ledger_id == ledger
            and entries & set(range(other.first_entry_id, other.last_entry_id + 1))
        ]
        if not meets:
            assert self.buffer.add(run, self.seq)
            self.held.append((self.seq, run))
            self.seq += 1
        elif meets == [run]:
            assert not self.buffer.add(run, self.seq)
        else:
            with pytest.raises(CorruptError):
                self.buffer.add(run, self.seq)

    @rule(share=st.floats(0, 1))
    def group_is_durable(self, share: float) -> None:
        self.durable += int((self.seq - 1 - self.durable) * share)

    @rule(share=st.floats(0, 1))
    def group_is_refused(self, share: float) -> None:
        seq = self.durable + 1 + int((self.seq - 1 - self.durable) * share)
        self.buffer.roll_back(seq)
        self.held = [one for one in self.held if one[0] < seq]

    @rule()
    def flush_begins(self) -> None:
        self.taken = self.buffer.snapshot(self.durable)
        found = [(run.header.ledger_id, run.first_entry_id) for run in self.taken]
        assert found == sorted(
            (run.header.ledger_id, run.first_entry_id)
            for seq, run in self.held
            if seq <= self.durable
        )

    @precondition(lambda self: self.taken)
    @rule()
    def flush_ends(self) -> None:
        self.buffer.drop(self.taken)
        dropped = {id(run) for run in self.taken}
        self.held = [one for one in self.held if id(one[1]) not in dropped]
        self.taken = []

    @rule(ledger=ledgers)
    def forget(self, ledger: int) -> None:
        self.buffer.forget_ledger(ledger)
        self.held = [one for one in self.held if one[1].header.ledger_id != ledger]

    @invariant()
    def agrees(self) -> None:
        entries = {
            (int(run.header.ledger_id), entry_id): run
            for _, run in self.held
            for entry_id in range(run.first_entry_id, run.last_entry_id + 1)
        }
        assert self.buffer.ledger_ids() == {ledger for ledger, _ in entries}
        assert len(self.buffer) == len(self.held)
        costs = sum(len(run.encoded) + RUN_OVERHEAD for _, run in self.held)
        assert self.buffer.bytes == costs
        for ledger in (1, 2, 3):
            ids = sorted(entry_id for one, entry_id in entries if one == ledger)
            assert self.buffer.last_entry_id(ledger) == (ids[-1] if ids else -1)
            for entry_id in range(-1, 36):
                assert self.buffer.find(ledger, entry_id) is entries.get((ledger, entry_id))
                after = next((one for one in ids if one > entry_id), None)
                assert self.buffer.first_after(ledger, entry_id) == after


BufferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_write_buffer = BufferMachine.TestCase
