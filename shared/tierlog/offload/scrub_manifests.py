"""What manifests speak for: copies that one names, or should name, and the cluster's own.

Owns the second look before one is told to be missing, whether policies above streams are older,
and what names an attempt as of now. Does not own manifests that are there and can't be read, nor
what is done about a finding (``tierlog.offload.scrub``).

Invariants:
    * What only manifests of a stream name whose deletion was accepted, and which is gone from the
      metadata, is nobody's: they were lost before the deletion came to its end. Of a stream that
      is there, older than such a manifest, or that can't be read, all that it names is kept.
    * A copy that is younger than the safety age is not missed: the leader may be about to name it.
    * Metadata are called older than a manifest only after the manifest was read again, and they
      after it.
    * What is missed was read again, the manifest first and the ledger's context behind it: a copy
      that was named, trimmed or replaced meanwhile is none.
    * An id that was still to be given when the bucket was listed, and has objects, was given by
      metadata that are lost: it is told, and left as a mark that by schedule nothing is repaired,
      until somebody asks for it.
    * One finding for a stream, however many of its ledgers are not named.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final
from uuid import UUID

from tierlog.catalog import Catalog
from tierlog.format.manifest import clusters_folder, manifest_folder
from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import copy_of, levels_older
from tierlog.model.offload import OffloadContext
from tierlog.model.scrub import Finding, FindingKind
from tierlog.model.stream import ListedLedger, Stream, StreamLifecycle
from tierlog.offload import scrub_rules as rules
from tierlog.offload.manifests import KnownManifest, ManifestStore, Standing
from tierlog.ports.clock import Clock

NAMED_MS_MAX: Final = 600_000
"""So long a leader may take to name a copy, however low the safety age."""
UNNAMED_KEPT_MAX: Final = 1000
"""So many ledgers of a stream are looked at again; one that is not named is enough."""
REMEDY: Final = (
    "Find out what deleted it. The scheduler that leads writes it anew in its slow round "
    "(TIERLOG_SCHEDULER__REREAD_S); a restart makes the next leader do so at once"
)


def stopped_by(finding: Finding) -> str:
    """Return why nothing is deleted beside such a finding."""
    if finding.kind is FindingKind.METADATA_OLDER:
        return f"the metadata are older than the bucket: {finding.cause}"
    return f"manifests below {finding.key} are missing"


class ManifestLook:
    """Looks for manifests that are not there. ``pay`` waits until one more request may be sent."""

    def __init__(
        self,
        *,
        manifests: ManifestStore,
        catalog: Catalog,
        cluster_id: UUID,
        key_prefix: str,
        clock: Clock,
        safety_ms: int,
        pay: Callable[[int], Awaitable[None]],
    ) -> None:
        self._manifests = manifests
        self._contexts = catalog.contexts
        self._streams = catalog.streams
        self._ledgers = catalog.ledgers
        self._scrubs = catalog.scrubs
        self._policies = catalog.policies
        self._cluster_id = cluster_id
        self._prefix = key_prefix
        self._clock = clock
        self._age_ms = max(safety_ms, NAMED_MS_MAX)
        self._pay = pay
        self._newest: KnownManifest | None = None
        self._unnamed: dict[LedgerId, UUID] = {}
        self._no_cluster = self._is_behind = False
        self._next_id = LedgerId(0)
        self._ids_unread = ""

    def __repr__(self) -> str:
        return f"<ManifestLook unnamed={len(self._unnamed)}>"

    async def newest(self, name: StreamName, incarnation: UUID) -> KnownManifest:
        """Return the newest manifest; the last one that was read is read again if it moved."""
        kept = self._newest
        if kept is not None and (kept.stream, kept.incarnation) == (name, incarnation):
            await self._pay(0)
            if await self._manifests.standing(kept) is Standing.NEWEST:
                return kept
        await self._pay(0)
        self._newest = await self._manifests.newest(name, incarnation)
        return self._newest

    async def older(
        self,
        known: KnownManifest | None,
        stream: Stream,
        listed: Mapping[LedgerId, ListedLedger],
        contexts: Mapping[LedgerId, OffloadContext],
    ) -> str | None:
        """Say in what contexts, read after a manifest, are older than it; None: in nothing.

        It may have been hours before: a copy that it names was replaced and swept since.
        """
        if rules.older_attempts(known, stream, listed, contexts) is None:
            return None
        await self._pay(0)
        known = await self._manifests.newest(stream.name, stream.incarnation)
        try:
            snapshot = await self._streams.snapshot(stream.name)
        except RefusedError as error:
            if error.reason is Reason.STREAM_NOT_FOUND:
                return None
            raise
        if snapshot.stream.incarnation != stream.incarnation:
            return None
        listed = {one.ledger_id: one for one in snapshot.ledgers}
        again = {one: await self._contexts.get(one) for one in contexts}
        there = {one: context for one, context in again.items() if context is not None}
        return rules.older_attempts(known, snapshot.stream, listed, there)

    async def is_left(self, known: KnownManifest) -> bool:
        """Tell whether a manifest was left by a stream of ours that was being deleted, and is gone.

        As of now, by the metadata: a stream of the same name that was made behind it is another.
        """
        head = known.head
        if head is None or known.cluster_id != self._cluster_id:
            return False
        if head.lifecycle is not StreamLifecycle.DELETING:
            return False
        try:
            stream = await self._streams.get(known.stream)
        except RefusedError as error:
            if error.reason is Reason.STREAM_NOT_FOUND:
                return True
            raise
        return stream.incarnation != known.incarnation and stream.created_ms > head.created_ms

    async def named_now(
        self, ledger_id: LedgerId, uuid: UUID, stream: str, incarnations: Sequence[UUID]
    ) -> bool:
        """Ask metadata and manifests, as of now, whether they name an attempt.

        ``stream``: by the word of its objects; what names them is below that stream's folder, which
        has manifests of these incarnations.
        """
        context = await self._contexts.get(ledger_id)
        if context is not None and context.names(uuid):
            return True
        asked = [(StreamName(stream), one) for one in incarnations]
        if context is not None:
            asked.insert(0, (context.stream, context.incarnation))
        for name, incarnation in dict.fromkeys(asked):
            known = await self.newest(name, incarnation)
            if known.names(ledger_id, uuid) and not await self.is_left(known):
                return True
        return False

    def see(self, known: KnownManifest, context: OffloadContext) -> None:
        """Note a complete copy that a manifest should name by now, and doesn't."""
        copy = copy_of(context)
        if copy is None or known.names(context.ledger_id, copy.uuid) or self._is_young(context):
            return
        if len(self._unnamed) < UNNAMED_KEPT_MAX:
            self._unnamed[context.ledger_id] = copy.uuid

    async def unnamed(self, name: StreamName, incarnation: UUID) -> Finding | None:
        """Look again at what was noted of a stream, and forget it."""
        noted, self._unnamed = self._unnamed, {}
        if not noted:
            return None
        known = await self.newest(name, incarnation)
        for ledger_id, uuid in noted.items():
            if known.names(ledger_id, uuid):
                continue
            again = await self._contexts.get(ledger_id)
            copy = copy_of(again) if again is not None else None
            if again is None or copy is None or self._is_young(again):
                continue
            if (again.incarnation, copy.uuid) == (incarnation, uuid):
                newest = (
                    f"{known.generation} is the newest" if known.generation else "none is there"
                )
                return Finding(
                    kind=FindingKind.MANIFEST_UNREADABLE,
                    stream=name,
                    key=manifest_folder(self._prefix, name, incarnation),
                    cause=f"a manifest is missing: {newest} and the complete copy of ledger "
                    f"{ledger_id} is not named: a restore would not bring it back",
                    remedy=REMEDY,
                )
        return None

    def _is_young(self, context: OffloadContext) -> bool:
        return self._clock.wall_ms() - context.timestamp_ms < self._age_ms

    async def see_ids(self) -> None:
        """Note how far ids have come, once the bucket was listed: what was listed has one below.

        Hours later they may have passed what older metadata have forgotten.
        """
        await self._pay(0)
        try:
            self._next_id = await self._ledgers.next_id()
        except TierlogError as error:
            self._ids_unread = str(error)  # for whoever has to know

    def was_given(self, ledger_id: LedgerId) -> bool:
        """Tell whether a ledger's id is known to have been given before the scrub."""
        return ledger_id < self._next_id

    async def not_given(self, ledger_id: LedgerId) -> Finding | None:
        """Say, once, that objects are of a ledger whose id is still to be given; None: it was."""
        if self.was_given(ledger_id) or self._is_behind:
            return None
        if self._ids_unread:
            raise RetryableError(
                f"how far ledger ids have come could not be read: {self._ids_unread}",
                remedy="Scrub again",
            )
        # Ids go on, and one day they have passed it.
        await self._scrubs.note_behind()
        self._is_behind = True
        return Finding(
            kind=FindingKind.METADATA_OLDER,
            ledger_id=ledger_id,
            cause=f"ledger {ledger_id} has objects, and the next one to be made would have been "
            f"{self._next_id} when they were listed",
        )

    async def cluster(self) -> Finding | None:
        """Read the cluster's own manifest, which a restore begins with; not there: not yet.

        Say so where the policies above streams, read after it, are older.
        """
        await self._pay(0)
        generation, written = await self._manifests.cluster(self._cluster_id)
        self._no_cluster = not generation
        older = levels_older(written, await self._policies.levels())
        return Finding(kind=FindingKind.METADATA_OLDER, cause=older) if older is not None else None

    async def no_cluster(
        self,
        walked: Mapping[StreamName, tuple[UUID, int]],
        incarnations: Mapping[StreamName, Sequence[UUID]],
    ) -> Finding | None:
        """Look again for the cluster's manifest, where it was not and a stream has had its own.

        ``walked``: incarnation and time of creation of each stream. ``incarnations``: those that
        have manifests. A leader writes the cluster's before any stream's.
        """
        old_ms = self._clock.wall_ms() - self._age_ms
        due = any(
            created_ms <= old_ms and incarnation in incarnations.get(name, ())
            for name, (incarnation, created_ms) in walked.items()
        )
        missed = due and self._no_cluster
        if not missed:
            return None
        await self.cluster()
        if not self._no_cluster:
            return None
        return Finding(
            kind=FindingKind.MANIFEST_UNREADABLE,
            key=f"{clusters_folder(self._prefix)}{self._cluster_id}/",
            cause="the manifest of the cluster is not there: a restore would bring no policies of "
            "cluster and namespaces back",
            remedy=REMEDY,
        )
