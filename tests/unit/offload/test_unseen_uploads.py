"""Open uploads that the store does not let be listed: unknown is not empty, and no failure either.

A copy that is complete stays complete; what is swept is never called clean; a scrub says that it
could not look.
"""

import asyncio
from contextlib import contextmanager
from uuid import UUID

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.gates import leader_of
from tests.unit.offload.scrubs import REPAIR, SAFETY_S, kinds, plant, plant_upload, scrub
from tests.unit.offload.world import STREAM, ListHandle, World, entries_of
from tierlog.adapters.memory.objects import MemoryObjectsClient
from tierlog.format.keys import object_keys
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import LedgerId
from tierlog.model.policy import Policy
from tierlog.model.scrub import FindingKind, ScrubState
from tierlog.offload.cleaning import UploadsUnseenError
from tierlog_scheduler.scheduler import SchedulerLimits

LEDGER = LedgerId(7)
ENTRIES = [b"one", b"three"]
LIMITS = SchedulerLimits(interval_s=10, request_again_s=60, sweep_again_s=300)


@contextmanager
def denied(calls: list[str] | None = None, *, what: str = "list_uploads"):
    """Let nobody list open uploads, or abort them."""

    async def refuse(self, key, *args):
        if calls is not None:
            calls.append(key)
        raise RefusedError(f"{what} of b: Access Denied", reason=Reason.PERMISSION_DENIED)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(MemoryObjectsClient, what, refuse)
        yield


def counted(during: str) -> float:
    name = "tierlog_offload_uploads_unseen_total"
    return REGISTRY.get_sample_value(name, {"during": during}) or 0.0


@pytest.mark.parametrize("what", ["list_uploads", "abort_upload"])
def test_a_copy_that_is_there_is_no_failure(what):
    async def main():
        world = World()
        offloader, uuid = world.offloader(), UUID(int=1)
        # An upload whose answer was lost.
        await plant_upload(world, offloader.location(LEDGER, uuid).data_key)
        before = counted("upload")
        with capture_logs() as lines, denied(what=what):
            await offloader.offload(ListHandle(LEDGER, ENTRIES), uuid, {})
        assert counted("upload") == before + 1
        (told,) = [one for one in lines if one["event"] == "uploads.unseen"]
        assert told["log_level"] == "warning"
        assert "s3:ListBucketMultipartUploads" in told["remedy"]
        assert await entries_of(await offloader.read_offloaded(LEDGER, uuid)) == ENTRIES
        assert len(world.bucket.uploads) == 1

    run_virtual(main())


@pytest.mark.parametrize("what", ["list_uploads", "abort_upload"])
def test_a_sweep_deletes_objects_and_says_that_it_could_not_see_the_rest(what):
    async def main():
        world = World()
        offloader, uuid = world.offloader(), UUID(int=1)
        await offloader.offload(ListHandle(LEDGER, ENTRIES), uuid, {})
        await plant_upload(world, offloader.location(LEDGER, uuid).data_key)
        before = counted("sweep")
        with denied(what=what), pytest.raises(UploadsUnseenError) as caught:
            await offloader.delete_offloaded(LEDGER, uuid)
        assert caught.value.reason is Reason.PERMISSION_DENIED
        assert "s3:ListBucketMultipartUploads" in caught.value.remedy
        assert counted("sweep") == before + 1
        assert not world.bucket.objects
        assert len(world.bucket.uploads) == 1
        await offloader.delete_offloaded(LEDGER, uuid)
        assert not world.bucket.uploads

    run_virtual(main())


def test_a_sweep_that_could_not_look_is_done_again_later_and_never_struck_off():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(deletion_lag_ms=-1))
        ledger_id = await world.seal(claimed, ENTRIES)
        contexts, uuid = world.catalog().contexts, UUID(int=9)
        location = world.offloader().location(ledger_id, uuid)
        await contexts.begin_attempt(ledger_id, uuid=uuid, location=location, worker="dead")
        await plant_upload(world, location.data_key)
        with denied():
            # Its successor could not look either.
            await world.worker().handle(world.request(claimed, ledger_id))
        leader = leader_of(world, LIMITS)
        await leader.begin()
        looks: list[str] = []
        with denied(looks):
            for _ in range(90):
                await leader.run_pass()
                await asyncio.sleep(10)
        (left,) = (await world.context(ledger_id)).abandoned
        assert (left.uuid, left.swept_ms) == (uuid, 0)
        assert len(looks) == 3
        for _ in range(70):
            await leader.run_pass()
            await asyncio.sleep(10)
        context = await world.context(ledger_id)
        assert context.complete
        assert not context.abandoned
        assert not world.bucket.uploads

    run_virtual(main())


def test_a_scrub_that_can_not_look_for_uploads_is_not_clean_and_keeps_what_it_doubts():
    async def main():
        world = World()
        await world.stream()
        orphan = await plant(world, 5)
        await plant_upload(world, object_keys("", UUID(int=6), LedgerId(901)).data)
        world.clock.advance(SAFETY_S + 1)
        before = counted("scrub")
        with denied():
            report = await scrub(world, REPAIR)
        assert counted("scrub") == before + 1
        report.state = ScrubState.DONE
        assert sorted(kinds(report)) == ["not-checked", "orphan-objects"]
        assert report.remaining == 1
        assert not report.is_clean
        said = {one.kind: one for one in report.findings}
        assert "s3-permissions" in said[FindingKind.NOT_CHECKED].remedy
        assert "Access Denied" in said[FindingKind.NOT_CHECKED].cause
        assert "can't be seen" in said[FindingKind.ORPHAN_OBJECTS].kept
        assert orphan in world.bucket.objects
        assert kinds(await scrub(world, REPAIR)) == ["orphan-objects", "orphan-upload"]
        assert not world.bucket.objects

    run_virtual(main())


def test_what_could_not_be_checked_alone_is_no_fault_and_not_clean_either():
    async def main():
        world = World()
        await world.stream()
        with denied():
            report = await scrub(world, REPAIR)
        report.state = ScrubState.DONE
        assert (report.remaining, report.is_clean) == (0, False)

    run_virtual(main())


def test_a_worker_completes_what_it_copied():
    async def main():
        world = World()
        claimed = await world.stream()
        ledger_id = await world.seal(claimed, ENTRIES)
        worker = world.worker()
        with denied():
            await worker.handle(world.request(claimed, ledger_id))
        assert worker.completed == 1
        assert (await world.context(ledger_id)).complete
        assert (await world.catalog().streams.get(STREAM)).deleting == ()

    run_virtual(main())
