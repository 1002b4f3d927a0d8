"""``copy`` and ``restore``: a whole bucket into another one, or back out of it, by executors.

Owns the order: copies first, then the manifest of each stream of which all have arrived, or had
before, the cluster's last. Does not own a copy's way, nor how it is verified
(``tierlog.offload.moving``).

Invariants:
    * A bucket that is copied is never taken for whole before it is: no manifest names what has
      not arrived. Of a stream that had arrived once it says that such a ledger has no copy.
    * A stream whose manifest can't be read, in either bucket, keeps back no other one.
    * Nothing is written where the clusters' manifests say that the target is another cluster's.
    * ``restore`` brings back objects that are missing or damaged, under the very keys that the
      bucket's manifests name; where there are none, those of its copy. What its copy can't bring
      is looked at all the same, and fails where it is not sound. It deletes nothing, and writes a
      manifest only where there is none. Nothing comes back of a stream that the bucket, or where
      that knows nothing of it its copy, says is being deleted: asked for by name, it fails.

Crash: run it again; what has arrived is found by its index object, and is not sent again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal
from uuid import UUID

from tierlog.format.keys import key_prefix
from tierlog.format.manifest import keep, unkeep
from tierlog.model.errors import CorruptError, RefusedError, TierlogError
from tierlog.model.ids import StreamName
from tierlog.model.manifest import ClusterManifest
from tierlog.model.stream import StreamLifecycle
from tierlog.offload.driver import DRIVER, Tier2Settings
from tierlog.offload.drivers import DriverParts, Drivers, driver_name, known_here
from tierlog.offload.manifests import KnownManifest, ManifestStore
from tierlog.offload.moving import (
    BucketPlace,
    CopyMover,
    check_index,
    check_same_stream,
    write_manifest,
)
from tierlog.offload.verify import ReadBack
from tierlog.ports.objects import ObjectExistsError, ObjectStore
from tierlog.ports.spending import Cause, CostMeter, spending
from tierlog.runtime.settings import S3Settings, Settings
from tierlog.wiring.build import system_clock, system_ids
from tierlog.wiring.objects import open_bucket
from tierlog_spark.bucket import opened
from tierlog_spark.jobs.fanout import (
    Requests,
    asked_of,
    pace_of_task,
    run_tasks,
    slots_of,
    spread,
    task_count,
)
from tierlog_spark.jobs.frame import JobReport, JobRun, Unread, without_unread
from tierlog_spark.jobs.moving_plan import (
    BROUGHT,
    DELETED,
    FAILED,
    MISSING,
    NOT_IN_SOURCE,
    OTHER_COPY,
    OUTCOMES,
    THERE,
    Deleted,
    Incarnation,
    Moved,
    MoveItem,
    StreamEnd,
    StreamPair,
    also_there,
    arrived,
    best,
    dying,
    living,
    not_restored,
    older_sources,
    older_targets,
    own_indexes,
    still_wanted,
    strays,
    to_move,
    to_restore,
    unbacked,
)

TASK_BYTES: Final = 1024**3
TASKS_A_SLOT: Final = 4
TRIES_MAX: Final = 3
COPY: Final = "copy"
RESTORE: Final = "restore"
WORKER: Final = "spark-copy"
# Who only reads puts no cluster's id on an object.
_NO_CLUSTER: Final = UUID(int=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """From where to where, and how.

    ``deep``: also what seems to have arrived is read and compared, all of it; None: by ``restore``,
    which looks for damage, and not by ``copy``. ``layout``: the one that copies have afterwards;
    None: the one they have. ``bytes_per_s``: of one executor; 0: as fast as it goes.
    """

    source: S3Settings
    target: S3Settings
    streams: tuple[StreamName, ...] = ()
    deep: bool | None = None
    read_back: ReadBack = ReadBack.FULL
    layout: Literal["two-objects", "single-object"] | None = None
    bytes_per_s: float = 0.0
    restores: bool = False

    @property
    def compares_all(self) -> bool:
        """Whether what is there is read and compared, all of it."""
        return self.restores if self.deep is None else self.deep

    @property
    def places(self) -> tuple[BucketPlace, BucketPlace]:
        """Both places, as copies say them."""
        return _place(self.source), _place(self.target)

    def check(self) -> None:
        """Refuse to move a bucket onto itself."""
        source, target = self.source, self.target
        ends = [
            (one.endpoint_url, one.bucket, key_prefix(one.key_prefix)) for one in (source, target)
        ]
        if ends[0] == ends[1]:
            raise RefusedError(
                f"s3://{source.bucket}/{ends[0][2]} is both source and target",
                remedy="Name another bucket, or another key prefix",
            )


def _place(s3: S3Settings) -> BucketPlace:
    return BucketPlace(bucket=s3.bucket, endpoint_name=s3.endpoint_name, key_prefix=s3.key_prefix)


def copy(run: JobRun, move: Move) -> JobReport:
    """Bring everything that a bucket's manifests name into another bucket, which is there.

    What is being deleted is marked so there; streams of which nothing is known here are told.
    """
    return _moved(run, replace(move, restores=False), COPY)


def restore(run: JobRun, move: Move) -> JobReport:
    """Bring back into a bucket what is missing or damaged in it, out of a copy of it.

    Copies that metadata name are brought back as they were: ``layout`` is none of its options.
    """
    return _moved(run, replace(move, restores=True, layout=None), RESTORE)


def _moved(run: JobRun, move: Move, job: str) -> JobReport:
    move.check()
    paced = _throttled(move, pace_of_task(run, move.bytes_per_s))
    both = asyncio.run(_prepared(move))
    requests, slots = Requests(), slots_of(run)
    tasks = spread(both, lambda _: 1, TASKS_A_SLOT * slots)
    rows = run_tasks(run, "streams", tasks, partial(_read_pairs, move))
    found, unread = without_unread(requests.rest(rows))
    lives, older = _by_age(move, living(found))
    for pair in () if move.restores else found:
        if pair.source.generation:
            check_same_stream(pair.source, pair.target)
    ended, left = ([], []) if move.restores else (dying(found), strays(found))
    pairs, deleted = lives, [Deleted(one.head.stream) for one in ended]
    if move.restores:
        pairs, deleted = still_wanted(lives), not_restored(found, move.streams)
    items = [*to_restore(pairs), *unbacked(found)] if move.restores else to_move(pairs)
    total = sum(one.data_len for one in items)
    number = task_count(total, len(items), slots, weight_max=TASK_BYTES)
    work = partial(_move_some, paced, dry_run=run.dry_run)
    shared = spread(items, lambda one: one.data_len, number)
    seen = best(requests.rest(run_tasks(run, "copies", shared, work)))
    counts = _counts(pairs, seen) | {"streams_deleted": len(deleted)}
    if not move.restores:
        counts["streams_not_in_source"] = len(left)
    # What could not have been brought keeps back nothing else of its stream.
    moved = [one for one in seen if not one.item.unbacked]
    whole = all(one.outcome != FAILED for one in moved)
    troubles = [_stream_row(one.stream, FAILED, one.error) for one in (*unread, *older)]
    of_none: list[dict[str, Any]] = []
    if not run.dry_run:
        ends = [*arrived(pairs, moved, anew=not move.restores), *ended]
        troubles += _finish(run, paced, ends, requests)
        counts["uploads_aborted"], of_none = asyncio.run(
            _end(move, living(found), moved, whole=whole and not troubles)
        )
        if move.restores:
            # Last: what the backup can't bring keeps back nothing that it can.
            troubles += _look(run, move, own_indexes(found, ends), requests)
    counts["streams_failed"] = len(troubles)
    counts["failed"] += len(troubles) + len(of_none) + sum(one.failed for one in deleted)
    told = [_row(one) for one in seen if one.error or one.outcome in (BROUGHT, MISSING)]
    return JobReport(
        job=job,
        dry_run=run.dry_run,
        counts=counts | requests.counts,
        rows=[
            *told,
            *(_stream_row(one.stream, DELETED, one.cause or None) for one in deleted),
            *map(_stray, left),
            *troubles,
            *of_none,
        ],
    )


def _by_age(move: Move, lives: list[StreamPair]) -> tuple[list[StreamPair], list[Unread]]:
    """Return the streams that are moved, and those of which one manifest is too old; say why."""
    older = older_targets(lives) if move.restores else older_sources(lives)
    told = [Unread(name, error) for (name, _), error in older.items()]
    if move.restores:
        return lives, told
    return [one for one in lives if one.name not in older], told


def _throttled(move: Move, pace: float) -> Move:
    """Return the move as a process makes it that may send so many bytes a second; 0: no limit."""
    if not pace:
        return move
    target = move.target.model_copy(update={"bytes_per_s_max": pace})
    return replace(move, target=target)


def _counts(pairs: Sequence[StreamPair], moved: Sequence[Moved]) -> dict[str, int]:
    counts = {"streams": len(pairs), "ledgers": len(moved)}
    counts |= {name: sum(one.outcome == name for one in moved) for name in OUTCOMES}
    for name, outcomes in (("bytes", OUTCOMES), ("bytes_moved", (BROUGHT, MISSING))):
        counts[name] = sum(one.item.data_len for one in moved if one.outcome in outcomes)
    return counts


def _finish(
    run: JobRun, move: Move, ends: Sequence[StreamEnd], requests: Requests
) -> list[dict[str, Any]]:
    """Bring attribute indexes and write manifests; return a row for each stream that failed."""
    tasks = spread(ends, lambda one: 1 + len(one.ledgers or ()), TASKS_A_SLOT * slots_of(run))
    rows = run_tasks(run, "manifests", tasks, partial(_end_some, move))
    return [_stream_row(name, FAILED, error) for name, error in dict(requests.rest(rows)).items()]


def _look(
    run: JobRun, move: Move, streams: Sequence[Incarnation], requests: Requests
) -> list[dict[str, Any]]:
    """Look at attribute indexes of the target itself; return a row for each that is not sound."""
    tasks = spread(streams, lambda _: 1, TASKS_A_SLOT * slots_of(run))
    rows = run_tasks(run, "indexes", tasks, partial(_look_some, move))
    return [_stream_row(name, FAILED, error) for name, error in dict(requests.rest(rows)).items()]


async def _prepared(move: Move) -> list[Incarnation]:
    """Return the streams that either has; refuse what is no source, and what can't be read."""
    async with opened(move.source) as bucket:
        found = await bucket.incarnations(move.streams)
        copied = await bucket.manifests.clusters()
    async with _both(move) as (_, target):
        place = _manifests(target, move.target, _NO_CLUSTER)
        there = await place.clusters()
        if copied and there and there.keys().isdisjoint(copied):
            raise _anothers(move, copied, there)
        return also_there(found, await place.streams(), move.streams)


def _anothers(move: Move, copied: Iterable[UUID], there: Iterable[UUID]) -> RefusedError:
    of, ours = (", ".join(sorted(map(str, ids))) for ids in (copied, there))
    done, remedy = "copied", "Name a bucket, or prefix, that is empty or has a copy of this cluster"
    if move.restores:
        done = "restored"
        remedy = (
            "Name a copy of this bucket; what is another cluster's gets a bucket, or prefix, of "
            "its own, with: tierlog spark copy"
        )
    return RefusedError(
        f"s3://{move.source.bucket} is of cluster {of}, and s3://{move.target.bucket}, into which "
        f"it is to be {done}, of cluster {ours}",
        remedy=remedy,
        details={"bucket": (move.source if move.restores else move.target).bucket},
    )


@contextlib.asynccontextmanager
async def _both(
    move: Move, meter: CostMeter | None = None
) -> AsyncIterator[tuple[ObjectStore, ObjectStore]]:
    """Open both buckets, as they are; no other settings are needed, least of all an executor's."""
    source, target = (Settings.model_construct(s3=s3) for s3 in (move.source, move.target))
    async with (
        open_bucket(source, move.source.bucket, meter=meter) as origin,
        open_bucket(target, move.target.bucket, meter=meter) as place,
    ):
        yield origin, place


def _manifests(objects: ObjectStore, s3: S3Settings, cluster_id: UUID) -> ManifestStore:
    return ManifestStore(
        objects,
        cluster_id=cluster_id,
        clock=system_clock(),
        ids=system_ids(),
        key_prefix=s3.key_prefix,
    )


async def _read_pairs(move: Move, some: Sequence[Incarnation]) -> list[Any]:
    """Read the newest manifests of both buckets, on an executor; say which stream has none."""
    meter, found = CostMeter(), list[Any]()
    async with _both(move, meter) as (source, target):
        origin = _manifests(source, move.source, _NO_CLUSTER)
        place = _manifests(target, move.target, _NO_CLUSTER)
        for name, incarnation in some:
            where = move.target
            try:
                known = await place.newest(name, incarnation)
                where = move.source
                found.append(StreamPair(await origin.newest(name, incarnation), known))
            except CorruptError as error:
                found.append(Unread(name, f"in s3://{where.bucket}: {error}"))
    return [*found, *asked_of(meter)]


async def _move_some(move: Move, some: Sequence[MoveItem], *, dry_run: bool) -> list[Any]:
    """Bring some ledgers' copies, or see whether they are there, on an executor."""
    meter, found = CostMeter(), list[Any]()
    with spending(Cause.RESTORE):
        async with _both(move, meter) as (source, target):
            movers: dict[UUID, CopyMover] = {}
            for item in some:
                mover = movers.get(item.cluster_id)
                if mover is None:
                    mover = movers[item.cluster_id] = mover_of(
                        move, source, target, item.cluster_id
                    )
                found.append(await move_one(mover, move, item, dry_run=dry_run))
    return [*found, *asked_of(meter)]


async def move_one(mover: CopyMover, move: Move, item: MoveItem, *, dry_run: bool) -> Moved:
    """Bring one ledger's copy, unless it is there."""
    ledger = unkeep(item.packed)
    known = None if item.known is None else unkeep(item.known)
    assert ledger.copy is not None
    if item.unbacked and not known_here(ledger.copy.location):
        # No loss, as far as anybody knows.
        cause = f"driver {ledger.copy.location.driver!r} wrote it, which can't be asked here"
        return Moved(item=item, outcome=item.unbacked, error=cause)
    tell, deep = bool(item.unbacked), move.compares_all
    try:
        there = await mover.arrived(ledger, known, deep=deep, tell=tell)
        if there is not None:
            outcome = item.unbacked or THERE
            if outcome == THERE and not dry_run:
                await mover.bring_export(ledger)
            return Moved(item=item, outcome=outcome, packed=keep(there).packed)
        assert not tell, "who is to tell of a copy returns it, or raises"
        if dry_run:
            mover.check_movable(ledger)
            return Moved(item=item, outcome=MISSING)
        extra = {"ManagedLedgerName": str(item.stream), "TierlogWorker": WORKER}
        named = move.restores or known is not None
        brought = await mover.bring(ledger, extra, named=named)
    except TierlogError as error:
        is_lost = tell and isinstance(error, CorruptError)
        cause = _lost(item, error.message) if is_lost else str(error)
        return Moved(item=item, outcome=FAILED, error=cause)
    return Moved(item=item, outcome=BROUGHT, packed=keep(brought).packed)


def _lost(item: MoveItem, cause: str) -> str:
    what = "another copy" if item.unbacked == OTHER_COPY else "no copy"
    return (
        f"the copy of ledger {item.ledger_id} is missing or damaged, or was trimmed meanwhile, "
        f"and the backup has {what} of it: {cause}. Run this again; what stays so, bring from a "
        "backup that has it, or repair: tierlog scrub --repair --deep"
    )


def mover_of(move: Move, source: ObjectStore, target: ObjectStore, cluster_id: UUID) -> CopyMover:
    """Return what brings copies of one cluster's ledgers."""
    origin, place = move.places
    layouts = None
    if move.layout is not None:
        layouts = (
            Drivers(_parts(source, origin, cluster_id)),
            Drivers(_parts(target, place, cluster_id), writes=driver_name(DRIVER, move.layout)),
        )
    return CopyMover(
        source,
        target,
        origin=origin,
        place=place,
        read_back=move.read_back,
        layouts=layouts,
        restores=move.restores,
    )


def _parts(objects: ObjectStore, place: BucketPlace, cluster_id: UUID) -> DriverParts:
    settings = Tier2Settings(
        bucket=place.bucket,
        cluster_id=cluster_id,
        endpoint_name=place.endpoint_name,
        key_prefix=place.key_prefix,
    )
    return DriverParts(objects=objects, settings=settings)


async def _end_some(move: Move, some: Sequence[StreamEnd]) -> list[Any]:
    """Bring attribute indexes, and write manifests, on an executor; return what failed."""
    meter, failed = CostMeter(), list[Any]()
    with spending(Cause.RESTORE):
        async with _both(move, meter) as (source, target):
            for one in some:
                mover = mover_of(move, source, target, one.cluster_id)
                manifests = _manifests(target, move.target, one.cluster_id)
                try:
                    await end_stream(mover, manifests, one, move)
                except TierlogError as error:
                    failed.append((one.head.stream, str(error)))
    return [*failed, *asked_of(meter)]


async def end_stream(
    mover: CopyMover, manifests: ManifestStore, end: StreamEnd, move: Move
) -> None:
    """Bring a stream's attribute index, and write its manifest."""
    head = end.head
    if head.lifecycle is StreamLifecycle.ACTIVE:
        head = replace(head, attributes=await mover.bring_attributes(head, deep=move.compares_all))
    if end.ledgers is not None:
        ledgers = [unkeep(packed) for packed in end.ledgers]
        await write_manifest(manifests, head, ledgers, first=move.restores)


async def _look_some(move: Move, some: Sequence[Incarnation]) -> list[Any]:
    """Look at attribute indexes of the target itself, on an executor; return what failed."""
    meter, failed = CostMeter(), list[Any]()
    with spending(Cause.RESTORE):
        async with _both(move, meter) as (_, target):
            manifests = _manifests(target, move.target, _NO_CLUSTER)
            for name, incarnation in some:
                try:
                    # As of now: of one that was named hours ago objects may be swept.
                    known = await manifests.newest(name, incarnation)
                    if known.head is not None:
                        await check_index(target, known.head, move.target.key_prefix)
                except TierlogError as error:
                    failed.append((name, str(error)))
    return [*failed, *asked_of(meter)]


async def _end(
    move: Move, pairs: Sequence[StreamPair], moved: Sequence[Moved], *, whole: bool
) -> tuple[int, list[dict[str, Any]]]:
    """Abort what tasks that died left open, and write the clusters' manifests, if all is there.

    Returns how many uploads were aborted, and a row for each thing that failed: all else is done,
    and no report of hours is lost to it.
    """
    _, place = move.places
    packed = [one.packed or one.item.packed for one in moved if one.outcome != THERE]
    ours = {
        copy.location.data_key
        for copy in (place.here(unkeep(one)).copy for one in packed)
        if copy is not None
    }
    aborted, failed = 0, list[dict[str, Any]]()
    async with _both(move) as (source, target):
        try:
            for upload in await target.list_uploads(key_prefix(place.key_prefix)):
                if upload.key in ours:
                    await target.abort_upload(upload.key, upload.upload_id)
                    aborted += 1
        except RefusedError:
            # Where the store lets nobody list uploads, its own rules for old ones take them.
            pass
        except TierlogError as error:
            what = f"uploads that tasks left open in s3://{place.bucket} were not all aborted"
            failed.append(_stream_row(None, FAILED, f"{what}: {error}. Run this again"))
        for cluster_id in {one.source.cluster_id for one in pairs}:
            assert cluster_id is not None
            origins = _manifests(source, move.source, cluster_id)
            places = _manifests(target, move.target, cluster_id)
            try:
                await copy_cluster(move, origins, places, cluster_id, whole=whole)
            except TierlogError as error:
                failed.append(_stream_row(None, FAILED, f"cluster {cluster_id}: {error}"))
    return aborted, failed


async def copy_cluster(
    move: Move, origin: ManifestStore, place: ManifestStore, cluster_id: UUID, *, whole: bool = True
) -> None:
    """Write a cluster's manifest, where another one is there or none is.

    ``whole``: all that it is the manifest of has arrived; before, a copy has no first one. Later
    ones go along: by policies of before a restore of metadata would trim what is to be kept.
    """
    _, manifest = await _cluster_in(move.source, origin, cluster_id)
    for left in reversed(range(TRIES_MAX)):
        generation, there = await _cluster_in(move.target, place, cluster_id)
        begun = whole or move.restores or there is not None
        if manifest is None or manifest == there or not begun:
            return
        if there is not None:
            _check_levels(manifest, there, restores=move.restores)
            if move.restores:
                return
        try:
            await place.write_cluster(generation + 1, manifest)
        except ObjectExistsError:
            # Another run was first; what it wrote is looked at.
            if not left:
                raise


def _check_levels(source: ClusterManifest, target: ClusterManifest, *, restores: bool) -> None:
    """Refuse to have older policies in a newer one's place, and to call them restored."""
    by_scheduler = "Where ZooKeeper lives, let its scheduler write a newer one, and run this again"
    if restores and target.levels.older_than(source.levels):
        raise RefusedError(
            "the bucket's manifest has policies of the cluster or of namespaces from before the "
            "backup's: by them a restore of metadata would trim",
            remedy=f"{by_scheduler}; where it is lost, move what lies below the cluster's folder "
            "away, and run this again: the backup's comes back then",
        )
    if not restores and source.levels.older_than(target.levels):
        raise RefusedError(
            "the target's manifest has policies of the cluster or of namespaces that were changed "
            "later than the source's: that one is older, or each went on by itself",
            remedy=f"{by_scheduler}; or copy to an empty bucket, or prefix",
        )


async def _cluster_in(
    s3: S3Settings, manifests: ManifestStore, cluster_id: UUID
) -> tuple[int, ClusterManifest | None]:
    try:
        return await manifests.cluster(cluster_id)
    except CorruptError as error:
        raise CorruptError(
            f"in s3://{s3.bucket}: {error.message}",
            remedy="Move that object away, and run this again: a generation before it counts then, "
            "or a scheduler of the cluster, or the other bucket, brings another one",
            details=error.details,
        ) from error


def _stray(known: KnownManifest) -> dict[str, Any]:
    error = (
        f"the target has incarnation {known.incarnation} of this stream, and the source nothing of "
        "it: a restore from the target brings it back; see the how-to run-jobs-with-spark"
    )
    return _stream_row(known.stream, NOT_IN_SOURCE, error)


def _stream_row(name: StreamName | None, outcome: str, error: str | None = None) -> dict[str, Any]:
    return {"stream": name, "ledger_id": None, "outcome": outcome, "bytes": 0, "error": error}


def _row(one: Moved) -> dict[str, Any]:
    return {
        "stream": one.item.stream,
        "ledger_id": int(one.item.ledger_id),
        "outcome": one.outcome,
        "bytes": one.item.data_len,
        "error": one.error or None,
    }
