"""How long copies and their exports may take: each for itself.

ADR-0024: "nothing depends on" an export. A copy that is whole is complete, however slow or stuck
its export is; what the export had begun is taken away.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.test_export import ENTRIES, LEDGER, TIER2, handle_of
from tests.unit.offload.world import CLUSTER, TOPICS, ListHandle, World
from tierlog.adapters.memory.faults import Faults, Outcome, no_faults
from tierlog.format.run import Run
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.node import Cluster
from tierlog.offload.budget import UploadBudget
from tierlog.offload.driver import BlockOffloader
from tierlog.offload.drivers import DriverParts, Drivers
from tierlog.offload.export import Exporter, ExportingOffloader
from tierlog.offload.messages import parse_result
from tierlog.offload.timed import CopyTime
from tierlog.proto.v1 import events_pb2 as pb
from tierlog.runtime.settings import Settings
from tierlog.wiring import offload as wiring
from tierlog.wiring.offload import ledger_offloader

HOUR = 3600.0
LIMIT = CopyTime(base_s=4 * HOUR, bytes_per_s_min=10**6)


class StuckLater(ListHandle):
    """Gives a driver all its entries, and an export, which reads them again, none."""

    passes = 0

    async def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0
    ) -> AsyncIterator[Sequence[Run]]:
        self.passes += first == 0
        if self.passes > 1:
            await asyncio.sleep(1000 * HOUR)
        async for runs in super().read_runs(first, last, bytes_max=bytes_max, wait_s=wait_s):
            yield runs


def stuck() -> StuckLater:
    plain = handle_of(ENTRIES)
    return StuckLater(LEDGER, plain.entries, plain.ledger_metadata)


def wired(world: World) -> ExportingOffloader:
    """Return what an offloader that exports is wired with."""
    settings = Settings()
    s3 = settings.s3.model_copy(update={"export_events": True, "bucket": "b"})
    found = ledger_offloader(
        settings.model_copy(update={"s3": s3}),
        Cluster(cluster_id=CLUSTER, created_ms=1),
        world.bucket.connect(),
        copy_time=LIMIT,
    )
    assert isinstance(found, ExportingOffloader)
    return found


def test_exports_and_uploads_are_wired_with_one_budget(monkeypatch):
    made: list[UploadBudget] = []

    def drivers(parts: DriverParts, **how: Any) -> Drivers:
        assert parts.budget is not None
        made.append(parts.budget)
        return Drivers(parts, **how)

    monkeypatch.setattr(wiring, "Exporter", lambda *_, budget, **__: made.append(budget))
    monkeypatch.setattr(wiring, "Drivers", drivers)
    wired(World())
    of_uploads, of_exports = made
    assert of_uploads is of_exports


def test_a_copy_is_complete_whose_export_takes_too_long():
    async def main():
        world = World()
        claimed = await world.stream()
        ledger_id = await world.seal(claimed, ENTRIES)

        def opened(asked: LedgerId, metadata: LedgerMetadata) -> StuckLater:
            return StuckLater(asked, ENTRIES, metadata)

        worker, offloader = world.worker(), wired(world)
        worker._offloader, worker._open_ledger = offloader, opened
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with capture_logs() as lines:
            await worker.handle(world.request(claimed, ledger_id))
        assert loop.time() - began_s < 5 * HOUR
        assert (await world.context(ledger_id)).complete
        (event,) = world.queue.events(TOPICS.completed)
        assert parse_result(event).outcome == pb.OffloadResult.OUTCOME_COMPLETED
        assert set(world.bucket.objects) == await world.expected_keys()
        assert not world.bucket.uploads
        assert (worker.attempts, offloader.exported, offloader.failed) == (1, 0, 1)
        (told,) = [line for line in lines if line["event"] == "export.failed"]
        assert told["cause"] == "it took longer than 14400 s"

    run_virtual(main())


def test_an_export_waits_for_its_turn_no_longer_than_it_may_take():
    async def main():
        world = World()
        offloader = wired(world)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as group:
            for number in range(1, 4):
                group.create_task(offloader.offload(stuck(), UUID(int=number), {}))
                await asyncio.sleep(HOUR)
        assert loop.time() - began_s < 7 * HOUR
        assert offloader.failed == 3
        assert not world.bucket.uploads
        await offloader.offload(handle_of(ENTRIES), UUID(int=4), {})
        assert offloader.exported == 1

    run_virtual(main())


@pytest.mark.parametrize("refused", [False, True])
def test_an_export_that_is_cancelled_takes_its_upload_along_and_is_no_failure(refused: bool):
    async def main():
        world, faults = World(), no_faults()
        objects = world.bucket.connect(faults)
        offloader = ExportingOffloader(BlockOffloader(objects, TIER2), Exporter(objects, TIER2))
        task = asyncio.create_task(offloader.offload(stuck(), UUID(int=1), {}))
        await asyncio.sleep(60)
        assert len(world.bucket.uploads) == 1
        if refused:
            faults.next("objects.abort_upload", Outcome.REFUSED)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(world.bucket.uploads) == refused
        assert offloader.failed == 0

    run_virtual(main())


def test_an_error_of_an_export_is_told_also_when_its_upload_can_not_be_aborted():
    async def main():
        world, faults = World(), Faults(World().rng)
        objects = world.bucket.connect(faults)
        offloader = ExportingOffloader(BlockOffloader(objects, TIER2), Exporter(objects, TIER2))
        faults.next("objects.abort_upload", Outcome.REFUSED)
        with capture_logs() as lines:
            await offloader.offload(handle_of([b"not an entry"]), UUID(int=1), {})
        told = {line["event"]: line["cause"] for line in lines if "export" in line["event"]}
        assert told.keys() == {"export.failed", "export.abort_failed"}
        assert told["export.failed"] != told["export.abort_failed"]

    run_virtual(main())
