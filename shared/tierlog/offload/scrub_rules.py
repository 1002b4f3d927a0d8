"""What a bucket, the metadata and the manifests say of each other, as functions of values.

Owns the judgement of what was listed first and of metadata that were read after it. Does not own
reading, nor repairs: each finding is a suspicion until it was looked at anew, since attempts
begin, end and are swept meanwhile (``tierlog.offload.scrub``).

Invariants:
    * What was listed before the metadata were read, and is named by nothing in them nor in the
      newest manifests, will never be named: an attempt is named before its first byte is sent.
    * What is younger than the safety age is never called an orphan, nor what is of a cluster
      with another id, or of none.
    * Memory: about 70 bytes for each attempt in the bucket (23 MB for a million objects), as much
      again for each that nothing names, and what one stream needs.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

from tierlog.format import keys
from tierlog.format.keys import ObjectKeys, ObjectRole, ParsedKey, parse_key
from tierlog.model.errors import CorruptError, TierlogError
from tierlog.model.ids import LedgerId
from tierlog.model.manifest import copy_of, older_than_manifest
from tierlog.model.offload import OffloadContext, OffloadState, Tier2Copy
from tierlog.model.scrub import Finding, FindingKind
from tierlog.model.stream import ListedLedger, Stream
from tierlog.offload.manifests import KnownManifest
from tierlog.ports.objects import ObjectInfo, OpenUpload

Sizes = Mapping[ObjectRole, int]
Verdict = tuple[FindingKind, str]

_ABSENT: Final = -1
_UUID_LEN: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubLimits:
    """How old, how fast, how long."""

    safety_age_s: float = 86_400.0
    requests_per_s: float = 100.0
    bytes_per_s: float = 50 * 1024 * 1024
    deep_s_max: float = 6 * 3600.0

    @property
    def safety_ms(self) -> int:
        """The safety age in milliseconds."""
        return round(self.safety_age_s * 1000)


class SeenAttempt(NamedTuple):
    """An attempt of which objects were listed."""

    uuid: UUID
    ledger_id: LedgerId


class Survey:
    """Attempts in a bucket, and which of them are named."""

    def __init__(self, key_prefix: str = "") -> None:
        self._prefix = key_prefix
        self._uuids = bytearray()
        self._ledgers = array("q")
        self._sizes = {role: array("q") for role in ObjectRole}
        self._named = bytearray()

    def __len__(self) -> int:
        return len(self._ledgers)

    def __repr__(self) -> str:
        return f"<Survey attempts={len(self)} named={self._named.count(1)}>"

    def see_object(self, info: ObjectInfo) -> bool:
        """Take an object, in the order of keys; False when it is none of an attempt."""
        parsed = parse_key(self._prefix, info.key)
        if parsed is None:
            return False
        last = len(self) - 1
        here = (parsed.uuid.bytes, parsed.ledger_id)
        if last < 0 or (self._raw_uuid(last), self._ledgers[last]) != here:
            self._append(parsed, info.key)
        self._sizes[parsed.role][-1] = info.size
        return True

    def see_attempt(self, uuid: UUID, ledger_id: LedgerId, sizes: Sizes) -> None:
        """Take an attempt, in the order of UUIDs, with the lengths of its objects."""
        assert not len(self) or uuid.bytes >= self._raw_uuid(len(self) - 1), "in their order"
        self._add(uuid, ledger_id)
        for role, size in sizes.items():
            self._sizes[role][-1] = size

    def _append(self, parsed: ParsedKey, key: str) -> None:
        if len(self) and parsed.uuid.bytes < self._raw_uuid(len(self) - 1):
            raise CorruptError(
                f"the store lists {key} behind keys that come after it",
                remedy="Look whether the store lists objects in the order of their keys",
                details={"object": key, "offset": "0"},
            )
        self._add(parsed.uuid, parsed.ledger_id)

    def _add(self, uuid: UUID, ledger_id: LedgerId) -> None:
        self._uuids += uuid.bytes
        self._ledgers.append(ledger_id)
        self._named.append(0)
        for column in self._sizes.values():
            column.append(_ABSENT)

    def _raw_uuid(self, row: int) -> bytes:
        return bytes(self._uuids[row * _UUID_LEN : (row + 1) * _UUID_LEN])

    def _row(self, uuid: UUID, ledger_id: LedgerId) -> int | None:
        row = bisect_left(range(len(self)), uuid.bytes, key=self._raw_uuid)
        while row < len(self) and self._raw_uuid(row) == uuid.bytes:
            if self._ledgers[row] == ledger_id:
                return row
            row += 1
        return None

    def sizes_of(self, uuid: UUID, ledger_id: LedgerId) -> Sizes:
        """Return the lengths of an attempt's objects that were listed."""
        row = self._row(uuid, ledger_id)
        return {} if row is None else self._sizes_in(row)

    def _sizes_in(self, row: int) -> Sizes:
        return {role: column[row] for role, column in self._sizes.items() if column[row] != _ABSENT}

    def name(self, uuid: UUID, ledger_id: LedgerId) -> None:
        """Note that something names an attempt."""
        row = self._row(uuid, ledger_id)
        if row is not None:
            self._named[row] = 1

    def see_context(self, context: OffloadContext) -> Verdict | None:
        """Note what a context names; return what seems wrong with its complete copy."""
        if context.uuid is not None:
            self.name(context.uuid, context.ledger_id)
        for attempt in context.abandoned:
            self.name(attempt.uuid, context.ledger_id)
        if context.repair is not None:
            self.name(context.repair.uuid, context.ledger_id)
        copy = copy_of(context)
        if copy is None:
            return None
        sizes = self.sizes_of(copy.uuid, context.ledger_id)
        return judge_copy(copy.copy, sizes, single=copy.location.is_single)

    def see_manifest(self, known: KnownManifest) -> None:
        """Note what a manifest names."""
        for ledger_id, kept in known.ledgers.items():
            if kept.uuid is not None:
                self.name(kept.uuid, ledger_id)

    def unnamed(self) -> Iterator[SeenAttempt]:
        """Iterate over the attempts that nothing has named, of the newest ledger first.

        An id that is still to be given says that the metadata are older, before others are judged.
        """
        rows = (row for row, named in enumerate(self._named) if not named)
        for row in sorted(rows, key=self._ledgers.__getitem__, reverse=True):
            yield SeenAttempt(UUID(bytes=self._raw_uuid(row)), LedgerId(self._ledgers[row]))


def has_ended(named: ObjectKeys, there: Sequence[ObjectInfo] | None) -> bool:
    """Tell whether an attempt, by its objects, came to its end."""
    # The index comes last.
    return any(one.key in {named.index, named.single} for one in there or ())


def judge_copy(copy: Tier2Copy, sizes: Sizes, *, single: bool = False) -> Verdict | None:
    """Say what is wrong with a complete copy of which these objects are there.

    Of an export copy nothing is said: nobody depends on it.
    """
    wanted = {ObjectRole.DATA: copy.data_len, ObjectRole.INDEX: copy.index_len}
    if single:
        wanted = {ObjectRole.SINGLE: copy.data_len}
    if copy.side_len:
        wanted[ObjectRole.SIDE] = copy.side_len
    missing = [role.value for role in wanted if role not in sizes]
    if len(missing) == len(wanted):
        return FindingKind.POINTS_NOWHERE, "no object of its copy is there"
    if missing:
        return FindingKind.MISSING_OBJECT, f"not there: {', '.join(missing)}"
    wrong = [
        f"the {role.value} object has {sizes[role]} bytes and not {length}"
        for role, length in wanted.items()
        if sizes[role] != length
    ]
    return (FindingKind.WRONG_OBJECT, "; ".join(wrong)) if wrong else None


def judge_unnamed(
    objects: Iterable[ObjectInfo], *, own: UUID, now_ms: int, safety_ms: int
) -> FindingKind:
    """Say what the objects of an attempt are that nothing names; ``own``: this cluster's id.

    One that is another's, or too young, keeps all of them.
    """
    some = list(objects)
    if any(keys.cluster_of(one.metadata) != own for one in some):
        return FindingKind.FOREIGN
    if any(now_ms - one.modified_ms < safety_ms for one in some):
        return FindingKind.TOO_YOUNG
    return FindingKind.ORPHAN_OBJECTS


def older_attempts(
    known: KnownManifest | None,
    stream: Stream,
    listed: Mapping[LedgerId, ListedLedger],
    contexts: Mapping[LedgerId, OffloadContext],
) -> str | None:
    """Say in what these contexts are older than a manifest; None: in nothing that is known.

    Of their ledgers alone: all contexts of a stream at once may be too many.
    """
    if known is None or known.head is None:
        return None
    return older_than_manifest(
        known.head,
        {one: known.ledgers[one] for one in contexts if one in known.ledgers},
        stream,
        [listed[one] for one in contexts if one in listed],
        contexts,
    )


def upload_is_wanted(context: OffloadContext | None, uuid: UUID) -> bool:
    """Tell whether an open upload is an attempt's at work, or one that is swept by itself.

    Beside a complete copy an open upload is what a lost answer left.
    """
    if context is None:
        return False
    if context.uuid == uuid:
        return not context.complete
    return context.names(uuid)


def judge_upload(
    upload: OpenUpload,
    context: OffloadContext | None,
    uuid: UUID,
    *,
    shared: bool,
    now_ms: int,
    safety_ms: int,
) -> FindingKind | None:
    """Say what an open upload is; ``shared``: others have objects below the same prefix.

    An upload does not say whose it is: in a shared place only what a context knows is ours.
    """
    if upload_is_wanted(context, uuid):
        return None
    if shared and (context is None or not context.names(uuid)):
        return FindingKind.FOREIGN
    if now_ms - upload.initiated_ms < safety_ms:
        return FindingKind.TOO_YOUNG
    return FindingKind.ORPHAN_UPLOAD


def is_stalled(context: OffloadContext, *, now_ms: int, safety_ms: int) -> bool:
    """Tell whether an attempt has been going on for too long."""
    begun = context.state is OffloadState.OFFLOADING and bool(context.attempt_started_ms)
    return begun and now_ms - context.attempt_started_ms >= safety_ms


def classify(
    objects: Iterable[ObjectInfo],
    uploads: Iterable[OpenUpload],
    contexts: Iterable[OffloadContext],
    manifests: Iterable[KnownManifest],
    *,
    cluster_id: UUID,
    key_prefix: str = "",
    now_ms: int,
    safety_ms: int,
) -> list[Finding]:
    """Judge a whole bucket at once; ``objects`` with their metadata, in the order of keys.

    The same judgement as a scrub's, which has them one after the other. ``manifests``: without
    those of streams that are gone.
    """
    survey = Survey(key_prefix)
    lying: dict[tuple[UUID, LedgerId], list[ObjectInfo]] = {}
    for info in objects:
        if survey.see_object(info) and (parsed := parse_key(key_prefix, info.key)) is not None:
            lying.setdefault(parsed[:2], []).append(info)
    known = {one.ledger_id: one for one in contexts}
    found: list[Finding] = []
    for context in known.values():
        verdict = survey.see_context(context)
        found += [finding_of(context, *verdict)] if verdict is not None else []
        if is_stalled(context, now_ms=now_ms, safety_ms=safety_ms):
            found.append(finding_of(context, FindingKind.STALLED_ATTEMPT, context.last_error))
    for manifest in manifests:
        survey.see_manifest(manifest)
    shared = False
    for seen in survey.unnamed():
        some = lying[seen.uuid, seen.ledger_id]
        kind = judge_unnamed(some, own=cluster_id, now_ms=now_ms, safety_ms=safety_ms)
        shared = shared or kind is FindingKind.FOREIGN
        found.append(Finding(kind=kind, ledger_id=seen.ledger_id, uuid=seen.uuid))
    for upload in uploads:
        at = parse_key(key_prefix, upload.key)
        if at is not None:
            what = judge_upload(
                upload,
                known.get(at.ledger_id),
                at.uuid,
                shared=shared,
                now_ms=now_ms,
                safety_ms=safety_ms,
            )
            found += [Finding(kind=what, ledger_id=at.ledger_id, uuid=at.uuid)] if what else []
    return found


def finding_of(context: OffloadContext, kind: FindingKind, cause: str) -> Finding:
    """Return a finding about a ledger of which a context is there."""
    return Finding(
        kind=kind,
        stream=context.stream,
        ledger_id=context.ledger_id,
        uuid=context.uuid,
        key=context.location.data_key if context.location is not None else "",
        cause=cause,
    )


def unread_manifest(error: TierlogError, stream: str) -> Finding:
    """Return a finding about a stream's manifest, or the cluster's own where there is no stream."""
    remedy = "" if stream else "Restart the scheduler that leads: the next leader writes it anew"
    return Finding(
        kind=FindingKind.MANIFEST_UNREADABLE,
        stream=stream,
        key=error.details.get("object", ""),
        cause=str(error),
        remedy=remedy,
    )
