"""A cluster's metadata from its bucket alone, when ZooKeeper and all disks are gone.

Owns the plan, made of the newest manifests and checked against the objects, and its application
to an empty metadata store. Does not own the records (``tierlog.catalog.restore``).

Invariants:
    * Nothing in the bucket is changed.
    * What can't be read now ends the plan with an error: unknown is not lost.
    * Objects of this cluster that no manifest names are told, unless their ledger comes back
      otherwise or was to go. A stream of which there are such objects and no manifest is damage.
    * Lost and damaged ledgers are named, and a plan with damage, with losses in the middle of a
      stream, or with writers of whom is not known what they appended, is applied only when
      somebody said so.
    * The attributes of writers come back as of the checkpoint that the manifest names, with all its
      objects read and compared, and the owner adds the entries behind it. Where they can't be known
      that is said.
    * Ledger ids go on above every id that the bucket shows, and a margin above that, since ledgers
      that never came to the bucket had ids too.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final
from uuid import UUID

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.restore import RestoredStream
from tierlog.format.attribute_objects import attributes_folder
from tierlog.format.keys import (
    MANAGED_LEDGER_NAME,
    ObjectRole,
    cluster_of,
    key_prefix,
    object_keys,
    parse_key,
)
from tierlog.format.manifest import unkeep
from tierlog.model.attribute_record import AttributesRecord, losses_of
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import LEDGER_ID_MAX, LedgerId, StreamName
from tierlog.model.manifest import NO_LEDGER, ManifestCopy, ManifestHead, ManifestLedger
from tierlog.model.node import Cluster
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.model.policy import NO_LEVELS, PolicyLevels
from tierlog.model.stream import ListedLedger, Stream, StreamLifecycle
from tierlog.offload.attribute_restore import attributes_cause, checked_attributes
from tierlog.offload.drivers import known_here
from tierlog.offload.groups import plain_errors
from tierlog.offload.manifests import KnownManifest, ManifestStore
from tierlog.offload.verify import verify_copy
from tierlog.ports.objects import ObjectStore
from tierlog.ports.spending import Cause, spending

log = structlog.get_logger()

LEDGER_ID_MARGIN: Final = 1_000_000
CHECKS_IN_FLIGHT_MAX: Final = 32
HEADS_AT_ONCE: Final = 1000
STREAMS_IN_FLIGHT_MAX: Final = 8
NO_STREAM: Final = StreamName("")


class Verdict(StrEnum):
    """What becomes of a ledger, or of a stream, that is not simply restored."""

    LOST = "lost"
    """It was not in the bucket, and went with the disks."""
    DAMAGED = "damaged"
    """Its objects are missing, or not what the manifest says."""
    SKIPPED = "skipped"
    """A stream that was being deleted, or an older incarnation. What is left of the first stays
    until somebody has a scrub repair."""
    UNNAMED = "unnamed"
    """Its objects are there, and no manifest names them: they stay until somebody has a scrub
    repair."""
    STATE_UNKNOWN = "state-unknown"
    """What its writers appended before is not known: a writer that retries may append twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something to know of a restore; without a ledger it is of the whole stream.

    Without a stream it is of the cluster itself.
    """

    verdict: Verdict
    stream: StreamName
    ledger_id: LedgerId | None = None
    entries: int = 0
    in_the_middle: bool = False
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """A stream as it will be: its head, and every ledger that the bucket has, whole or not.

    A damaged one comes back too, when that is accepted: readers are told what is damaged of it,
    where it is, and nothing is skipped in silence.
    """

    head: ManifestHead
    written_ms: int
    ledgers: tuple[ManifestLedger, ...]
    attributes: AttributesRecord | None = None

    @property
    def entries(self) -> int:
        """How many entries come back."""
        return sum(one.listed.entry_count for one in self.ledgers)

    @property
    def length(self) -> int:
        """How many bytes of payload come back."""
        return sum(one.listed.length for one in self.ledgers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """Everything that a restore will make, and what it can't."""

    cluster: Cluster
    levels: PolicyLevels
    streams: tuple[StreamPlan, ...]
    findings: tuple[Finding, ...]
    ledger_id_seen: LedgerId

    def check(self, *, accept_loss: bool, accept_damage: bool) -> None:
        """Refuse what nobody has accepted."""
        damaged = [one for one in self.findings if one.verdict is Verdict.DAMAGED]
        if damaged and not accept_damage:
            raise CorruptError(
                f"{len(damaged)} ledgers or manifests in the bucket are damaged, the first: "
                f"{_name(damaged[0])}: {damaged[0].cause}",
                remedy="Bring the objects back, or those manifests; or restore without them: "
                "--accept-damage",
            )
        holes = [one for one in self.findings if one.in_the_middle]
        if holes and not accept_loss:
            raise RefusedError(
                f"{len(holes)} ledgers in the middle of streams were never offloaded, the first: "
                f"{_name(holes[0])}",
                remedy="Bring storage nodes and ZooKeeper back if you can, or go on without "
                "those ledgers: --accept-loss",
            )
        unknown = [one for one in self.findings if one.verdict is Verdict.STATE_UNKNOWN]
        if unknown and not accept_loss:
            raise RefusedError(
                f"what writers appended to {len(unknown)} streams is not known, the first: "
                f"{_name(unknown[0])}: {unknown[0].cause}",
                remedy="Bring storage nodes and ZooKeeper back if you can, or go on and let no "
                "writer retry what it appended before: --accept-loss",
            )


class Restorer:
    """Plans, and applies, the restore of one cluster from one place in a bucket."""

    def __init__(
        self,
        objects: ObjectStore,
        manifests: ManifestStore,
        *,
        bucket: str,
        endpoint_name: str,
        key_prefix: str = "",
        ledger_id_margin: int = LEDGER_ID_MARGIN,
    ) -> None:
        self._objects = objects
        self._manifests = manifests
        self._bucket = bucket
        self._endpoint_name = endpoint_name
        self._prefix = key_prefix
        self._margin = ledger_id_margin
        self._checks = asyncio.Semaphore(CHECKS_IN_FLIGHT_MAX)
        self._loads = asyncio.Semaphore(STREAMS_IN_FLIGHT_MAX)

    async def plan(self, cluster_id: UUID | None = None) -> RestorePlan:
        """Read and check everything; nothing is changed anywhere."""
        with spending(Cause.RESTORE):
            return await self._plan(cluster_id)

    async def _plan(self, cluster_id: UUID | None) -> RestorePlan:
        found, findings = await self._read_streams()
        cluster, levels = await self._cluster(cluster_id, found, findings)
        own = [one for one in found if one.cluster_id == cluster.cluster_id]
        chosen, skipped = _choose(own)
        with plain_errors():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._plan_stream(one)) for one in chosen]
        plans = [task.result() for task in tasks]
        findings = [*findings, *skipped, *(one for _, some in plans for one in some)]
        seen, unnamed = await self._listed(found)
        findings += await self._unnamed(unnamed, own, findings, cluster.cluster_id)
        highest = max(seen, *(_highest_of(one) for one in own), NO_LEDGER)
        base = max(cluster.ledger_id_base, highest + 1 + self._margin)
        if base > LEDGER_ID_MAX:
            raise RefusedError(
                f"ledger ids would begin at {base}, and end at {LEDGER_ID_MAX}",
                remedy="Give a smaller --ledger-id-margin",
            )
        return RestorePlan(
            cluster=replace(cluster, ledger_id_base=base),
            levels=levels,
            streams=tuple(plan for plan, _ in plans),
            findings=tuple(findings),
            ledger_id_seen=LedgerId(highest),
        )

    async def _read_streams(self) -> tuple[list[KnownManifest], list[Finding]]:
        """Return the newest manifest of each incarnation, and those that can't be read."""
        names = sorted(await self._manifests.streams())
        findings: list[Finding] = []

        async def one(stream: StreamName, incarnation: UUID) -> KnownManifest | None:
            async with self._loads:
                try:
                    return await self._manifests.newest(stream, incarnation)
                except CorruptError as error:
                    findings.append(
                        Finding(verdict=Verdict.DAMAGED, stream=stream, cause=error.message)
                    )
                    return None

        with plain_errors():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*name)) for name in names]
        found = [known for task in tasks if (known := task.result()) is not None]
        return found, sorted(findings, key=lambda one: one.stream)

    async def _cluster(
        self, cluster_id: UUID | None, found: Sequence[KnownManifest], findings: list[Finding]
    ) -> tuple[Cluster, PolicyLevels]:
        ids = set(await self._manifests.clusters())
        ids |= {one.cluster_id for one in found if one.cluster_id is not None}
        if cluster_id is None and len(ids) == 1:
            (cluster_id,) = ids
        if cluster_id is None or cluster_id not in ids:
            named = ", ".join(sorted(map(str, ids)))
            raise RefusedError(
                f"there are {len(ids)} clusters below {self._bucket}/{self._prefix}: {named}"
                if ids
                else f"there are no manifests below {self._bucket}/{self._prefix}",
                reason=Reason.INVALID_ARGUMENT if ids else Reason.STREAM_NOT_FOUND,
                remedy="Name one of them with --cluster" if ids else "Correct --from",
            )
        try:
            _, manifest = await self._manifests.cluster(cluster_id)
            if manifest is not None:
                return manifest.cluster, manifest.levels
        except CorruptError as error:
            # No older one in its place: policies of long ago may delete what is to be kept.
            cause = f"{error.message}; no policies of cluster and namespaces come back"
            findings.append(Finding(verdict=Verdict.DAMAGED, stream=NO_STREAM, cause=cause))
        # Damaged, or lost between the first stream's manifest and the cluster's own.
        heads = [one.head for one in found if one.cluster_id == cluster_id and one.head]
        created_ms = min((head.created_ms for head in heads), default=0)
        log.warning("restore.no_cluster_manifest", cluster_id=str(cluster_id))
        return Cluster(cluster_id=cluster_id, created_ms=created_ms), NO_LEVELS

    async def _listed(self, found: Sequence[KnownManifest]) -> tuple[int, dict[str, LedgerId]]:
        """Return the largest ledger id that any key shows, of open uploads too.

        And of each attempt that no manifest names the object that was written last, by its key.
        """
        named = {kept.uuid for one in found for kept in one.ledgers.values()}
        highest, unnamed = int(NO_LEDGER), dict[str, LedgerId]()
        folder = key_prefix(self._prefix)
        async for info in self._objects.list(folder):
            key = parse_key(self._prefix, info.key)
            if key is None:
                continue
            highest = max(highest, key.ledger_id)
            if key.role in (ObjectRole.INDEX, ObjectRole.SINGLE) and key.uuid not in named:
                unnamed[info.key] = key.ledger_id
        for upload in await self._objects.list_uploads(folder):
            key = parse_key(self._prefix, upload.key)
            if key is not None:
                highest = max(highest, key.ledger_id)
        return highest, unnamed

    async def _streams_of(self, found: Sequence[str], cluster_id: UUID) -> dict[str, StreamName]:
        """Ask of which stream objects are; those of other clusters are left out."""

        async def stream_of(key: str) -> StreamName | None:
            async with self._checks:
                try:
                    info = await self._objects.head(key)
                except RefusedError:
                    # Another's object in a bucket that is shared: ours we may look at.
                    return None
            if info is None or cluster_of(info.metadata) != cluster_id:
                return None
            return StreamName(info.metadata.get(MANAGED_LEDGER_NAME, ""))

        streams: dict[str, StreamName] = {}
        for start in range(0, len(found), HEADS_AT_ONCE):
            some = found[start : start + HEADS_AT_ONCE]
            with plain_errors():
                async with asyncio.TaskGroup() as group:
                    tasks = {key: group.create_task(stream_of(key)) for key in some}
            for key, task in tasks.items():
                if (name := task.result()) is not None:
                    streams[key] = name
        return streams

    async def _unnamed(
        self,
        unnamed: Mapping[str, LedgerId],
        own: Sequence[KnownManifest],
        findings: Sequence[Finding],
        cluster_id: UUID,
    ) -> list[Finding]:
        """Tell of this cluster's objects that no manifest names, once for each stream."""
        streams = await self._streams_of(list(unnamed), cluster_id)
        # Of a stream whose manifest can't be read that is said already.
        told = {one.stream for one in findings if one.verdict is Verdict.DAMAGED}
        known: dict[StreamName, list[KnownManifest]] = {}
        for one in own:
            known.setdefault(one.stream, []).append(one)
        left: dict[StreamName, set[LedgerId]] = {}
        for key, name in streams.items():
            ledger_id = unnamed[key]
            if name in told and name not in known:
                continue
            if not any(_accounts_for(one, ledger_id) for one in known.get(name, ())):
                left.setdefault(name, set()).add(ledger_id)
        return [
            _left_out(name, some, known=any(map(_lives, known.get(name, ()))))
            for name, some in sorted(left.items())
        ]

    async def _plan_stream(self, known: KnownManifest) -> tuple[StreamPlan, list[Finding]]:
        head = known.head
        assert head is not None, "there is a generation"
        name = head.stream
        ledgers = [
            moved_here(
                unkeep(kept.packed),
                bucket=self._bucket,
                endpoint_name=self._endpoint_name,
                prefix=self._prefix,
            )
            for kept in known.ledgers.values()
        ]
        causes = await self._check_all(ledgers)
        copied = tuple(one for one in ledgers if one.copy is not None)
        last_copied = copied[-1].listed.ledger_id if copied else NO_LEDGER
        findings: list[Finding] = []
        for one, cause in zip(ledgers, causes, strict=True):
            ledger_id = one.listed.ledger_id
            if one.copy is not None and cause is None:
                continue
            lost = one.copy is None
            findings.append(
                Finding(
                    verdict=Verdict.LOST if lost else Verdict.DAMAGED,
                    stream=name,
                    ledger_id=ledger_id,
                    entries=one.listed.entry_count,
                    in_the_middle=lost and ledger_id < last_copied,
                    cause=cause or "it was not offloaded when the last manifest was written",
                )
            )
        attributes, cause = await self._attributes(head, ledgers, findings)
        if cause is not None:
            found = Finding(verdict=Verdict.STATE_UNKNOWN, stream=name, cause=cause)
            findings.append(found)
        plan = StreamPlan(
            head=head, written_ms=known.written_ms, ledgers=copied, attributes=attributes
        )
        return plan, findings

    async def _attributes(
        self, head: ManifestHead, ledgers: Sequence[ManifestLedger], findings: list[Finding]
    ) -> tuple[AttributesRecord | None, str | None]:
        """Return the checkpoint that comes back, and why writers' state is unknown if it is."""
        cause, named = attributes_cause(head, ledgers), head.attributes
        if named is None or cause is not None:
            return losses_of(named), cause
        folder = attributes_folder(self._prefix, head.stream, head.incarnation)
        try:
            return await checked_attributes(self._objects, folder, named, self._checks), None
        except CorruptError as error:
            damage = Finding(verdict=Verdict.DAMAGED, stream=head.stream, cause=error.message)
            findings.append(damage)
            return losses_of(named), attributes_cause(replace(head, attributes=None), ledgers)

    async def _check_all(self, ledgers: Sequence[ManifestLedger]) -> list[str | None]:
        async def one(ledger: ManifestLedger) -> str | None:
            if ledger.copy is None:
                return None
            if not known_here(ledger.copy.location):
                return f"driver {ledger.copy.location.driver!r} wrote it, which can't be asked here"
            async with self._checks:
                try:
                    await verify_copy(self._objects, ledger.copy.location, ledger.copy.copy)
                except CorruptError as error:
                    return error.message
            return None

        with plain_errors():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(ledger)) for ledger in ledgers]
        return [task.result() for task in tasks]

    async def apply(self, plan: RestorePlan, catalog: Catalog) -> Cluster:
        """Make the records in an empty metadata store; again after a crash, until it returns."""
        restore = catalog.restore
        with plain_errors():
            anew = await restore.begin(plan.cluster)
            await restore.check_only([one.head.stream for one in plan.streams])
            await restore.put_levels(plan.levels)
            for one in plan.streams:
                await restore.put_stream(restored_stream(one))
            cluster = await restore.end(plan.cluster)
        log.info("restore.done", cluster_id=str(cluster.cluster_id), made=anew)
        return cluster


def moved_here(
    ledger: ManifestLedger, *, bucket: str, endpoint_name: str, prefix: str
) -> ManifestLedger:
    """Return the ledger with its copy where the bucket is now, under whatever name."""
    copy = ledger.copy
    if copy is None:
        return ledger
    location = copy.location
    bare = object_keys("", copy.uuid, ledger.listed.ledger_id).data
    here = replace(location, bucket=bucket, endpoint_name=endpoint_name)
    before, found, _ = location.data_key.rpartition(bare)
    if found:
        after = object_keys(prefix, copy.uuid, ledger.listed.ledger_id).data.removesuffix(bare)
        side = location.side_key
        here = replace(
            here,
            data_key=after + location.data_key.removeprefix(before),
            index_key=after + location.index_key.removeprefix(before),
            side_key=after + side.removeprefix(before) if side else "",
        )
    return replace(ledger, copy=replace(copy, location=here))


def restored_stream(plan: StreamPlan) -> RestoredStream:
    """Return the records of a stream: nobody owns it, and all of it is in tier 2 alone."""
    head = plan.head
    stream = Stream(
        name=head.stream,
        incarnation=head.incarnation,
        created_ms=head.created_ms,
        raw=head.raw,
        owner_epoch=head.owner_epoch,
        policy=head.policy,
        policy_changed_ms=head.policy_changed_ms,
        partitions=head.partitions,
        offload_pause=head.offload_pause,
        offload_pauses=head.offload_pauses,
        offload_through=head.offload_through,
        trimmed_end=head.trimmed_end,
    )
    return RestoredStream(
        stream=stream,
        ledgers=tuple(one.listed for one in plan.ledgers),
        contexts=tuple(_context_of(head, one.listed, one.copy) for one in plan.ledgers),
        attributes=plan.attributes,
    )


def _context_of(
    head: ManifestHead, listed: ListedLedger, copy: ManifestCopy | None
) -> OffloadContext:
    assert copy is not None, "only ledgers in the bucket come back"
    return OffloadContext(
        stream=head.stream,
        incarnation=head.incarnation,
        ledger_id=listed.ledger_id,
        state=OffloadState.TIER1_DELETED,
        uuid=copy.uuid,
        complete=True,
        bookkeeper_deleted=True,
        timestamp_ms=copy.complete_ms,
        location=copy.location,
        copy=copy.copy,
        attempt_count=1,
    )


def _choose(found: Sequence[KnownManifest]) -> tuple[list[KnownManifest], list[Finding]]:
    """Return one incarnation of each stream, the newest that lives, and what is left out."""
    chosen: dict[StreamName, KnownManifest] = {}
    skipped: list[Finding] = []
    for one in sorted(found, key=lambda one: one.head.created_ms if one.head else 0):
        head = one.head
        assert head is not None, "there is a generation"
        if head.lifecycle is StreamLifecycle.DELETING:
            skipped.append(_skipped(one, "it was being deleted"))
            continue
        older = chosen.pop(head.stream, None)
        if older is not None:
            skipped.append(_skipped(older, f"incarnation {older.incarnation} is not the newest"))
        chosen[head.stream] = one
    return [chosen[name] for name in sorted(chosen)], skipped


def _skipped(known: KnownManifest, cause: str) -> Finding:
    entries = sum(one.last_entry_id + 1 for one in known.ledgers.values())
    return Finding(verdict=Verdict.SKIPPED, stream=known.stream, entries=entries, cause=cause)


def _accounts_for(known: KnownManifest, ledger_id: LedgerId) -> bool:
    """Tell whether a manifest says why objects of a ledger lie there that it does not name."""
    head, kept = known.head, known.ledgers.get(ledger_id)
    if head is not None and head.lifecycle is StreamLifecycle.DELETING:
        # Ids behind those that it knew may be of a stream of the same name, made anew.
        return ledger_id <= _highest_of(known)
    trimmed = head is not None and ledger_id <= head.trimmed_through
    return trimmed or (kept is not None and kept.uuid is not None)


def _lives(known: KnownManifest) -> bool:
    return known.head is not None and known.head.lifecycle is not StreamLifecycle.DELETING


def _left_out(name: StreamName, ledgers: Collection[LedgerId], *, known: bool) -> Finding:
    what = f"objects of {len(ledgers)} ledgers lie there, the first {min(ledgers)}, and no manifest"
    return Finding(
        verdict=Verdict.UNNAMED if known else Verdict.DAMAGED,
        stream=name,
        cause=f"{what} names them" if known else f"{what} of the stream is there",
    )


def _highest_of(known: KnownManifest) -> int:
    head = known.head
    marked = head.ledger_id_max if head is not None else NO_LEDGER
    return max(marked, *known.ledgers, NO_LEDGER)


def _name(finding: Finding) -> str:
    if finding.ledger_id is None:
        return f"stream {finding.stream}" if finding.stream else "the cluster"
    return f"ledger {finding.ledger_id} of {finding.stream}"
