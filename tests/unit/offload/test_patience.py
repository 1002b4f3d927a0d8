"""An upload outlives trouble of the store that is shorter than its patience, and only that."""

import asyncio
import random

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import BLOCK, ListHandle, World, entries_of
from tierlog.adapters.memory.faults import FaultRates, Faults, Outcome
from tierlog.format.checksum import crc32c_of
from tierlog.model.errors import CorruptError, RefusedError, RetryableError
from tierlog.model.ids import LedgerId
from tierlog.ports.objects import NoSuchUploadError
from tierlog.ports.retrying import Retries, RetryLimits

LEDGER = LedgerId(7)
ENTRIES = [bytes([number]) * (BLOCK - 140) for number in range(5)]
LIMITS = RetryLimits(tries_max=1000, time_s_max=100.0, wait_s_first=0.5, wait_s_max=10.0)
VERBS = ["create_upload", "upload_part", "complete_upload", "put", "head", "get", "list_uploads"]


async def whole(world, offloader, uuid) -> None:
    """The copy is there, whole, and nothing else is."""
    tier2 = await offloader.read_offloaded(LEDGER, uuid)
    assert await entries_of(tier2) == ENTRIES
    location = offloader.location(LEDGER, uuid)
    own = {location.data_key, location.index_key, location.side_key}
    assert set(world.bucket.objects) == own
    assert not world.bucket.uploads


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.REQUEST_LOST, Outcome.REPLY_LOST])
@pytest.mark.parametrize("verb", VERBS)
def test_each_request_may_fail_and_be_sent_again(verb, outcome):
    async def main():
        world, faults = World(), Faults(random.Random(1))
        for _ in range(3):
            faults.next(f"objects.{verb}", outcome)
        offloader, uuid = world.offloader(faults, limits=LIMITS), world.ids.uuid()
        await offloader.offload(ListHandle(LEDGER, ENTRIES), uuid, {})
        await whole(world, offloader, uuid)

    run_virtual(main())


@pytest.mark.parametrize("seed", range(8))
def test_a_store_that_mostly_fails_is_outlived(seed):
    async def main():
        world = World(seed=seed)
        rates = FaultRates(refused=0.3, request_lost=0.15, reply_lost=0.15, delay_s_max=0.2)
        faults = Faults(random.Random(seed), rates=rates)
        offloader, uuid = world.offloader(faults, limits=LIMITS), world.ids.uuid()
        await offloader.offload(ListHandle(LEDGER, ENTRIES), uuid, {})
        faults.rates = FaultRates()
        await whole(world, offloader, uuid)

    run_virtual(main())


@pytest.mark.parametrize(("outage_s", "outlived"), [(60, True), (150, False)])
def test_an_outage_is_outlived_up_to_the_limit_with_few_requests(outage_s, outlived):
    async def main():
        world, faults = World(), Faults(random.Random(1))
        faults.calls = []
        offloader, uuid = world.offloader(faults, limits=LIMITS), world.ids.uuid()
        faults.outages.add("objects.upload_part")
        attempt = asyncio.create_task(offloader.offload(ListHandle(LEDGER, ENTRIES), uuid, {}))
        await asyncio.sleep(outage_s)
        during = faults.calls.count("objects.upload_part")
        faults.outages.clear()
        if outlived:
            await attempt
            await whole(world, offloader, uuid)
        else:
            with pytest.raises(RetryableError):
                await attempt
            assert asyncio.get_running_loop().time() == outage_s
        # Four parts at once; each waits five seconds on average.
        assert 10 < during < 4 * (min(outage_s, 100) / 5 + 12)

    run_virtual(main())


def test_a_part_damaged_on_its_way_is_sent_again_one_damaged_in_memory_is_not(monkeypatch):
    async def main():
        for in_memory in (False, True):
            world = World()
            offloader, uuid = world.offloader(limits=LIMITS), world.ids.uuid()
            upload_part = offloader._objects.upload_part
            damages = 2

            async def damaging(
                key, upload_id, number, body, *, crc32c, in_memory=in_memory, send=upload_part
            ):
                nonlocal damages
                if damages and number == 2:
                    damages -= 1
                    if in_memory:
                        body[0] = bytes(len(body[0]))
                        assert crc32c_of(body) != crc32c
                    else:
                        body = [bytes(len(body[0])), *body[1:]]
                return await send(key, upload_id, number, body, crc32c=crc32c)

            monkeypatch.setattr(offloader._objects, "upload_part", damaging)
            if in_memory:
                with pytest.raises(CorruptError, match="in this process's memory"):
                    await offloader.offload(ListHandle(LEDGER, ENTRIES), uuid, {})
                assert not world.bucket.objects
            else:
                await offloader.offload(ListHandle(LEDGER, ENTRIES), uuid, {})
                assert damages == 0
                await whole(world, offloader, uuid)

    run_virtual(main())


@pytest.mark.parametrize("error", [RefusedError("no"), NoSuchUploadError("gone")])
def test_what_is_refused_is_not_sent_again(error, monkeypatch):
    async def main():
        world = World()
        offloader = world.offloader(limits=LIMITS)
        calls = 0

        async def refusing(*_args, **_kwargs):
            nonlocal calls
            calls += 1
            raise error

        monkeypatch.setattr(offloader._objects, "complete_upload", refusing)
        with pytest.raises(type(error)):
            await offloader.offload(ListHandle(LEDGER, ENTRIES), world.ids.uuid(), {})
        assert calls == 1
        assert asyncio.get_running_loop().time() < 1

    run_virtual(main())


def test_waits_are_drawn_from_zero_to_a_cap_that_grows_and_ends():
    world = World()
    limits = RetryLimits(tries_max=2000, time_s_max=1e9, wait_s_first=0.5, wait_s_max=10.0)
    drawn: dict[int, list[float]] = {}
    for _ in range(200):
        retries = Retries(limits, clock=world.clock, ids=world.ids)
        for failure in range(1, 10):
            wait_s = retries.wait_s()
            assert wait_s is not None
            drawn.setdefault(failure, []).append(wait_s)
    for failure, waits in drawn.items():
        cap = min(10.0, 0.5 * 2 ** (failure - 1))
        assert 0.9 * cap < max(waits) <= cap
        assert min(waits) < 0.1 * cap
    assert limits.cap_s(1999) == 10.0


def test_tries_and_time_are_bounded_and_the_servers_wish_is_heard():
    world = World()
    limits = RetryLimits(tries_max=3, time_s_max=20.0, wait_s_first=0.5, wait_s_max=5.0)
    retries = Retries(limits, clock=world.clock, ids=world.ids)
    asked = retries.wait_s(3.0)
    assert asked is not None
    assert asked >= 3.0
    assert retries.wait_s(1e9) == 5.0
    assert retries.wait_s() is None
    late = Retries(limits, clock=world.clock, ids=world.ids)
    world.clock.advance(19.9)
    assert late.wait_s(1.0) is None
