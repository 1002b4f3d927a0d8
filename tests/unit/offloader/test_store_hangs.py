"""A store that hangs over one ledger's object holds up no other ledger for longer than one request.

One block for an entry: as long as the ledger has no more of them than its share of parts, others
go on beside it. One that had all parts of the process, being alone, gives them back as its
requests end, and gets all of them no more. Only who offloads one ledger at a time waits until it is
given up.
"""

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import TOPICS, World
from tierlog.adapters.memory.objects import MemoryObjectsClient
from tierlog.model.errors import RetryableError
from tierlog.offload.budget import LEDGER_PARTS, PARTS_MAX
from tierlog.ports.retrying import RetryLimits
from tierlog.runtime.worker import WorkerLimits, run_worker

REQUEST_S_MAX = 30.0
PATIENCE = RetryLimits(tries_max=100, time_s_max=60, wait_s_first=1, wait_s_max=5)
GIVEN_UP_S = PATIENCE.time_s_max + 2 * REQUEST_S_MAX


@pytest.mark.parametrize(
    ("at_once", "blocks", "within_s"),
    [(2, LEDGER_PARTS, 1.0), (2, PARTS_MAX + 2, REQUEST_S_MAX + 1), (1, 1, GIVEN_UP_S)],
    ids=["beside it", "it had all parts of the process", "it was alone in hand"],
)
def test_other_ledgers_go_on_while_the_store_hangs_for_one(monkeypatch, at_once, blocks, within_s):
    hung: set[str] = set()
    upload_part = MemoryObjectsClient.upload_part

    async def hang(self, key, *args, **more):
        if any(key.endswith(name) for name in hung):
            await asyncio.sleep(REQUEST_S_MAX)
            raise RetryableError(f"upload_part of {key}: not done within {REQUEST_S_MAX} s")
        return await upload_part(self, key, *args, **more)

    monkeypatch.setattr(MemoryObjectsClient, "upload_part", hang)

    async def main():
        world, stop = World(), asyncio.Event()
        claimed = await world.stream()
        first = await world.seal(claimed, [bytes(300)] * blocks)
        other = await world.seal(claimed, [bytes(300)] * 6)
        hung.add(f"-ledger-{first}")
        publisher = world.queue.publisher()
        for ledger_id in (first, other):
            event = world.request(claimed, ledger_id)
            await publisher.publish(
                event.topic, key=b"same", value=event.value, headers=event.headers
            )
        worker = world.worker(limits=PATIENCE)
        limits = WorkerLimits(in_flight_max=at_once, drain_s_max=5)
        source = world.queue.source([TOPICS.requested], group="g")
        async with asyncio.TaskGroup() as group:
            group.create_task(run_worker(source, worker.handle, stop=stop, limits=limits))
            await asyncio.sleep(within_s)
            assert (await world.context(other)).complete
            assert not (await world.context(first)).complete
            assert worker.completed == 1
            hung.clear()
            await asyncio.sleep(300)
            assert (await world.context(first)).complete
            stop.set()
        assert not world.bucket.uploads

    run_virtual(main())
