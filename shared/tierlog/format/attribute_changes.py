"""What an entry changes of its stream's attributes: read from its header, worked out on values.

The attributes of a stream at a position are a function of the entries up to it (ADR-0027): each
one sets the attribute of its writer id to its event number, adds its event count to EVENT_COUNT,
and makes the updates that it lists, in this order.

Owns that function, and which appends are formed so that they can be checked. Does not own where
values are kept, nor what is known of them.

Invariants:
    * A change is made wholly or not at all.
    * Reading never looks at the events, nor at the entry's checksum: what is judged here stands in
      a run, whose checksum covers it.
    * What can't be read, or names a core attribute, changes nothing.
"""

import functools
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final, NamedTuple
from uuid import UUID

from google.protobuf.message import DecodeError

from tierlog.format.checksum import Buffer
from tierlog.format.entry import (
    APPEND_HEADER_LEN_MAX,
    APPEND_HEADER_OFFSET,
    ENTRY_MAGIC,
    AttributeUpdate,
    Verb,
)
from tierlog.format.versions import Format, current
from tierlog.model.attributes import (
    CORE_PREFIX,
    KEY_LEN,
    NO_EVENT_NUMBER,
    VALUE_MAX,
    VALUE_MIN,
    AppendCondition,
    AttributeKey,
    is_core,
)
from tierlog.model.core_attributes import name_of
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.position import Edge, Position
from tierlog.proto.v1 import entry_pb2 as pb

_FIXED: Final = Struct(">2sBBI")
_READABLE: Final = (ENTRY_MAGIC, current(Format.APPEND_HEADER), 0)
_VERBS: Final = {verb.value: verb for verb in Verb}

Lookup = Callable[[AttributeKey], int | None]
"""The value of an attribute right before a change; None: it is not there."""


class Change(NamedTuple):
    """What one entry changes. ``writer`` None: none that keeps state."""

    event_count: int = 0
    writer: AttributeKey | None = None
    event_number: int = 0
    updates: tuple[AttributeUpdate, ...] = ()

    @property
    def keys_checked(self) -> tuple[AttributeKey, ...]:
        """The attributes whose values decide over the updates, or that they add to."""
        if not self.updates:
            return ()
        keys = (attribute_key(one.key) for one in self.updates if one.verb is not Verb.REPLACE)
        return tuple(key for key in keys if key != self.writer)


class Failed(NamedTuple):
    """Which attribute was otherwise, and what it was."""

    key: AttributeKey
    value: int | None
    why: str


def attribute_key(key: UUID) -> AttributeKey:
    """Return the key of an attribute, or of a writer, that is named by a UUID."""
    return AttributeKey(key.bytes)


def change_of(data: Buffer) -> Change | None:
    """Read what an entry changes; None: its header can't be read.

    Raises INVALID_ARGUMENT for one that names a core attribute.
    """
    header = _header(data)
    if header is None:
        return None
    writer, count = header.writer_id, header.event_count
    if not writer and not header.attribute_updates:
        return _plain(count) if count >= 0 else None
    if count < 0 or len(writer) not in {0, KEY_LEN}:
        return None
    updates: tuple[AttributeUpdate, ...] = ()
    if header.attribute_updates:
        found = _updates(header)
        if found is None:
            return None
        updates = found
    if updates or writer[:8] == CORE_PREFIX:
        _refuse_core(writer, updates)
    return Change(count, AttributeKey(writer) if writer else None, header.event_number, updates)


def _header(data: Buffer) -> pb.AppendHeader | None:
    if len(data) < APPEND_HEADER_OFFSET:
        return None
    magic, version, flags, header_len = _FIXED.unpack_from(data)
    end = APPEND_HEADER_OFFSET + header_len
    if (magic, version, flags) != _READABLE or end > len(data):
        return None
    if header_len > APPEND_HEADER_LEN_MAX:
        return None
    try:
        return pb.AppendHeader.FromString(bytes(data[APPEND_HEADER_OFFSET:end]))
    except DecodeError:
        return None


@functools.lru_cache(1024)
def _plain(event_count: int) -> Change:
    return Change(event_count)


def _updates(header: pb.AppendHeader) -> tuple[AttributeUpdate, ...] | None:
    updates = []
    for one in header.attribute_updates:
        verb = _VERBS.get(one.verb)
        if verb is None or len(one.key) != KEY_LEN:
            return None
        updates.append(
            AttributeUpdate(
                key=UUID(bytes=one.key), verb=verb, value=one.value, expected=one.expected
            )
        )
    return tuple(updates)


def _refuse_core(writer: bytes, updates: Sequence[AttributeUpdate]) -> None:
    keys = [writer] if writer else []
    for key in (*keys, *(one.key.bytes for one in updates)):
        if is_core(key):
            raise RefusedError(
                f"{name_of(AttributeKey(key))} is a core attribute, which only Tierlog sets",
                remedy="Use a key, or a writer id, whose first 8 bytes are not all zero",
                details={"key": str(UUID(bytes=key))},
            )


def check_shape(changes: Sequence[Change | None], condition: AppendCondition | None) -> None:
    """Raise INVALID_ARGUMENT for an append that can't be judged as one.

    ``changes`` are those of its entries. A conditional append, and one with updates, is one entry.
    """
    for one in changes:
        if one is not None and one.writer is not None:
            _check_own_number(one, one.writer)
    has_updates = any(one is not None and one.updates for one in changes)
    if condition is None and not has_updates:
        return
    what = "a conditional append" if condition is not None else "an append with attribute updates"
    if len(changes) != 1:
        raise RefusedError(
            f"{what} of {len(changes)} entries", remedy="Put its events into one entry"
        )
    change = changes[0]
    if change is None:
        raise RefusedError(
            f"{what} whose header can't be read",
            remedy="Send an entry as formats.md has it; raw streams have no attributes",
        )
    last = condition.last_event_number if condition is not None else None
    if last is not None and (change.writer is None or change.event_number <= last):
        writer = UUID(bytes=change.writer) if change.writer else "nobody"
        raise RefusedError(
            f"{what} after event {last} is event {change.event_number} of {writer}",
            remedy="Name the writer in the entry's header, with a number above its last one",
        )


def _check_own_number(change: Change, writer: AttributeKey) -> None:
    """Refuse a number below the first, and an update that changes the number, too."""
    if change.event_number <= NO_EVENT_NUMBER:
        raise RefusedError(
            f"event {change.event_number} of writer {UUID(bytes=writer)}",
            remedy="Number a writer's events from 1",
        )
    if any(one.key.bytes == writer for one in change.updates):
        raise RefusedError(
            f"an entry of writer {UUID(bytes=writer)} that updates the attribute of that key",
            remedy="Update another attribute: this one is the number of the writer's last event",
        )


def changed(
    change: Change, lookup: Lookup, *, last_event_number: int | None = None
) -> dict[AttributeKey, int] | Failed:
    """Check a change and return the values that it sets, but for EVENT_COUNT.

    ``lookup`` is asked for the writer if there is a ``last_event_number``, and for
    ``change.keys_checked``.
    """
    made: dict[AttributeKey, int] = {}
    if change.writer is not None:
        if last_event_number is not None:
            value = lookup(change.writer)
            if (NO_EVENT_NUMBER if value is None else value) != last_event_number:
                return Failed(change.writer, value, f"not {last_event_number}")
        made[change.writer] = change.event_number
    for update in change.updates:
        key = attribute_key(update.key)
        if update.verb is Verb.REPLACE:
            made[key] = update.value
            continue
        value = made[key] if key in made else lookup(key)
        why = _trouble(update, value)
        if why:
            return Failed(key, value, why)
        is_sum = update.verb is Verb.ACCUMULATE
        made[key] = (value or 0) + update.value if is_sum else update.value
    return made


def _trouble(update: AttributeUpdate, value: int | None) -> str:
    """Say what is in the way of an update; empty: nothing."""
    verb = update.verb
    if verb is Verb.REPLACE_IF_GREATER and (value is None or update.value <= value):
        return f"not below {update.value}"
    if verb is Verb.REPLACE_IF_EQUALS and value != update.expected:
        return f"not {update.expected}"
    if verb is Verb.REPLACE_IF_ABSENT and value is not None:
        return "there already"
    if verb is Verb.ACCUMULATE and not VALUE_MIN <= (value or 0) + update.value <= VALUE_MAX:
        return f"too far out to add {update.value}"
    return ""


def replayed(change: Change, lookup: Lookup) -> dict[AttributeKey, int]:
    """Return the values that an entry sets which is in the stream: it was checked before it was.

    ``lookup`` is asked for what it adds to. A sum that would leave the values' range, which no
    owner lets in, is not made.
    """
    made: dict[AttributeKey, int] = {}
    if change.writer is not None:
        made[change.writer] = change.event_number
    for update in change.updates:
        key = attribute_key(update.key)
        if update.verb is not Verb.ACCUMULATE:
            made[key] = update.value
            continue
        value = made[key] if key in made else lookup(key)
        if not _trouble(update, value):
            made[key] = (value or 0) + update.value
    return made


def change_in_stream(data: Buffer) -> Change | None:
    """Read what an entry changes that is in its stream; None: nothing."""
    try:
        return change_of(data)
    except RefusedError:
        return None


def failed_check(failed: Failed, *, writer: AttributeKey | None) -> RefusedError:
    """Say that an attribute was otherwise than an append wants it."""
    key, value = UUID(bytes=failed.key), failed.value
    details = {"key": str(key)}
    if value is not None:
        details["value"] = str(value)
    if failed.key == writer:
        number = NO_EVENT_NUMBER if value is None else value
        details["event_number"] = str(number)
        what = f"the last event of writer {key} is {number}"
        remedy = "Drop the events up to that number, they are in the stream; go on behind it"
    else:
        what = f"attribute {key} is {'not there' if value is None else value}"
        remedy = "Read the attribute and decide anew"
    return RefusedError(
        f"nothing was appended: {what}, {failed.why}" if failed.why else what,
        reason=Reason.CONDITIONAL_APPEND_FAILED,
        remedy=remedy,
        details=details,
    )


def failed_position(wanted: Position | Edge, last: Position | None) -> RefusedError:
    """Say that the stream's last entry is another one than an append wants."""
    found = Edge.EARLIEST.value if last is None else str(last)
    return RefusedError(
        f"nothing was appended: the stream's last entry is {found}, not {wanted}",
        reason=Reason.CONDITIONAL_APPEND_FAILED,
        remedy="Read what came after, and decide anew",
        details={"last_position": found},
    )
