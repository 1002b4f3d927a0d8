"""Manifests in the bucket: the newest of a stream, the next one, and those that are not needed.

Owns reading and writing generations. Does not own what they hold (``tierlog.model.manifest``),
their bytes (``tierlog.format.manifest``), nor when one is written: the scheduler's leader does.

Invariants:
    * A generation is written with If-None-Match: of two writers of one number one is refused.
    * What is written is the newest: a writer that slept until its number was pruned finds a newer
      generation when it looks again, and is refused too.
    * What is read is whole: each object's digest, and the digest of the one before, are checked.
    * A change goes behind a chain that is there, as the listing after each put says. Behind one
      that lacks an object (a lifecycle rule, a deletion by hand) a snapshot is called for.
    * The newest snapshot, and the one before it with all between, are never pruned; nor the newest
      ``CLUSTER_KEPT`` generations of the cluster's own, of which the newest alone is ever read.

Crash: at any point a generation is there or isn't; parts that no generation names are pruned with
their number. A put whose answer was lost is found by looking.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final, Protocol
from uuid import UUID

import structlog

from tierlog.format import keys
from tierlog.format import manifest as fmt
from tierlog.format.manifest import ManifestKey, PartRef, StreamGeneration
from tierlog.format.versions import Format, current
from tierlog.model.errors import CorruptError, RetryableError, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import ClusterManifest, KeptLedger, ManifestHead
from tierlog.model.offload import AbandonedAttempt, OffloadContext
from tierlog.offload.drivers import known_here
from tierlog.offload.groups import plain_errors
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.objects import ObjectExistsError, ObjectInfo, ObjectStore
from tierlog.ports.spending import Cause, spending

log = structlog.get_logger()

ROLE: Final = "manifest"
LOAD_TRIES_MAX: Final = 3
# Longer than any leader makes one, whatever its limits.
CHAIN_MAX: Final = 4096
CLUSTER_KEPT: Final = 8
WHOLE_KEPT: Final = 8
"""Of abandoned attempts that ended their uploads so many stay, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestLimits:
    """When a snapshot is due, and how many objects are read at once.

    Between the two counts it is due once what changed is as long as the snapshot: what is written
    in all is then at most twice what changed.
    """

    changes_min: int = 32
    changes_max: int = 128
    reads_in_flight_max: int = 16

    def __post_init__(self) -> None:
        assert self.changes_min <= self.changes_max < CHAIN_MAX


class Standing(Enum):
    """What the bucket has of a manifest that somebody knows."""

    NEWEST = auto()
    SUPERSEDED = auto()
    """There is a newer one."""
    GONE = auto()
    """There is no newer one, and objects of this one are not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownManifest:
    """The newest manifest of a stream; generation 0: there is none yet.

    ``gone``: nobody can read it, as the bucket lacks objects of it; the next one is a snapshot.
    Without ``sha256`` it is what was left of one: nothing goes behind it but that.
    """

    stream: StreamName
    incarnation: UUID
    generation: int = 0
    sha256: bytes = b""
    cluster_id: UUID | None = None
    written_ms: int = 0
    snapshot_generation: int = 0
    snapshot_len: int = 0
    changes_len: int = 0
    part_keys: tuple[str, ...] = ()
    gone: bool = False
    head: ManifestHead | None = None
    ledgers: Mapping[LedgerId, KeptLedger] = field(default_factory=dict)

    def names(self, ledger_id: LedgerId, uuid: UUID) -> bool:
        """Tell whether that attempt is what the manifest has as the ledger's copy."""
        kept = self.ledgers.get(ledger_id)
        return kept is not None and kept.uuid == uuid


class ManifestGapError(CorruptError):
    """The newest manifest of a stream is there, and lacks an object that it is made of."""


class AttemptGuard(Protocol):
    """Says whether what an abandoned attempt left may be deleted."""

    async def may_clean(self, context: OffloadContext, uuid: UUID) -> bool:
        """Tell whether no manifest names the attempt as a copy; False when that can't be told."""
        ...


class ManifestStore:
    """The manifests below one key prefix of a bucket."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        cluster_id: UUID,
        clock: Clock,
        ids: Ids,
        key_prefix: str = "",
        limits: ManifestLimits | None = None,
    ) -> None:
        self._objects = objects
        self._cluster_id = cluster_id
        self._clock = clock
        self._ids = ids
        self._prefix = key_prefix
        self._limits = limits or ManifestLimits()
        self._slots = asyncio.Semaphore(self._limits.reads_in_flight_max)

    def __repr__(self) -> str:
        return f"<ManifestStore {self._prefix!r} of {self._cluster_id}>"

    async def standing(self, known: KnownManifest) -> Standing:
        """Tell whether a manifest is the newest, and all there, by a listing of now."""
        with spending(Cause.MANIFEST, known.stream):
            listed = await self._listed(known.stream, known.incarnation)
        if max((one.generation for one in listed), default=0) > known.generation:
            return Standing.SUPERSEDED
        return Standing.NEWEST if _is_whole(known, listed) else Standing.GONE

    async def newest(self, stream: StreamName, incarnation: UUID) -> KnownManifest:
        """Return the newest manifest of a stream, checked; CORRUPT when that can't be."""
        with spending(Cause.MANIFEST, stream):
            return await self._newest(stream, incarnation)

    async def _newest(self, stream: StreamName, incarnation: UUID) -> KnownManifest:
        for tries_left in reversed(range(LOAD_TRIES_MAX)):
            listed = await self._listed(stream, incarnation)
            newest = max((one.generation for one in listed), default=0)
            if not newest:
                return KnownManifest(stream=stream, incarnation=incarnation)
            try:
                return await self._load(stream, incarnation, newest)
            except _MissingError as missing:
                # Pruned between listing and reading; unless it stays so.
                if not tries_left:
                    raise ManifestGapError(
                        f"manifest object {missing.details['object']} is not there",
                        remedy="Nothing of the stream is deleted; see the how-to "
                        "restore-from-a-bucket",
                        details=missing.details,
                    ) from missing
        raise AssertionError("the last try returns or raises")

    async def behind_gap(self, stream: StreamName, incarnation: UUID) -> KnownManifest:
        """Return what a manifest that lacks objects still says, as ``gone``.

        Its head, and what the generations behind the gap say of ledgers: nothing is newer.
        """
        with spending(Cause.MANIFEST, stream):
            listed = await self._listed(stream, incarnation)
            number = max((one.generation for one in listed), default=0)
            key = fmt.manifest_key(self._prefix, stream, incarnation, number)
            raw = await self._get(key)
            last = fmt.decode_generation(raw, key=key)
            there = {one.generation for one in listed}
            tail = [(last, raw)]
            while number > last.snapshot_generation and number - 1 in there:
                number -= 1
                key = fmt.manifest_key(self._prefix, stream, incarnation, number)
                raw = await self._get(key)
                tail.insert(0, (fmt.decode_generation(raw, key=key), raw))
        for at, (one, _) in enumerate(tail):
            _check_link(one, number + at, tail[:at], key, last, (stream, incarnation))
        ledgers: dict[LedgerId, KeptLedger] = {}
        for one, _ in tail:
            ledgers = {**_without(ledgers, one.removed), **one.ledgers}
        return KnownManifest(
            stream=stream,
            incarnation=incarnation,
            generation=last.generation,
            cluster_id=last.cluster_id,
            written_ms=last.written_ms,
            snapshot_generation=last.snapshot_generation,
            part_keys=tuple(one.key for one in tail[0][0].parts),
            gone=True,
            head=last.head,
            ledgers=ledgers,
        )

    async def may_be_last(self, context: OffloadContext, uuid: UUID) -> bool:
        """Tell whether an abandoned attempt may be the only whole copy of a ledger.

        It ended its uploads, and no other one is complete. By metadata from a backup the ledger may
        seem to be in tier 1, and whoever named the attempt may be lost with the manifests. Where
        the complete one is damaged, a repair reads what is good in the data of all others.
        """
        if context.swept_at(uuid) != 0 or not context.lacks_sound_copy:
            return False
        whole = 0
        for attempt in reversed(context.abandoned):
            if whole == WHOLE_KEPT:
                # Each has all entries: who dies behind its last byte for ever fills no bucket.
                return False
            found = not attempt.swept_ms and await self._is_whole(attempt, context)
            if attempt.uuid == uuid:
                return found
            whole += found and known_here(attempt.location)  # of others nobody knows that
        return False

    async def _is_whole(self, attempt: AbandonedAttempt, context: OffloadContext) -> bool:
        if not known_here(at := attempt.location):
            return True  # its driver alone could tell
        # The index comes last, or all is in one object.
        wanted = at.data_key if context.complete else at.index_key or at.data_key
        with spending(Cause.SWEEP, context.stream):
            return await self._objects.head(wanted) is not None

    async def streams(self, only: StreamName | None = None) -> dict[tuple[StreamName, UUID], int]:
        """Return every incarnation of every stream, or of one, and its newest generation."""
        found: dict[tuple[StreamName, UUID], int] = {}
        whole = fmt.streams_folder(self._prefix)
        folder = whole if only is None else fmt.stream_folder(self._prefix, only)
        async for info in self._objects.list(folder):
            key = fmt.parse_manifest_key(self._prefix, info.key)
            if key is not None and not key.is_part:
                name = (key.stream, key.incarnation)
                found[name] = max(key.generation, found.get(name, 0))
        return found

    async def write(
        self,
        known: KnownManifest,
        head: ManifestHead,
        *,
        put: Mapping[LedgerId, KeptLedger],
        removed: Sequence[LedgerId] = (),
    ) -> KnownManifest:
        """Write the generation behind ``known`` and return it.

        Raises ``ObjectExistsError`` when someone else did: then what was read is too old.
        What comes back as ``gone`` lies behind a gap: it names what it should, and only the next
        one can be read.
        """
        with spending(Cause.MANIFEST, head.stream):
            return await self._write(known, head, put, removed)

    async def _write(
        self,
        known: KnownManifest,
        head: ManifestHead,
        put: Mapping[LedgerId, KeptLedger],
        removed: Sequence[LedgerId],
    ) -> KnownManifest:
        ledgers = dict(sorted({**_without(known.ledgers, removed), **put}.items()))
        number = known.generation + 1
        snapshot = self._snapshot_due(known, len(put))
        parts = await self._write_parts(head, number, ledgers) if snapshot else ()
        inline = {} if parts else ledgers
        raw = fmt.encode_generation(
            StreamGeneration(
                generation=number,
                cluster_id=self._cluster_id,
                written_ms=self._clock.wall_ms(),
                head=head,
                snapshot_generation=number if snapshot else known.snapshot_generation,
                previous_sha256=b"" if snapshot else known.sha256,
                ledgers=inline if snapshot else put,
                removed=() if snapshot else tuple(removed),
                parts=parts,
            )
        )
        key = fmt.manifest_key(self._prefix, head.stream, head.incarnation, number)
        await self._put(key, raw, if_none_match=True)
        listed = await self._listed(head.stream, head.incarnation)
        if any(one.generation > number for one in listed):
            raise ObjectExistsError(
                f"generation {number} of the manifest of {head.stream} was pruned before",
                remedy="Read the newest one, then the metadata, and start over",
            )
        log.info(
            "manifest.written",
            stream=head.stream,
            generation=number,
            ledgers=len(ledgers),
            snapshot=snapshot,
            length=len(raw),
        )
        written = KnownManifest(
            stream=head.stream,
            incarnation=head.incarnation,
            generation=number,
            sha256=hashlib.sha256(raw).digest(),
            cluster_id=self._cluster_id,
            snapshot_generation=number if snapshot else known.snapshot_generation,
            snapshot_len=_length(raw, parts) if snapshot else known.snapshot_len,
            changes_len=0 if snapshot else known.changes_len + len(raw),
            part_keys=tuple(one.key for one in parts) if snapshot else known.part_keys,
            head=head,
            ledgers=ledgers,
        )
        if not _is_whole(written, listed):
            return replace(written, gone=True)
        if snapshot and known.snapshot_generation:
            await self._prune(listed, below=known.snapshot_generation)
        return written

    def _snapshot_due(self, known: KnownManifest, put_count: int) -> bool:
        limits = self._limits
        changes = known.generation - known.snapshot_generation
        if not known.generation or known.gone:
            return True
        if changes >= limits.changes_max or put_count > fmt.PART_LEDGERS:
            return True
        return changes >= limits.changes_min and known.changes_len >= known.snapshot_len

    async def _write_parts(
        self, head: ManifestHead, generation: int, ledgers: Mapping[LedgerId, KeptLedger]
    ) -> tuple[PartRef, ...]:
        if len(ledgers) <= fmt.PART_LEDGERS:
            return ()
        writer, values = self._ids.uuid(), list(ledgers.values())
        parts: list[PartRef] = []
        for start in range(0, len(values), fmt.PART_LEDGERS):
            some = values[start : start + fmt.PART_LEDGERS]
            raw = fmt.encode_part(
                generation,
                cluster_id=self._cluster_id,
                incarnation=head.incarnation,
                ledgers=some,
            )
            key = fmt.part_key(
                self._prefix,
                head.stream,
                head.incarnation,
                generation,
                writer=writer,
                number=len(parts),
            )
            await self._put(key, raw)
            digest = hashlib.sha256(raw).digest()
            parts.append(PartRef(key=key, sha256=digest, length=len(raw), ledger_count=len(some)))
        return tuple(parts)

    async def _put(self, key: str, raw: bytes, *, if_none_match: bool = False) -> None:
        await self._objects.put(
            key,
            raw,
            metadata={
                keys.ROLE: ROLE,
                keys.FORMAT_VERSION: str(current(Format.MANIFEST)),
                keys.CLUSTER_ID: str(self._cluster_id),
            },
            content_type=keys.CONTENT_TYPE,
            if_none_match=if_none_match,
        )

    async def _prune(self, listed: Iterable["_Listed"], *, below: int) -> None:
        """Delete what lies before the snapshot before the newest."""
        await self._delete_all(one.info.key for one in listed if one.key.generation < below)

    async def _delete_all(self, doomed: Iterable[str]) -> None:
        """Delete what is not needed any more. Failing is legal."""
        try:
            for key in doomed:
                await self._objects.delete(key)
        except TierlogError as error:
            log.warning("manifest.prune_failed", cause=str(error))

    async def _listed(self, stream: StreamName, incarnation: UUID) -> list["_Listed"]:
        # Every generation begins with a zero; what else lies in the folder is not listed.
        folder = fmt.manifest_folder(self._prefix, stream, incarnation)
        found: list[_Listed] = []
        async for info in self._objects.list(f"{folder}0"):
            key = fmt.parse_manifest_key(self._prefix, info.key)
            if key is None:
                continue
            if info.size > fmt.MANIFEST_LEN_MAX:
                raise _chain_broken(info.key, f"has {info.size} bytes")
            found.append(_Listed(key, info))
        return found

    async def _load(self, stream: StreamName, incarnation: UUID, generation: int) -> KnownManifest:
        def key_of(number: int) -> str:
            return fmt.manifest_key(self._prefix, stream, incarnation, number)

        newest = await self._get(key_of(generation))
        last = fmt.decode_generation(newest, key=key_of(generation))
        if generation - last.snapshot_generation > CHAIN_MAX:
            raise _chain_broken(key_of(generation), "is too far from its snapshot")
        numbers = range(last.snapshot_generation, generation)
        before = await self._get_all([key_of(number) for number in numbers])
        chain: list[tuple[StreamGeneration, bytes]] = []
        for number, raw in zip([*numbers, generation], [*before, newest], strict=True):
            one = fmt.decode_generation(raw, key=key_of(number))
            _check_link(one, number, chain, key_of(number), last, (stream, incarnation))
            chain.append((one, raw))
        ledgers = await self._ledgers_of([one for one, _ in chain])
        first, first_raw = chain[0]
        return KnownManifest(
            stream=stream,
            incarnation=incarnation,
            generation=generation,
            sha256=hashlib.sha256(newest).digest(),
            cluster_id=last.cluster_id,
            written_ms=last.written_ms,
            snapshot_generation=last.snapshot_generation,
            snapshot_len=_length(first_raw, first.parts),
            changes_len=sum(len(raw) for _, raw in chain[1:]),
            part_keys=tuple(one.key for one in first.parts),
            head=last.head,
            ledgers=ledgers,
        )

    async def _ledgers_of(self, chain: Sequence[StreamGeneration]) -> dict[LedgerId, KeptLedger]:
        ledgers: dict[LedgerId, KeptLedger] = {}
        parts = chain[0].parts
        for part, raw in zip(parts, await self._get_all([one.key for one in parts]), strict=True):
            if hashlib.sha256(raw).digest() != part.sha256:
                raise _chain_broken(part.key, "has another digest than the manifest says")
            ledgers |= fmt.decode_part(raw, key=part.key)
        for one in chain:
            ledgers = {**_without(ledgers, one.removed), **one.ledgers}
        return dict(sorted(ledgers.items()))

    async def _get_all(self, wanted: Sequence[str]) -> list[bytes]:
        async def one(key: str) -> bytes:
            async with self._slots:
                return await self._get(key)

        with plain_errors():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(key)) for key in wanted]
        return [task.result() for task in tasks]

    async def _get(self, key: str) -> bytes:
        found = await self._objects.get(key)
        if found is None:
            raise _MissingError(f"object {key} is not there", details={"object": key})
        return found[1]

    async def cluster(self, cluster_id: UUID) -> tuple[int, ClusterManifest | None]:
        """Return the newest generation of a cluster's manifest, and it; 0, None: there is none."""
        with spending(Cause.MANIFEST):
            newest = await self.newest_of_cluster(cluster_id)
            if not newest:
                return 0, None
            key = fmt.cluster_key(self._prefix, cluster_id, newest)
            return newest, fmt.decode_cluster_manifest(await self._get(key), key=key)

    async def newest_of_cluster(self, cluster_id: UUID) -> int:
        """Return the number of the newest generation of a cluster's manifest; 0: there is none."""
        with spending(Cause.MANIFEST):
            return (await self.clusters()).get(cluster_id, 0)

    async def clusters(self) -> dict[UUID, int]:
        """Return the clusters that have manifests here, and the newest generation of each."""
        found: dict[UUID, int] = {}
        async for info in self._objects.list(fmt.clusters_folder(self._prefix)):
            key = fmt.parse_cluster_key(self._prefix, info.key)
            if key is not None:
                found[key.cluster_id] = max(key.generation, found.get(key.cluster_id, 0))
        return found

    async def write_cluster(self, generation: int, manifest: ClusterManifest) -> None:
        """Write a generation of the cluster's manifest, and prune those of long ago.

        ``ObjectExistsError``: someone else wrote it, or a newer one.
        """
        raw = fmt.encode_cluster_manifest(
            manifest, generation=generation, now_ms=self._clock.wall_ms()
        )
        key = fmt.cluster_key(self._prefix, manifest.cluster.cluster_id, generation)
        with spending(Cause.MANIFEST):
            await self._put(key, raw, if_none_match=True)
            await self._prune_cluster(manifest.cluster.cluster_id, generation)
        log.info("manifest.cluster_written", generation=generation)

    async def _prune_cluster(self, cluster_id: UUID, generation: int) -> None:
        """Delete generations of long ago, if this one is the newest. Failing is legal."""
        folder, listed = fmt.clusters_folder(self._prefix), dict[int, str]()
        try:
            async for info in self._objects.list(folder):
                key = fmt.parse_cluster_key(self._prefix, info.key)
                if key is not None and key.cluster_id == cluster_id:
                    listed[key.generation] = info.key
        except TierlogError as error:
            log.warning("manifest.prune_failed", cause=str(error))
            return
        if any(number > generation for number in listed):
            raise ObjectExistsError(
                f"generation {generation} of the cluster's manifest was pruned before",
                remedy="Read the newest one, then the metadata, and start over",
            )
        await self._delete_all(
            key for number, key in sorted(listed.items()) if number <= generation - CLUSTER_KEPT
        )


class BucketGuard:
    """``AttemptGuard`` for workers: reads the newest manifest of the stream each time."""

    def __init__(self, manifests: ManifestStore) -> None:
        self._manifests = manifests

    async def may_clean(self, context: OffloadContext, uuid: UUID) -> bool:
        try:
            known = await self._manifests.newest(context.stream, context.incarnation)
            if not known.names(context.ledger_id, uuid):
                return not await self._manifests.may_be_last(context, uuid)
        except TierlogError as error:
            log.warning("manifest.unread", stream=context.stream, cause=str(error))
            return False
        log.error("manifest.names_abandoned", ledger_id=context.ledger_id, uuid=str(uuid))
        return False


@dataclass(frozen=True, slots=True)
class _Listed:
    key: ManifestKey
    info: ObjectInfo

    @property
    def generation(self) -> int:
        """The number of a generation; a part has none, and is never the newest."""
        return 0 if self.key.is_part else self.key.generation


def _is_whole(known: KnownManifest, listed: Iterable[_Listed]) -> bool:
    """Tell whether every object that a reader of this manifest needs is in a listing."""
    numbers = set[int]()
    parts = set(known.part_keys)
    for one in listed:
        numbers.add(one.generation)
        parts.discard(one.info.key)
    needed = range(known.snapshot_generation, known.generation + 1) if known.generation else ()
    return not parts and numbers.issuperset(needed)


class _MissingError(RetryableError):
    """An object that should be there isn't: pruned since, or lost."""


def _without(
    ledgers: Mapping[LedgerId, KeptLedger], removed: Sequence[LedgerId]
) -> Mapping[LedgerId, KeptLedger]:
    gone = frozenset(removed)
    return {number: one for number, one in ledgers.items() if number not in gone}


def _check_link(
    one: StreamGeneration,
    number: int,
    chain: Sequence[tuple[StreamGeneration, bytes]],
    key: str,
    last: StreamGeneration,
    whose: tuple[StreamName, UUID],
) -> None:
    """Check that a generation is the one behind those before it, of the same stream."""
    if one.generation != number or (one.head.stream, one.head.incarnation) != whose:
        raise _chain_broken(key, "is another one than its key says")
    if one.snapshot_generation != last.snapshot_generation or one.cluster_id != last.cluster_id:
        raise _chain_broken(key, "belongs to another snapshot, or to another cluster")
    if chain and one.previous_sha256 != hashlib.sha256(chain[-1][1]).digest():
        raise _chain_broken(key, "was not written behind the generation before it")


def _chain_broken(key: str, what: str) -> CorruptError:
    return CorruptError(
        f"manifest {key} {what}",
        remedy="Nothing of the stream is deleted; see the how-to restore-from-a-bucket",
        details={"object": key, "offset": "0"},
    )


def _length(raw: bytes, parts: Sequence[PartRef]) -> int:
    return len(raw) + sum(part.length for part in parts)
