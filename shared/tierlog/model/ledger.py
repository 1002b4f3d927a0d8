"""A ledger as its metadata describes it (seeds/003; protocols.md section 1).

Owns the states of a ledger, their transitions, and which nodes hold which entry. Does not own
how the metadata is stored: ``tierlog.format.ledger_metadata`` does.

Invariants:
    * ``ack_quorum <= write_quorum <= ensemble_size``; every segment names that many nodes.
    * Segments are ordered by first entry id, and the first begins with entry 0.
    * A closed ledger never changes again.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Final, Self

from tierlog.model.errors import RefusedError
from tierlog.model.ids import INT64_MAX, NO_ENTRY, EntryId, NodeId
from tierlog.model.replication import EntryRange


class LedgerState(IntEnum):
    """BookKeeper's states and their numbers."""

    OPEN = 1
    IN_RECOVERY = 2
    CLOSED = 3


LEDGER_TRANSITIONS: Final[Mapping[LedgerState, frozenset[LedgerState]]] = {
    LedgerState.OPEN: frozenset({LedgerState.OPEN, LedgerState.IN_RECOVERY, LedgerState.CLOSED}),
    LedgerState.IN_RECOVERY: frozenset({LedgerState.IN_RECOVERY, LedgerState.CLOSED}),
    LedgerState.CLOSED: frozenset({LedgerState.CLOSED}),
}


class DigestType(Enum):
    """How a run is authenticated, with BookKeeper's numbers."""

    CRC32 = 1
    HMAC = 2
    CRC32C = 3
    DUMMY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """From ``first_entry_id`` on, entries lie on ``ensemble``."""

    first_entry_id: EntryId
    ensemble: tuple[NodeId, ...]


# Keys of the custom metadata that Tierlog writes.
KEY_APPLICATION: Final = "application"
KEY_COMPONENT: Final = "component"
KEY_STREAM: Final = "tierlog/stream"
KEY_INCARNATION: Final = "tierlog/incarnation"
KEY_OWNER_EPOCH: Final = "tierlog/owner-epoch"
KEY_STRIPE_ENTRIES: Final = "tierlog/stripe-entries"
KEY_BLOCK_SIZE: Final = "tierlog/block-size"
DIGITS_MAX: Final = 18
"""The most that a number among them has."""
KEY_RAW: Final = "tierlog/raw"
KEY_KEY_ID: Final = "tierlog/key-id"
"""Which key signs the runs of a ledger of digest type HMAC; never the key itself."""
KEY_LOST: Final = "tierlog/lost"
"""Entries whose loss was accepted: ``first-last``, ascending, with commas between ranges."""
KEY_LOSS_ACCEPTED: Final = "tierlog/loss-accepted"
"""Who said, and when (ms since 1970), that recovery may give up what no node can give."""
KEY_WRITER: Final = "tierlog/writer"
"""UUID of the one writer that a bare ledger ever has."""
KEY_STAGED_FOR: Final = "tierlog/staged-for"
KEY_STAGED_INCARNATION: Final = "tierlog/staged-incarnation"
KEY_STAGED_BY: Final = "tierlog/staged-by"
KEY_STAGED_NUMBER: Final = "tierlog/staged-number"
"""Stream, writer and number that a staging ledger was made for (``tierlog.model.staging``)."""
KEY_DELETION: Final = "tierlog/deletion"
KEY_DELETED_MS: Final = "tierlog/deleted-ms"
"""Who deleted a bare ledger, and when: in the record of its deletion alone."""

COMPONENT_BARE: Final = b"ledger"
COMPONENT_STREAM: Final = b"stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMetadata:
    """BookKeeper's ``LedgerMetadataFormat`` as a value. ``length`` counts payload bytes only."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    segments: tuple[Segment, ...]
    state: LedgerState = LedgerState.OPEN
    length: int = 0
    last_entry_id: EntryId = NO_ENTRY
    digest_type: DigestType | None = DigestType.CRC32C
    password: bytes | None = None
    ctime_ms: int | None = None
    custom: Mapping[str, bytes] = field(default_factory=dict)
    ctoken: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.ack_quorum <= self.write_quorum <= self.ensemble_size:
            raise RefusedError(
                f"quorums {self.ensemble_size}/{self.write_quorum}/{self.ack_quorum} do not fit",
                remedy="They need ack <= write <= ensemble, and at least 1",
            )

    @property
    def is_bare(self) -> bool:
        """Whether the ledger belongs to no stream."""
        return KEY_STREAM not in self.custom

    @property
    def is_staging(self) -> bool:
        """Whether the ledger was made for a stream that it does not belong to (ADR-0031)."""
        return self.is_bare and KEY_STAGED_FOR in self.custom

    @property
    def stripe_entries(self) -> int:
        """Entries that go to the same nodes before the next stripe; 1 is BookKeeper's striping."""
        return int(self.custom.get(KEY_STRIPE_ENTRIES, b"1"))

    @property
    def named_nodes(self) -> frozenset[NodeId]:
        """Every node that an ensemble of the ledger names."""
        return frozenset(node for segment in self.segments for node in segment.ensemble)

    def write_set(self, entry_id: EntryId) -> tuple[NodeId, ...]:
        """Return the nodes that hold ``entry_id``, in order of preference."""
        segment = self.segment_of(entry_id)
        stripe = entry_id // self.stripe_entries
        return tuple(
            segment.ensemble[(stripe + step) % self.ensemble_size]
            for step in range(self.write_quorum)
        )

    @property
    def covering(self) -> int:
        """So many nodes of a write set leave no ack quorum without one of them."""
        return self.write_quorum - self.ack_quorum + 1

    def is_covered(self, answered: Container[NodeId]) -> bool:
        """Tell whether no ack quorum of the last segment is without a node that answered."""
        ensemble = self.segments[-1].ensemble
        size = len(ensemble)
        return all(
            sum(ensemble[(start + step) % size] in answered for step in range(self.write_quorum))
            >= self.covering
            for start in range(size)
        )

    def segment_of(self, entry_id: EntryId) -> Segment:
        """Return the last segment that begins at or before ``entry_id``."""
        return next(s for s in reversed(self.segments) if s.first_entry_id <= entry_id)

    def segment_end(self, entry_id: EntryId) -> EntryId:
        """Return the last entry that may lie where ``entry_id`` does."""
        following = (s.first_entry_id for s in self.segments if s.first_entry_id > entry_id)
        return EntryId(next(following, INT64_MAX) - 1)

    @property
    def lost(self) -> tuple[EntryRange, ...]:
        """Entries whose loss was accepted: ranges, both ends included, ascending and apart."""
        text = self.custom.get(KEY_LOST, b"").decode("ascii")
        pairs = (one.partition("-")[::2] for one in text.split(",") if one)
        return tuple((EntryId(int(first)), EntryId(int(last))) for first, last in pairs)

    def with_tail(self, segments: tuple[Segment, ...]) -> Self:
        """Return the ledger with the last segment as recovery left it.

        The segments before it stay as they are here: auto-recovery may have changed them since.
        """
        *before, last = self.segments
        tail = tuple(s for s in segments if s.first_entry_id >= last.first_entry_id)
        assert tail, "recovery never takes the last segment away"
        assert tail[0].first_entry_id == last.first_entry_id
        return replace(self, segments=(*before, *tail))

    def with_loss(self, lost: Sequence[EntryRange]) -> Self:
        """Return the ledger with the entries on record that are given up."""
        ranges = ",".join(f"{first}-{last}" for first, last in lost)
        return replace(self, custom={**self.custom, KEY_LOST: ranges.encode()})

    def moved_to(
        self, state: LedgerState, *, last_entry_id: EntryId = NO_ENTRY, length: int = 0
    ) -> Self:
        """Return the ledger in ``state``; repeating a transition is legal, skipping one raises."""
        if state not in LEDGER_TRANSITIONS[self.state]:
            raise RefusedError(
                f"a ledger can't go from {self.state.name} to {state.name}",
                remedy="Read the ledger's metadata again and decide anew",
            )
        if self.state is LedgerState.CLOSED:
            return self
        if state is LedgerState.CLOSED:
            return replace(self, state=state, last_entry_id=last_entry_id, length=length)
        return replace(self, state=state)
