"""One scrub: list the bucket, read the metadata, look anew at what seems wrong, repair it.

Owns the order of steps and the second look before anything is told or changed. Does not own what
the values mean (``tierlog.offload.scrub_rules``), nor when a scrub runs: the scheduler does.

Steps (protocols.md section 3, step 11): list the bucket and its open uploads; per stream read the
newest manifest, then the metadata; then judge what nobody named.

Invariants:
    * Nothing is told to be wrong before it was looked at again, together with the ledger's
      context as of then: an offload at work is no fault.
    * Deletions come last, one attempt at a time, each after its context, the newest manifests
      that could name it and its objects were read at that very moment.
    * Metadata that are older than a manifest, or a manifest or context that can't be read, stop
      every deletion of the scrub, and no look at others. A stream that is paused is left as it is.
    * A damaged copy stays what it is until a new one is complete (``tierlog.offload.repair``); its
      objects stay until a manifest names the new copy. It is put in doubt first, whether it is
      repaired or not, so that no local copy goes; only a deep look that finds it sound, all of
      it, takes that back. What could not be looked at changes nothing of that. Until then every
      scrub tells of it, whoever found it, and repairs it where that is asked for.
    * Requests, bytes, findings and the time of a deep scrub are bounded.

Crash: nothing is left half done; each repair is one compare-and-set, or a deletion that the next
scrub finishes. Two scrubs at once do no harm.
"""

from collections.abc import Awaitable, Callable, Container, Sequence
from typing import Final, ParamSpec, TypeVar
from uuid import UUID

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.streams import StreamSnapshot
from tierlog.format import keys
from tierlog.format.keys import ObjectKeys, parse_key
from tierlog.format.manifest import is_manifest_key
from tierlog.model.errors import CorruptError, Reason, RefusedError, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import older_than_manifest
from tierlog.model.offload import OffloadContext
from tierlog.model.scrub import DeepPlace, Finding, FindingKind, ScrubReport, ScrubWish
from tierlog.model.stream import StreamLifecycle
from tierlog.offload import scrub_rules as rules
from tierlog.offload.attribute_scrub import AttributeScrub
from tierlog.offload.attribute_sweep import AttributeSweeper
from tierlog.offload.cleaning import UNSEEN, delete_objects
from tierlog.offload.manifests import KnownManifest, ManifestStore
from tierlog.offload.repair import Repairer
from tierlog.offload.scrub_copies import CopyLook
from tierlog.offload.scrub_crew import Crew, Merger, NamesAlone, StreamLook
from tierlog.offload.scrub_manifests import ManifestLook, stopped_by
from tierlog.ports.clock import Clock
from tierlog.ports.objects import ObjectInfo, ObjectStore, OpenUpload
from tierlog.ports.spending import Cause, spending
from tierlog.ports.throttle import TokenBucket

log = structlog.get_logger()

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")

CONTEXTS_AT_ONCE: Final = 64
LIST_PAGE: Final = 1000
PAUSED: Final = "the stream is paused"
NOT_ASKED: Final = "nobody asked for a repair of it"


class Scrubber:
    """Scrubs one cluster's part of one bucket."""

    def __init__(
        self,
        *,
        objects: ObjectStore,
        catalog: Catalog,
        manifests: ManifestStore,
        repairer: Repairer,
        cluster_id: UUID,
        bucket: str,
        endpoint_name: str,
        key_prefix: str,
        clock: Clock,
        limits: rules.ScrubLimits,
    ) -> None:
        self.objects = objects
        self.catalog = catalog
        self.manifests = manifests
        self.repairer = repairer
        self.cluster_id = cluster_id
        self.bucket = bucket
        self.endpoint_name = endpoint_name
        self.key_prefix = key_prefix
        self.clock = clock
        self.limits = limits
        self.sweeper = AttributeSweeper(
            objects=objects,
            catalog=catalog,
            manifests=manifests,
            cluster_id=cluster_id,
            key_prefix=key_prefix,
            clock=clock,
            safety_ms=limits.safety_ms,
        )

    def __repr__(self) -> str:
        return f"<Scrubber {self.key_prefix!r} of {self.cluster_id}>"

    async def run(
        self,
        report: ScrubReport,
        *,
        deep_from: DeepPlace | None = None,
        crew: Crew | None = None,
    ) -> None:
        """Scrub, and tell ``report``; raises what makes the whole of it impossible.

        ``crew``: who lists the bucket, and looks at the ledgers of all streams, instead.
        """
        with spending(Cause.SCRUB, ""):
            await _Run(self, report, deep_from, crew).run()

    async def look(
        self, report: ScrubReport, name: StreamName, only: Container[LedgerId]
    ) -> StreamLook:
        """Look at some ledgers of one stream, as one of a crew; nothing is repaired."""
        assert not report.wish.repair, "whoever has a crew repairs afterwards"
        with spending(Cause.SCRUB, name):
            return await _Run(self, report, None).look(name, only)


class _Run:
    """One scrub at work."""

    def __init__(
        self,
        parts: Scrubber,
        report: ScrubReport,
        deep_from: DeepPlace | None,
        crew: Crew | None = None,
    ) -> None:
        self._parts = parts
        self._crew = crew
        self._only: Container[LedgerId] | None = None
        self._objects = parts.objects
        self._contexts = parts.catalog.contexts
        self._report = report
        self._wish: ScrubWish = report.wish
        self._deep_from = deep_from
        self._deep_until_s = parts.clock.monotonic_s() + parts.limits.deep_s_max
        self._requests = TokenBucket(
            parts.clock, per_s=parts.limits.requests_per_s, burst=parts.limits.requests_per_s
        )
        self._bytes = TokenBucket(parts.clock, per_s=parts.limits.bytes_per_s)
        self._survey: rules.Survey = rules.Survey(parts.key_prefix)
        self._copies = CopyLook(
            objects=parts.objects,
            catalog=parts.catalog,
            bucket=parts.bucket,
            endpoint_name=parts.endpoint_name,
            clock=parts.clock,
            safety_ms=parts.limits.safety_ms,
            pay=self._pay,
        )
        self._manifests = ManifestLook(
            manifests=parts.manifests,
            catalog=parts.catalog,
            cluster_id=parts.cluster_id,
            key_prefix=parts.key_prefix,
            clock=parts.clock,
            safety_ms=parts.limits.safety_ms,
            pay=self._pay,
        )
        self._indexes = AttributeScrub(parts.sweeper, parts.key_prefix)
        self._uploads: Sequence[OpenUpload] = ()
        self._incarnations: dict[StreamName, list[UUID]] = {}
        self._shared = False
        self._unread: set[StreamName] = set()
        self._paused: set[str] = set()
        self._walked: dict[StreamName, tuple[UUID, int]] = {}
        self._merger = Merger(report, self._survey)

    async def look(self, name: StreamName, only: Container[LedgerId]) -> StreamLook:
        """Look at some ledgers of a stream, and give back what they and its manifest name."""
        survey = self._survey = NamesAlone(self._parts.key_prefix)
        self._only = only
        await self._stream(name)
        return StreamLook(
            name=name,
            report=self._report,
            named=tuple(survey.named),
            walked=self._walked.get(name),
            paused=name in self._paused,
        )

    async def run(self) -> None:
        report = self._report
        report.phase = "list"
        await self._list()
        await self._missing(self._manifests.cluster())
        report.phase = "metadata"
        await self._walk()
        await self._missing(self._manifests.no_cluster(self._walked, self._incarnations))
        report.phase = "unnamed"
        for seen in self._survey.unnamed():
            await self._unnamed(seen)
        report.phase = "uploads"
        for upload in self._uploads:
            await self._upload(upload)
        report.phase = "attributes"
        known = [(name, found[0]) for name, found in self._walked.items()]
        await self._indexes.run(report, known, pay=self._pay, kept=self._index_kept)
        report.phase = ""

    async def _list(self) -> None:
        """List everything before any metadata are read."""
        prefix = keys.key_prefix(self._parts.key_prefix)
        try:
            self._uploads = await self._paid(self._objects.list_uploads, prefix)
        except RefusedError as error:
            # Unknown is not empty: that there are none is not said.
            UNSEEN.labels("scrub").inc()
            cause = f"open uploads: {error.message}"
            self._report.add(Finding(kind=FindingKind.NOT_CHECKED, key=prefix, cause=cause))
        self._report.uploads = len(self._uploads)
        if self._crew is not None:
            self._merger.take_listing(await self._crew.listing(), self._indexes)
        else:
            await self._list_objects(prefix)
        await self._manifests.see_ids()
        for name, incarnation in await self._parts.manifests.streams():
            self._incarnations.setdefault(name, []).append(incarnation)
        self._shared = bool(set(await self._parts.manifests.clusters()) - {self._parts.cluster_id})

    async def _list_objects(self, prefix: str) -> None:
        async for info in self._objects.list(prefix):
            if self._report.objects % LIST_PAGE == 0:
                await self._requests.take(1)
            self._report.objects += 1
            if not (
                self._survey.see_object(info)
                or is_manifest_key(self._parts.key_prefix, info.key)
                or self._indexes.see(info.key)
            ):
                self._report.counts[FindingKind.FOREIGN] += 1

    def _take_look(self, look: StreamLook) -> None:
        """Take what one of a crew found."""
        self._merger.take(look)
        if look.report.deletions_stopped:
            self._stop(look.report.deletions_stopped)
        if look.walked is not None:
            self._walked[look.name] = look.walked
            self._unread.discard(look.name)
        if look.paused:
            self._paused.add(look.name)
        self._report.streams = len(self._walked)

    async def _walk(self) -> None:
        """Read each stream's manifest, then its metadata."""
        names = sorted(await self._parts.catalog.streams.names())
        self._unread.update(names)
        if self._crew is not None:
            async for look in self._crew.looks(names):
                self._take_look(look)
        else:
            for name in names:
                with spending(Cause.SCRUB, name):
                    await self._stream(name)
        for name, incarnations in self._incarnations.items():
            for incarnation in incarnations:
                if self._walked.get(name, (None, 0))[0] != incarnation:
                    await self._only_in_bucket(name, incarnation)

    async def _stream(self, name: StreamName) -> None:
        streams = self._parts.catalog.streams
        try:
            incarnation = (await streams.get(name)).incarnation
            known = await self._manifest(name, incarnation)
            snapshot = await streams.snapshot(name)
        except TierlogError as error:
            if error.reason is not Reason.STREAM_NOT_FOUND:
                self._report.skip(f"stream {name}: {error}")
                self._stop(f"the metadata of stream {name} could not be read")
            return
        self._report.streams += 1
        self._unread.discard(name)
        if snapshot.stream.offload_pause is not None:
            self._paused.add(name)
        self._walked[name] = (incarnation, snapshot.stream.created_ms)
        if known is None or snapshot.stream.incarnation != incarnation:
            known = None
        elif known.head is not None:
            older = older_than_manifest(
                known.head, known.ledgers, snapshot.stream, snapshot.ledgers, {}
            )
            if older is not None:
                self._older(name, older)
                known = None
        await self._ledgers(snapshot, known)

    async def _manifest(self, name: StreamName, incarnation: UUID) -> KnownManifest | None:
        """Return the newest manifest and note what it speaks for; None: nobody can tell."""
        try:
            known = await self._paid(self._parts.manifests.newest, name, incarnation)
            left = await self._manifests.is_left(known)
        except TierlogError as error:
            self._unread_manifest(error, f"the manifest of stream {name}", name)
            return None
        if not left:
            self._survey.see_manifest(known)
        elif known.head is not None and known.head.offload_pause and name not in self._walked:
            # Nobody can resume it any more, nor did anybody. One that was made anew is another.
            self._paused.add(name)
        return known

    async def _missing(self, look: Awaitable[Finding | None], stream: str = "") -> None:
        """Take what a look for a missing manifest comes to."""
        try:
            finding = await look
        except TierlogError as error:
            what = f"the manifest of {f'stream {stream}' if stream else 'the cluster'}"
            self._unread_manifest(error, what, stream)
            return
        if finding is not None:
            self._report.add(finding)
            self._stop(stopped_by(finding))

    def _unread_manifest(self, error: TierlogError, what: str, stream: str = "") -> None:
        if isinstance(error, CorruptError | RefusedError):
            self._report.add(rules.unread_manifest(error, stream))
        else:
            self._report.skip(f"{what}: {error}")
        self._stop(f"{what} could not be read")

    async def _only_in_bucket(self, name: StreamName, incarnation: UUID) -> None:
        """Look at a manifest of a stream that the metadata do not have."""
        known = await self._manifest(name, incarnation)
        if known is None or known.head is None or known.cluster_id != self._parts.cluster_id:
            return
        if name in self._unread:
            return
        copied = any(one.uuid is not None for one in known.ledgers.values())
        if known.head.created_ms < self._walked.get(name, (None, 0))[1]:
            # An older incarnation: what its manifest names is kept, and that is all.
            return
        if copied and known.head.lifecycle is StreamLifecycle.ACTIVE:
            self._older(name, f"incarnation {incarnation} is unknown to the metadata")

    def _older(self, name: StreamName, cause: str) -> None:
        self._report.add(Finding(kind=FindingKind.METADATA_OLDER, stream=name, cause=cause))
        self._stop(f"the metadata of stream {name} are older than its manifest")

    def _stop(self, cause: str) -> None:
        self._report.deletions_stopped = self._report.deletions_stopped or cause

    async def _ledgers(self, snapshot: StreamSnapshot, known: KnownManifest | None) -> None:
        """Look at the ledgers of a stream, and at those that are being deleted."""
        wanted = [*(one.ledger_id for one in snapshot.ledgers), *snapshot.stream.deleting]
        if self._only is not None:
            wanted = [one for one in wanted if one in self._only]
        listed, stream = {one.ledger_id: one for one in snapshot.ledgers}, snapshot.stream
        for start in range(0, len(wanted), CONTEXTS_AT_ONCE):
            some = wanted[start : start + CONTEXTS_AT_ONCE]
            contexts, unread = await self._copies.contexts_of(stream.name, some, self._report)
            if unread:
                # It may name what nothing else does.
                self._stop(f"the context of ledger {min(unread)} could not be read")
            try:
                older = await self._manifests.older(known, stream, listed, contexts)
            except TierlogError as error:
                older, known = None, None
                self._unread_manifest(error, f"the manifest of stream {stream.name}", stream.name)
            if older is not None:
                self._older(stream.name, older)
                known = None
            for ledger_id in some:
                self._report.ledgers += 1
                context = contexts.get(ledger_id)
                if context is not None:
                    if known is not None and ledger_id in listed:
                        self._manifests.see(known, context)
                    await self._context(context, may_repair=known is not None)
                elif ledger_id in listed and ledger_id not in unread:
                    self._add(await self._copies.unknown(stream.name, ledger_id, self._report))
        look = self._manifests.unnamed(stream.name, stream.incarnation)
        await self._missing(look, stream.name)

    def _add(self, finding: Finding | None) -> None:
        if finding is not None:
            self._report.add(finding)

    async def _context(self, context: OffloadContext, *, may_repair: bool) -> None:
        verdict = self._survey.see_context(context)
        try:
            if context.stream not in self._paused:
                self._add(await self._copies.stalled(context))
            if not context.complete or context.location is None:
                self._add(await self._copies.local_alone(context))
                return
            if not self._copies.is_here(context):
                self._report.elsewhere += 1
                return
            self._report.copies_checked += 1
            finding = None
            if verdict is not None:
                finding = await self._copies.confirmed(context)
            if finding is None and self._wish.deep and self._wish.asks_for(context.ledger_id):
                finding = await self._deep(context)
            if finding is not None:
                await self._copies.doubt(context, finding, self._report)
            else:
                finding = await self._copies.unfinished(
                    context, self._parts.repairer
                ) or await self._copies.doubted(context)
            if finding is not None:
                await self._repair(context, finding, may_repair=may_repair)
                self._report.add(finding)
        except TierlogError as error:
            self._report.skip(f"ledger {context.ledger_id} of {context.stream}: {error}")

    async def _deep(self, context: OffloadContext) -> Finding | None:
        """Read all of a copy and compare, as long as there is time."""
        place = DeepPlace(context.stream, context.ledger_id)
        if self._deep_from is not None and place < self._deep_from:
            return None
        if self._parts.clock.monotonic_s() >= self._deep_until_s:
            self._report.deep_next = self._report.deep_next or place
            return None
        assert context.copy is not None
        try:
            return await self._copies.read_whole(context)
        finally:
            self._report.bytes_read += context.copy.data_len

    async def _repair(self, context: OffloadContext, finding: Finding, *, may_repair: bool) -> None:
        """Make a new copy in the place of a damaged one, or say why not."""
        if not self._wish.repair:
            return
        if not self._wish.asks_for(context.ledger_id):
            finding.kept = NOT_ASKED
            return
        finding.kept = await self._pause_of(context.stream)
        if finding.kept:
            return
        if not may_repair:
            finding.kept = "the manifest of the stream does not vouch for the metadata"
            return
        cause = f"{finding.kind.value}: {finding.cause}"
        done = await self._parts.repairer.repair(context, cause, self._bytes)
        finding.repaired, finding.kept = done.repaired, done.kept
        finding.lost, finding.lost_count = done.lost, done.lost_count
        if not done.repaired:
            finding.remedy = (
                f"Bring {finding.key} back from another copy of the bucket, or what belongs to "
                "it; see the how-to scrub-a-bucket"
            )

    async def _unnamed(self, seen: rules.SeenAttempt) -> None:
        """Judge objects that neither metadata nor manifests name."""
        named = keys.object_keys(self._parts.key_prefix, seen.uuid, seen.ledger_id)
        try:
            looked = await self._look(named)
            if looked is None:
                return
            finding = Finding(
                kind=rules.judge_unnamed(
                    looked,
                    own=self._parts.cluster_id,
                    now_ms=self._parts.clock.wall_ms(),
                    safety_ms=self._parts.limits.safety_ms,
                ),
                stream=looked[0].metadata.get(keys.MANAGED_LEDGER_NAME, "")[:256],
                ledger_id=seen.ledger_id,
                uuid=seen.uuid,
                key=looked[0].key,
                cause=f"{len(looked)} objects with {sum(one.size for one in looked)} bytes",
            )
            if finding.kind is FindingKind.FOREIGN:
                self._shared = True
            elif await self._named_now(seen, finding.stream):
                return
            else:
                await self._check_given(seen.ledger_id)
                if finding.kind is FindingKind.ORPHAN_OBJECTS:
                    await self._delete(named, seen, finding)
        except TierlogError as error:
            self._report.skip(f"{named.data}: {error}")
            if not self._manifests.was_given(seen.ledger_id):
                self._stop(f"whether ledger {seen.ledger_id} was given can't be told")
            return
        self._report.add(finding, objects=len(looked), size=sum(one.size for one in looked))

    async def _check_given(self, ledger_id: LedgerId) -> None:
        finding = await self._manifests.not_given(ledger_id)
        if finding is not None:
            self._report.add(finding)
            self._stop(f"the metadata are older than the bucket: {finding.cause}")

    async def _look(self, named: ObjectKeys) -> list[ObjectInfo] | None:
        """Return an attempt's objects as of now, whoever wrote it; None: they are gone."""
        some = dict.fromkeys((named.data, *named.every))
        found = [await self._paid(self._objects.head, key) for key in some]
        return [one for one in found if one is not None] or None

    async def _named_now(self, seen: rules.SeenAttempt, stream: str) -> bool:
        incarnations = self._incarnations.get(StreamName(stream), ())
        return await self._manifests.named_now(seen.ledger_id, seen.uuid, stream, incarnations)

    async def _delete(self, named: ObjectKeys, seen: rules.SeenAttempt, finding: Finding) -> None:
        if not self._wish.repair or await self._kept(finding):
            return
        context = await self._paid(self._contexts.get, seen.ledger_id)
        if await self._copies.may_be_last(context, named, await self._look(named)):
            finding.kept = "its ledger has no other copy in tier 2 that is complete and sound"
            return
        try:
            uploads = await self._paid(self._objects.list_uploads, named.data)
        except RefusedError as error:
            finding.kept = f"whether an upload of the attempt is open can't be seen: {error}"
            return
        now_ms, safety_ms = self._parts.clock.wall_ms(), self._parts.limits.safety_ms
        if any(now_ms - one.initiated_ms < safety_ms for one in uploads):
            finding.kept = "an upload of the same attempt is younger than the safety age"
            return
        await delete_objects(self._objects, named.data, named.every)
        finding.repaired = "deleted"
        log.warning("scrub.deleted", ledger_id=seen.ledger_id, uuid=str(seen.uuid))

    async def _kept(self, finding: Finding) -> bool:
        """Say why nothing is deleted, if something stops it."""
        is_asked = self._wish.asks_for(finding.ledger_id)
        finding.kept = await self._kept_of(finding.stream) if is_asked else NOT_ASKED
        return bool(finding.kept)

    async def _index_kept(self, name: str) -> str:
        return NOT_ASKED if self._wish.ledgers is not None else await self._kept_of(name)

    async def _kept_of(self, name: str) -> str:
        return await self._pause_of(name) or self._report.deletions_stopped

    async def _pause_of(self, name: str) -> str:
        """Say that a stream is paused, by now or when it was looked at, or may be; else nothing."""
        if name in self._paused:
            return PAUSED
        if name not in self._walked:
            return ""
        try:
            stream = await self._parts.catalog.streams.get(StreamName(name))
        except TierlogError as error:
            gone = error.reason is Reason.STREAM_NOT_FOUND
            return "" if gone else f"whether the stream is paused can't be told: {error}"
        return PAUSED if stream.offload_pause is not None else ""

    async def _upload(self, upload: OpenUpload) -> None:
        """Judge an open upload, with the context of its ledger as of now."""
        at = parse_key(self._parts.key_prefix, upload.key)
        if at is None:
            self._report.counts[FindingKind.FOREIGN] += 1
            return
        try:
            context = await self._contexts.get(at.ledger_id)
            kind = rules.judge_upload(
                upload,
                context,
                at.uuid,
                shared=self._shared,
                now_ms=self._parts.clock.wall_ms(),
                safety_ms=self._parts.limits.safety_ms,
            )
            if kind is None:
                return
            finding = Finding(kind=kind, ledger_id=at.ledger_id, uuid=at.uuid, key=upload.key)
            finding.stream = context.stream if context is not None else ""
            if kind is FindingKind.ORPHAN_UPLOAD:
                open_now = await self._paid(self._objects.list_uploads, upload.key)
                if upload.upload_id not in {one.upload_id for one in open_now}:
                    return
                if self._wish.repair and not await self._kept(finding):
                    await self._paid(self._objects.abort_upload, upload.key, upload.upload_id)
                    finding.repaired = "aborted"
                    log.warning("scrub.aborted", key=upload.key)
        except TierlogError as error:
            self._report.skip(f"upload of {upload.key}: {error}")
            return
        self._report.add(finding)

    async def _pay(self, length: int) -> None:
        await self._requests.take(1)
        await self._bytes.take(length)

    async def _paid(
        self,
        ask: Callable[Arguments, Awaitable[Answer]],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Answer:
        """Ask the store, at the pace that is allowed."""
        await self._requests.take(1)
        return await ask(*args, **kwargs)
