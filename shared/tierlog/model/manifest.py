"""A stream as the bucket describes it, and what follows when the metadata say otherwise.

Owns the values and the pure decisions: what the next generation holds, whether one is called for,
whether the metadata are older than the bucket. Does not own bytes nor where they lie.

Invariants (protocols.md section 3):
    * A generation is made of metadata read after the generation before it was known.
    * ``trimmed_through`` never goes back: what retention took stays taken.
    * A copy is named only when its attempt is complete.
    * A checkpoint of attributes is named only when every ledger up to it was trimmed or has a copy
      that is named: what was lost with the disks stands in no attribute that is restored.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, NamedTuple
from uuid import UUID

from tierlog.model.attribute_record import AttributesRecord, covered, record_of
from tierlog.model.attributes import Checkpoint
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.node import Cluster
from tierlog.model.offload import OffloadContext, OffloadState, Tier2Copy, Tier2Location
from tierlog.model.policy import NO_LEVELS, Policy, PolicyLevels
from tierlog.model.position import Position
from tierlog.model.stream import ListedLedger, OffloadPause, Stream, StreamLifecycle

NO_LEDGER: Final = LedgerId(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestCopy:
    """A complete copy: where it lies and what it must be."""

    uuid: UUID
    location: Tier2Location
    complete_ms: int
    copy: Tier2Copy


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestLedger:
    """A closed ledger; without a copy it is lost when the local disks are."""

    listed: ListedLedger
    copy: ManifestCopy | None = None


class KeptLedger(NamedTuple):
    """A ledger of a manifest as it is kept in memory: what decisions ask, and the bytes."""

    uuid: UUID | None
    last_entry_id: EntryId
    packed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestHead:
    """A stream but for its ledgers."""

    stream: StreamName
    incarnation: UUID
    created_ms: int
    lifecycle: StreamLifecycle = StreamLifecycle.ACTIVE
    raw: bool = False
    partitions: int = 0
    owner_epoch: int = 0
    policy: Policy = Policy()
    policy_changed_ms: int = 0
    offload_pause: OffloadPause | None = None
    offload_pauses: int = 0
    offload_through: LedgerId | None = None
    trimmed_through: LedgerId = NO_LEDGER
    trimmed_last: EntryId | None = None
    """The last entry of that ledger; -1: it was empty; None: no generation had its end."""
    ledger_id_max: LedgerId = NO_LEDGER
    attributes: AttributesRecord | None = None
    """The newest checkpoint that a restore can go on from, and no other one; and what was given up
    of attributes, ever. One of nothing (``through`` None) is there for that alone."""

    @property
    def trimmed_end(self) -> Position | None:
        """Where the newest trimmed ledger ended; None: none was, or no generation had its end."""
        if self.trimmed_last is None:
            return None
        return Position(self.trimmed_through, EntryId(self.trimmed_last + 1))

    @property
    def attributes_through(self) -> Position | None:
        """As of which entry the attributes are named; None: as of none."""
        return self.attributes.newest.through if self.attributes is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterManifest:
    """What a cluster is besides its streams."""

    cluster: Cluster
    levels: PolicyLevels = NO_LEVELS


def copy_of(context: OffloadContext) -> ManifestCopy | None:
    """Return the complete copy that a context names; None when there is none."""
    if not context.complete or context.state is OffloadState.TRIMMING:
        return None
    if context.uuid is None or context.location is None or context.copy is None:
        return None
    return ManifestCopy(
        uuid=context.uuid,
        location=context.location,
        complete_ms=context.timestamp_ms,
        copy=context.copy,
    )


def head_of(
    stream: Stream,
    ledgers: Iterable[ListedLedger],
    before: ManifestHead | None,
    *,
    kept: Mapping[LedgerId, KeptLedger] | None = None,
    attributes: AttributesRecord | None = None,
) -> ManifestHead:
    """Return the head of the next generation; ``kept``: the ledgers of the one before it."""
    trimmed = before.trimmed_through if before is not None else NO_LEDGER
    # Where the generations before this one are gone, the metadata alone know of the last trim.
    ended = _trimmed_through(stream)
    through = max(trimmed, ended, *stream.deleting)
    highest = before.ledger_id_max if before is not None else NO_LEDGER
    return ManifestHead(
        stream=stream.name,
        incarnation=stream.incarnation,
        created_ms=stream.created_ms,
        lifecycle=stream.lifecycle,
        raw=stream.raw,
        partitions=stream.partitions,
        owner_epoch=stream.owner_epoch,
        policy=stream.policy,
        policy_changed_ms=_changed_ms(stream, before),
        offload_pause=stream.offload_pause,
        offload_pauses=stream.offload_pauses,
        offload_through=stream.offload_through,
        trimmed_through=through,
        trimmed_last=_trimmed_last(through, before, kept or {}, stream.trimmed_end),
        ledger_id_max=max(
            highest, ended, *stream.deleting, *(one.ledger_id for one in ledgers), NO_LEDGER
        ),
        attributes=attributes,
    )


def _changed_ms(stream: Stream, before: ManifestHead | None) -> int:
    """Return when the policy was changed; a release that does not know that forgets it."""
    same = before is not None and before.policy == stream.policy
    return max(stream.policy_changed_ms, before.policy_changed_ms if before and same else 0)


def _trimmed_through(stream: Stream) -> LedgerId:
    return NO_LEDGER if stream.trimmed_end is None else stream.trimmed_end.ledger_id


def _trimmed_last(
    through: LedgerId,
    before: ManifestHead | None,
    kept: Mapping[LedgerId, KeptLedger],
    end: Position | None,
) -> EntryId | None:
    if end is not None and end.ledger_id == through:
        return EntryId(end.entry_id - 1)
    if before is not None and before.trimmed_through == through:
        return before.trimmed_last
    return kept[through].last_entry_id if through in kept else None


def attributes_to_name(
    record: AttributesRecord | None,
    ledgers: Iterable[tuple[LedgerId, bool]],
    head: ManifestHead | None,
) -> AttributesRecord | None:
    """Return the checkpoint that the next generation names; ``head``: of the one before it.

    ``ledgers``: those of the list, each with whether the generation names a copy of it. It is the
    one before as long as there is none that is newer, or that was rebuilt as of the same entry.
    """
    before = head.attributes if head is not None else None
    trimmed = head.trimmed_through if head is not None else NO_LEDGER
    copied = covered(ledgers)
    last = trimmed if copied is None else max(trimmed, copied)
    if record is None:
        return before
    found = record.within(last)
    if found is None and (record.given_up or record.lost_keys):
        found = Checkpoint()
    if found is None:
        return before
    if before is not None and not _replaces(found, before):
        if (before.given_up, before.lost_keys) == (record.given_up, record.lost_keys):
            return before
        return replace(before, given_up=record.given_up, lost_keys=record.lost_keys)
    return record_of(record.incarnation, found, generation=record.generation, losses=record)


def _replaces(found: Checkpoint, before: AttributesRecord) -> bool:
    """Tell whether a checkpoint is another one than a manifest names, and not older.

    As of the same entry it has other objects when those of before were damaged and left out.
    """
    through, named = found.through, before.newest.through
    if through != named:
        return named is None or (through is not None and through > named)
    lies = (found.root, found.chunks, found.objects)
    return lies != (before.newest.root, before.chunks, before.objects)


def head_calls_for_write(before: ManifestHead | None, after: ManifestHead) -> bool:
    """Tell whether a changed head is worth a generation of its own; who owns it now is not."""
    if before is None:
        return True
    return before != replace(
        after, owner_epoch=before.owner_epoch, ledger_id_max=before.ledger_id_max
    )


def older_than_manifest(
    head: ManifestHead,
    kept: Mapping[LedgerId, KeptLedger],
    stream: Stream,
    ledgers: Iterable[ListedLedger],
    contexts: Mapping[LedgerId, OffloadContext],
) -> str | None:
    """Say in what the metadata, read after the manifest, are older than it; None: in nothing.

    That happens only when the metadata came back from a backup. Contexts that are not given are
    not judged.
    """
    listed = {one.ledger_id: one for one in ledgers}
    found = chain(_head_newer(head, stream), _ledgers_newer(head, kept, stream, listed))
    return next(chain(found, _attempts_newer(kept, contexts)), None)


def levels_older(written: ClusterManifest | None, levels: PolicyLevels) -> str | None:
    """Say which policies, read after the cluster's manifest, are older; None: none are."""
    found = levels.older_than(written.levels) if written is not None else None
    return None if found is None else f"by the cluster's manifest {found}"


def attributes_older(head: ManifestHead | None, record: AttributesRecord | None) -> str | None:
    """Say that a record of attributes is older than the one that a manifest names; None: not so.

    Objects that an old root needs may be gone. A stream without a record rebuilds from its entries.
    """
    named = head.attributes_through if head is not None else None
    if record is None or named is None:
        return None
    through = record.newest.through
    if through is not None and through >= named:
        return None
    return f"the checkpoint of attributes is as of {through} where the manifest has {named}"


def _head_newer(head: ManifestHead, stream: Stream) -> Iterator[str]:
    if head.owner_epoch > stream.owner_epoch:
        yield f"owner epoch {stream.owner_epoch} where the manifest has {head.owner_epoch}"
    if head.lifecycle is StreamLifecycle.DELETING and stream.lifecycle is StreamLifecycle.ACTIVE:
        yield "the stream lives, and the manifest says that it is being deleted"
    yield from _said_newer(head, stream)


def said_older(said: Stream | ManifestHead, head: ManifestHead) -> str | None:
    """Say what of a stream's policy, pause and wishes a manifest has of later; None: nothing."""
    return next(_said_newer(head, said), None)


def _said_newer(head: ManifestHead, said: Stream | ManifestHead) -> Iterator[str]:
    if head.policy != said.policy and said.policy_changed_ms < head.policy_changed_ms:
        there_ms, here_ms = head.policy_changed_ms, said.policy_changed_ms
        yield f"the stream's own policy was changed at {there_ms} there, and at {here_ms} here"
    # One that was ended since has its number in what is newer.
    ended = said.offload_pause is not None or said.offload_pauses >= head.offload_pauses
    if head.offload_pause is not None and not ended:
        yield "the stream was paused since, as the manifest says"
    wish, known = head.offload_through, said.offload_through
    if wish is not None and (known is None or known < wish):
        yield f"the wish that ledgers up to {wish} be offloaded is in the manifest alone"


def _ledgers_newer(
    head: ManifestHead,
    kept: Mapping[LedgerId, KeptLedger],
    stream: Stream,
    listed: Mapping[LedgerId, ListedLedger],
) -> Iterator[str]:
    for ledger_id in listed:
        if ledger_id <= head.trimmed_through:
            yield f"ledger {ledger_id} is listed, and the manifest says that it was trimmed"
    deleting, trimmed = frozenset(stream.deleting), _trimmed_through(stream)
    for ledger_id, one in kept.items():
        found = listed.get(ledger_id)
        if found is None:
            # One without a copy is not missed: after a restore it is lost. Nor is one of which the
            # metadata know that it was trimmed: then the generation that says so is gone.
            gone = ledger_id in deleting or ledger_id <= trimmed
            if one.uuid is not None and not gone:
                yield f"ledger {ledger_id} is named by the manifest and unknown to the metadata"
        elif not found.closed or found.last_entry_id != one.last_entry_id:
            yield f"ledger {ledger_id} has another end than the manifest says"


def _attempts_newer(
    kept: Mapping[LedgerId, KeptLedger], contexts: Mapping[LedgerId, OffloadContext]
) -> Iterator[str]:
    for ledger_id, context in contexts.items():
        named = kept.get(ledger_id)
        if named is not None and named.uuid is not None and not _as_new(context, named.uuid):
            yield f"ledger {ledger_id} has a newer attempt in the manifest, {named.uuid}"


def _as_new(context: OffloadContext, uuid: UUID) -> bool:
    """Tell whether a context is at least as new as the completion of that attempt."""
    if context.state is OffloadState.TRIMMING:
        return True
    # An attempt to repair is no copy yet: named here, it was completed since.
    known = context.uuid == uuid or context.swept_at(uuid) is not None
    return context.complete and known
