"""Once a fault has passed, scheduler and offloader are as idle as where there was none.

Counted on virtual time: requests to any server, and turns of the event loop, which a loop that
does not wait would drive up without a request.
"""

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.simulation import virtual_loop
from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import TOPICS, World
from tests.unit.scheduler.test_scheduler import ENTRIES, LIMITS, scheduler
from tierlog.adapters.memory.faults import no_faults
from tierlog.model.policy import Policy
from tierlog.runtime.worker import WorkerLimits, run_worker
from tierlog_scheduler.manifests import BucketManifests

OUT_S, REST_S, COUNTED_S = 900.0, 3600.0, 600.0
SERVERS = ("objects.", "metadata.", "events.")


async def counted(out: set[str], turns: list[int]) -> tuple[Counter[str], int, int]:
    """Return requests, turns and passes in some minutes of rest behind an outage of servers."""
    world, stop, given = World(), asyncio.Event(), no_faults()
    claimed = await world.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=-1))
    gate = BucketManifests(world.manifests(given), world.catalog(given))
    leader = scheduler(world, given, manifests=gate)
    source = world.queue.source([TOPICS.requested], group="offloader", faults=given)
    limits = WorkerLimits(in_flight_max=2, drain_s_max=5)
    worker = world.worker(given)
    async with asyncio.TaskGroup() as group:
        group.create_task(leader.run(stop))
        group.create_task(run_worker(source, worker.handle, stop=stop, limits=limits))
        await asyncio.sleep(60)
        given.outages = set(out)
        ledgers = [await world.seal(claimed, ENTRIES) for _ in range(3)]
        await asyncio.sleep(OUT_S)
        assert not out or not all([(await world.context(one)).complete for one in ledgers])
        given.outages = set()
        await asyncio.sleep(REST_S)
        assert all([(await world.context(one)).complete for one in ledgers])
        given.calls, before, passes = [], turns[0], leader.passes
        await asyncio.sleep(COUNTED_S)
        found = Counter(given.calls), turns[0] - before, leader.passes - passes
        stop.set()
    return found


@pytest.mark.parametrize(
    "out", [{one} for one in SERVERS] + [set(SERVERS)], ids=lambda out: "+".join(sorted(out))
)
def test_they_ask_and_turn_no_more_than_where_nothing_was(out: set[str], monkeypatch: Any) -> None:
    turns, select = [0], virtual_loop._JumpSelector.select

    def counting(*asked: Any) -> Any:
        turns[0] += 1
        return select(*asked)

    monkeypatch.setattr(virtual_loop._JumpSelector, "select", counting)
    calls, turned, passes = run_virtual(counted(set(), turns), until_s=1e5)
    assert abs(passes - COUNTED_S / LIMITS.interval_s) <= 1
    # A pass of a cluster at rest asks for its own record alone.
    assert set(calls) <= {"metadata.get", "metadata.sync", "metadata.children", "objects.list"}
    assert calls.total() <= 5 * passes
    assert turned <= 40 * passes
    after, turned_after, passes_after = run_virtual(counted(out, turns), until_s=1e5)
    assert abs(passes_after - passes) <= 1
    assert after.total() <= calls.total() + 10
    assert turned_after <= turned * 1.1 + 100
