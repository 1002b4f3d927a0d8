"""One life of a lane's ledger, with one trouble at one request of one of its processes.

``life``: a ledger of three blocks is sealed, comes to tier 2, loses its local copy, and the ledger
before it is trimmed. ``scrub_life``: the bucket gets what nobody names and loses an object of a
complete copy; a scrub mends it. Either ends at rest, with everything read back. ``_deleting_life``:
a stream is made that has a ledger in both tiers and one in mid-upload, and is deleted; nothing of
it is left, in the bucket, on the node or in the metadata.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final
from uuid import uuid4

import aiohttp

from tests.faults.invariants import Fate
from tests.faults.lane import SAFETY_S, STREAM, UNTRIMMED, Lane, until
from tests.faults.proxy import COUNTED, Act, Judge, Place
from tierlog.embedded.services import SERVICE_PORTS
from tierlog.format import keys
from tierlog.model.ids import LedgerId
from tierlog.offload.driver import SOFTWARE

COMPLETE_S_MAX: Final = 60.0
REST_S_MAX: Final = 90.0
SCRUBBED_S_MAX: Final = 180.0
"""Several scrubs, of which each reads all data, on a machine that does much beside."""
MEET_S_MAX: Final = 25.0
BACK_PAUSE_S: Final = 0.2


class Trouble(Enum):
    """What happens to a process at a request, and what becomes of the request."""

    KILL_BEFORE = Act.HOLD_REQUEST
    KILL_AFTER = Act.HOLD_REPLY
    DROP_REQUEST = Act.DROP_REQUEST
    DROP_REPLY = Act.DROP_REPLY
    DELAY = Act.DELAY
    TWICE = Act.TWICE
    STOP = "stopped past its session, a peer does the work; the request is sent on after that"
    WIPE = "the queue comes back without anything; the request is cut after that"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One life: whose request, which, and what happens there (None: nothing at all)."""

    victim: str
    place: Place | None = None
    trouble: Trouble | None = None
    scrub: bool = False
    delete: bool = False

    def __str__(self) -> str:
        what = self.trouble.name.lower() if self.trouble is not None else "no trouble"
        kind = "scrub: " * self.scrub + "delete: " * self.delete
        return f"{kind}{self.victim} {what} at {self.place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """How a life went: whether its trouble was done, and how long until the copy was complete."""

    plan: Plan
    met: bool
    complete_s: float
    places: tuple[Place, ...]


async def life(lane: Lane, plan: Plan) -> Told:
    """Live once; raises ``AssertionError`` with what is wrong.

    After a wipe once more, without trouble: a place behind all that the queue is for shows nothing.
    """
    told = await _life(lane, plan)
    if plan.trouble is Trouble.WIPE and told.met:
        await _life(lane, replace(plan, place=None, trouble=None))
    return told


async def _life(lane: Lane, plan: Plan) -> Told:
    lane.count_anew(reader="scheduler" if plan.scrub else "offloader")
    judge = lane.judges[plan.victim]
    if not plan.delete:
        _arm(judge, plan)
    async with _trouble(lane, plan, judge) as over:
        if plan.scrub:
            return await _scrub_life(lane, plan, judge, over)
        if plan.delete:
            return await _deleting_life(lane, plan, judge, over)
        ledger_id = await lane.seal(Fate.MOVED)
        took_s = await lane.until_complete(ledger_id, seconds=COMPLETE_S_MAX)
        await lane.until_rest(seconds=REST_S_MAX)
        await _over(lane, plan, over)
    return _told(plan, judge, took_s)


def _arm(judge: Judge, plan: Plan) -> None:
    if plan.place is not None and plan.trouble is not None:
        act = plan.trouble.value if isinstance(plan.trouble.value, Act) else Act.HOLD_REQUEST
        judge.arm(plan.place, act)


async def _over(lane: Lane, plan: Plan, over: "Over") -> None:
    """See that it rests again after a trouble: a place behind all of it may have come only now."""
    if await over():
        if plan.trouble is Trouble.STOP:
            await scrubbed(lane)
        await lane.until_rest(seconds=REST_S_MAX)


async def _deleting_life(lane: Lane, plan: Plan, judge: Judge, over: "Over") -> Told:
    await lane.make(UNTRIMMED)
    whole = await lane.seal(Fate.COMPLETE)
    took_s = await lane.until_complete(whole, seconds=COMPLETE_S_MAX)
    lane.count_anew()
    if plan.victim == "offloader":
        _arm(judge, plan)
    uploading = await lane.seal(Fate.COMPLETE)
    await lane.until_uploading(uploading, seconds=COMPLETE_S_MAX)
    if plan.victim == "scheduler":
        # Of the deletion alone: what comes before it is another life's.
        lane.count_anew()
        _arm(judge, plan)
    await lane.delete()
    await lane.until_rest(seconds=REST_S_MAX)
    await _over(lane, plan, over)
    return _told(plan, judge, took_s)


def _told(plan: Plan, judge: Judge, took_s: float) -> Told:
    act = plan.trouble.value if plan.trouble is not None else None
    # A request that may not be sent twice came, and was not.
    met = judge.met.is_set() and (act not in COUNTED or judge.done[act] > 0)
    return Told(plan=plan, met=met, complete_s=took_s, places=tuple(judge.places()))


Over = Callable[[], Awaitable[bool]]


@contextlib.asynccontextmanager
async def _trouble(lane: Lane, plan: Plan, judge: Judge) -> AsyncIterator[Over]:
    """Do the trouble when its place has come. What is given waits for its end, if it began."""
    acting = asyncio.create_task(_act(lane, plan, judge))

    async def over() -> bool:
        if judge.met.is_set():
            await acting
        return judge.met.is_set()

    try:
        yield over
    finally:
        if not judge.met.is_set():
            acting.cancel()
        judge.let_go(cut=True)
        with contextlib.suppress(asyncio.CancelledError):
            await acting


async def _act(lane: Lane, plan: Plan, judge: Judge) -> None:
    await judge.met.wait()
    if plan.trouble in {Trouble.KILL_BEFORE, Trouble.KILL_AFTER}:
        lane.kill(plan.victim)
        await asyncio.sleep(BACK_PAUSE_S)
        judge.let_go(cut=True)
        await lane.restart(plan.victim)
    elif plan.trouble is Trouble.STOP:
        await _stop(lane, plan, judge)
    elif plan.trouble is Trouble.WIPE:
        await lane.wipe()
        judge.let_go(cut=True)


async def _stop(lane: Lane, plan: Plan, judge: Judge) -> None:
    """Stop the process past its session while a peer does its work."""
    lane.stop(plan.victim)
    try:
        name = f"{lane.settings.s3.key_prefix}-{plan.victim}-2"
        ports = lane.take_ports(name, SERVICE_PORTS[plan.victim])
        async with lane.peer(plan.victim, ports):
            await lane.until_rest(seconds=REST_S_MAX)
            # What it had sent comes now, and after that it goes on as if nothing had been.
            judge.let_go(cut=False)
            await asyncio.sleep(BACK_PAUSE_S)
            lane.resume(plan.victim)
            await asyncio.sleep(2 * SAFETY_S)
    finally:
        lane.resume(plan.victim)


# Scrubs


async def _scrub_life(lane: Lane, plan: Plan, judge: Judge, over: Over) -> Told:
    ledger_id = max(lane.wanted.fates)
    await _plant(lane, ledger_id)
    await asyncio.sleep(SAFETY_S + 0.5)
    judge.count_anew()
    if plan.place is not None and plan.trouble is not None:
        judge.arm(plan.place, plan.trouble.value)
    began_s = asyncio.get_running_loop().time()
    await scrubbed(lane)
    await lane.until_rest(seconds=REST_S_MAX)
    took_s = asyncio.get_running_loop().time() - began_s
    if await over():
        await scrubbed(lane)
        await lane.until_rest(seconds=REST_S_MAX)
    return _told(plan, judge, took_s)


async def _plant(lane: Lane, ledger_id: LedgerId) -> None:
    """Put what nobody names into the bucket, and take an object of the copy away."""
    context = await lane.parts.catalog.contexts.get(ledger_id)
    assert context is not None
    assert context.location is not None
    prefix, objects = lane.settings.s3.key_prefix, lane.parts.objects
    beside = keys.object_metadata(
        keys.ObjectRole.DATA,
        stream=STREAM,
        cluster_id=lane.parts.cluster.cluster_id,
        cluster_name="tierlog",
        software=SOFTWARE,
    )
    given = lane.parts.catalog.ledgers
    orphan = keys.object_keys(prefix, uuid4(), await given.new_id())
    for key in (orphan.data, orphan.side, orphan.index):
        await objects.put(key, b"planted", metadata=beside)
    stray = keys.object_keys(prefix, uuid4(), await given.new_id()).data
    await objects.create_upload(stray, metadata=beside, content_type="application/octet-stream")
    await objects.delete(context.location.side_key)


async def scrubbed(lane: Lane) -> None:
    """Scrub and repair, again and again, until a scrub finds nothing."""
    last: dict[str, Any] = {}

    async def clean() -> bool:
        last.clear()
        last.update(await _scrub_once(lane))
        return bool(last.get("clean")) and not last.get("repaired")

    await until(clean, SCRUBBED_S_MAX, lambda: f"the last scrub: {last}")


async def _scrub_once(lane: Lane) -> dict[str, Any]:
    """Ask for a scrub and wait for its end; {} when the scheduler did not live to tell."""
    wish = {"repair": True, "deep": True}
    try:
        async with aiohttp.ClientSession(lane.scheduler_url) as session:
            async with session.post("/v1/scrubs", json=wish) as answer:
                found: dict[str, Any] = await answer.json()
            while found.get("state") == "running":
                await asyncio.sleep(0.1)
                async with session.get(f"/v1/scrubs/{found['scrub_id']}") as answer:
                    found = await answer.json()
            return found
    except (aiohttp.ClientError, TimeoutError):
        return {}


_READS: Final = frozenset(
    {"get", "head", "list", "list_uploads", "exists", "children", "sync", "ping"}
    | {"fetch", "heartbeat", "metadata", "api_versions", "list_offsets", "fetch_offsets"}
)
_DOUBLED: Final = frozenset({"put", "upload_part", "delete", "abort_upload"})


def fits(trouble: Trouble, place: Place, *, scrub: bool = False) -> bool:
    """Tell whether a trouble is possible at a place, and leaves what no other leaves.

    A read leaves the servers as they were: to die, or to hear nothing, before it and after it is
    the same, and late or doubled it changes nothing. A scrub reads without an end: a read that had
    no answer is only one of them.
    """
    if trouble is Trouble.TWICE:
        return place.server == "s3" and place.kind in _DOUBLED
    changes_only = {Trouble.KILL_AFTER, Trouble.DROP_REQUEST, Trouble.DELAY}
    if trouble in changes_only or (scrub and trouble is Trouble.DROP_REPLY):
        return place.kind not in _READS
    return True


def plans_at(told: Told, *, troubles: tuple[Trouble, ...]) -> list[Plan]:
    """Return the plan of every place that a life without trouble had."""
    return [
        replace(told.plan, place=place, trouble=trouble)
        for place in told.places
        for trouble in troubles
        if fits(trouble, place, scrub=told.plan.scrub)
    ]
