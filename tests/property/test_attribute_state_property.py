"""An owner's attributes against a list of entries that is folded anew at every look.

The oracle knows of no cache, no checkpoint and no pending values: only of entries, in order, of
which a part is confirmed.
"""

from dataclasses import dataclass, field
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tierlog.format.attribute_changes import Change, Failed, changed, replayed
from tierlog.format.entry import AttributeUpdate, Verb
from tierlog.model.attributes import EVENT_COUNT, VALUE_MAX, AttributeKey, Checkpoint, IndexRoot
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position
from tierlog_ingest.streams.attributes.state import AttributeState

KEYS = [AttributeKey(bytes([1 + number]) * 16) for number in range(5)]
CAPACITY = 2
EDGES = (0, 1, -1, 2, VALUE_MAX, VALUE_MAX - 1, -VALUE_MAX - 1)

keys = st.sampled_from(KEYS)
values = st.sampled_from(EDGES) | st.integers(-(2**63), 2**63 - 1)
updates = st.builds(
    AttributeUpdate,
    key=keys.map(lambda key: UUID(bytes=key)),
    verb=st.sampled_from(Verb),
    value=values,
    expected=values,
)
changes = st.builds(
    Change,
    event_count=st.integers(0, 3),
    writer=st.none() | keys,
    event_number=st.integers(1, 9),
    updates=st.lists(updates, max_size=3).map(tuple),
)


@dataclass
class Fold:
    """What entries make, by the words of the article."""

    values: dict[bytes, int] = field(default_factory=dict)
    events: int = 0

    def take(self, change: Change, last: int | None, *, check: bool = True) -> bool:
        """Make a change; False: it fails, and nothing is changed."""
        after = dict(self.values)
        if change.writer is not None:
            if check and last is not None and after.get(change.writer, 0) != last:
                return False
            after[change.writer] = change.event_number
        for one in change.updates:
            key, there = one.key.bytes, one.key.bytes in after
            old = after.get(key)
            holds = {
                Verb.REPLACE: True,
                Verb.REPLACE_IF_GREATER: old is not None and one.value > old,
                Verb.REPLACE_IF_EQUALS: there and old == one.expected,
                Verb.REPLACE_IF_ABSENT: not there,
                Verb.ACCUMULATE: -(2**63) <= (old or 0) + one.value < 2**63,
            }[one.verb]
            if check and not holds:
                return False
            if one.verb is Verb.ACCUMULATE:
                after[key] = (old or 0) + one.value
            else:
                after[key] = one.value
        self.values = after
        self.events += change.event_count
        return True


class AttributeMachine(RuleBasedStateMachine):
    """Appends, confirmations, flushes, fetches and rebuilds, in any order."""

    def __init__(self) -> None:
        super().__init__()
        # A stream with a history, of which all is in the index and nothing in memory.
        self.entries = [Change(1, key, 3) for key in KEYS[:4]]
        self.confirmed = len(self.entries)
        self.under_way = 0
        """Entries of the piece that was not sent yet."""
        self.ends = [self.confirmed]
        self.index: dict[int, dict[AttributeKey, int]] = {}
        self.state = self.fresh(self.published(self.confirmed, dict.fromkeys(KEYS[:4], 3)))
        self.fetches: list[tuple[list[AttributeKey], dict[AttributeKey, int]]] = []
        self.flushing: tuple[int, dict[AttributeKey, int]] | None = None

    def fresh(self, base: Checkpoint) -> AttributeState:
        return AttributeState(base, created_ms=0, capacity=CAPACITY)

    def published(self, count: int, stored: dict[AttributeKey, int]) -> Checkpoint:
        version = len(self.index) + 1
        self.index[version] = stored
        root = IndexRoot(root_offset=version, root_length=1, count=len(stored))
        core = {EVENT_COUNT: self.fold(count).events}
        return Checkpoint(through=self.at(count), core=core, root=root)

    def at(self, count: int) -> Position:
        return Position(LedgerId(3), EntryId(count - 1))

    def fold(self, count: int) -> Fold:
        found = Fold()
        for change in self.entries[:count]:
            assert found.take(change, None, check=False)
        return found

    def in_index(self) -> dict[AttributeKey, int]:
        return self.index.get(self.state.base.root.root_offset, {})

    def fetch(self, wanted: list[AttributeKey]) -> None:
        unknown = self.state.unknown(wanted)
        self.state.pin(unknown)
        stored = self.in_index()
        self.state.absorb(unknown, {key: stored[key] for key in unknown if key in stored})
        self.state.unpin(unknown)

    @rule(
        change=changes,
        last=st.none() | st.sampled_from((0, 3)),
        then=st.sampled_from(("", "sent", "confirmed", "confirmed")),
    )
    def append(self, change: Change, last: int | None, then: str) -> None:
        wanted = [*change.keys_checked, *([change.writer] if change.writer else [])]
        self.state.pin(wanted)
        self.fetch(wanted)
        expected = self.fold(len(self.entries)).take(change, last)
        made = changed(change, self.state.value, last_event_number=last)
        self.state.unpin(wanted)
        assert isinstance(made, Failed) is not expected
        if not isinstance(made, Failed):
            self.state.change(made, change.event_count)
            self.entries.append(change)
            self.under_way += 1
            if then:
                self.send()
            if then == "confirmed":
                self.confirm_through(len(self.entries))

    @precondition(lambda self: self.under_way)
    @rule()
    def send(self) -> None:
        self.state.sent(self.at(len(self.entries)), 10 * self.under_way)
        self.ends.append(len(self.entries))
        self.under_way = 0

    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        sent = self.ends[-1] if self.ends else 0
        sent = max(sent, self.confirmed)
        count = data.draw(st.just(sent) | st.integers(self.confirmed, sent))
        self.confirm_through(count)

    def confirm_through(self, count: int) -> None:
        if count:
            self.state.confirm(self.at(count))
        self.confirmed = max([self.confirmed, *(end for end in self.ends if end <= count)])

    @rule(wanted=st.lists(keys, min_size=1, max_size=3, unique=True))
    def begin_fetch(self, wanted: list[AttributeKey]) -> None:
        unknown = self.state.unknown(wanted)
        self.state.pin(unknown)
        stored = self.in_index()
        self.fetches.append((unknown, {key: stored[key] for key in unknown if key in stored}))

    @precondition(lambda self: self.fetches)
    @rule()
    def end_fetch(self) -> None:
        # Whatever happened since: what was fetched may be stale by now.
        unknown, found = self.fetches.pop(0)
        self.state.absorb(unknown, found)
        self.state.unpin(unknown)

    @precondition(lambda self: self.flushing is None)
    @rule()
    def begin_flush(self) -> None:
        flush = self.state.begin_flush()
        assert (flush is None) is (self.state.through == self.state.base.through)
        if flush is None:
            return
        stored = {**self.in_index(), **flush.changes}
        folded = self.fold(self.confirmed)
        assert flush.through == self.at(self.confirmed)
        assert stored == folded.values
        assert flush.core[EVENT_COUNT] == folded.events
        self.flushing = self.confirmed, stored

    @precondition(lambda self: self.flushing is not None)
    @rule(succeeds=st.booleans())
    def end_flush(self, succeeds: bool) -> None:
        assert self.flushing is not None
        (count, stored), self.flushing = self.flushing, None
        if not succeeds:
            self.state.fail_flush()
            return
        self.state.finish_flush(self.published(count, stored))

    @rule(data=st.data())
    def recover(self, data: st.DataObject) -> None:
        """Lose what is not confirmed, or a part of it, and rebuild."""
        sent = self.ends[-1] if self.ends else 0
        survivors = data.draw(st.integers(self.confirmed, max(sent, self.confirmed)))
        self.state.vanish()
        self.state = self.fresh(self.state.base)
        self.fetches, self.flushing, self.under_way = [], None, 0
        del self.entries[survivors:]
        self.ends = [end for end in self.ends if end < survivors]
        if survivors:
            self.ends.append(survivors)
        self.confirmed = survivors
        through = self.state.base.through
        first = through.entry_id + 1 if through is not None else 0
        for offset, change in enumerate(self.entries[first:]):
            wanted = list(change.keys_checked)
            self.state.pin(wanted)
            self.fetch(wanted)
            self.state.unpin(wanted)
            end = self.at(first + offset + 1)
            made = replayed(change, self.state.value)
            self.state.replay(made, change.event_count, end=end, size=1)

    @invariant()
    def what_is_known_is_right(self) -> None:
        sent, confirmed = self.fold(len(self.entries)), self.fold(self.confirmed)
        for key in KEYS:
            if not self.state.unknown([key]):
                assert self.state.value(key) == sent.values.get(key)
            is_known, value = self.state.confirmed(key)
            if is_known:
                assert value == confirmed.values.get(key)
            else:
                assert self.in_index().get(key) == confirmed.values.get(key)
        assert self.state.core[EVENT_COUNT] == confirmed.events
        assert self.state.through == (self.at(self.confirmed) if self.confirmed else None)
        listed = {**self.in_index(), **self.state.unflushed(KEYS[0], KEYS[-1])}
        assert listed == confirmed.values

    @invariant()
    def memory_is_bounded(self) -> None:
        held = self.state.statistics()
        pinned = sum(len(unknown) for unknown, _ in self.fetches)
        # What waits for a flush is bounded by whoever lets appends in.
        assert held["attributes_cached"] <= CAPACITY + pinned + 3


@pytest.mark.covers("E07", "E14", "E23", "E25", "E59")
def test_the_state_keeps_to_the_model():
    run_state_machine_as_test(
        AttributeMachine, settings=settings(max_examples=60, stateful_step_count=30)
    )
