"""``usage``: bytes, objects and requests of a bucket, by stream, kind and age.

Owns the order: manifests first, then the list of the bucket. Does not own the sums
(``usage_plan``). Nothing is written, so that it may be run again, and run twice, as one likes.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

from pyspark import Broadcast

from tierlog.model.errors import CorruptError
from tierlog.model.ids import StreamName
from tierlog.model.manifest import ManifestHead
from tierlog.ports.spending import Cause, CostMeter, spending
from tierlog.runtime.settings import S3Settings
from tierlog_spark.bucket import opened
from tierlog_spark.jobs.fanout import Requests, asked_of, run_tasks, slots_of, spread
from tierlog_spark.jobs.frame import JobReport, JobRun, Unread, without_unread
from tierlog_spark.jobs.usage_plan import (
    Named,
    NamedLedger,
    Sums,
    add,
    count,
    named_ledger,
    names_of,
    shard_weight,
    shards,
)

TASKS_A_SLOT: Final = 4

Incarnation = tuple[StreamName, UUID]


class StreamLedgers(NamedTuple):
    """A stream as its newest manifest has it."""

    head: ManifestHead
    ledgers: tuple[NamedLedger, ...]
    cluster_id: UUID | None


def usage(run: JobRun, s3: S3Settings, *, streams: Sequence[StreamName] = ()) -> JobReport:
    """Say what lies in a bucket; of ``streams`` alone, where some are named."""
    wanted = asyncio.run(wanted_of(s3, streams))
    if run.dry_run:
        counts = {"streams": len({name for name, _ in wanted})}
        return JobReport(job="usage", dry_run=True, counts=counts)
    requests = Requests()
    found, unread = ledgers_of(run, s3, wanted, requests)
    sums = sums_of(run, s3, found, requests)
    names = {name for name, _ in wanted} if streams else None
    rows: list[dict[str, Any]] = [
        {
            "stream": place.stream or None,
            "kind": place.kind.value,
            "age": place.age,
            "ledgers": used.ledgers,
            "entries": used.entries,
            "objects": used.objects,
            "bytes": used.bytes,
            "requests": used.requests,
            "error": None,
        }
        for place, used in sorted(sums.items())
        if names is None or place.stream in names
    ]
    summed = ("ledgers", "objects", "bytes", "requests")
    counts = {name: sum(row[name] for row in rows) for name in summed}
    counts |= {"streams": len({name for name, _ in wanted}), "streams_failed": len(unread)}
    rows += [one._asdict() for one in unread]
    return JobReport(job="usage", dry_run=False, counts=counts | requests.counts, rows=rows)


async def wanted_of(s3: S3Settings, streams: Sequence[StreamName]) -> list[Incarnation]:
    """Return the streams that are looked at, all their incarnations; refuse what is not there."""
    async with opened(s3) as bucket:
        return await bucket.incarnations(streams)


def ledgers_of(
    run: JobRun, s3: S3Settings, wanted: Sequence[Incarnation], requests: Requests
) -> tuple[list[StreamLedgers], list[Unread]]:
    """Read the newest manifests of streams, on executors; return those that can't be, too."""
    tasks = spread(wanted, lambda _: 1, TASKS_A_SLOT * slots_of(run))
    rows = run_tasks(run, "manifests", tasks, partial(_read_manifests, s3))
    return without_unread(requests.rest(rows))


def sums_of(
    run: JobRun, s3: S3Settings, streams: Sequence[StreamLedgers], requests: Requests
) -> Sums:
    """List a bucket, on executors, and count what is in it."""
    named = names_of((one.head.stream, one.ledgers) for one in streams)
    told: Broadcast[Named] = run.spark.sparkContext.broadcast(named)
    try:
        tasks = spread(shards(s3.key_prefix), shard_weight, slots_of(run))
        work = partial(_count_objects, s3, told, run.clock.wall_ms())
        sums: Sums = {}
        for place, used in requests.rest(run_tasks(run, "objects", tasks, work)):
            add(sums, place, used)
    finally:
        told.destroy()
    return sums


async def _read_manifests(s3: S3Settings, some: Sequence[Incarnation]) -> list[Any]:
    meter, found = CostMeter(), list[Any]()
    async with opened(s3, meter=meter) as bucket:
        for name, incarnation in some:
            try:
                known = await bucket.manifests.newest(name, incarnation)
            except CorruptError as error:
                found.append(Unread(name, str(error)))
                continue
            if known.head is not None:
                ledgers = tuple(named_ledger(one) for one in bucket.ledgers_of(known))
                found.append(StreamLedgers(known.head, ledgers, known.cluster_id))
    return [*found, *asked_of(meter)]


async def _count_objects(
    s3: S3Settings, named: "Broadcast[Named]", now_ms: int, some: Sequence[str]
) -> list[Any]:
    meter, sums = CostMeter(), Sums()
    with spending(Cause.OTHER):
        async with opened(s3, meter=meter) as bucket:
            for beginning in some:
                async for info in bucket.objects.list(beginning):
                    place, used = count(info, named.value, prefix=s3.key_prefix, now_ms=now_ms)
                    add(sums, place, used)
    return [*sums.items(), *asked_of(meter)]
