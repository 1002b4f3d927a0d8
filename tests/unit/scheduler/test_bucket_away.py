"""A bucket that is away: the leader finds it out once in a pass, not once for each stream.

Must hold: requests and what metrics say do not wait for it, whatever there is of streams; one
stream's trouble is no other one's; and once it is back all manifests are written.
"""

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import TOPICS, World
from tests.unit.scheduler.manifests_kit import Leader
from tests.unit.scheduler.test_scheduler import ENTRIES, scheduler
from tierlog.model.errors import RetryableError
from tierlog.model.ids import StreamName
from tierlog.model.policy import Policy
from tierlog_scheduler.manifests import FAILURES_MAX

NAMES = [StreamName(f"s{number:03}") for number in range(100)]
HANG_S = 25.0


@pytest.mark.parametrize("known_before", [False, True])
def test_a_bucket_that_does_not_answer_holds_a_pass_up_once(monkeypatch, known_before):
    async def main():
        world = World()
        claimed = [await world.stream(name, Policy(offload_time_ms=0)) for name in NAMES]
        gate = Leader(world).gate
        leader = scheduler(world, manifests=gate)
        await leader.begin()
        if known_before:
            await leader.run_pass()
        for one in claimed:
            # A copy, that is to be named by the next manifest, and a ledger to be asked for.
            copied = await world.seal(one, ENTRIES[:1])
            await world.worker().handle(world.request(one, copied))
            await world.seal(one, ENTRIES[:1])
        with monkeypatch.context() as patched:

            async def hangs(*asked, **how):
                await asyncio.sleep(HANG_S)
                raise RetryableError("no answer", remedy="Look after it")

            patched.setattr(gate._store, "newest", hangs)
            patched.setattr(gate._store, "write", hangs)
            patched.setattr(gate._store, "standing", hangs)
            for _ in range(2):
                await leader.run_pass()
                assert leader.pass_s < 3 * HANG_S
                assert len(leader.lags) == len(NAMES)
            assert len(world.queue.events(TOPICS.requested)) == len(NAMES)
        for _ in range(2):
            await leader.run_pass()
        assert not [name for name in NAMES if gate.stopped(name)]

    run_virtual(main(), until_s=10_000)


@pytest.mark.parametrize(
    "bad", [NAMES[:: FAILURES_MAX // 4], NAMES[:FAILURES_MAX], NAMES[40 : 40 + 2 * FAILURES_MAX]]
)
def test_streams_whose_own_manifests_fail_keep_no_others_from_theirs(monkeypatch, bad):
    async def main():
        world = World()
        for name in NAMES:
            await world.stream(name)
        gate = Leader(world).gate
        leader = scheduler(world, manifests=gate)
        await leader.begin()
        whole = gate._store.newest

        async def newest(name, incarnation):
            if name in bad:
                raise RetryableError("slow down", remedy="Nothing to do")
            return await whole(name, incarnation)

        monkeypatch.setattr(gate._store, "newest", newest)
        # Which streams a pass asks for first moves on from pass to pass.
        for _ in range(8):
            await leader.run_pass()
        assert {name for name in NAMES if gate.stopped(name)} == set(bad)

    run_virtual(main())
