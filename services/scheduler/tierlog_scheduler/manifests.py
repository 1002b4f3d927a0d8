"""What the bucket says of its own streams, and which deletions wait for it (protocols.md 3).

Owns when a manifest is written, and the questions between the leader's loop and the manifests.
Does not own their bytes (``tierlog.format.manifest``), reading and writing them
(``tierlog.offload.manifests``), nor what they hold (``tierlog.model.manifest``).

A pass over a stream: ``look`` before its metadata is read, ``record`` with what was read, then
the deletions, each after the question that belongs to it. Neither of the first two raises what the
bucket does: a manifest that can't be read or written stops deletions, and nothing else. A bucket
that is away holds a pass up for as long as it takes to find that out, not for each stream. A
question that it does not answer is raised: what was to be deleted failed, and is told as failing.

Invariants:
    * The next generation is written behind the one known before the metadata was read, with
      If-None-Match: a later generation never holds older metadata.
    * A deletion is allowed only by the newest generation, looked for at that very moment.
    * What is known of a manifest that the bucket has no more (``gone``) is forgotten only once
      another one is there: it is written anew, as a snapshot behind the last number known. Until
      then nothing of the stream is deleted.
    * Metadata that are older than the manifest, since they came back from a backup, stop every
      deletion of the stream, until they are as new again. No manifest is written of them. So do
      policies above streams that are older than the cluster's manifest: of all streams; and as
      long as a leader could not compare the two.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol
from uuid import UUID

import structlog
from prometheus_client import Counter

from tierlog.catalog import Catalog
from tierlog.catalog.streams import StreamSnapshot
from tierlog.format.manifest import keep, unkeep
from tierlog.model.attribute_record import AttributesRecord
from tierlog.model.errors import CorruptError, IndeterminateError, RetryableError, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import (
    ClusterManifest,
    KeptLedger,
    ManifestHead,
    ManifestLedger,
    attributes_older,
    attributes_to_name,
    copy_of,
    head_calls_for_write,
    head_of,
    levels_older,
    older_than_manifest,
)
from tierlog.model.offload import OffloadContext
from tierlog.model.position import Position
from tierlog.model.stream import ListedLedger, Stream
from tierlog.offload.manifests import KnownManifest, ManifestGapError, ManifestStore, Standing
from tierlog.ports.objects import ObjectExistsError

log = structlog.get_logger()

WRITTEN: Final = Counter("tierlog_scheduler_manifests_written_total", "Manifests that were written")
RESTORED: Final = "metadata older than the manifest"
UNREAD: Final = "manifest not read or not written"
FAILURES_MAX: Final = 16
"""Behind so many in a row the bucket is asked for no manifest more in that pass."""


class ManifestGate(Protocol):
    """Writes manifests, and says what may be deleted, or raises that it could not ask."""

    def begin_term(self) -> None:
        """Forget what was known: another leader may have written since."""
        ...

    def begin_pass(self) -> None:
        """Ask the bucket again, whatever it was like before."""
        ...

    def forget(self, name: StreamName) -> None:
        """Forget a stream that is not there any more."""
        ...

    async def look(self, name: StreamName, *, compare: bool = False) -> bool:
        """Know the newest manifest of a stream, before its metadata is read.

        True: someone else wrote it, or it is known for the first time; what is kept of the
        stream's metadata from before this call must be read again. Cheap when nothing moved.
        ``compare``: what is known may be of long ago, and is compared with a listing.
        """
        ...

    async def record(
        self, snapshot: StreamSnapshot, contexts: Mapping[LedgerId, OffloadContext]
    ) -> None:
        """Write the next manifest, if what was read since ``look`` calls for one.

        ``contexts``: those read in this pass, or kept and unchanged. One that is not given is as
        it was when it was given last; one never given is read.
        """
        ...

    async def may_delete_local(self, context: OffloadContext) -> bool:
        """Tell whether the newest manifest, asked for now, names the context's copy (step 9)."""
        ...

    async def may_sweep(self, context: OffloadContext, uuid: UUID) -> bool:
        """Tell whether an abandoned attempt is surely not what a manifest names (step 3)."""
        ...

    async def let_go(self, name: StreamName, incarnation: UUID, ledger_id: LedgerId) -> bool:
        """Tell whether the newest manifest says that a ledger was trimmed (step 10).

        Only then may its objects be deleted, and its id be struck off ``deleting``.
        """
        ...

    async def record_cluster(self, *, compare: bool = False) -> None:
        """Write the cluster's own manifest, if its identity or its policies have changed.

        ``compare``: or if the one that was written is not there any more.
        """
        ...

    def attributes_through(self, name: StreamName) -> Position | None:
        """Return as of which entry the manifest names a stream's attributes; None: not known."""
        ...

    def stopped(self, name: StreamName) -> str | None:
        """Return why nothing of a stream is deleted now; None: nothing stops it."""
        ...

    def reads_again(self, name: StreamName) -> bool:
        """Tell whether a stream is stopped for what reading it anew in each pass may end."""
        ...

    def stopped_streams(self) -> Mapping[str, int]:
        """Return of how many streams nothing is deleted now, by the kind of cause."""
        ...


class BucketManifests:
    """``ManifestGate`` over manifests in a bucket."""

    def __init__(self, store: ManifestStore, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog
        self._cluster: tuple[int, ClusterManifest | None] | None = None
        # It is not in the bucket any more.
        self._cluster_gone = False
        # Why nothing of any stream is deleted; whether this term compared the policies.
        self._all_stopped: tuple[str, str] | None = None
        self._compared = False
        self._known: dict[StreamName, KnownManifest] = {}
        self._stopped: dict[StreamName, tuple[str, str]] = {}
        # Copies of which the manifest has other digests than the metadata.
        self._differing: set[LedgerId] = set()
        # Streams whose attributes were swept while a manifest was written: it may name what went.
        self._swept: set[StreamName] = set()
        self._failures = 0

    def __repr__(self) -> str:
        return f"<BucketManifests known={len(self._known)} stopped={len(self._stopped)}>"

    def begin_term(self) -> None:
        self._cluster = self._all_stopped = None
        self._compared = self._cluster_gone = False
        self._known.clear()
        self._stopped.clear()
        self._differing.clear()
        self._swept.clear()

    def begin_pass(self) -> None:
        self._failures = 0

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Ask the bucket about a stream, unless it is away: each one may wait as long."""
        if self._failures >= FAILURES_MAX:
            raise RetryableError("the bucket is away", remedy="The next pass asks again")
        try:
            yield
        except (RetryableError, IndeterminateError):
            self._failures += 1
            raise
        except TierlogError:
            self._failures = 0
            raise
        self._failures = 0

    def forget(self, name: StreamName) -> None:
        self._known.pop(name, None)
        self._swept.discard(name)
        self._stopped.pop(name, None)

    async def look(self, name: StreamName, *, compare: bool = False) -> bool:
        known = self._known.get(name)
        if known is not None and not await self._is_superseded(known, compare=compare):
            return False
        try:
            incarnation = (await self._catalog.streams.get(name)).incarnation
            with self._asking():
                self._known[name] = await self._newest_or_rest(name, incarnation)
        except TierlogError as error:
            self._stop(name, UNREAD, str(error))
        return True

    async def _newest_or_rest(self, name: StreamName, incarnation: UUID) -> KnownManifest:
        """Return the newest manifest; of one that lacks objects what is left.

        Whoever knew the rest may be dead, and nobody else would write it anew.
        """
        try:
            return await self._store.newest(name, incarnation)
        except ManifestGapError as error:
            log.error("manifest.gone", stream=name, cause=str(error))  # noqa: TRY400 - no bug of ours
            known = await self._store.behind_gap(name, incarnation)
        self._stop(name, UNREAD, "the bucket has no more what the manifest is made of")
        return known

    async def _is_superseded(self, known: KnownManifest, *, compare: bool) -> bool:
        """Compare with the bucket, if there is reason to; note what is gone."""
        name = known.stream
        # Of metadata that are older no manifest is written: that one is gone can wait.
        waits = known.gone and self._stopped.get(name, ("", ""))[0] != RESTORED
        if not (compare or waits):
            return False
        try:
            with self._asking():
                standing = await self._store.standing(known)
        except TierlogError as error:
            log.warning("manifest.unread", stream=name, cause=str(error))
            return False
        if standing is Standing.GONE:
            self._say_gone(known)
        elif standing is Standing.NEWEST and known.gone:
            if not known.sha256:
                # What it lacked is there again, and was not read.
                return True
            # A list that lags behind what was put did not have it yet.
            self._known[name] = replace(known, gone=False)
        return standing is Standing.SUPERSEDED

    async def record(
        self, snapshot: StreamSnapshot, contexts: Mapping[LedgerId, OffloadContext]
    ) -> None:
        name = snapshot.stream.name
        known = self._known.get(name)
        if known is None:
            return
        try:
            await self._record(snapshot, contexts, known)
        except ObjectExistsError as error:
            self._look_again(name, "another leader wrote a manifest meanwhile", error)
        except TierlogError as error:
            # Also a put whose answer was lost: the next look finds what became of it.
            self._look_again(name, "the manifest could not be written", error)

    async def _record(
        self,
        snapshot: StreamSnapshot,
        contexts: Mapping[LedgerId, OffloadContext],
        known: KnownManifest,
    ) -> None:
        stream, name = snapshot.stream, snapshot.stream.name
        if stream.incarnation != known.incarnation:
            self._known.pop(name)
            self._look_again(name, "the stream was made anew")
            return
        if known.head is not None:
            older = older_than_manifest(
                known.head, known.ledgers, stream, snapshot.ledgers, contexts
            )
            if older is not None:
                await self._say_older(name, known, older)
                return
        record = None if stream.raw else await self._catalog.attributes.peek(name)
        if attributes_older(known.head, record) is not None:
            # Another leader may have named what this client has not seen yet.
            record = await self._catalog.attributes.get(name)
        older = attributes_older(known.head, record)
        if older is not None:
            await self._say_older(name, known, older)
            return
        closed = [one for one in snapshot.ledgers if one.closed]
        changed = await self._changed(closed, contexts, known)
        listed = {one.ledger_id for one in closed}
        removed = [one for one in known.ledgers if one not in listed]
        named = self._attributes(record, closed, changed, known)
        head = head_of(stream, snapshot.ledgers, known.head, kept=known.ledgers, attributes=named)
        copied = any(one.uuid is not None for one in changed.values())
        called_for = copied or removed or head_calls_for_write(known.head, head)
        if called_for or known.gone:
            with self._asking():
                written = await self._write(known, head, changed, removed)
            self._differing -= changed.keys()
            if written.gone:
                return
            before = known.head.attributes if known.head is not None else None
            if named not in (None, before) and not await self._stands(stream, record, named):
                return
        self._go_on(name)

    async def _write(
        self,
        known: KnownManifest,
        head: ManifestHead,
        changed: Mapping[LedgerId, KeptLedger],
        removed: Sequence[LedgerId],
    ) -> KnownManifest:
        """Write the next manifest; behind a gap all of it anew, that a later leader can read it."""
        written = await self._store.write(known, head, put=changed, removed=removed)
        self._take(written)
        if written.gone and not known.gone:
            written = await self._store.write(written, head, put={})
            self._take(written)
        return written

    def _take(self, written: KnownManifest) -> None:
        WRITTEN.inc()
        self._known[written.stream] = written
        if written.gone:
            self._say_gone(written)

    def _attributes(
        self,
        record: AttributesRecord | None,
        closed: Sequence[ListedLedger],
        changed: Mapping[LedgerId, KeptLedger],
        known: KnownManifest,
    ) -> AttributesRecord | None:
        """Return the checkpoint of attributes that the next manifest names."""
        kept = {**known.ledgers, **changed}
        copies = [(one.ledger_id, kept[one.ledger_id].uuid is not None) for one in closed]
        head = known.head
        if head is not None and known.stream in self._swept:
            head = replace(head, attributes=None)
        return attributes_to_name(record, copies, head)

    async def _stands(
        self, stream: Stream, record: AttributesRecord | None, named: AttributesRecord | None
    ) -> bool:
        """Tell whether what a manifest names was not swept before it was there.

        A sweep raises the generation, reads the manifest, and only then deletes: with the
        generation of before, every later one sees what is named.
        """
        now = await self._catalog.attributes.get(stream.name)
        before = record.generation if record is not None else None
        if (now.generation if now is not None else None) != before:
            self._swept.add(stream.name)
            self._look_again(stream.name, "attributes were swept while the manifest was written")
            return False
        self._swept.discard(stream.name)
        through = named.newest.through if named is not None else None
        if through is not None and now is not None and now.ends:
            attributes = self._catalog.attributes
            await attributes.drop_ends(stream.name, stream.incarnation, before=through)
        return True

    async def _say_older(self, name: StreamName, known: KnownManifest, older: str) -> None:
        """Stop the stream, unless it is this leader that lags behind another."""
        if self._stopped.get(name) == (RESTORED, older):
            return
        if await self._store.standing(known) is Standing.SUPERSEDED:
            self._look_again(name, "another leader wrote a manifest meanwhile")
            return
        self._stop(name, RESTORED, older)

    async def _changed(
        self,
        closed: Sequence[ListedLedger],
        contexts: Mapping[LedgerId, OffloadContext],
        known: KnownManifest,
    ) -> dict[LedgerId, KeptLedger]:
        """Return the ledgers that the manifest has not, or has without the copy of now."""
        changed: dict[LedgerId, KeptLedger] = {}
        for listed in closed:
            ledger_id = listed.ledger_id
            kept, context = known.ledgers.get(ledger_id), contexts.get(ledger_id)
            if context is None and kept is None:
                context = await self._catalog.contexts.peek(ledger_id)
            elif context is None:
                continue
            copy = copy_of(context) if context is not None else None
            uuid = copy.uuid if copy is not None else None
            if kept is None or kept.uuid != uuid or ledger_id in self._differing:
                changed[ledger_id] = keep(ManifestLedger(listed=listed, copy=copy))
        return changed

    async def may_delete_local(self, context: OffloadContext) -> bool:
        known = await self._newest(context.stream, context.incarnation)
        return known is not None and self._has_copy(known, context)

    async def may_sweep(self, context: OffloadContext, uuid: UUID) -> bool:
        known = await self._newest(context.stream, context.incarnation)
        if known is None or known.names(context.ledger_id, uuid):
            return False
        if await self._store.may_be_last(context, uuid):
            return False
        # Of a ledger with a complete copy, the attempt may be the one that was complete before:
        # a manifest that is just being written could name it, unless this one names the new one.
        return not context.complete or self._has_copy(known, context)

    async def let_go(self, name: StreamName, incarnation: UUID, ledger_id: LedgerId) -> bool:
        known = await self._newest(name, incarnation)
        if known is None or known.head is None:
            return False
        return ledger_id <= known.head.trimmed_through and ledger_id not in known.ledgers

    def _has_copy(self, known: KnownManifest, context: OffloadContext) -> bool:
        kept = known.ledgers.get(context.ledger_id)
        if kept is None or kept.uuid is None or kept.uuid != context.uuid:
            return False
        if unkeep(kept.packed).copy == copy_of(context):
            return True
        log.error("manifest.differs", stream=context.stream, ledger_id=context.ledger_id)
        self._differing.add(context.ledger_id)
        return False

    async def _newest(self, name: StreamName, incarnation: UUID) -> KnownManifest | None:
        """Return the manifest, if it is the newest at this moment and nothing is stopped.

        Raises what the bucket does: of a quiet stream nobody else would find that out.
        """
        known = self._known.get(name)
        if known is None or known.incarnation != incarnation or self.stopped(name) is not None:
            return None
        standing = await self._store.standing(known)
        if standing is Standing.NEWEST:
            return known
        if standing is Standing.SUPERSEDED:
            self._look_again(name, "another leader wrote a manifest meanwhile")
        else:
            self._say_gone(known)
        return None

    def _say_gone(self, known: KnownManifest) -> None:
        """Keep what is known, delete nothing, and write it anew at the next pass."""
        name = known.stream
        self._known[name] = replace(known, gone=True)
        if name not in self._stopped:
            log.error("manifest.gone", stream=name, generation=known.generation)
            self._stop(name, UNREAD, "the bucket has no more what the manifest is made of")

    async def record_cluster(self, *, compare: bool = False) -> None:
        # By older policies none is written: that it is gone can wait, and what it said is kept.
        older = self._all_stopped is not None and self._all_stopped[0] == RESTORED
        try:
            if compare or (self._cluster_gone and not older):
                await self._compare_cluster()
            await self._record_cluster()
        except TierlogError as error:
            if not (self._cluster_gone or older):
                self._cluster = None
            log.warning("manifest.cluster_failed", cause=str(error))
            if not self._compared and self._all_stopped is None:
                self._all_stopped = (UNREAD, f"the cluster's manifest: {error}")

    async def _compare_cluster(self) -> None:
        """See whether the manifest that is known is still the newest one."""
        generation, manifest = self._cluster or (0, None)
        if manifest is None:
            return
        newest = await self._store.newest_of_cluster(manifest.cluster.cluster_id)
        if newest < generation:
            # What it said is known, and stops what is older as before.
            log.error("manifest.cluster_gone", generation=generation)
            self._cluster_gone = True
        elif newest > generation or self._cluster_gone:
            self._cluster, self._cluster_gone = None, False

    async def _record_cluster(self) -> None:
        known = self._cluster
        cluster = await self._catalog.nodes.cluster()
        if cluster is None:
            return
        if known is None:
            known = await self._known_cluster(cluster.cluster_id)
            # Read after the manifest, as with streams.
            cluster = await self._catalog.nodes.cluster() or cluster
        generation, written = known
        levels = await self._catalog.policies.levels()
        if written is not None:
            levels = levels.knowing(written.levels)
        manifest = ClusterManifest(cluster=cluster, levels=levels)
        older = levels_older(written, levels)
        if older is not None:
            # Of these no manifest is written, nor is anything deleted by them.
            self._stop_all(older)
            self._cluster = known
            return
        self._compared, self._all_stopped = True, None
        # What they say may be as before, and be said later.
        changed = manifest != written or levels.changed_ms > written.levels.changed_ms
        if changed or self._cluster_gone:
            generation += 1
            await self._store.write_cluster(generation, manifest)
            self._cluster_gone = False
        self._cluster = (generation, manifest)

    async def _known_cluster(self, cluster_id: UUID) -> tuple[int, ClusterManifest | None]:
        """Return the newest one; one that is damaged as none, behind which the next is written."""
        try:
            return await self._store.cluster(cluster_id)
        except CorruptError as error:
            log.error("manifest.cluster_damaged", cause=str(error))  # noqa: TRY400 - no bug of ours
            return await self._store.newest_of_cluster(cluster_id), None

    def attributes_through(self, name: StreamName) -> Position | None:
        known = self._known.get(name)
        return known.head.attributes_through if known is not None and known.head else None

    def stopped(self, name: StreamName) -> str | None:
        found = self._stopped.get(name) or self._all_stopped
        return None if found is None else f"{found[0]}: {found[1]}"

    def reads_again(self, name: StreamName) -> bool:
        return name in self._stopped

    def stopped_streams(self) -> Mapping[str, int]:
        found = [kind for kind, _ in self._stopped.values()]
        if self._all_stopped is not None:
            # One at least: who trims nothing yet is told of it, too.
            left = len(self._known.keys() - self._stopped.keys())
            found += [self._all_stopped[0]] * max(1, left)
        return {kind: found.count(kind) for kind in (RESTORED, UNREAD)}

    def _look_again(self, name: StreamName, cause: str, error: TierlogError | None = None) -> None:
        """Look anew at the next pass; until then nothing of the stream is deleted."""
        known = self._known.get(name)
        if known is not None and not known.gone:
            self._known.pop(name)
        self._stop(name, UNREAD, f"{cause} ({error.message})" if error is not None else cause)

    def _stop_all(self, cause: str) -> None:
        if self._all_stopped != (RESTORED, cause):
            self._all_stopped = (RESTORED, cause)
            log.error(
                "deletions.stopped",
                cause=f"{RESTORED}: {cause}",
                remedy="Restore newer metadata, or set the policies that are to hold; see the "
                "how-to restore-from-a-bucket",
            )

    def _stop(self, name: StreamName, kind: str, cause: str) -> None:
        if self._stopped.get(name) == (kind, cause):
            return
        self._stopped[name] = (kind, cause)
        if kind == RESTORED:
            log.error(
                "deletions.stopped",
                stream=name,
                cause=f"{kind}: {cause}",
                remedy="Restore newer metadata; see the how-to restore-from-a-bucket",
            )
        else:
            log.warning("deletions.wait", stream=name, cause=cause)

    def _go_on(self, name: StreamName) -> None:
        if self._stopped.pop(name, None) is not None:
            log.info("deletions.go_on", stream=name)
