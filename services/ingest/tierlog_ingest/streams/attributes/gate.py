"""Between a stream's queue of appends and its attributes: who may be sent, and who waits.

Owns the check of each append when it is taken, appends that wait beside the queue for values that
are not in memory, and those whose check failed until that may be told. Does not own the queue's
order, nor how values are fetched (``keeper``).

Invariants:
    * An append is checked against everything that was sent before it, before it has an entry id;
      what it changes stands as soon as it is let through.
    * Appends of one writer keep their order: behind one that waits beside the queue they all do.
      Nobody else waits for it. One of several writers is in the order of each.
    * A writer's number that is in memory is never set back, also not by a plain append.
    * A failed check is told only once the entry that it rests on is confirmed, and then only by
      the stream's owner; if that entry vanishes, it is APPEND_INDETERMINATE.
    * Whatever the gate took from the queue it gives back or answers.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierlog.format.attribute_changes import (
    Change,
    Failed,
    change_of,
    changed,
    check_shape,
    failed_check,
    failed_position,
)
from tierlog.model.attributes import AttributeKey
from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import EntryId
from tierlog.model.position import Edge, Position
from tierlog_ingest.streams.appends import Append, indeterminate
from tierlog_ingest.streams.attributes.state import AttributeState, Sent


@dataclass(slots=True, eq=False)
class _Lane:
    """Appends that wait for values, in order, and whose they are; ``keys``: what they want."""

    appends: deque[Append]
    keys: list[AttributeKey]
    writers: list[AttributeKey]


class AttributeGate:
    """The gate of one stream. Without a state nothing is checked, and no condition is taken."""

    def __init__(
        self,
        *,
        give_back: Callable[[Sequence[Append]], None],
        wake: Callable[[], None],
    ) -> None:
        self.state: AttributeState | None = None
        self.failed: list[tuple[Append, TierlogError]] = []
        """Failed checks that rest on confirmed entries, for the owner to tell."""
        self.refusal = "the stream has no attributes"
        """Why there is no state."""
        self._give_back = give_back
        self._wake = wake
        self._lanes: dict[_Lane, None] = {}
        self._lane_of: dict[AttributeKey, _Lane] = {}
        """The lane of each writer that has appends in one; no writer has two."""
        self._waiting: dict[Sent, list[tuple[Append, TierlogError]]] = {}
        self._readers: dict[Sent, list[asyncio.Future[None]]] = {}

    def __repr__(self) -> str:
        return f"<AttributeGate {self.state!r} {self.statistics()}>"

    def statistics(self) -> dict[str, int]:
        """Return who waits, and how much is held."""
        return {
            **(self.state.statistics() if self.state is not None else {}),
            "appends_fetching": sum(len(lane.appends) for lane in self._lanes),
            "checks_failed": len(self.failed) + sum(map(len, self._waiting.values())),
        }

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits here for an answer."""
        if self.failed or self._waiting:
            return True
        return any(not one.answer.done() for lane in self._lanes for one in lane.appends)

    # Checks

    def lets(self, append: Append, first: Position | None = None, ahead: int = 0) -> bool:
        """Tell whether an append may be sent now; if not, the gate has taken charge of it.

        ``ahead``: so many entries go before it in the same piece, the first of them to ``first``.
        """
        state, changes = self.state, append.changes
        if state is None:
            return self._lets_unchecked(append)
        if changes is None:
            changes = self._read(append)
            if changes is None:
                return False
        if self._lanes and self._is_behind(append, changes):
            return False
        holds = not append.is_checked or self._check(append, changes[0], first, ahead)
        if not holds or (append.condition is None and self._goes_back(append, changes)):
            return False
        if state.is_full and not state.has_all(_keys_changed(append, changes)):
            append.finish(_full(of_all=not state.is_at_capacity))
            return False
        return True

    def _lets_unchecked(self, append: Append) -> bool:
        if append.condition is None:
            return True
        append.finish(
            RefusedError(
                f"a conditional append where {self.refusal}", remedy="Append without a condition"
            )
        )
        return False

    def _read(self, append: Append) -> Sequence[Change | None] | None:
        """Read what an append changes, once; None: it was refused."""
        condition = append.condition
        try:
            changes = [change_of(entry) for entry in append.draft.entries()]
            check_shape(changes, condition)
        except TierlogError as error:
            append.finish(error)
            return None
        append.changes = changes
        updates = changes[0].updates if changes and changes[0] is not None else ()
        append.is_checked = condition is not None or bool(updates)
        return changes

    def _is_behind(self, append: Append, changes: Sequence[Change | None]) -> bool:
        """Put an append behind those of its writers that wait; False: there are none."""
        writers = _writers(changes)
        lanes = dict.fromkeys(self._lane_of[one] for one in writers if one in self._lane_of)
        if not lanes:
            return False
        lane, *others = lanes
        for other in others:
            # From here on their order matters.
            self._drop(other)
            lane.appends += other.appends
            lane.keys += other.keys
            self._take_in(lane, other.writers)
        lane.appends.append(append)
        self._take_in(lane, writers)
        return True

    def _take_in(self, lane: _Lane, writers: Sequence[AttributeKey]) -> None:
        for writer in writers:
            if writer not in self._lane_of:
                self._lane_of[writer] = lane
                lane.writers.append(writer)

    def _drop(self, lane: _Lane) -> None:
        del self._lanes[lane]
        for writer in lane.writers:
            del self._lane_of[writer]

    def _check(
        self, append: Append, change: Change | None, first: Position | None, ahead: int
    ) -> bool:
        state, condition = self.state, append.condition
        assert state is not None
        change = change or Change()
        number = condition.last_event_number if condition is not None else None
        keys = change.keys_checked
        if number is not None and change.writer is not None:
            keys = (change.writer, *keys)
        unknown = state.unknown(keys)
        if unknown:
            self._put_aside(append, change.writer, unknown)
            return False
        made = changed(change, state.value, last_event_number=number)
        if isinstance(made, Failed):
            error = failed_check(made, writer=change.writer)
            self._fail(append, error, state.setter(made.key))
            return False
        wanted = condition.after if condition is not None else None
        if wanted is not None:
            last = state.last
            if ahead and first is not None:
                last = Position(first.ledger_id, EntryId(first.entry_id + ahead - 1))
            if wanted != (Edge.EARLIEST if last is None else last):
                # It rests on the piece under way, too, if that has entries.
                on = state.under_way() if ahead else state.newest()
                self._fail(append, failed_position(wanted, last), on)
                return False
        append.made = made
        return True

    def _goes_back(self, append: Append, changes: Sequence[Change | None]) -> bool:
        """Refuse a plain append that would set a number back that is in memory."""
        state = self.state
        assert state is not None
        seen: dict[AttributeKey, int] = {}
        for change in changes:
            writer = None if change is None else change.writer
            if change is None or writer is None:
                continue
            last = seen.get(writer)
            if last is None and not state.unknown((writer,)):
                last = state.value(writer)
            number = seen[writer] = change.event_number
            if last is not None and last >= number:
                error = failed_check(Failed(writer, last, f"not below {number}"), writer=writer)
                self._fail(append, error, state.setter(writer))
                return True
        return False

    def enter(self, append: Append, count: int) -> None:
        """Count in what the next ``count`` entries of an append change; it was let through."""
        state = self.state
        changes = append.changes
        if state is None or not changes:
            return
        if append.is_checked:
            change = changes[0]
            state.change(append.made, change.event_count if change is not None else 0)
            return
        for change in changes[append.taken : append.taken + count]:
            if change is not None:
                made = {} if change.writer is None else {change.writer: change.event_number}
                state.change(made, change.event_count)

    def sent(self, end: Position, size: int) -> None:
        """Note that a piece was sent: all that entered since the last one."""
        if self.state is not None:
            self.state.sent(end, size)

    # What becomes of what was sent

    def _fail(self, append: Append, error: TierlogError, on: Sent | None) -> None:
        if on is None:
            self.failed.append((append, error))
            self._wake()
        else:
            self._waiting.setdefault(on, []).append((append, error))

    def confirm(self, through: Position) -> None:
        """Take note that all entries up to ``through`` are confirmed."""
        if self.state is None:
            return
        for piece in self.state.confirm(through):
            failed = self._waiting.pop(piece, None)
            if failed:
                self.failed += failed
                self._wake()
            for reader in self._readers.pop(piece, ()):
                if not reader.done():
                    reader.set_result(None)

    def vanish(self, cause: str) -> None:
        """Drop the state: what was sent and not confirmed may or may not be in the stream."""
        self.state = None
        waiting, self._waiting = self._waiting, {}
        for append, _ in (one for failed in waiting.values() for one in failed):
            append.finish(indeterminate(cause))
        readers, self._readers = self._readers, {}
        for reader in (one for readers_of in readers.values() for one in readers_of):
            if not reader.done():
                reader.set_exception(_being_rebuilt())

    async def all_confirmed(self) -> AttributeState:
        """Wait until all that was sent by now is confirmed; return the state."""
        if self.state is None:
            raise _being_rebuilt()
        newest = self.state.newest()
        if newest is not None:
            reader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._readers.setdefault(newest, []).append(reader)
            await reader
        if self.state is None:
            raise _being_rebuilt()
        return self.state

    # Beside the queue

    def _put_aside(
        self, append: Append, writer: AttributeKey | None, unknown: list[AttributeKey]
    ) -> None:
        state = self.state
        assert state is not None
        lane = _Lane(deque((append,)), list(unknown), [])
        self._lanes[lane] = None
        self._take_in(lane, () if writer is None else (writer,))
        # From now until its answer: so that what was fetched is still there when it is checked.
        state.pin(unknown)
        append.answer.add_done_callback(lambda _: state.unpin(unknown))
        self._wake()

    def wanted(self, count_max: int) -> list[AttributeKey]:
        """Return keys that appends wait for; those that were given up want nothing."""
        keys: dict[AttributeKey, None] = {}
        for lane in list(self._lanes):
            if all(one.answer.done() for one in lane.appends):
                self._drop(lane)
            elif len(keys) < count_max:
                keys.update(dict.fromkeys(lane.keys))
        return list(keys)

    def look_again(self) -> None:
        """Give those back to the queue whose values are known now, in their order."""
        state = self.state
        assert state is not None
        ready = [lane for lane in self._lanes if not state.unknown(lane.keys)]
        for lane in ready:
            self._drop(lane)
        if ready:
            self._give_back([one for lane in ready for one in lane.appends])

    def fail_waiting(self, error: TierlogError) -> None:
        """Answer those who wait beside the queue: nothing of them was sent."""
        lanes, self._lanes, self._lane_of = self._lanes, {}, {}
        for lane in lanes:
            for append in lane.appends:
                append.finish(error)

    def end(self, error: TierlogError) -> None:
        """Answer everybody."""
        self.vanish(error.message)
        self.fail_waiting(error)
        failed, self.failed = self.failed, []
        for append, _ in failed:
            append.finish(error)


def _writers(changes: Sequence[Change | None]) -> list[AttributeKey]:
    return [one.writer for one in changes if one is not None and one.writer is not None]


def _keys_changed(append: Append, changes: Sequence[Change | None]) -> list[AttributeKey]:
    if append.is_checked:
        return list(append.made)
    return _writers(changes)


def _full(*, of_all: bool) -> RetryableError:
    limit = "unflushed_all_max" if of_all else "cached_max"
    whose = "of all streams of this node" if of_all else "of the stream"
    return RetryableError(
        f"too many attributes {whose} wait to be written to tier 2",
        reason=Reason.RESOURCE_EXHAUSTED,
        remedy="Nothing was appended; see whether tier 2 is within reach, and try again",
        details={"budget": f"owner.attributes.{limit}"},
        retry_after_s=1.0,
    )


def _being_rebuilt() -> RetryableError:
    return RetryableError(
        "the stream's attributes are being rebuilt", remedy="Ask again", retry_after_s=0.1
    )
