"""Two leaders at once: one is cut off from the metadata, or dies at any step of a trim.

Design: reliability.md B15 (deleted before the list moved; leaks; two leaders), C2 (split brain).
A leader that is cut off is not told: for the metadata its session is over and another one leads,
while it reaches bucket and queue as before.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.simulation.servers import Changes, WatchedMetadata
from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, TOPICS, entries_of
from tests.unit.scheduler.test_leaders_and_manifests import Judged
from tests.unit.scheduler.test_scheduler import ENTRIES, HOUR, running, scheduler
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.format import paths, records
from tierlog.format.keys import parse_key
from tierlog.model.errors import CorruptError
from tierlog.model.ids import LedgerId
from tierlog.model.offload import OffloadState
from tierlog.model.policy import Policy
from tierlog.offload.messages import parse_request
from tierlog_scheduler.manifests import BucketManifests
from tierlog_scheduler.scheduler import Scheduler

INTERVAL_S = 10.0
PART_S = 0.02
"""Two leaders' calls take up to so long: each has its turn between two steps of the other."""


class StepFaults(Faults):
    """No faults, but something is done at a leader's ``at``-th step."""

    def __init__(self, seed: int, *, delay_s_max: float = 0.0) -> None:
        super().__init__(random.Random(seed), rates=FaultRates(delay_s_max=delay_s_max))
        self.at: int | None = None
        self.act: Callable[[], object] = lambda: None
        self.calls = []

    async def _step(self, rates: FaultRates) -> None:
        await super()._step(rates)
        if self.at is not None and self.steps >= self.at:
            self.at = None
            self.act()


class Watching(Judged):
    """What became of each ledger, in its order; and that the list moves before objects go."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        self.metadata = self.world.metadata = WatchedMetadata()
        self.metadata.watcher = self
        self.states: dict[LedgerId, list[OffloadState | None]] = {}
        self.attempts_of: dict[LedgerId, int] = {}
        self.listed: list[LedgerId] = []

    def metadata_changed(self, before: Changes) -> None:
        """See ``Watcher``."""
        for path in before:
            found = self.metadata.get(path)
            if path == paths.stream_path(STREAM):
                self._list_changed(found.data if found is not None else None)
            try:
                ledger_id = paths.context_ledger_id_of(path)
            except CorruptError:
                continue
            context = records.decode_context(found.data) if found is not None else None
            states = self.states.setdefault(ledger_id, [])
            state = context.state if context is not None else None
            if not states or states[-1] is not state:
                states.append(state)
            if context is not None:
                self.attempts_of[ledger_id] = context.attempt_count

    def _list_changed(self, data: bytes | None) -> None:
        now = [one.ledger_id for one in records.decode_stream(data).ledgers] if data else []
        kept = [one for one in self.listed if one in now]
        if kept != self.listed[len(self.listed) - len(kept) :]:
            self.complaints.append(f"the list went from {self.listed} to {now}")
        self.listed = now

    def object_deleted(self, key: str) -> None:
        """See ``Watcher``."""
        super().object_deleted(key)
        parsed = parse_key("", key)
        if parsed is not None and parsed.ledger_id in self.listed:
            self.complaints.append(f"{key} was deleted, its ledger {parsed.ledger_id} is listed")

    def leader(self, given: Faults) -> Scheduler:
        """Return a candidate."""
        gate = BucketManifests(self.world.manifests(given), self.world.catalog(given))
        return scheduler(self.world, given, manifests=gate)

    def check_done_once(self) -> None:
        """Each ledger went its way once, by one attempt."""
        for ledger_id, states in self.states.items():
            assert len(set(states)) == len(states), f"ledger {ledger_id}: {states}"
        assert set(self.attempts_of.values()) == {1}
        assert not self.complaints, self.complaints[:3]

    async def check_kept(self, ledger_id: LedgerId) -> None:
        """One ledger is left, with its copy, and nothing of any other."""
        snapshot = await self.world.catalog().streams.snapshot(STREAM)
        assert [one.ledger_id for one in snapshot.ledgers] == [ledger_id]
        assert snapshot.stream.deleting == ()
        context = await self.world.context(ledger_id)
        assert context.location is not None
        assert context.uuid is not None
        assert self.attempts() == set(context.location.keys)
        assert not self.bucket.uploads
        handle = await self.world.offloader().read_offloaded(
            ledger_id, context.uuid, context.location, copy=context.copy
        )
        assert await entries_of(handle) == ENTRIES
        left = [one for one, states in self.states.items() if states[-1] is not None]
        assert left == [ledger_id]


def cut_off(leader: Scheduler, given: Faults) -> asyncio.Event:
    """Part a leader from the metadata, where its session ends; return what is to tell it."""
    store: Any = leader._catalog.store
    session = store._session
    told: asyncio.Event = session.lost
    session.lost, session.watching = asyncio.Event(), []
    given.outages.add("metadata.")
    store.expire_session()
    return told


POLICY = Policy(offload_time_ms=0, deletion_lag_ms=30_000, retention_size_bytes=1)


async def _cut_at(step: int | None) -> int:
    """Cut a leader off at a step of its work; return how many it takes."""
    watching, given = Watching(), StepFaults(1)
    world, stop = watching.world, asyncio.Event()
    claimed = await world.stream(policy=POLICY)
    first, second = watching.leader(given), watching.leader(Faults(random.Random(2)))
    told = asyncio.Event()

    def cut() -> None:
        nonlocal told
        told = cut_off(first, given)

    async with running(world, schedulers=0), asyncio.TaskGroup() as group:
        group.create_task(first.run(stop))
        await asyncio.sleep(1)
        assert first.leading
        group.create_task(second.run(stop))
        begun = given.steps
        given.at, given.act = (None if step is None else begun + step), cut
        for _ in range(3):
            await world.seal(claimed, ENTRIES)
            await asyncio.sleep(3 * INTERVAL_S)
        taken = given.steps - begun
        if step is not None:
            # It had time to end the pass that it was in, and stands for nothing since.
            assert given.calls is not None
            given.calls.clear()
            await asyncio.sleep(12 * INTERVAL_S)  # twice what an answer is waited for
            assert first.leading
            assert second.leading
            acts = [one for one in given.calls if not one.startswith("metadata.")]
            looks = (".get", ".list", ".mark")
            assert not [one for one in acts if not any(look in one for look in looks)], acts
            given.outages.clear()
            await asyncio.sleep(2 * INTERVAL_S)  # it leads still, and reaches everything
            told.set()
            await asyncio.sleep(2 * INTERVAL_S)
            assert (first.leading, second.leading) == (False, True)
        last = await world.seal(claimed, ENTRIES)
        await asyncio.sleep(1200)
        stop.set()
    watching.check_done_once()
    await watching.check_kept(last)
    asked = [parse_request(one).ledger_id for one in world.queue.events(TOPICS.requested)]
    assert all(asked.count(one) <= 2 for one in asked), "each leader asks once"
    return taken


@pytest.mark.timeout(300)
def test_a_leader_that_is_cut_off_and_not_told_acts_no_more_and_doubles_nothing():
    with capture_logs():
        taken = run_virtual(_cut_at(None), until_s=10 * HOUR)
        assert taken > 100
        for step in range(1, taken, 9):
            run_virtual(_cut_at(step), until_s=10 * HOUR)


async def _trim_together(step: int | None) -> int:
    """Trim by two leaders, one of which dies at a step; return how many it takes."""
    watching = Watching()
    world, given = watching.world, StepFaults(step or 0, delay_s_max=PART_S)
    claimed = await world.stream(policy=Policy(offload_time_ms=0))
    ledgers = [await world.seal(claimed, ENTRIES) for _ in range(3)]
    for ledger_id in ledgers:
        await world.worker().handle(world.request(claimed, ledger_id))
    leaders = [
        watching.leader(given),
        watching.leader(Faults(random.Random(step or 0), rates=FaultRates(delay_s_max=PART_S))),
    ]
    for leader in leaders:
        await leader.begin()
        await leader.run_pass()
    await world.catalog().streams.set_policy(STREAM, POLICY)
    begun = given.steps

    async def lead(leader: Scheduler, later_s: float = 0.0) -> None:
        await asyncio.sleep(later_s)
        for _ in range(60):
            await leader.run_pass()
            await asyncio.sleep(INTERVAL_S)

    async with asyncio.TaskGroup() as group:
        dying = group.create_task(lead(leaders[0]))
        given.on_crash = dying.cancel
        given.crash_at_step = None if step is None else begun + step
        # In step with the other, or one or more passes behind it.
        group.create_task(lead(leaders[1], (step or 0) % 4 * 1.5 * INTERVAL_S))
    assert given.crashed or step is None
    watching.check_done_once()
    await watching.check_kept(ledgers[-1])
    return given.steps - begun


@pytest.mark.timeout(300)
def test_two_leaders_trim_at_once_and_one_dies_between_any_two_steps():
    with capture_logs():
        taken = run_virtual(_trim_together(None), until_s=10 * HOUR)
        assert taken > 100
        # By the last ones all is done, and how many there are depends on how long calls take.
        for step in range(1, taken - 100, 7):
            run_virtual(_trim_together(step), until_s=10 * HOUR)
