"""What is done in a run, whose process meets the trouble, and how it has to end.

    offload  a sealed ledger of three blocks comes to tier 2
    move     a ledger that is in both tiers loses its local copy
    trim     the older of two ledgers is taken away by retention, the newer one stays
    delete   the whole stream is deleted, with a ledger in both tiers and one in mid-upload
    scrub    objects and an upload that nobody names go; two copies that lack an object are made
             anew, one from the local copy, one from what is left of it

Every run ends with the same questions (``tests.faults.invariants``). A copy must be complete
within a minute after the trouble, all of it at rest within three, of virtual time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID

from tests.faults import invariants
from tests.faults.invariants import Fate, Wanted
from tests.faults.small import (
    BLOCK_SIZE,
    LEDGER_BYTES_MAX,
    SAFETY_S,
    STREAM,
    ScrubProcess,
    SmallWorld,
)
from tests.faults.troubles import LATE_S, Call, Point, PointFaults, Trouble
from tests.simulation.services import WorkerProcess
from tests.simulation.trace import Trace
from tests.simulation.virtual_loop import run_virtual
from tests.simulation.world import logs_into, small_blocks
from tests.unit.offload.scrubs import metadata as beside
from tierlog.adapters.memory.faults import FaultRates
from tierlog.format import keys
from tierlog.model.errors import TierlogError
from tierlog.model.ids import LedgerId
from tierlog.model.policy import NEVER, Policy

COMPLETE_S_MAX: Final = 60.0
REST_S_MAX: Final = 180.0
STOPPED_S: Final = 25.0
"""Four sessions, and long enough for a peer to do all the work."""
WOKEN_S: Final = 10.0
"""So long who was resumed may do what it likes."""
_TICK_S: Final = 0.5

_SLOW: Final = {name: FaultRates(delay_s_max=0.02) for name in ("objects.", "metadata.", "rpc.")}
Prepare = Callable[[SmallWorld], Awaitable[dict[LedgerId, Fate]]]


@dataclass(frozen=True, slots=True)
class Story:
    """``kinds``: the processes that take part, each of which may be the victim."""

    name: str
    prepare: Prepare
    kinds: tuple[str, ...]


@dataclass(slots=True)
class Ending:
    """How a run ended. ``calls``: all that the victim's first life asked for."""

    calls: list[Call] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    met: bool = False
    lines: list[str] = field(default_factory=list)


def kept(**changed: Any) -> Policy:
    """Return a policy that does nothing by itself, but for what is given."""
    policy = Policy(
        offload_time_ms=NEVER,
        deletion_lag_ms=NEVER,
        block_size=BLOCK_SIZE,
        ledger_bytes_max=LEDGER_BYTES_MAX,
    )
    return replace(policy, **changed)


async def _offload(world: SmallWorld) -> dict[LedgerId, Fate]:
    claimed = await world.begin(kept(offload_time_ms=0))
    return {await world.seal(claimed): Fate.COMPLETE}


async def _move(world: SmallWorld) -> dict[LedgerId, Fate]:
    claimed = await world.begin(kept(deletion_lag_ms=3000))
    ledger_id = await world.seal(claimed)
    await world.copied(ledger_id)
    return {ledger_id: Fate.MOVED}


async def _trim(world: SmallWorld) -> dict[LedgerId, Fate]:
    claimed = await world.begin(kept())
    old, new = await world.seal(claimed), await world.seal(claimed)
    for ledger_id in (old, new):
        await world.copied(ledger_id)
    await world.catalog.streams.set_policy(STREAM, kept(retention_size_bytes=1))
    return {old: Fate.TRIMMED, new: Fate.COMPLETE}


async def _delete(world: SmallWorld) -> dict[LedgerId, Fate]:
    claimed = await world.begin(kept(offload_time_ms=0))
    copied, local = await world.seal(claimed), await world.seal(claimed)
    await world.copied(copied)
    return {copied: Fate.TRIMMED, local: Fate.TRIMMED}


async def _scrub(world: SmallWorld) -> dict[LedgerId, Fate]:
    claimed = await world.begin(kept(offload_time_ms=0))
    both, alone = await world.seal(claimed), await world.seal(claimed)
    await world.copied(both)
    await world.moved(alone)
    cluster = await world.catalog.nodes.ensure_cluster()
    bucket = world.servers.bucket.connect()
    own = beside(cluster.cluster_id, STREAM)
    orphan = keys.object_keys("", UUID(int=5), await world.catalog.ledgers.new_id())
    for key in (orphan.data, orphan.side, orphan.index):
        await bucket.put(key, b"planted", metadata=own)
    stray = keys.object_keys("", UUID(int=6), await world.catalog.ledgers.new_id()).data
    await bucket.create_upload(stray, metadata=own, content_type="")
    # A manifest that names the copy, as there is one in a bucket that is in use.
    leader = world.process("scheduler", 9)
    leader.start()
    await asyncio.sleep(5.0)
    leader.crash()
    await leader.bury()
    for context in world.witness.contexts.values():
        assert context.location is not None
        local = context.ledger_id == both
        await bucket.delete(context.location.side_key if local else context.location.index_key)
    await asyncio.sleep(SAFETY_S + 5.0)
    return {both: Fate.COMPLETE, alone: Fate.MOVED}


STORIES: Final = {
    one.name: one
    for one in (
        Story("offload", _offload, ("worker", "scheduler")),
        Story("move", _move, ("scheduler",)),
        Story("trim", _trim, ("scheduler",)),
        Story("delete", _delete, ("scheduler", "worker")),
        Story("scrub", _scrub, ("scrub", "scheduler")),
    )
}


def run_story(name: str, victim: str, point: Point | None = None) -> Ending:
    """Run a story once; whatever goes wrong is in the ending."""
    trace, ending = Trace(), Ending()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        trace.now_s = loop.time
        world = SmallWorld(trace)
        world.servers.tasks.install(loop)
        try:
            await _Run(world, STORIES[name], victim, point, ending).run()
        finally:
            trace.end()

    with logs_into(trace), small_blocks():
        run_virtual(main(), until_s=3600.0)
    ending.lines = trace.lines
    return ending


class _Run:
    """One run of one story."""

    def __init__(
        self,
        world: SmallWorld,
        story: Story,
        victim: str,
        point: Point | None,
        ending: Ending,
    ) -> None:
        self._world = world
        self._story = story
        self._point = point
        self._ending = ending
        self._victim = world.process(victim)
        self._kind = victim
        self._others = [world.process(kind) for kind in story.kinds if kind != victim]
        self._faults = PointFaults(world.trace, point)
        self._faults.on_trouble = self._trouble
        self._trouble_s = 0.0
        self._thaw_s: float | None = None
        self._quiet_from_s = 0.0
        """Before that, what is at rest may have something to come."""

    async def run(self) -> None:
        world = self._world
        fates = await self._story.prepare(world)
        world.planting = False
        world.witness.watching = {one for one, fate in fates.items() if fate is not Fate.TRIMMED}
        for one in self._others:
            one.rates.update(_SLOW)
            one.start()
        self._start_victim()
        self._trouble_s = world.now_s()
        if self._story.name == "delete":
            await self._delete_in_mid_upload()
        wanted = Wanted(fates=fates, entries=world.entries)
        await self._until_rest(wanted)
        await self._end(wanted)

    async def _delete_in_mid_upload(self) -> None:
        world = self._world
        async with asyncio.timeout(REST_S_MAX):
            while not world.servers.bucket.uploads and not self._faults.met:
                await asyncio.sleep(0.02)
        await world.catalog.retention.begin_stream_deletion(STREAM)

    def _start_victim(self) -> None:
        self._victim.start()
        # Its main has not run yet: what it connects with are these.
        self._faults.on_crash = self._victim._fell
        self._victim.faults = self._faults

    async def _until_rest(self, wanted: Wanted) -> None:
        world = self._world
        end_s = world.now_s() + REST_S_MAX
        while world.now_s() < end_s:
            await asyncio.sleep(_TICK_S)
            await self._tend()
            if self._quiet() and not self._wrong_now(wanted):
                return
        self._ending.broken.append(f"not at rest after {REST_S_MAX:g} s")

    def _wrong_now(self, wanted: Wanted) -> list[str]:
        """Return what keeps the world from rest; what came behind a sweep is the scrub's."""
        seen = self._world.seen()
        scrubbed = any(isinstance(one, ScrubProcess) for one in (self._victim, *self._others))
        if scrubbed or self._point is None or _swept_by_itself(self._point):
            return invariants.wrong_at_rest(seen, wanted)
        return list(invariants.wrong_contexts(seen, wanted))

    def _quiet(self) -> bool:
        """Tell whether nothing of the trouble is still to come."""
        if self._thaw_s is not None or not self._victim.running:
            return False
        if self._world.now_s() < self._quiet_from_s:
            return False
        return self._kind != "scrub" or self._victim.ready.is_set()

    async def _tend(self) -> None:
        """Be the supervisor: bring back who died, resume who was stopped."""
        world = self._world
        if self._thaw_s is not None and world.now_s() >= self._thaw_s:
            self._thaw_s = None
            self._quiet_from_s = world.now_s() + WOKEN_S
            self._faults.thawed.set()
            if isinstance(self._victim, WorkerProcess) and self._victim.running:
                self._victim.join_group()
        for one in (self._victim, *self._others):
            if not one.running:
                await one.bury()
                one.start()
            if one.failure is not None:
                self._ending.broken.append(f"{one.name} failed: {one.failure!r}")
                one.failure = None

    def _trouble(self, trouble: Trouble) -> None:
        world = self._world
        self._trouble_s = world.now_s()
        if trouble in {Trouble.STOP_BEFORE, Trouble.STOP_AFTER}:
            self._thaw_s = world.now_s() + STOPPED_S
            # For everybody else it is dead.
            if self._victim.store is not None:
                self._victim.store.expire_session()
            if isinstance(self._victim, WorkerProcess):
                self._victim.leave_group()
            peer = world.process(self._kind, 2)
            self._others.append(peer)
            peer.start()
        elif trouble is Trouble.LATE:
            self._quiet_from_s = world.now_s() + LATE_S + WOKEN_S
        elif trouble in {Trouble.WIPE, Trouble.WIPE_AND_KILL}:
            world.servers.queue.wipe()
        elif trouble is Trouble.REPLAY:
            world.replay()

    async def _end(self, wanted: Wanted) -> None:
        """Stop everything, sweep what only a scrub can find, and look."""
        world, ending = self._world, self._ending
        for one in (self._victim, *self._others):
            one.crash()
            await one.bury()
        if self._point is not None and self._faults.met and not _swept_by_itself(self._point):
            await self._scrub_all()
        read: dict[LedgerId, list[bytes]] = {}
        try:
            read = {} if ending.broken else await world.read_back()
        except TierlogError as error:
            ending.broken.append(f"can't be read back: {error}")
        ending.broken += invariants.wrong_at_rest(world.seen(read), wanted)
        ending.broken += world.witness.broken
        ending.broken += [f"logged: {line.strip()}" for line in world.trace.errors]
        counts = invariants.complete_in_bucket(world.servers.bucket.objects)
        ending.broken += [f"ledger {one} has {n} indexes" for one, n in counts.items() if n != 1]
        for ledger_id, fate in wanted.fates.items():
            done_s = world.witness.completed_s.get(ledger_id)
            if fate is not Fate.TRIMMED and done_s is None:
                ending.broken.append(f"ledger {ledger_id} never became complete")
            elif done_s is not None and done_s > self._trouble_s + COMPLETE_S_MAX:
                ending.broken.append(f"ledger {ledger_id} became complete at {done_s:g} s")
        ending.calls, ending.met = self._faults.calls_made, self._faults.met

    async def _scrub_all(self) -> None:
        """Sweep as the schedule does, once what is left is old enough."""
        await asyncio.sleep(SAFETY_S + 10.0)
        scrub = self._world.process("scrub", 7)
        assert isinstance(scrub, ScrubProcess)
        scrub.start()
        await scrub.ready.wait()
        scrub.crash()
        await scrub.bury()
        assert scrub.report is not None
        if scrub.report.error or scrub.report.remaining or scrub.report.unread:
            self._ending.broken.append(f"the scrub ended with {scrub.report}")


def _swept_by_itself(point: Point) -> bool:
    """Tell whether nothing may be left for a scrub: no request can come after its sweep."""
    return point.trouble not in {Trouble.LATE, Trouble.STOP_BEFORE, Trouble.STOP_AFTER}
