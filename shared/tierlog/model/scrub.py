"""What a scrub of a bucket finds, and what is done about each kind.

Owns the table of kinds and the report as values. Does not own how things are found
(``tierlog.offload.scrub_rules``) nor reading, deleting and copying (``tierlog.offload.scrub``).

Invariant: every kind stands in ``KINDS``; what is no fault never makes a scrub fail, and is
counted only.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final
from uuid import UUID

from tierlog.model.ids import LedgerId
from tierlog.model.replication import EntryRange

LOST_RANGES_MAX: Final = 100
ASKED_LEDGERS_MAX: Final = 10_000
"""So many ledgers one scrub may be asked for by their numbers."""
TELL_EACH_S: Final = 60.0
"""How often a scrub at work is kept for other processes."""
SILENT_S_MAX: Final = 600
assert SILENT_S_MAX > 5 * TELL_EACH_S, "metadata may be away for a while"


class FindingKind(StrEnum):
    """What is wrong, or only worth counting."""

    ORPHAN_OBJECTS = "orphan-objects"
    ORPHAN_UPLOAD = "orphan-upload"
    MISSING_OBJECT = "missing-object"
    WRONG_OBJECT = "wrong-object"
    DAMAGED_DATA = "damaged-data"
    UNFINISHED_REPAIR = "unfinished-repair"
    POINTS_NOWHERE = "points-nowhere"
    STALLED_ATTEMPT = "stalled-attempt"
    METADATA_OLDER = "metadata-older"
    MANIFEST_UNREADABLE = "manifest-unreadable"
    NOT_CHECKED = "not-checked"
    TOO_YOUNG = "too-young"
    FOREIGN = "foreign"


class Repair(StrEnum):
    """What is done about a finding, when that is wanted and may be done."""

    DELETE = "delete"
    ABORT = "abort"
    COPY_AGAIN = "copy-again"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a kind means and what follows. ``fault``: it counts as long as it is not repaired."""

    repair: Repair
    meaning: str
    remedy: str = ""
    fault: bool = True


_K = FindingKind
REPAIR_IT: Final = "Repair it with: tierlog scrub --repair"
REPAIR_COPY: Final = (
    "Read the local copy while there is one; repair this one with: tierlog scrub --repair --deep"
)
"""The remedy of whoever meets a damaged copy in tier 2."""
KINDS: Final[Mapping[FindingKind, Rule]] = {
    _K.ORPHAN_OBJECTS: Rule(
        Repair.DELETE,
        "objects of an attempt that neither the metadata nor a manifest names",
        "Delete them with: tierlog scrub --repair",
    ),
    _K.ORPHAN_UPLOAD: Rule(
        Repair.ABORT,
        "an open multipart upload of which nothing will come",
        "Abort it with: tierlog scrub --repair",
    ),
    _K.MISSING_OBJECT: Rule(
        Repair.COPY_AGAIN,
        "a complete copy lacks an object",
        REPAIR_IT,
    ),
    _K.WRONG_OBJECT: Rule(
        Repair.COPY_AGAIN,
        "an object of a complete copy has another length or digest",
        REPAIR_IT,
    ),
    _K.DAMAGED_DATA: Rule(
        Repair.COPY_AGAIN,
        "data of a complete copy are not what was written",
        REPAIR_IT,
    ),
    _K.UNFINISHED_REPAIR: Rule(
        Repair.COPY_AGAIN,
        "someone began to repair a copy and did not come to the end; it is as readable as before",
        REPAIR_IT,
    ),
    _K.POINTS_NOWHERE: Rule(
        Repair.COPY_AGAIN,
        "the metadata name a ledger that is not where they say",
        "Bring back what is gone; see the how-to scrub-a-bucket",
    ),
    _K.STALLED_ATTEMPT: Rule(
        Repair.NONE,
        "an attempt has not ended for longer than the safety age",
        "The scheduler asks again, or abandons it where nothing asks for its ledger; look at: "
        "tierlog offload attempts",
    ),
    _K.METADATA_OLDER: Rule(
        Repair.NONE,
        "the metadata are older than the bucket; nothing at all is deleted",
        "Restore newer metadata; see the how-to restore-from-a-bucket",
    ),
    _K.MANIFEST_UNREADABLE: Rule(
        Repair.NONE,
        "a manifest can't be read, or is missing: what it names is not known; nothing at all is "
        "deleted",
        "See the how-to restore-from-a-bucket",
    ),
    _K.NOT_CHECKED: Rule(
        Repair.NONE,
        "the store refuses to show it, so nothing is known of it",
        "Give the scheduler's keys the rights that the reference s3-permissions names",
    ),
    _K.TOO_YOUNG: Rule(
        Repair.NONE, "named by nobody, and younger than the safety age", fault=False
    ),
    _K.FOREIGN: Rule(Repair.NONE, "of another cluster, or of nobody who says so", fault=False),
}
assert set(KINDS) == set(FindingKind)
FAULTS: Final = tuple(
    kind for kind, rule in KINDS.items() if rule.fault and kind is not _K.NOT_CHECKED
)
"""What is wrong until it is repaired; of what could not be checked nobody knows."""


@dataclass(slots=True, kw_only=True)
class Finding:
    """Something that was found. ``repaired``: what was done; ``kept``: why it was not.

    ``lost``: entries that are in no copy, ``LOST_RANGES_MAX`` ranges at most; ``lost_count``: all.
    """

    kind: FindingKind
    stream: str = ""
    ledger_id: LedgerId | None = None
    uuid: UUID | None = None
    key: str = ""
    cause: str = ""
    remedy: str = ""
    repaired: str = ""
    kept: str = ""
    lost: tuple[EntryRange, ...] = ()
    lost_count: int = 0


class ScrubState(StrEnum):
    """How far a scrub has come."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubWish:
    """What is asked for: ``deep`` reads all data, ``repair`` changes what may be changed.

    ``ledgers``: of those alone is all data read and anything changed; None: of all.
    """

    repair: bool = False
    deep: bool = False
    ledgers: frozenset[LedgerId] | None = None

    def asks_for(self, ledger_id: LedgerId | None) -> bool:
        """Tell whether what is found of a ledger is to be looked into, and repaired."""
        return self.ledgers is None or ledger_id in self.ledgers


@dataclass(frozen=True, slots=True, order=True)
class DeepPlace:
    """Where a deep scrub ran out of time; the next one goes on there."""

    stream: str
    ledger_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubTimes:
    """When the last scrubs by schedule began that came to an end; 0: none did.

    ``deep_next``: where the last deep one of all stopped; None: it came to the end.
    """

    begun_ms: int = 0
    deep_begun_ms: int = 0
    deep_next: DeepPlace | None = None


@dataclass(slots=True, kw_only=True)
class ScrubReport:
    """What a scrub came to, or how far it has come."""

    scrub_id: UUID
    wish: ScrubWish
    started_ms: int
    findings_max: int
    ended_ms: int = 0
    number: int = 0
    """One more than those that were kept when it began: of two, clocks may not say which came
    later. 0: it was not kept yet, or by a release that gave none."""
    told_ms: int = 0
    """When it was last kept for others, as which it is again and again while it is at work."""
    state: ScrubState = ScrubState.RUNNING
    phase: str = ""
    error: str = ""
    objects: int = 0
    uploads: int = 0
    streams: int = 0
    ledgers: int = 0
    copies_checked: int = 0
    bytes_read: int = 0
    elsewhere: int = 0
    """Copies in buckets that this process does not have."""
    unread: list[str] = field(default_factory=list)
    """What could not be looked at, with the cause; nothing is said of it."""
    unread_left_off: int = 0
    deletions_stopped: str = ""
    deep_next: DeepPlace | None = None
    counts: Counter[FindingKind] = field(default_factory=Counter)
    repaired: Counter[FindingKind] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    findings_left_off: int = 0
    orphan_objects: int = 0
    """Objects that nothing names and that stay, with their bytes."""
    orphan_bytes: int = 0

    def add(self, finding: Finding, *, objects: int = 0, size: int = 0) -> None:
        """Count what was found, and keep it if it is a fault and there is room.

        ``objects``, ``size``: those that nothing names, and their bytes.
        """
        self.counts[finding.kind] += 1
        if finding.kind is FindingKind.ORPHAN_OBJECTS and not finding.repaired:
            self.orphan_objects += objects
            self.orphan_bytes += size
        if finding.repaired:
            self.repaired[finding.kind] += 1
        if not KINDS[finding.kind].fault:
            return
        finding.remedy = finding.remedy or KINDS[finding.kind].remedy
        if len(self.findings) < self.findings_max:
            self.findings.append(finding)
        else:
            self.findings_left_off += 1

    def skip(self, cause: str) -> None:
        """Note that something could not be looked at."""
        if len(self.unread) < self.findings_max:
            self.unread.append(cause)
        else:
            self.unread_left_off += 1

    @property
    def left(self) -> Counter[FindingKind]:
        """How many faults of each kind were found and not repaired."""
        return Counter({kind: self.counts[kind] - self.repaired[kind] for kind in FAULTS})

    @property
    def remaining(self) -> int:
        """How many faults were found and not repaired."""
        return self.left.total()

    @property
    def unread_count(self) -> int:
        """How much could not be looked at."""
        return len(self.unread) + self.unread_left_off

    @property
    def is_clean(self) -> bool:
        """Whether everything was looked at and no fault is left."""
        looked = not self.unread_count and not self.counts[FindingKind.NOT_CHECKED]
        looked = looked and self.deep_next is None
        return self.state is ScrubState.DONE and not self.remaining and looked


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFaults:
    """What is wrong in a bucket, as far as scrubs know, by kind; orphans with their bytes."""

    by_kind: Mapping[FindingKind, int]
    orphan_objects: int = 0
    orphan_bytes: int = 0


def places_of(reports: Iterable[ScrubReport]) -> dict[UUID, int]:
    """Say where reports stand, by their numbers: of two places the higher one is the newer one's.

    One of a release that gave none is where its clock says, in front of none that began before.
    """
    some = list(reports)
    numbered = [(one.started_ms, one.number) for one in some if one.number]
    return {
        one.scrub_id: one.number
        or max((number for began_ms, number in numbered if began_ms <= one.started_ms), default=0)
        for one in some
    }


def known_faults(reports: Iterable[ScrubReport]) -> KnownFaults | None:
    """Say what scrubs left, by their reports, newest first; None: none of them came to its end.

    The newest one knows of all but two things. Of what it could not look at it says nothing: of
    each kind there are as many as the newest that looked at everything left, or one since. And
    damaged bytes of attribute indexes only a deep one reads, and no metadata say what it found.
    """
    done = [one for one in reports if one.state is ScrubState.DONE]
    if not done:
        return None
    looked = list(_since_all_was_seen(done))
    left = Counter[FindingKind]({kind: max(one.left[kind] for one in looked) for kind in FAULTS})
    deep = list(_since_all_was_seen(one for one in done if one.wish.deep))
    left[FindingKind.DAMAGED_DATA] = max(
        one.left[FindingKind.DAMAGED_DATA] - _damaged_indexes(one) for one in looked
    ) + max(map(_damaged_indexes, deep), default=0)
    return KnownFaults(
        by_kind=left,
        orphan_objects=max(one.orphan_objects for one in looked),
        orphan_bytes=max(one.orphan_bytes for one in looked),
    )


def all_seen_ms(reports: Iterable[ScrubReport], times: ScrubTimes) -> int:
    """Return when the newest scrub began that looked at everything, by reports newest first.

    Of none that is kept that is before the oldest that came to its end, or else before the last
    one by schedule did, or before the oldest of all; 0: there was none.
    """
    found = counted_from(reports)
    if found is not None and found.state is ScrubState.DONE:
        return found.started_ms
    return times.begun_ms or (found.started_ms if found is not None else 0)


def counted_from(reports: Iterable[ScrubReport]) -> ScrubReport | None:
    """Return of reports, newest first, the one from which ``all_seen_ms`` counts: it stays."""
    some = [one for one in reports if one.wish.ledgers is None]
    done = [one for one in some if one.state is ScrubState.DONE]
    seen = [one for one in done if not one.unread_count][:1]
    return next(iter(seen or done[-1:] or some[-1:]), None)


def _since_all_was_seen(done: Iterable[ScrubReport]) -> Iterator[ScrubReport]:
    """Iterate over the reports up to the newest that could look at everything."""
    for one in done:
        yield one
        if not one.unread_count:
            return


def _damaged_indexes(report: ScrubReport) -> int:
    return sum(
        one.kind is FindingKind.DAMAGED_DATA and one.ledger_id is None for one in report.findings
    )


def as_heard(report: ScrubReport, *, silent_s: float) -> ScrubReport:
    """Return another process's report: one at work of which nothing is heard any more, as failed.

    Who was killed says nothing, and whoever waits for the end would wait for ever. ``silent_s``:
    how long whoever asks has seen the same ``told_ms``, by no wall clock.
    """
    if report.state is not ScrubState.RUNNING or silent_s <= SILENT_S_MAX:
        return report
    error = (
        f"nothing was heard of it for {silent_s:.0f} s; its scheduler has ended, or can't say it"
    )
    return replace(report, state=ScrubState.FAILED, error=error)
