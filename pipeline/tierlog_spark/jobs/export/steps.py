"""Which entries each batch of an export takes (pure).

Owns the cutting. Does not own offsets (``tierlog_spark.offsets``), nor the log (``log``).

Invariants:
    * Batches follow each other without a gap, from the log's end to what was readable at the
      beginning.
    * What was trimmed before it was exported is an error, or said; so is a stream made anew, or
      gone, as nobody knows what the one before had.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.position import Position
from tierlog_spark.offsets import BEGINNING, Budget, Offsets, ReadableLedger, advanced_all
from tierlog_spark.planning import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A stream without partitions, as it can be read now."""

    stream: StreamName
    incarnation: UUID
    trimmed_through: int
    ledgers: Sequence[ReadableLedger]

    @property
    def begins(self) -> Position:
        """The first position that retention has left."""
        return Position(LedgerId(self.trimmed_through + 1), EntryId(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a batch takes of one stream; ``stop`` is not included, and lies in its last ledger."""

    stream: StreamName
    start: Position
    stop: Position
    entries: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One batch."""

    start: Offsets
    to: Offsets
    pieces: tuple[Piece, ...]

    @property
    def entries(self) -> int:
        """How many entries it takes."""
        return sum(one.entries for one in self.pieces)

    @property
    def length(self) -> int:
        """How many bytes they have, about."""
        return sum(one.length for one in self.pieces)


def beginning(sources: Sequence[Source], to: Offsets) -> dict[StreamName, Position]:
    """Return where an export goes on whose newest record ends at ``to``.

    What went of a stream before an export first saw it is none of its losses. A partition of which
    the bucket had nothing then begins at 0:0: what came, and was trimmed, meanwhile is one.
    """
    return {**{one.stream: BEGINNING if to else one.begins for one in sources}, **to}


def is_missing_some(sources: Sequence[Source], to: Offsets, *, skip: bool, place: str) -> bool:
    """Tell whether a stream is gone that the newest record has; refuse it unless ``skip``.

    It is a partition that was deleted, or that has no manifest any more, and is told of in each
    run: it goes on where it was, once its manifests come back.
    """
    missing = sorted(to.keys() - {one.stream for one in sources})
    if missing and not skip:
        name = missing[0]
        raise RefusedError(
            f"the bucket has stream {name} no more, and {place} has it up to {to[name]}",
            reason=Reason.NO_SUCH_ENTRY,
            remedy="Export out of the bucket that the export began with, or go on without what is "
            "gone, as long as it is: --skip-trimmed",
            details={"stream": name},
        )
    return bool(missing)


def behind_trimmed(sources: Sequence[Source], start: Offsets) -> dict[StreamName, Position]:
    """Return where it goes on once losses were told, so that nobody is told of them again."""
    return {**start, **{one.stream: max(start[one.stream], one.begins) for one in sources}}


def incarnations_of(
    sources: Sequence[Source], known: Mapping[StreamName, UUID]
) -> dict[StreamName, UUID]:
    """Return of which streams a record's positions are.

    They are still of the one before while one that was made anew has no ledger to compare.
    """
    return {
        **known,
        **{
            one.stream: one.incarnation if one.ledgers else known.get(one.stream, one.incarnation)
            for one in sources
        },
    }


def check_incarnations(
    sources: Sequence[Source], start: Offsets, known: Mapping[StreamName, UUID], place: str
) -> None:
    """Refuse another cluster's stream of the same name: positions don't say what was exported.

    A stream that was deleted and made anew has ledgers behind all of the one before.
    """
    for one in sources:
        before = known.get(one.stream)
        if before is None or before == one.incarnation or not one.ledgers:
            continue
        if one.ledgers[0].ledger_id < start[one.stream].ledger_id:
            raise RefusedError(
                f"{place} has another stream {one.stream}, incarnation {before}, "
                f"and this is {one.incarnation}",
                remedy="Export it to a place of its own",
                details={"stream": one.stream},
            )


def was_lost_unread(
    source: Source, start: Position, known: UUID | None, *, skip: bool, place: str
) -> bool:
    """Tell whether entries are gone that were not exported, or may be; refuse it unless ``skip``.

    ``known``: the stream's incarnation, as the newest record has it.
    """
    if start.ledger_id <= source.trimmed_through:
        what, reason = f"was trimmed up to ledger {source.trimmed_through}", Reason.TRIMMED
    elif source.ledgers and known is not None and known != source.incarnation:
        what, reason = "was deleted and made anew", Reason.NO_SUCH_ENTRY
    elif _is_gone(source.ledgers, start):
        what, reason = f"has lost its ledger {start.ledger_id}", Reason.NO_SUCH_ENTRY
    else:
        return False
    if not skip:
        raise RefusedError(
            f"stream {source.stream} {what}, and {place} has it up to {start}",
            reason=reason,
            remedy="Go on without what is gone: --skip-trimmed",
            details={"stream": source.stream},
        )
    return True


def _is_gone(ledgers: Sequence[ReadableLedger], start: Position) -> bool:
    """Tell whether the ledger that was exported in part is not there, and later ones are.

    Only trimming takes one away, and a restore out of a bucket that had not all of it.
    """
    ids = [one.ledger_id for one in ledgers if one.entry_count]
    return bool(start.entry_id and ids) and start.ledger_id < ids[-1] and start.ledger_id not in ids


def steps(sources: Sequence[Source], start: Offsets, *, batch_bytes: int) -> Iterator[Step]:
    """Iterate over the batches of an export."""
    numbers = {one.stream: [ledger.ledger_id for ledger in one.ledgers] for one in sources}
    while True:
        # A log may have very many ledgers: those behind are not looked at again and again.
        left = {
            one.stream: one.ledgers[bisect_left(numbers[one.stream], start[one.stream].ledger_id) :]
            for one in sources
        }
        to = advanced_all(start, left, Budget(length=batch_bytes))
        pieces = [
            _piece(one.stream, left[one.stream], start[one.stream], to[one.stream])
            for one in sources
        ]
        found = tuple(one for one in pieces if one is not None)
        if not found:
            return
        yield Step(start=start, to=to, pieces=found)
        start = to


def _piece(
    stream: StreamName, ledgers: Sequence[ReadableLedger], start: Position, to: Position
) -> Piece | None:
    within = Range(start=start, end=to)
    first: Position | None = None
    stop, entries, length = start, 0, 0
    for one in ledgers:
        if one.ledger_id > to.ledger_id:
            break
        wanted = within.within(one.ledger_id, one.entry_count - 1)
        if wanted is None:
            continue
        if first is None:
            first = Position(one.ledger_id, EntryId(wanted[0]))
        stop = Position(one.ledger_id, EntryId(wanted[1] + 1))
        count = wanted[1] - wanted[0] + 1
        entries += count
        length += one.length * count // one.entry_count
    if first is None:
        return None
    return Piece(stream=stream, start=first, stop=stop, entries=entries, length=length)
