"""When a scrub runs, and the reports of those that did.

Owns the schedule, one scrub at a time, and the newest reports. Does not own what a scrub does
(``tierlog.offload.scrub``).

Invariants:
    * By schedule only the leader scrubs; asked for, any scheduler does. Two at once do no harm.
    * At most ``reports_max`` reports are kept, each with at most ``findings_max`` findings, for as
      long as the process lives.
    * A scrub that fails is told, and no other work of the scheduler waits for it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import structlog
from prometheus_client import Counter, Gauge

from tierlog.catalog import Catalog
from tierlog.ledger.reader import ReadHandle
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.model.offload import OffloadContext
from tierlog.model.scrub import DeepPlace, FindingKind, ScrubReport, ScrubState, ScrubWish
from tierlog.offload.scrub import CheckTier1, Scrubber
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.runtime.worker import unless_stopped

log = structlog.get_logger()

SCRUBS: Final = Counter("tierlog_scheduler_scrubs_total", "Scrubs that ended", ["state"])
REMAINING: Final = Gauge(
    "tierlog_scheduler_scrub_findings",
    "Faults that the last scrub found and did not repair",
    ["kind"],
)

OpenLedger = Callable[[LedgerId, LedgerMetadata], ReadHandle]


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
        *,
        leading: Callable[[], bool],
        clock: Clock,
        ids: Ids,
        schedule: ScrubSchedule,
    ) -> None:
        self._scrubber = scrubber
        self._leading = leading
        self._clock = clock
        self._ids = ids
        self._schedule = schedule
        self._asked: ScrubReport | None = None
        self._wake = asyncio.Event()
        self._reports: deque[ScrubReport] = deque(maxlen=schedule.reports_max)
        self._deep_from: DeepPlace | None = None
        now_s, first_s = clock.monotonic_s(), schedule.first_s
        self._due_s = now_s + min(first_s, schedule.interval_s or first_s)
        self._deep_due_s = now_s + schedule.deep_interval_s

    def __repr__(self) -> str:
        return f"<ScrubRunner reports={len(self._reports)}>"

    @property
    def reports(self) -> Sequence[ScrubReport]:
        """What was kept, newest first."""
        return list(reversed(self._reports))

    def report(self, scrub_id: UUID) -> ScrubReport:
        """Return a report, or raise NO_SUCH_ENTRY."""
        found = next((one for one in self._reports if one.scrub_id == scrub_id), None)
        if found is None:
            raise RefusedError(
                f"there is no report of scrub {scrub_id}",
                reason=Reason.NO_SUCH_ENTRY,
                remedy="Old ones are forgotten, and all at a restart; begin a new scrub with: "
                "tierlog scrub",
            )
        return found

    def ask(self, wish: ScrubWish) -> ScrubReport:
        """Begin a scrub as soon as may be; refused while another one runs."""
        running = next((one for one in self._reports if one.state is ScrubState.RUNNING), None)
        if running is not None:
            raise RetryableError(
                f"scrub {running.scrub_id} is still at work ({running.phase or 'begins'})",
                reason=Reason.UNAVAILABLE,
                remedy="Wait until it has ended: GET /v1/scrubs",
            )
        self._asked = self._begin(wish)
        self._wake.set()
        return self._asked

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
        """Scrub when asked and when it is time, until ``stop``."""
        while not stop.is_set():
            report = self._next()
            if report is not None:
                await unless_stopped(self._scrub(report), stop)
                continue
            wait_s = None
            if self._schedule.interval_s:
                wait_s = max(1.0, self._due_s - self._clock.monotonic_s())
            over = asyncio.wait_for(self._wake.wait(), wait_s)
            try:
                await unless_stopped(over, stop)
            except TimeoutError:
                continue

    def _next(self) -> ScrubReport | None:
        """Return the scrub that is to run now, if any."""
        self._wake.clear()
        asked, self._asked = self._asked, None
        now_s = self._clock.monotonic_s()
        schedule = self._schedule
        if asked is not None or not schedule.interval_s or now_s < self._due_s:
            return asked
        self._due_s = now_s + schedule.interval_s
        if not self._leading():
            return None
        deep = bool(schedule.deep_interval_s) and now_s >= self._deep_due_s
        if deep:
            self._deep_due_s = now_s + schedule.deep_interval_s
        # One that ran out of time goes on with the next one.
        return self._begin(
            ScrubWish(repair=schedule.repair, deep=deep or self._deep_from is not None)
        )

    async def _scrub(self, report: ScrubReport) -> None:
        log.info("scrub.begun", scrub_id=str(report.scrub_id), deep=report.wish.deep)
        try:
            await self._scrubber.run(report, deep_from=self._deep_from)
        except TierlogError as error:
            report.error, report.state = str(error), ScrubState.FAILED
            log.warning("scrub.failed", cause=str(error))
        else:
            report.state = ScrubState.DONE
            if report.wish.deep:
                self._deep_from = report.deep_next
        finally:
            if report.state is ScrubState.RUNNING:
                report.error, report.state = "the process ended", ScrubState.FAILED
            report.ended_ms = self._clock.wall_ms()
            self._tell(report)

    def _tell(self, report: ScrubReport) -> None:
        SCRUBS.labels(report.state.value).inc()
        if report.state is ScrubState.DONE:
            for kind in FindingKind:
                REMAINING.labels(kind.value).set(report.counts[kind] - report.repaired[kind])
        tell = log.info if report.is_clean else log.warning
        tell(
            "scrub.ended",
            scrub_id=str(report.scrub_id),
            state=report.state.value,
            remaining=report.remaining,
            unread=len(report.unread),
            counts={kind.value: count for kind, count in report.counts.items()},
        )


def tier1_check(catalog: Catalog, open_ledger: OpenLedger) -> CheckTier1:
    """Return what reads all of a ledger's local copy, once, before it is relied on."""

    async def check(context: OffloadContext) -> None:
        ledger_id = context.ledger_id
        metadata = await catalog.ledgers.get(ledger_id)
        if metadata is None or metadata.state is not LedgerState.CLOSED:
            raise CorruptError(
                f"ledger {ledger_id} has no closed local copy",
                remedy="Bring the objects back; see the how-to scrub-a-bucket",
                details={"ledger_id": str(ledger_id)},
            )
        handle, behind = open_ledger(ledger_id, metadata), 0
        try:
            async for runs in handle.read_runs(EntryId(0), metadata.last_entry_id):
                for run in runs:
                    if run.first_entry_id != behind:
                        break
                    behind = run.last_entry_id + 1
        finally:
            await handle.close()
        if behind != metadata.last_entry_id + 1:
            raise CorruptError(
                f"the local copy of ledger {ledger_id} ends before entry {behind}",
                remedy="Make it whole with: tierlog node check; then scrub again",
                details={"ledger_id": str(ledger_id)},
            )

    return check
