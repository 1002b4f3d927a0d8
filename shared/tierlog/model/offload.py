"""What is known of a ledger's way to tier 2: PIP-17's context, with the states it implies.

Owns the transition table and the values; ``tierlog.catalog`` stores them by compare-and-set.

Invariants (protocols.md section 3):
    * An attempt's UUID is here before the first byte is uploaded.
    * ``complete`` is true exactly in the states where tier 2 serves reads.
    * A UUID that is replaced goes to ``abandoned`` in the same change, and never comes back.
    * While a copy is repaired, the damaged one stays the ledger's copy, and what is good in it is
      read; the attempt that is to replace it stands beside it.
    * A complete copy that was found damaged is in doubt until another one is in its place, or all
      of it was found sound since; until then the local copy is not deleted in favour of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, NamedTuple, Self
from uuid import UUID

from tierlog.model.errors import RefusedError
from tierlog.model.ids import LedgerId, StreamName


class OffloadState(Enum):
    """Where a ledger's data is, or is going."""

    LOCAL = 1
    OFFLOADING = 2
    COMPLETE = 3
    TIER1_DELETING = 4
    TIER1_DELETED = 5
    REPAIRING = 6
    TRIMMING = 7


_S = OffloadState
TRANSITIONS: Final[Mapping[OffloadState, frozenset[OffloadState]]] = {
    _S.LOCAL: frozenset({_S.LOCAL, _S.OFFLOADING, _S.TRIMMING}),
    _S.OFFLOADING: frozenset({_S.OFFLOADING, _S.COMPLETE, _S.LOCAL, _S.TRIMMING}),
    _S.COMPLETE: frozenset({_S.COMPLETE, _S.TIER1_DELETING, _S.REPAIRING, _S.TRIMMING}),
    _S.TIER1_DELETING: frozenset({_S.TIER1_DELETING, _S.TIER1_DELETED, _S.REPAIRING, _S.COMPLETE}),
    _S.TIER1_DELETED: frozenset({_S.TIER1_DELETED, _S.REPAIRING, _S.TRIMMING}),
    _S.REPAIRING: frozenset({_S.REPAIRING, _S.COMPLETE, _S.TIER1_DELETED, _S.TRIMMING}),
    _S.TRIMMING: frozenset({_S.TRIMMING}),
}
assert set(TRANSITIONS) == set(OffloadState)

READABLE_IN_TIER2: Final = frozenset(
    {_S.COMPLETE, _S.TIER1_DELETING, _S.TIER1_DELETED, _S.REPAIRING}
)
GONE_FROM_TIER1: Final = frozenset({_S.TIER1_DELETING, _S.TIER1_DELETED})

HISTORY_MAX: Final = 10
DOUBT_REMEDY: Final = (
    "Mend it with: tierlog scrub --repair --deep; where all of it is sound, that ends the doubt"
)


class AttemptOutcome(Enum):
    """What became of an attempt; RUNNING also says of one that its worker died with it."""

    RUNNING = 1
    COMPLETE = 2
    FAILED = 3
    ABANDONED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier2Location:
    """Where an attempt's objects lie; kept per attempt, since settings change over the years."""

    driver: str
    endpoint_name: str
    bucket: str
    data_key: str
    index_key: str
    side_key: str

    @property
    def is_single(self) -> bool:
        """Whether one object holds the data and its index."""
        return bool(self.data_key) and self.index_key == self.data_key

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all objects that an attempt writes."""
        keys = (self.data_key, self.index_key, self.side_key)
        return tuple(dict.fromkeys(key for key in keys if key))


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonedAttempt:
    """An attempt whose leftovers are still to be deleted (``swept_ms`` 0: never yet)."""

    uuid: UUID
    location: Tier2Location
    abandoned_ms: int
    swept_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairAttempt:
    """An attempt that is to replace a damaged copy."""

    uuid: UUID
    location: Tier2Location
    worker: str
    started_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """What was found wrong with a complete copy; each time it is, under a ``mark`` of its own."""

    mark: UUID
    found_ms: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """What people may want to know of an attempt. ``ended_ms`` 0: not known to have ended."""

    uuid: UUID
    worker: str
    started_ms: int
    ended_ms: int = 0
    outcome: AttemptOutcome = AttemptOutcome.RUNNING
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier2Copy:
    """What a successful attempt wrote, for the context: lengths in bytes, SHA-256 digests."""

    format_version: int
    data_len: int
    index_len: int
    index_sha256: bytes
    entry_count: int
    block_count: int
    side_len: int = 0
    side_sha256: bytes = b""
    side_header_sha256: bytes = b""
    data_sha256: bytes = b""


class LedgerSample(NamedTuple):
    """The newest ledger id that was seen when leaders had been at work for so long."""

    ledger_id: LedgerId
    progress_ms: int


class CopySeen(NamedTuple):
    """A complete copy, and when leaders had been at work for how long when it was first seen."""

    uuid: UUID
    progress_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerProgress:
    """How long leaders were at work in all, on clocks that never jump.

    ``complete_seen``: when on that clock a ledger was first seen complete with that very copy,
    while its local copy stands; ``closed_seen_ms``: was first seen closed that is its stream's
    last, or was for long. Time during which no leader was at work does not count. ``samples``,
    oldest first.
    """

    progress_ms: int = 0
    complete_seen: Mapping[LedgerId, CopySeen] = field(default_factory=dict)
    closed_seen_ms: Mapping[LedgerId, int] = field(default_factory=dict)
    samples: tuple[LedgerSample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadContext:
    """A ledger's context as a value (seeds/000: uuid, complete, deleted, time of success)."""

    stream: StreamName
    incarnation: UUID
    ledger_id: LedgerId
    state: OffloadState = OffloadState.LOCAL
    uuid: UUID | None = None
    complete: bool = False
    bookkeeper_deleted: bool = False
    timestamp_ms: int = 0
    location: Tier2Location | None = None
    copy: Tier2Copy | None = None
    abandoned: tuple[AbandonedAttempt, ...] = ()
    attempt_count: int = 0
    attempt_started_ms: int = 0
    last_error: str = ""
    last_error_ms: int = 0
    last_worker: str = ""
    repair: RepairAttempt | None = None
    history: tuple[PastAttempt, ...] = ()
    """The newest ``HISTORY_MAX`` attempts, oldest first: for people, never for a decision."""
    doubt: Doubt | None = None
    """Of the complete copy; None: nothing was found wrong with it."""

    def moved_to(self, state: OffloadState) -> Self:
        """Return the context in ``state``, or raise ``RefusedError`` on an illegal step."""
        if state not in TRANSITIONS[self.state]:
            raise RefusedError(
                f"ledger {self.ledger_id} can't go from {self.state.name} to {state.name}",
                remedy="Read the ledger's context again and decide anew",
            )
        return replace(self, state=state)

    def attempt_begun(
        self, *, uuid: UUID, location: Tier2Location, worker: str, now_ms: int
    ) -> Self:
        """Return the context with a fresh attempt; the one before it, if any, is abandoned.

        Raises ``RefusedError`` when it was begun before, and another one came since.
        """
        self._check_fresh(uuid)
        abandoned = self.abandoned
        if self.uuid is not None:
            assert self.location is not None
            given_up = AbandonedAttempt(uuid=self.uuid, location=self.location, abandoned_ms=now_ms)
            abandoned = (*abandoned, given_up)
        return replace(
            self.moved_to(OffloadState.OFFLOADING),
            uuid=uuid,
            location=location,
            abandoned=abandoned,
            attempt_count=self.attempt_count + 1,
            attempt_started_ms=now_ms,
            last_worker=worker,
            history=(
                *self._ended(self.uuid, AttemptOutcome.ABANDONED, now_ms),
                PastAttempt(uuid=uuid, worker=worker, started_ms=now_ms),
            )[-HISTORY_MAX:],
        )

    def _check_fresh(self, uuid: UUID) -> None:
        """Refuse to begin what is abandoned already: its objects are deleted, whatever it is else.

        The answer to its beginning was lost, and before that was read back another one came.
        """
        if self.names(uuid):
            raise RefusedError(
                f"attempt {uuid} of ledger {self.ledger_id} was superseded before it knew that it "
                "had begun",
                remedy="Drop out; the attempt is cleaned up by others",
            )

    def _ended(
        self, uuid: UUID | None, outcome: AttemptOutcome, now_ms: int, error: str = ""
    ) -> tuple[PastAttempt, ...]:
        """Return the history with that attempt ended, if it was running."""
        return tuple(
            replace(one, ended_ms=now_ms, outcome=outcome, error=error)
            if one.uuid == uuid and one.outcome is AttemptOutcome.RUNNING
            else one
            for one in self.history
        )

    def failed(self, uuid: UUID, *, error: str, now_ms: int) -> Self:
        """Return the context with what went wrong with that attempt."""
        history = self._ended(uuid, AttemptOutcome.FAILED, now_ms, error)
        return replace(self, last_error=error, last_error_ms=now_ms, history=history)

    def tells_failure(self, uuid: UUID, error: str) -> bool:
        """Tell whether ``failed`` with these would say nothing new."""
        running = any(
            one.uuid == uuid and one.outcome is AttemptOutcome.RUNNING for one in self.history
        )
        return self.last_error == error and not running

    def attempt_given_up(self, uuid: UUID, *, now_ms: int) -> Self:
        """Return the context without that attempt, which is abandoned with none in its place."""
        if self.uuid != uuid or self.state is not OffloadState.OFFLOADING:
            raise RefusedError(
                f"attempt {uuid} of ledger {self.ledger_id} is not the one that goes on",
                remedy="Read the ledger's context again and decide anew",
            )
        assert self.location is not None
        given_up = AbandonedAttempt(uuid=uuid, location=self.location, abandoned_ms=now_ms)
        return replace(
            self.moved_to(OffloadState.LOCAL),
            uuid=None,
            location=None,
            abandoned=(*self.abandoned, given_up),
            history=self._ended(uuid, AttemptOutcome.ABANDONED, now_ms),
        )

    def attempt_completed(self, *, uuid: UUID, copy: Tier2Copy, now_ms: int) -> Self:
        """Return the context complete; raises ``RefusedError`` when ``uuid`` was superseded."""
        if self.uuid != uuid:
            raise RefusedError(
                f"attempt {uuid} of ledger {self.ledger_id} was superseded by {self.uuid}",
                remedy="Drop out; the attempt is cleaned up by its successor",
            )
        return replace(
            self.moved_to(OffloadState.COMPLETE),
            complete=True,
            timestamp_ms=now_ms,
            copy=copy,
            doubt=None,
            last_error="",
            history=self._ended(uuid, AttemptOutcome.COMPLETE, now_ms),
        )

    def doubted(self, uuid: UUID, doubt: Doubt) -> Self:
        """Return the context with what is wrong with that copy; as it is, unless it is complete.

        A local deletion that was begun is called off: until it is ended the local copy stands.
        """
        if self.uuid != uuid or not self.complete:
            return self
        begun = self.state is OffloadState.TIER1_DELETING
        kept = self.moved_to(OffloadState.COMPLETE) if begun else self
        return replace(kept, doubt=doubt)

    def is_doubted_by(self, mark: UUID) -> bool:
        """Tell whether that is the last thing which was found wrong with the copy."""
        return self.doubt is not None and self.doubt.mark == mark

    def found_sound(self, mark: UUID) -> Self:
        """Return the context without that doubt; one that came since stays."""
        return replace(self, doubt=None) if self.is_doubted_by(mark) else self

    def repair_begun(
        self, *, damaged: UUID, uuid: UUID, location: Tier2Location, worker: str, now_ms: int
    ) -> Self:
        """Return the context with an attempt beside the damaged copy, which stays readable.

        An attempt before it that was to repair the same copy is abandoned. A local copy that is
        about to be deleted, and stands, is kept from then on.
        """
        self._check_fresh(uuid)
        if self.uuid != damaged or not self.complete:
            raise RefusedError(
                f"attempt {damaged} of ledger {self.ledger_id} is not its complete copy",
                remedy="Read the ledger's context again and decide anew",
            )
        before = self._without_repair(AttemptOutcome.ABANDONED, now_ms)
        past = PastAttempt(uuid=uuid, worker=worker, started_ms=now_ms)
        return replace(
            before.moved_to(OffloadState.REPAIRING),
            repair=RepairAttempt(uuid=uuid, location=location, worker=worker, started_ms=now_ms),
            attempt_count=self.attempt_count + 1,
            last_worker=worker,
            history=(*before.history, past)[-HISTORY_MAX:],
        )

    def repair_completed(self, *, uuid: UUID, copy: Tier2Copy, now_ms: int) -> Self:
        """Return the context with the new copy; the damaged one is abandoned in the same change."""
        repair = self._own_repair(uuid)
        assert self.uuid is not None
        assert self.location is not None
        damaged = AbandonedAttempt(uuid=self.uuid, location=self.location, abandoned_ms=now_ms)
        return replace(
            self._repaired(),
            uuid=uuid,
            location=repair.location,
            copy=copy,
            timestamp_ms=now_ms,
            abandoned=(*self.abandoned, damaged),
            doubt=None,
            last_error="",
            history=self._ended(uuid, AttemptOutcome.COMPLETE, now_ms),
        )

    def repair_given_up(self, uuid: UUID, *, error: str, now_ms: int) -> Self:
        """Return the context as it was before the repair, whose attempt is abandoned.

        Its copy is in doubt, whoever began: nothing else is repaired.
        """
        self._own_repair(uuid)
        without = self._without_repair(AttemptOutcome.FAILED, now_ms, error)
        return replace(
            without._repaired(),  # noqa: SLF001
            last_error=error,
            last_error_ms=now_ms,
            doubt=self.doubt or Doubt(mark=uuid, found_ms=now_ms, cause=error),
        )

    def _own_repair(self, uuid: UUID) -> RepairAttempt:
        if self.state is not OffloadState.REPAIRING or self.repair is None:
            raise RefusedError(
                f"ledger {self.ledger_id} is {self.state.name}, nothing is being repaired",
                remedy="Drop out; the attempt is cleaned up by others",
            )
        if self.repair.uuid != uuid:
            raise RefusedError(
                f"repair {uuid} of ledger {self.ledger_id} was superseded by {self.repair.uuid}",
                remedy="Drop out; the attempt is cleaned up by others",
            )
        return self.repair

    def _repaired(self) -> Self:
        """Return the context in the state that it had before the repair."""
        gone = self.bookkeeper_deleted
        after = self.moved_to(OffloadState.TIER1_DELETED if gone else OffloadState.COMPLETE)
        return replace(after, repair=None)

    def _without_repair(self, outcome: AttemptOutcome, now_ms: int, error: str = "") -> Self:
        """Return the context whose attempt to repair, if there is one, is abandoned."""
        if self.repair is None:
            return self
        uuid, location = self.repair.uuid, self.repair.location
        left = AbandonedAttempt(uuid=uuid, location=location, abandoned_ms=now_ms)
        return replace(
            self,
            repair=None,
            abandoned=(*self.abandoned, left),
            history=self._ended(uuid, outcome, now_ms, error),
        )

    def swept_at(self, uuid: UUID) -> int | None:
        """When an abandoned attempt was last swept (0: never); None when it isn't abandoned."""
        return next((one.swept_ms for one in self.abandoned if one.uuid == uuid), None)

    def is_own(self, uuid: UUID) -> bool:
        """Tell whether an attempt is the newest, or repairs."""
        return self.uuid == uuid or (self.repair is not None and self.repair.uuid == uuid)

    def names(self, uuid: UUID) -> bool:
        """Tell whether an attempt is still known here: newest, repairing, or abandoned."""
        return self.is_own(uuid) or self.swept_at(uuid) is not None

    def attempt_swept(self, *, uuid: UUID, now_ms: int) -> Self:
        """Return the context with that abandoned attempt swept just now."""
        swept = tuple(
            replace(one, swept_ms=now_ms) if one.uuid == uuid else one for one in self.abandoned
        )
        return replace(self, abandoned=swept)

    def attempt_struck_off(self, uuid: UUID) -> Self:
        """Return the context without that abandoned attempt."""
        return replace(self, abandoned=tuple(one for one in self.abandoned if one.uuid != uuid))

    @property
    def lacks_sound_copy(self) -> bool:
        """Whether what other attempts left may be all that there is of a ledger that stays."""
        if self.state is OffloadState.TRIMMING:
            return False
        return not self.complete or self.doubt is not None or self.repair is not None

    def in_tier1_deletion(self, uuid: UUID) -> bool:
        """Tell whether the local copy is being, or was, deleted in favour of that attempt."""
        return self.uuid == uuid and self.state in GONE_FROM_TIER1

    def tier1_deletion_begun(self, uuid: UUID) -> Self:
        """Return the context in TIER1_DELETING; refused unless that attempt is complete.

        Refused too while that copy is in doubt: the local one may be all that is good.
        """
        if self.uuid != uuid or not self.complete:
            raise RefusedError(
                f"attempt {uuid} of ledger {self.ledger_id} is not its complete copy",
                remedy="Read the ledger's context again and decide anew",
            )
        self.check_not_doubted()
        return self.moved_to(OffloadState.TIER1_DELETING)

    def check_not_doubted(self) -> None:
        """Raise ``RefusedError`` while the copy in tier 2 is in doubt."""
        if self.doubt is not None:
            raise RefusedError(
                f"ledger {self.ledger_id} keeps its local copy, since the one in tier 2 was found "
                f"damaged: {self.doubt.cause}",
                remedy=DOUBT_REMEDY,
            )

    def trimming_begun(self, *, now_ms: int) -> Self:
        """Return the context as retention leaves it: every attempt is to be deleted."""
        trimming = self.moved_to(OffloadState.TRIMMING)
        if self.state is OffloadState.TRIMMING:
            return trimming
        trimming = trimming._without_repair(AttemptOutcome.ABANDONED, now_ms)  # noqa: SLF001
        abandoned = trimming.abandoned
        if self.uuid is not None:
            assert self.location is not None
            last = AbandonedAttempt(uuid=self.uuid, location=self.location, abandoned_ms=now_ms)
            abandoned = (*abandoned, last)
        return replace(
            trimming,
            uuid=None,
            location=None,
            copy=None,
            complete=False,
            abandoned=abandoned,
            doubt=None,
        )

    def trimmed_locally(self) -> Self:
        """Return the context of a trimmed ledger whose copy in tier 1 is gone."""
        return replace(self.moved_to(OffloadState.TRIMMING), bookkeeper_deleted=True)

    @property
    def is_trimmed(self) -> bool:
        """Whether nothing of a ledger is left but this context."""
        trimming = self.state is OffloadState.TRIMMING
        return trimming and self.bookkeeper_deleted and not self.abandoned

    def tier1_deleted(self) -> Self:
        """Return the context after the local copy's metadata is gone."""
        return replace(self.moved_to(OffloadState.TIER1_DELETED), bookkeeper_deleted=True)
