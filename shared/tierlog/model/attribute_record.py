"""What is published of a stream's attributes, and how it moves on (protocols.md section 4).

Owns the record's value and the pure steps: the next checkpoint, the roots that are kept of ledgers
before, which objects they need. Does not own bytes, objects, nor who may publish.

Invariants:
    * ``newest`` only moves forward, and so does ``generation``.
    * Every object that a root of the record needs is named: inline, or by a chunk's list.
    * What no root needs is not named: objects wholly below every root that begins behind them.
    * At most ``ENDS_MAX`` roots of former ledgers are kept, the oldest among them, each the newest
      of its ledger; none where nothing is to be offloaded.
    * What was given up stays so: a rebuild tells the same whenever it is made.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Self
from uuid import UUID

from tierlog.model.attributes import (
    AttributeKey,
    Checkpoint,
    IndexChunk,
    IndexObject,
    IndexRoot,
)
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position
from tierlog.model.replication import EntryRange

ENDS_MAX: Final = 16
NO_INDEX: Final = IndexRoot()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRoot:
    """A checkpoint but for its objects, which the record has once for all."""

    through: Position | None = None
    core: Mapping[AttributeKey, int] = field(default_factory=dict)
    root: IndexRoot = NO_INDEX

    def is_at(self, other: "KeptRoot") -> bool:
        """Tell whether this is the same version, as of the same entry."""
        return (self.through, self.root) == (other.through, other.root)

    def needs(self, start: int, end: int) -> bool:
        """Tell whether the bytes from ``start`` to ``end`` may hold a node of it."""
        return bool(self.root.root_length) and start < self.root.end and self.root.start < end


class KeyRange(NamedTuple):
    """Keys from the first to the last, both included."""

    first: AttributeKey
    last: AttributeKey


class LostKeys(NamedTuple):
    """Attributes that could not be read as of an entry; those of them are what later entries say.

    Entries that were in the stream when they were given up are counted in, from nothing on.
    """

    through: Position
    keys: KeyRange


class GivenUp(NamedTuple):
    """Entries of a ledger that no tier gives, both ends included: they are not counted in."""

    ledger_id: LedgerId
    first: EntryId
    last: EntryId


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributesRecord:
    """What a stream's znode of attributes holds."""

    incarnation: UUID
    generation: int = 0
    newest: KeptRoot = KeptRoot()
    ends: tuple[KeptRoot, ...] = ()
    chunks: tuple[IndexChunk, ...] = ()
    objects: tuple[IndexObject, ...] = ()
    loss_accepted: str = ""
    """Who lets the owner give up what no tier gives, and when; empty: nobody."""
    given_up: tuple[GivenUp, ...] = ()
    lost_keys: tuple[LostKeys, ...] = ()

    def __post_init__(self) -> None:
        order = [one.through for one in (*self.ends, self.newest) if one.through is not None]
        assert order == sorted(set(order)), "roots are kept in the order of the stream"
        bounds = [(one.start, one.end) for one in self.chunks]
        bounds += [(one.start, one.end) for one in self.objects]
        assert all(start < end for start, end in bounds), "objects hold something"
        flat = [offset for pair in bounds for offset in pair]
        assert flat == sorted(flat), "objects lie one behind the other"

    @property
    def roots(self) -> tuple[KeptRoot, ...]:
        """All roots, ascending."""
        return (*self.ends, self.newest)

    @property
    def end(self) -> int:
        """Where the next object begins."""
        return self.newest.root.end

    @property
    def checkpoint(self) -> Checkpoint:
        """The newest one."""
        return self.checkpoint_of(self.newest)

    def checkpoint_of(self, kept: KeptRoot) -> Checkpoint:
        """Return one of the roots, with what is needed to read it."""
        return Checkpoint(
            through=kept.through,
            core=kept.core,
            root=kept.root,
            chunks=tuple(one for one in self.chunks if kept.needs(one.start, one.end)),
            objects=tuple(one for one in self.objects if kept.needs(one.start, one.end)),
            generation=self.generation,
        )

    def needs(self, start: int, end: int) -> bool:
        """Tell whether any of the roots needs these bytes."""
        return any(one.needs(start, end) for one in self.roots)

    def published(self, after: KeptRoot, made: IndexObject | None, *, keep_ends: bool) -> Self:
        """Return the record with another newest root, behind the one that is there."""
        before = self.newest
        assert before.through is None or (
            after.through is not None and before.through <= after.through
        ), "a checkpoint never goes back"
        ends = self.ends
        if keep_ends and before.through is not None and _ledger(before) != _ledger(after):
            ends = (*ends, before)
        objects = self.objects if made is None else (*self.objects, made)
        moved = replace(
            self,
            newest=after,
            ends=thinned(ends) if keep_ends else (),
            objects=objects,
            loss_accepted="",
        )
        return moved.trimmed()

    def made_anew(
        self,
        after: KeptRoot,
        *,
        good: Position | None,
        lost: Sequence[KeyRange],
    ) -> Self:
        """Return the record with another index as of the same entry: that of before is damaged.

        Roots behind ``good`` may be, too. An admin's consent stays: entries may be in the way yet.
        """
        through = self.newest.through
        assert through is not None
        assert after.through == through
        ends: tuple[KeptRoot, ...] = ()
        if good is not None:
            ends = tuple(one for one in self.ends if one.through and one.through <= good)
        anew = replace(
            self,
            newest=after,
            ends=ends,
            lost_keys=(*self.lost_keys, *(LostKeys(through, keys) for keys in lost)),
        )
        return anew.trimmed()

    def without_entries(self, lost: GivenUp) -> Self:
        """Return the record with entries given up; ranges that touch become one."""
        first, last, others = lost.first, lost.last, []
        for one in self.given_up:
            if one.ledger_id == lost.ledger_id and one.first <= last + 1 and first <= one.last + 1:
                first, last = min(first, one.first), max(last, one.last)
            else:
                others.append(one)
        kept = sorted([*others, GivenUp(lost.ledger_id, first, last)])
        return replace(self, given_up=tuple(kept))

    def given_up_of(self, ledger_id: LedgerId) -> tuple[EntryRange, ...]:
        """Return what was given up of one ledger, ascending."""
        return tuple((one.first, one.last) for one in self.given_up if one.ledger_id == ledger_id)

    def without_ends(self, before: Position) -> Self:
        """Return the record without roots below ``before``: a manifest has one that is newer."""
        ends = tuple(one for one in self.ends if one.through is not None and one.through >= before)
        return replace(self, ends=ends).trimmed()

    def trimmed(self) -> Self:
        """Return the record without the objects that no root needs."""
        return replace(
            self,
            chunks=tuple(one for one in self.chunks if self.needs(one.start, one.end)),
            objects=tuple(one for one in self.objects if self.needs(one.start, one.end)),
        )

    def closed(self, chunk: IndexChunk) -> Self:
        """Return the record with a chunk's list in the place of its objects."""
        behind = tuple(one for one in self.objects if one.start >= chunk.end)
        return replace(self, chunks=(*self.chunks, chunk), objects=behind).trimmed()

    def raised(self) -> Self:
        """Return the record as of the next generation: flushes of the one before are refused."""
        return replace(self, generation=self.generation + 1)

    def chunk_is_due(self, *, chunk_bytes: int, chunk_objects: int) -> bool:
        """Tell whether the objects that are named inline are a chunk."""
        length = sum(one.length for one in self.objects)
        return length >= chunk_bytes or len(self.objects) >= chunk_objects

    def within(self, last: LedgerId) -> Checkpoint | None:
        """Return the newest checkpoint of which no entry lies behind a ledger; None: there is none.

        A restore that ends with that ledger may take it.
        """
        fit = [
            one for one in self.roots if one.through is not None and one.through.ledger_id <= last
        ]
        return self.checkpoint_of(fit[-1]) if fit else None


def record_of(
    incarnation: UUID,
    checkpoint: Checkpoint,
    *,
    generation: int,
    losses: AttributesRecord | None = None,
) -> AttributesRecord:
    """Return the record of a stream that has this checkpoint alone, and what ``losses`` tells."""
    return AttributesRecord(
        incarnation=incarnation,
        generation=generation,
        newest=kept_of(checkpoint),
        chunks=checkpoint.chunks,
        objects=checkpoint.objects,
        given_up=losses.given_up if losses is not None else (),
        lost_keys=losses.lost_keys if losses is not None else (),
    )


def losses_of(named: AttributesRecord | None) -> AttributesRecord | None:
    """Return what a record tells of what was given up, without its checkpoint; None: nothing."""
    if named is None or not (named.given_up or named.lost_keys):
        return None
    generation = named.generation + 1
    return record_of(named.incarnation, Checkpoint(), generation=generation, losses=named)


def kept_of(checkpoint: Checkpoint) -> KeptRoot:
    """Return a checkpoint without its objects."""
    return KeptRoot(through=checkpoint.through, core=checkpoint.core, root=checkpoint.root)


def thinned(ends: Sequence[KeptRoot], count_max: int = ENDS_MAX) -> tuple[KeptRoot, ...]:
    """Return at most so many roots: those whose neighbours are nearest go, the oldest stays.

    The oldest is what the next manifest can name first, the newest is newly there.
    """
    kept = list(ends)
    while len(kept) > count_max:
        inner = range(1, len(kept) - 1)
        kept.pop(min(inner, key=lambda at: _ledger(kept[at + 1]) - _ledger(kept[at - 1])))
    return tuple(kept)


def holds_back(
    record: AttributesRecord | None, named: Position | None, end: Position, *, is_copied: bool
) -> str | None:
    """Say why a ledger must stay for the sake of attributes; None: it need not.

    ``end``: its last entry; ``named``: the checkpoint that the manifest names; ``is_copied``: the
    ledger is in tier 2, so that a restore begins with it.
    """
    if record is None:
        return None
    through = record.newest.through
    if through is None or through < end:
        seen = "none" if through is None else str(through)
        return f"the newest checkpoint of the stream's attributes ({seen}) lies before its end"
    if is_copied and (named is None or named < end):
        seen = "none" if named is None else str(named)
        return f"the checkpoint of attributes that the manifest names ({seen}) lies before its end"
    return None


def covered(ledgers: Iterable[tuple[LedgerId, bool]]) -> LedgerId | None:
    """Return the last ledger before which, and with which, all have a copy; None: there is none.

    ``ledgers``: ids in the order of the list, each with whether its copy is complete.
    """
    last: LedgerId | None = None
    for ledger_id, has_copy in ledgers:
        if not has_copy:
            break
        last = ledger_id
    return last


def _ledger(kept: KeptRoot) -> int:
    return kept.through.ledger_id if kept.through is not None else -1
