"""``scrub``: every object of a bucket against index, side object and metadata, by executors.

Owns what of a scrub goes to executors: the list of the bucket, and the looks at all ledgers, which
read all data. Does not own a scrub's order, nor its judgement (``tierlog.offload.scrub``): this is
the scheduler's scrub with a crew.

Invariants:
    * Nothing is repaired, deleted or aborted: ``tierlog scrub --repair --from-report`` does that,
      after a look of its own. Damaged copies are put in doubt, as every scrub does, and what all
      of is sound is in doubt no more.
    * A look that Spark repeats, or runs twice at once, tells the same twice, and is counted once.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

from tierlog.catalog import Catalog
from tierlog.model.errors import Reason, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.scrub import ScrubReport, ScrubState, ScrubWish
from tierlog.offload.repair import Repairer
from tierlog.offload.scrub import Scrubber
from tierlog.offload.scrub_crew import Listing, StreamLook
from tierlog.offload.scrub_rules import ScrubLimits
from tierlog.ports.spending import Cause, CostMeter, spending
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import system_clock, system_ids
from tierlog.wiring.objects import open_bucket
from tierlog.wiring.offload import ledger_offloader
from tierlog_spark.jobs.fanout import (
    Requests,
    asked_of,
    pace_of_task,
    run_tasks,
    slots_of,
    spread,
    task_count,
)
from tierlog_spark.jobs.frame import JobReport, JobRun
from tierlog_spark.jobs.scrub_plan import (
    Lister,
    LookItem,
    joined,
    look_items,
    report_counts,
    report_rows,
)
from tierlog_spark.jobs.site import Site, open_site
from tierlog_spark.jobs.usage_plan import shard_weight, shards
from tierlog_spark.shipping import shipped

JOB: Final = "scrub"
TASK_BYTES: Final = 1024**3
FINDINGS_MAX: Final = 100_000
# As fast as it goes: what holds a scheduler's scrub back is not asked of a job of its own.
UNBOUNDED: Final = 1e15


class Pace(NamedTuple):
    """How much of the data is read, and how fast by one process."""

    deep: bool
    bytes_per_s: float


def scrub(
    run: JobRun, settings: Settings, *, deep: bool = True, bytes_per_s: float = 0.0
) -> JobReport:
    """Look for everything that is not as metadata and manifests say.

    ``deep``: read all data and compare. ``bytes_per_s``: of one executor; 0: as fast as it goes.
    """
    pace = Pace(deep, pace_of_task(run, bytes_per_s) or UNBOUNDED)
    return asyncio.run(_scrub(run, settings, pace))


async def _scrub(run: JobRun, settings: Settings, pace: Pace) -> JobReport:
    async with open_site(settings) as site:
        await site.check_ours(settings)
        crew = SparkCrew(run, settings, site.catalog, pace)
        if run.dry_run:
            return await _planned(site, crew)
        report = new_report(deep=pace.deep)
        await scrubber_of(settings, site, pace).run(report, crew=crew)
    report.state = ScrubState.DONE
    counts = report_counts(report) | crew.requests.counts
    return JobReport(job=JOB, dry_run=False, counts=counts, rows=report_rows(report))


async def _planned(site: Site, crew: "SparkCrew") -> JobReport:
    items = await crew.plan(await site.catalog.streams.names())
    counts = {
        "streams": len({one.stream for one in items}),
        "ledgers": sum(len(one.ledgers) for one in items),
        "bytes": sum(one.bytes for one in items),
    }
    return JobReport(job=JOB, dry_run=True, counts=counts)


class SparkCrew:
    """``Crew`` of executors."""

    def __init__(self, run: JobRun, settings: Settings, catalog: Catalog, pace: Pace) -> None:
        self._run = run
        self._settings = shipped(settings, "s3", "zookeeper", "security", "keys", "wire")
        self._catalog = catalog
        self._pace = pace
        self.requests = Requests()

    def __repr__(self) -> str:
        return f"<SparkCrew of {self._settings.s3.bucket}>"

    async def listing(self) -> Listing:
        found = shards(self._settings.s3.key_prefix)
        tasks = spread(found, shard_weight, slots_of(self._run))
        rows = run_tasks(self._run, "list", tasks, partial(_list, self._settings))
        return joined(self.requests.rest(rows))

    async def looks(self, names: Sequence[StreamName]) -> AsyncIterator[StreamLook]:
        items = await self.plan(names)
        total = sum(one.bytes for one in items)
        number = task_count(total, len(items), slots_of(self._run), weight_max=TASK_BYTES)
        tasks = spread(items, lambda one: one.bytes, number)
        work = partial(_look, self._settings, self._pace)
        for row in self.requests.rest(run_tasks(self._run, "looks", tasks, work)):
            assert isinstance(row, StreamLook)
            yield row

    async def plan(self, names: Sequence[StreamName]) -> list[LookItem]:
        """Return the looks at all ledgers of these streams, those being deleted too."""
        found: list[LookItem] = []
        for name in names:
            try:
                snapshot = await self._catalog.streams.snapshot(name)
            except TierlogError as error:
                if error.reason is not Reason.STREAM_NOT_FOUND:
                    # Whoever looks at it says what is wrong.
                    found += look_items(name, (), bytes_max=TASK_BYTES)
                continue
            ledgers = [(one.ledger_id, one.length) for one in snapshot.ledgers]
            ledgers += [(one, 0) for one in snapshot.stream.deleting]
            found += look_items(name, ledgers, bytes_max=TASK_BYTES)
        return found


def new_report(*, deep: bool) -> ScrubReport:
    """Return a report of a scrub that begins now."""
    return ScrubReport(
        scrub_id=system_ids().uuid(),
        wish=ScrubWish(deep=deep),
        started_ms=system_clock().wall_ms(),
        findings_max=FINDINGS_MAX,
    )


def scrubber_of(settings: Settings, site: Site, pace: Pace) -> Scrubber:
    """Return a scrubber that repairs nothing."""
    offloader = ledger_offloader(settings, site.cluster, site.objects)
    return Scrubber(
        objects=site.objects,
        catalog=site.catalog,
        manifests=site.manifests,
        repairer=Repairer(
            objects=site.objects,
            catalog=site.catalog,
            offloader=offloader,
            open_ledger=_never_opened,
            ids=system_ids(),
        ),
        cluster_id=site.cluster.cluster_id,
        bucket=settings.s3.bucket,
        endpoint_name=settings.s3.endpoint_name,
        key_prefix=settings.s3.key_prefix,
        clock=system_clock(),
        limits=ScrubLimits(
            safety_age_s=settings.scheduler.scrub_safety_age_s,
            requests_per_s=UNBOUNDED,
            bytes_per_s=pace.bytes_per_s,
            deep_s_max=UNBOUNDED,
        ),
    )


def _never_opened(ledger_id: LedgerId, metadata: LedgerMetadata) -> NoReturn:
    raise AssertionError(f"a scrub without repairs opened {ledger_id}: {metadata}")


async def _list(settings: Settings, some: Sequence[str]) -> list[Any]:
    """List below some beginnings of keys, on an executor."""
    meter, found = CostMeter(), []
    with spending(Cause.SCRUB, ""):
        async with open_bucket(settings, settings.s3.bucket, meter=meter) as objects:
            for beginning in some:
                lister = Lister(settings.s3.key_prefix)
                async for info in objects.list(beginning):
                    lister.see(info)
                found.append(lister.listing())
    return [joined(found), *asked_of(meter)]


async def _look(settings: Settings, pace: Pace, some: Sequence[LookItem]) -> list[Any]:
    """Look at some ledgers, on an executor."""
    async with open_site(settings) as site:
        scrubber = scrubber_of(settings, site, pace)
        found: list[Any] = [
            await scrubber.look(new_report(deep=pace.deep), one.stream, frozenset(one.ledgers))
            for one in some
        ]
    return [*found, *asked_of(site.meter)]
