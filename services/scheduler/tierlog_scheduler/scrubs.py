"""When a scrub runs, and the reports of those that did.

Owns the schedule and one scrub at a time. Does not own what a scrub does
(``tierlog.offload.scrub``), nor where reports are kept (``tierlog.catalog.scrubs``).

Invariants:
    * By schedule only the leader scrubs; asked for, any scheduler does. Two at once do no harm.
    * What was found outlives the leader: ``reports_max`` reports are kept in the metadata, and the
      few older ones that say what these could not look at, each as long as there is room for. This
      process has its own, with all findings, besides.
    * A scrub at work is kept there too, before it is promised and every ``TELL_EACH_S``: whichever
      scheduler is asked knows of it, and that nothing is heard of it any more: by how long it
      sees the same report itself, since clocks of two hosts may be hours apart.
    * What metrics tell of the bucket is what the reports that are kept say, whoever made them: a
      leader looks at them every ``LOOK_AGAIN_S``.
    * When the last one by schedule began is kept there too: a new leader goes on with the same
      interval, and who does not lead looks every ``LOOK_AGAIN_S`` whether it does. A scrub that
      failed or was cut short does not count, and comes again after ``FAILED_AGAIN_S``. No clock
      that is or was off makes an interval longer; one that begins too early does no harm.
    * Of a cluster that was restored from its bucket a scrub by schedule repairs nothing until one
      that somebody asked to repair has ended, and nothing stopped it from deleting: what metadata
      do not name may be what did not come back. What was found since they asked they did not
      know; that, and a mark that could not be taken away, the scrub tells.
    * A deep one that ran out of time is gone on with by the next of its kind, by schedule or
      asked for: who asks is never answered with what another one read.
    * A scrub that fails is told, and no other work of the scheduler waits for it; nor does a
      defect in it end anything else (``defects``). For how long none could look at everything is a
      metric: that nothing was found says nothing then.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from uuid import UUID

import structlog
from prometheus_client import Counter

from tierlog.catalog import ScrubCatalog
from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.scrub import (
    TELL_EACH_S,
    DeepPlace,
    KnownFaults,
    ScrubReport,
    ScrubState,
    ScrubTimes,
    ScrubWish,
    all_seen_ms,
    as_heard,
    known_faults,
    places_of,
)
from tierlog.offload.scrub import Scrubber
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.runtime.worker import unless_stopped
from tierlog_scheduler.defects import note_defect

log = structlog.get_logger()

SCRUBS: Final = Counter("tierlog_scheduler_scrubs_total", "Scrubs that ended", ["state"])

LOOK_AGAIN_S: Final = 60.0
"""When it does not lead, or the metadata did not say how long ago the last one was."""
MARKED: Final = "the mark of metadata that came back from the bucket or from a backup"
MARKED_REMEDY: Final = (
    "look what nothing names, and whether nodes are in doubt; then ask for: tierlog scrub --repair"
)
FAILED_AGAIN_S: Final = 3600.0
"""After one that failed: it may have read much, so not at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubSchedule:
    """How often a leader scrubs (0: never), and what is kept of it."""

    interval_s: float = 86_400.0
    deep_interval_s: float = 604_800.0
    first_s: float = 600.0
    repair: bool = True
    findings_max: int = 1000
    reports_max: int = 20


class ScrubRunner:
    """Runs scrubs, one at a time."""

    def __init__(
        self,
        scrubber: Scrubber,
        kept: ScrubCatalog,
        *,
        leading: Callable[[], bool],
        clock: Clock,
        ids: Ids,
        schedule: ScrubSchedule,
    ) -> None:
        self._scrubber = scrubber
        self._kept = kept
        self._leading = leading
        self._clock = clock
        self._ids = ids
        self._schedule = schedule
        self.faults: KnownFaults | None = None
        """What is wrong in the bucket, by all reports that are kept; None: not known here."""
        self._made_ms = clock.wall_ms()
        self._all_seen_ms: int | None = None
        self._asked: ScrubReport | None = None
        self._wake = asyncio.Event()
        self._reports: deque[ScrubReport] = deque(maxlen=schedule.reports_max)
        # When what is kept of each was last heard, and since when, by the monotonic clock.
        self._heard: dict[UUID, tuple[int, float]] = {}
        # When each of the times kept was, by the monotonic clock: as it looked at first sight.
        self._begun_s: dict[int, float] = {}
        # Where the last deep one that was asked for ran out of time.
        self._asked_from: DeepPlace | None = None
        first_s = schedule.first_s
        self._due_s = clock.monotonic_s() + min(first_s, schedule.interval_s or first_s)

    def __repr__(self) -> str:
        return f"<ScrubRunner reports={len(self._reports)}>"

    async def reports(self) -> Sequence[ScrubReport]:
        """Return what is kept, newest first; what this process did, as it is now."""
        kept = self._as_heard(await self._kept.reports())
        found = kept | {one.scrub_id: one for one in self._reports}
        places = {**places_of(found.values()), **self._own_places()}
        newest = sorted(
            found.values(), key=lambda one: (places[one.scrub_id], one.started_ms), reverse=True
        )
        self.faults = known_faults(newest)
        # Of those beyond, what is kept: ``faults`` may be by it.
        few = self._schedule.reports_max
        return newest[:few] + [one for one in newest[few:] if one.scrub_id in kept]

    def _own_places(self) -> dict[UUID, float]:
        """Return where its own that are not kept stand among the numbers: as it made them."""
        places: dict[UUID, float] = {}
        behind = math.inf
        for one in reversed(self._reports):
            if one.number:
                behind = one.number - 0.5
            else:
                places[one.scrub_id] = behind
        return places

    def _as_heard(self, kept: Sequence[ScrubReport]) -> dict[UUID, ScrubReport]:
        now_s, before, self._heard = self._clock.monotonic_s(), self._heard, {}
        found: dict[UUID, ScrubReport] = {}
        for one in kept:
            told_ms, since_s = before.get(one.scrub_id, (one.told_ms, now_s))
            if told_ms != one.told_ms:
                # News, whichever of the two is the later.
                since_s = now_s
            self._heard[one.scrub_id] = (one.told_ms, since_s)
            found[one.scrub_id] = as_heard(one, silent_s=now_s - since_s)
        return found

    async def report(self, scrub_id: UUID) -> ScrubReport:
        """Return a report, or raise NO_SUCH_ENTRY."""
        found = next((one for one in await self.reports() if one.scrub_id == scrub_id), None)
        if found is None:
            raise RefusedError(
                f"there is no report of scrub {scrub_id}",
                reason=Reason.NO_SUCH_ENTRY,
                remedy="Only the newest are kept; list them with: tierlog scrub list",
            )
        return found

    async def ask(self, wish: ScrubWish) -> ScrubReport:
        """Begin a scrub as soon as may be; refused while another one runs."""
        running = next((one for one in self._reports if one.state is ScrubState.RUNNING), None)
        if running is not None:
            raise RetryableError(
                f"scrub {running.scrub_id} is still at work ({running.phase or 'begins'})",
                reason=Reason.UNAVAILABLE,
                remedy="Wait until it has ended: GET /v1/scrubs",
            )
        report = self._begin(wish)
        try:
            # First: the next question about it may be another scheduler's to answer.
            await self._keep(report)
        finally:
            self._asked = report
            self._wake.set()
        return report

    def _begin(self, wish: ScrubWish) -> ScrubReport:
        report = ScrubReport(
            scrub_id=self._ids.uuid(),
            wish=wish,
            started_ms=self._clock.wall_ms(),
            findings_max=self._schedule.findings_max,
        )
        self._reports.append(report)
        return report

    async def run(self, stop: asyncio.Event) -> None:
        """Scrub when asked and when it is time, and follow what others find, until ``stop``."""
        await unless_stopped(self._guarded(self._hear), stop)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(stop))
            await self._scrub_when_due(stop)

    async def _follow(self, stop: asyncio.Event) -> None:
        """Know what is wrong in the bucket as long as this process leads: it tells of it."""
        while not stop.is_set():
            if self._leading():
                await unless_stopped(self._guarded(self._hear), stop)
            else:
                self.faults = self._all_seen_ms = None
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_AGAIN_S)

    async def _scrub_when_due(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self._wake.clear()
            report, self._asked = self._asked, None
            if report is not None:
                await unless_stopped(self._guarded(partial(self._as_asked, report)), stop)
                continue
            wait_s = None
            if self._schedule.interval_s:
                if self._clock.monotonic_s() >= self._due_s:
                    await unless_stopped(self._guarded(self._by_schedule), stop)
                    continue
                wait_s = max(1.0, self._due_s - self._clock.monotonic_s())
            over = asyncio.wait_for(self._wake.wait(), wait_s)
            try:
                await unless_stopped(over, stop)
            except TimeoutError:
                continue

    async def _hear(self) -> None:
        """Look at what is kept: silence about what others began counts from the first look on."""
        with suppress(TierlogError):
            reports = await self.reports()
            self._all_seen_ms = all_seen_ms(reports, await self._kept.times())

    @property
    def incomplete_s(self) -> float | None:
        """For how long none looked at everything, beyond the interval; None: not known here.

        Nor where none is due. Before any began the time counts since this process did.
        """
        interval_s = self._schedule.interval_s
        if self._all_seen_ms is None or not interval_s:
            return None
        since_s = (self._clock.wall_ms() - (self._all_seen_ms or self._made_ms)) / 1000
        return max(0.0, since_s - interval_s)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do what must not end the scheduler, whatever becomes of it."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - told: metric, log
            note_defect("scrub schedule", error)

    async def _as_asked(self, report: ScrubReport) -> None:
        if report.wish.ledgers is not None:
            # It says itself where to look, and nothing of how far another one came.
            await self._scrub(report, None)
            return
        mark, unread = None, ""
        if report.wish.repair:
            try:
                mark = await self._kept.mark()
            except TierlogError as error:
                # To tell only if it is there: most clusters have none.
                unread = f"it could not be read when the scrub began: {error}"
        await self._scrub(report, self._asked_from, partial(self._lift, report, mark, unread))
        if report.state is ScrubState.DONE and report.wish.deep:
            self._asked_from = report.deep_next

    async def _lift(self, report: ScrubReport, mark: int | None, unread: str) -> None:
        """Take away the mark that stood when somebody asked, once it is done what they asked for.

        One that was stopped, by older metadata or because that can't be told, has deleted nothing
        behind it, and may have left the mark itself. Nor have they asked about what was found
        meanwhile. ``unread``: why nobody knows whether one stood then; empty: it is known.
        """
        if not report.wish.repair or report.deletions_stopped:
            return
        try:
            if mark is not None and await self._kept.note_repaired(mark):
                return
            if await self._kept.mark() is not None:
                anew = "metadata were found older meanwhile, or a node is in doubt yet"
                _tell_mark(report, "stays", unread or anew)
        except TierlogError as error:
            _tell_mark(report, "may stay", str(error))

    async def _by_schedule(self) -> None:
        """Scrub, if this process leads and nobody did for the interval."""
        schedule = self._schedule
        self._due_within(LOOK_AGAIN_S)
        if not self._leading():
            return
        try:
            times = await self._kept.times()
            marked = schedule.repair and await self._kept.is_restored()
        except TierlogError as error:
            log.warning("scrub.times_unread", cause=str(error))
            return
        now_s = self._see(times)
        left_s = self._left_s(times.begun_ms, schedule.interval_s)
        if left_s > 0:
            # Another leader did, not so long ago.
            self._due_s = self._clock.monotonic_s() + left_s
            return
        deep = bool(schedule.deep_interval_s and times.begun_ms)
        deep = deep and self._left_s(times.deep_begun_ms, schedule.deep_interval_s) <= 0
        # One that ran out of time goes on with the next one.
        repair = schedule.repair and not marked
        wish = ScrubWish(repair=repair, deep=deep or times.deep_next is not None)
        self._due_within(schedule.interval_s)
        report = self._begin(wish)
        if marked:
            # Else findings come back for ever, and nothing says why.
            report.deletions_stopped = f"{MARKED} is there: {MARKED_REMEDY}"
        await self._scrub(report, times.deep_next)
        if report.state is not ScrubState.DONE:
            self._due_within(FAILED_AGAIN_S)
            return
        self._begun_s[report.started_ms] = now_s
        # The first one of all is what the interval of the deep ones counts from.
        deep_begun = deep or not times.begun_ms
        await self._keep_times(
            replace(
                times,
                begun_ms=report.started_ms,
                deep_begun_ms=report.started_ms if deep_begun else times.deep_begun_ms,
                deep_next=report.deep_next,
            )
        )

    def _due_within(self, seconds: float) -> None:
        """Look at the schedule again after so long, or after an interval if that is shorter."""
        self._due_s = self._clock.monotonic_s() + min(seconds, self._schedule.interval_s)

    def _see(self, times: ScrubTimes) -> float:
        """Note when scrubs began, as it looks now; return now, by the same clock."""
        now_s, now_ms, before = self._clock.monotonic_s(), self._clock.wall_ms(), self._begun_s
        self._begun_s = {
            one: before.get(one, now_s - max(0, now_ms - one) / 1000)
            for one in (times.begun_ms, times.deep_begun_ms)
        }
        return now_s

    def _left_s(self, begun_ms: int, interval_s: float) -> float:
        """Return how much of an interval is left, by the clock that says less.

        Nothing is left where the beginning lies ahead: one of two clocks was, or is, off.
        """
        since_s = (self._clock.wall_ms() - begun_ms) / 1000
        if not begun_ms or since_s < 0:
            return 0.0
        return interval_s - max(since_s, self._clock.monotonic_s() - self._begun_s[begun_ms])

    async def _keep_times(self, times: ScrubTimes) -> None:
        try:
            await self._kept.save_times(times)
        except TierlogError as error:
            log.warning("scrub.times_not_kept", cause=str(error))

    async def _scrub(
        self,
        report: ScrubReport,
        deep_from: DeepPlace | None,
        then: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        log.info("scrub.begun", scrub_id=str(report.scrub_id), deep=report.wish.deep)
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_telling(report, ended))
            try:
                await self._until_end(report, deep_from, then)
            finally:
                ended.set()
        await self._keep(report)
        await self._hear()

    async def _keep_telling(self, report: ScrubReport, ended: asyncio.Event) -> None:
        while not ended.is_set():
            await self._keep(report)
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), TELL_EACH_S)

    async def _keep(self, report: ScrubReport) -> None:
        report.told_ms = self._clock.wall_ms()
        try:
            await self._kept.save(report, keep=self._schedule.reports_max)
        except TierlogError as error:
            log.warning("scrub.report_not_kept", cause=str(error))

    async def _until_end(
        self,
        report: ScrubReport,
        deep_from: DeepPlace | None,
        then: Callable[[], Awaitable[None]] | None,
    ) -> None:
        try:
            await self._scrubber.run(report, deep_from=deep_from)
            if then is not None:
                await then()
        except TierlogError as error:
            report.error, report.state = str(error), ScrubState.FAILED
            log.warning("scrub.failed", cause=str(error))
        except Exception as error:  # noqa: BLE001 - told: report, metric, log
            said = note_defect("scrub", error, scrub_id=str(report.scrub_id))
            report.error, report.state = f"unexpected {said}", ScrubState.FAILED
        else:
            report.state = ScrubState.DONE
        finally:
            if report.state is ScrubState.RUNNING:
                report.error, report.state = "the process ended", ScrubState.FAILED
            report.ended_ms = self._clock.wall_ms()
            self._tell(report)

    def _tell(self, report: ScrubReport) -> None:
        SCRUBS.labels(report.state.value).inc()
        tell = log.info if report.is_clean else log.warning
        tell(
            "scrub.ended",
            scrub_id=str(report.scrub_id),
            state=report.state.value,
            remaining=report.remaining,
            unread=report.unread_count,
            counts={kind.value: count for kind, count in report.counts.items()},
        )


def _tell_mark(report: ScrubReport, stays: str, cause: str) -> None:
    """Say that scrubs by schedule go on to repair nothing, for all that this one did."""
    what = f"{MARKED} {stays}, and while it does scrubs by schedule repair nothing"
    report.skip(f"{what}: {cause}. Ask again")
    log.warning("scrub.mark_kept", scrub_id=str(report.scrub_id), cause=cause)
