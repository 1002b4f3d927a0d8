"""Defects of exactly-once appends, each of a kind that protocols.md section 4 forbids."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from tierlog.format.attribute_changes import Failed, changed
from tierlog_ingest.streams.appends import Append
from tierlog_ingest.streams.attributes import gate
from tierlog_ingest.streams.attributes.gate import AttributeGate
from tierlog_ingest.streams.attributes.keeper import AttributeKeeper
from tierlog_ingest.streams.attributes.state import AttributeState, Flush


@contextlib.contextmanager
def tell_before_confirm() -> Iterator[None]:
    """Tell of a failed check at once, though what it rests on may vanish yet."""

    def fail(self: AttributeGate, append: Append, error: Any, on: Any) -> None:
        del on
        self.failed.append((append, error))
        self._wake()

    with patch.object(AttributeGate, "_fail", fail):
        yield


@contextlib.contextmanager
def skip_rebuild() -> Iterator[None]:
    """Take the checkpoint alone after a recovery."""

    async def nothing(
        self: AttributeKeeper, state: AttributeState, place: Any, entries: Any
    ) -> None:
        del self, state, place, entries

    with patch.object(AttributeKeeper, "_replay", nothing):
        yield


@contextlib.contextmanager
def send_before_check() -> Iterator[None]:
    """Give an append its place first; the check only tells of it."""

    def passed(change: Any, lookup: Any, **more: Any) -> Any:
        made = changed(change, lookup, **more)
        return {change.writer: change.event_number} if isinstance(made, Failed) else made

    with patch.object(gate, "changed", passed):
        yield


@contextlib.contextmanager
def flush_what_is_sent() -> Iterator[None]:
    """Put into a checkpoint what is not confirmed yet."""
    begin = AttributeState.begin_flush

    def too_much(self: AttributeState) -> Flush | None:
        flush = begin(self)
        if flush is None:
            return None
        sent = {key: value for key, (value, _) in self._sent.items()}
        return flush._replace(changes={**flush.changes, **sent})

    with patch.object(AttributeState, "begin_flush", too_much):
        yield


@contextlib.contextmanager
def tell_without_asking() -> Iterator[None]:
    """Tell of failed checks without asking whether this still is the owner."""

    async def surely(self: AttributeKeeper) -> None:
        del self

    with patch.object(AttributeKeeper, "_not_owner", surely):
        yield
