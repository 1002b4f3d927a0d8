"""Which entries of which ledgers a read wants, and how they are cut into tasks (pure).

Owns bounds, and what makes a read impossible: a range that was trimmed, a ledger that is not
where it would have to be. Does not own where ledgers are known from (``bucket``).

Invariants:
    * The parts of a plan hold every wanted entry exactly once, in order.
    * A part for the object store is whole blocks of one ledger, but at the ends of what is wanted.
    * A direct read ends where the stream's tail begins that has no copy yet, whatever the filter;
      any other ledger that is wanted and is not there is ``RefusedError``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple
from uuid import UUID

from tierlog.format.index import BlockRange
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId, StreamName
from tierlog.model.manifest import ManifestHead, ManifestLedger
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.model.position import Position

_INT64_MIN: Final = -(2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What rows are wanted; numbers and times from ``min`` to ``max``, both included."""

    streams: frozenset[str] | None = None
    ledgers: frozenset[int] | None = None
    ledger_min: int = 0
    ledger_max: int = INT64_MAX
    entry_min: int = 0
    entry_max: int = INT64_MAX
    ms_min: int = _INT64_MIN
    ms_max: int = INT64_MAX

    @property
    def has_times(self) -> bool:
        """Whether rows without a time are not wanted."""
        return (self.ms_min, self.ms_max) != (_INT64_MIN, INT64_MAX)

    def wants_stream(self, stream: str) -> bool:
        """Tell whether any row of a stream may be wanted."""
        return self.streams is None or stream in self.streams

    def entries_of(self, ledger_id: int, last_entry_id: int) -> tuple[int, int] | None:
        """Return the first and last entry of a ledger that are wanted; None: none is."""
        listed = self.ledgers is None or ledger_id in self.ledgers
        if not listed or not self.ledger_min <= ledger_id <= self.ledger_max:
            return None
        if self.ms_min > self.ms_max:
            return None
        first, last = max(0, self.entry_min), min(last_entry_id, self.entry_max)
        return (first, last) if first <= last else None


ALL: Final = Bounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLedger:
    """A complete copy in the object store."""

    stream: StreamName
    raw: bool
    ledger_id: LedgerId
    uuid: UUID
    location: Tier2Location
    copy: Tier2Copy | None

    @property
    def data_len(self) -> int:
        """How long its data object is; of one that nothing is known of, longer than any."""
        return INT64_MAX if self.copy is None else self.copy.data_len

    @property
    def needs_comparing(self) -> bool:
        """Whether only a look at all of the copy tells that its payloads are right.

        A single object has a digest of all of it and no other, and an entry of a raw stream none.
        """
        copy = self.copy
        if not self.raw or copy is None or copy.side_len:
            return False
        return self.location.is_single and bool(copy.data_sha256)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePart:
    """Entries of one ledger that one task reads from the object store.

    ``compared``: behind it the whole copy is compared with what was written.
    """

    ledger: StoredLedger
    first_entry_id: EntryId
    last_entry_id: EntryId
    ms_min: int
    ms_max: int
    compared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePart:
    """A range of a stream that one task reads through the readers; ``until`` is not included.

    ``times_asked``: the user wants times, so that a raw stream, which has none, is refused.
    """

    stream: StreamName
    start: Position
    until: Position
    bounds: Bounds
    times_asked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Where in one stream a read begins, and before which position it stops."""

    start: Position | None = None
    end: Position | None = None

    def within(self, ledger_id: int, last_entry_id: int) -> tuple[int, int] | None:
        """Return the first and last entry of a ledger that lie in it; None: none does."""
        first, last = 0, last_entry_id
        if self.start is not None:
            if ledger_id < self.start.ledger_id:
                return None
            if ledger_id == self.start.ledger_id:
                first = self.start.entry_id
        if self.end is not None:
            if ledger_id > self.end.ledger_id:
                return None
            if ledger_id == self.end.ledger_id:
                last = min(last, self.end.entry_id - 1)
        return (first, last) if first <= last else None


def check_range(
    head: ManifestHead, ledgers: Sequence[ManifestLedger], wanted: Range, *, to_the_end: bool
) -> None:
    """Refuse a range that was trimmed, or that the manifest does not have.

    ``to_the_end``: what lies behind the manifest's last ledger can't be read. What offsets write
    for a ledger's end, the next id's first, is a position; so is 0:0 while nothing was trimmed.
    """
    ids = {one.listed.ledger_id: one.listed.last_entry_id for one in ledgers}
    last = max(ids, default=head.trimmed_through)
    ends = {Position(LedgerId(one + 1), EntryId(0)) for one in (*ids, head.trimmed_through)}
    for name, where in (("start", wanted.start), ("end", wanted.end)):
        if where is None or where in ends:
            continue
        what = f"option {name}: stream {head.stream} has no position {where}"
        if where.ledger_id not in ids:
            first = min(ids, default=last)
            if where.ledger_id <= head.trimmed_through or where.ledger_id < first:
                raise RefusedError(
                    f"{what}: it was trimmed, and begins at {first}:0",
                    reason=Reason.TRIMMED,
                    remedy="Read from earliest",
                )
            if where.ledger_id < last or to_the_end:
                raise RefusedError(
                    f"{what} in the bucket, which has ledgers up to {last}",
                    reason=Reason.NO_SUCH_ENTRY,
                    remedy="Offload it first, or read with readMode=auto",
                )
        elif where.entry_id > ids[where.ledger_id] + 1:
            raise RefusedError(
                f"{what}: that ledger ends with entry {ids[where.ledger_id]}",
                reason=Reason.NO_SUCH_ENTRY,
                remedy="List the ledgers: table=ledgers",
            )


def trimmed_end_of(head: ManifestHead) -> Position | None:
    """Return where the newest trimmed ledger ended, or the next id's first; None: none was."""
    if head.trimmed_through < 0:
        return None
    return head.trimmed_end or Position(LedgerId(head.trimmed_through + 1), EntryId(0))


def check_not_trimmed(head: ManifestHead, fixed: Range) -> None:
    """Refuse a range of which entries were trimmed since it was fixed."""
    assert fixed.start is not None
    begins = trimmed_end_of(head)
    if begins is not None and fixed.start < begins:
        raise RefusedError(
            f"stream {head.stream} was trimmed up to {begins}, and is read from {fixed.start}",
            reason=Reason.TRIMMED,
            remedy="Read again, from earliest: retention took it while the read was planned",
            details={"stream": head.stream},
        )


def check_single(name: StreamName, count: int, within: Range) -> None:
    """Refuse a position of a stream that has partitions: each of them has positions of its own."""
    if count != 1 and within != Range():
        raise RefusedError(
            f"option start: stream {name} has {count} partitions, and a position is one of a "
            "single stream",
            reason=Reason.PARTITIONED,
            remedy=f"Read {name}-partition-0 and so on, each with its own, or give times",
        )


def intersection(
    one: tuple[int, int] | None, other: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return what lies in both, ends included."""
    if one is None or other is None:
        return None
    first, last = max(one[0], other[0]), min(one[1], other[1])
    return (first, last) if first <= last else None


def wanted_entries(ledger: ManifestLedger, within: Range, bounds: Bounds) -> tuple[int, int] | None:
    """Return the first and last entry that are wanted of a ledger; None: none is."""
    ledger_id, last = ledger.listed.ledger_id, ledger.listed.last_entry_id
    return intersection(within.within(ledger_id, last), bounds.entries_of(ledger_id, last))


class Wanted(NamedTuple):
    """Entries of one ledger that are wanted, both ends included."""

    ledger: ManifestLedger
    first: int
    last: int


def wanted_of(ledgers: Iterable[ManifestLedger], within: Range, bounds: Bounds) -> list[Wanted]:
    """Return what is wanted of a stream's ledgers, in order."""
    found = []
    for one in ledgers:
        entries = wanted_entries(one, within, bounds)
        if entries is not None:
            found.append(Wanted(one, *entries))
    return found


def behind(ledgers: Sequence[ManifestLedger], within: Range) -> Range:
    """Return what of a range lies behind the last of these ledgers."""
    if not ledgers:
        return within
    last = ledgers[-1].listed
    start = Position(last.ledger_id, EntryId(last.last_entry_id + 1))
    return Range(start=start if within.start is None else max(start, within.start), end=within.end)


def copied_alone(ledgers: Sequence[ManifestLedger], within: Range, bounds: Bounds) -> list[Wanted]:
    """Return what is wanted and lies in the bucket, which ends where its uncopied tail begins.

    Raises where a wanted ledger without a copy lies before one that has one, or before a named
    end. Where the tail begins is the same whatever filter there is: one that takes the ledgers
    behind a hole away makes no tail of it.
    """
    in_range = [one.ledger for one in wanted_of(ledgers, within, ALL)]
    copied = [one.listed.ledger_id for one in in_range if one.copy is not None]
    last = max(copied, default=-1) if within.end is None else INT64_MAX
    wanted = wanted_of(ledgers, within, bounds)
    for one in wanted:
        ledger_id = one.ledger.listed.ledger_id
        if one.ledger.copy is None and ledger_id <= last:
            raise RefusedError(
                f"ledger {ledger_id} is wanted, and the bucket has no copy of it yet",
                reason=Reason.LEDGER_NOT_FOUND,
                remedy="Offload it first, or read with readMode=auto",
                details={"ledger_id": str(ledger_id)},
            )
    return [one for one in wanted if one.ledger.copy is not None]


def cut(
    blocks: Sequence[BlockRange], first: int, last: int, *, bytes_target: int
) -> Iterator[tuple[EntryId, EntryId]]:
    """Cut entries ``first`` to ``last`` into runs of whole blocks of about so many bytes."""
    begin, length = first, 0
    for block in blocks:
        if block.last_entry_id < first or block.first_entry_id > last:
            continue
        if length and length + block.length > bytes_target:
            yield EntryId(begin), EntryId(block.first_entry_id - 1)
            begin, length = block.first_entry_id, 0
        length += block.length
    if length:
        yield EntryId(begin), EntryId(last)


def store_parts(
    ledger: StoredLedger, pieces: Iterable[tuple[EntryId, EntryId]], bounds: Bounds
) -> list[StorePart]:
    """Return a part for each piece; the last of a whole ledger compares it, where need be."""
    found = [
        StorePart(
            ledger=ledger,
            first_entry_id=first,
            last_entry_id=last,
            ms_min=bounds.ms_min,
            ms_max=bounds.ms_max,
        )
        for first, last in pieces
    ]
    if found and ledger.needs_comparing:
        assert ledger.copy is not None
        whole = (0, ledger.copy.entry_count - 1)
        if (found[0].first_entry_id, found[-1].last_entry_id) == whole:
            found[-1] = replace(found[-1], compared=True)
    return found
