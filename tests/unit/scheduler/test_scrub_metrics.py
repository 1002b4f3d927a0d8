"""What the metrics say of the bucket's faults: what alerts stand on."""

import asyncio
from collections.abc import Mapping
from uuid import UUID

from prometheus_client import REGISTRY

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import plant, runner
from tests.unit.offload.test_scrub import offloaded
from tierlog.model.scrub import FAULTS, FindingKind, ScrubReport, ScrubWish
from tierlog_scheduler.scrubs import ScrubRunner, ScrubSchedule

NEVER = ScrubSchedule(interval_s=0)
FINDINGS = "tierlog_scheduler_scrub_findings"


async def scrubbed(found: ScrubRunner, wish: ScrubWish) -> ScrubReport:
    """Have a scrub made, to its end."""
    report, stop = await found.ask(wish), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(found.run(stop))
        await asyncio.sleep(60)
        stop.set()
    assert report.ended_ms
    return report


def told() -> Mapping[str, float]:
    """Return what is left in the bucket, by kind."""
    return {
        sample.labels["kind"]: sample.value
        for metric in REGISTRY.collect()
        if metric.name == FINDINGS
        for sample in metric.samples
    }


def test_what_is_no_fault_is_counted_and_alerts_nobody():
    async def main():
        world, _ = await offloaded()
        await plant(world, 5)
        await plant(world, 6, cluster_id=UUID(int=3))
        found = runner(world, NEVER)
        report = await scrubbed(found, ScrubWish())
        assert report.counts[FindingKind.TOO_YOUNG] == report.counts[FindingKind.FOREIGN] == 1
        assert report.is_clean
        assert told() == {kind.value: 0 for kind in FAULTS}
        world.clock.advance(30 * 3600)
        report = await scrubbed(found, ScrubWish())
        assert sum(told().values()) == told()["orphan-objects"] == report.remaining == 1

    run_virtual(main())
