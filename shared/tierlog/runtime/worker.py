"""The loop of an event-driven service: take, handle, acknowledge; and end well.

Invariants:
    * At most ``in_flight_max`` events are being handled. The source is not asked for more.
    * An event is acknowledged only after its handler returned. A crash anywhere before that
      means redelivery, so handlers must be idempotent.
    * After ``stop`` no event is taken. Those begun get ``drain_s_max`` seconds to finish, then
      are cancelled, which a handler must survive as it survives a crash. One that cleans up for
      longer than ``give_up_s_max`` is cancelled again, each second, until it ends.
    * How long a handler may take is its own to say: who is cut off here could tell nobody.

Time is the event loop's: a test on a virtual-time loop drains in no time at all.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.ports.events import Event, EventSource

log = structlog.get_logger()

Result = TypeVar("Result")

INSIST_AGAIN_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Every bound of the loop, in one place."""

    in_flight_max: int
    drain_s_max: float
    give_up_s_max: float = 5.0


Handler = Callable[[Event], Awaitable[None]]


async def run_worker(
    source: EventSource, handle: Handler, *, stop: asyncio.Event, limits: WorkerLimits
) -> None:
    """Handle events until ``stop`` is set, then drain. Raises only what is a bug."""
    loop = asyncio.get_running_loop()
    in_hand = _InHand(source, handle, limits)
    try:
        async with asyncio.timeout(None) as drain, asyncio.TaskGroup() as group:
            while await unless_stopped(in_hand.slots.acquire(), stop):
                event = await unless_stopped(source.take(), stop)
                if event is None:
                    break
                in_hand.begin(group, event)
            until_s = loop.time() + limits.drain_s_max
            drain.reschedule(until_s)
            in_hand.insist_at(until_s + limits.give_up_s_max)
    except TimeoutError:
        # Not a failure: what was not acknowledged will be redelivered, to us or to a peer.
        log.warning("worker.drain_cut_short", drain_s_max=limits.drain_s_max)
    finally:
        in_hand.relent()


class _InHand:
    """The events that are being handled."""

    def __init__(self, source: EventSource, handle: Handler, limits: WorkerLimits) -> None:
        self._source = source
        self._handle = handle
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()
        self._insisting: asyncio.TimerHandle | None = None
        self.slots = asyncio.Semaphore(limits.in_flight_max)

    def begin(self, group: asyncio.TaskGroup, event: Event) -> None:
        task = group.create_task(self._one(event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, event: Event) -> None:
        try:
            if await self._handled(event):
                await self._source.ack(event)
            else:
                await self._source.retry_later(event)
        finally:
            self.slots.release()

    async def _handled(self, event: Event) -> bool:
        """Handle an event; False: it is to come again."""
        try:
            await self._handle(event)
        except (RetryableError, IndeterminateError) as error:
            log.warning("event.retry_later", cause=str(error), reason=error.reason.value)
            return False
        return True

    def insist_at(self, when_s: float) -> None:
        """From then on cancel what still runs, again and again."""
        self._insisting = asyncio.get_running_loop().call_at(when_s, self._insist)

    def _insist(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.insist_at(asyncio.get_running_loop().time() + INSIST_AGAIN_S)

    def relent(self) -> None:
        if self._insisting is not None:
            self._insisting.cancel()


async def unless_stopped(work: Awaitable[Result], stop: asyncio.Event) -> Result | None:
    """Await ``work``; but give it up, and return None, once ``stop`` is set."""
    # Both are awaited or cancelled before this returns.
    working = asyncio.ensure_future(work)  # noqa: TID251
    stopping = asyncio.ensure_future(stop.wait())  # noqa: TID251
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        # Done wins over stopped: an event already in hand is handled, not dropped.
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
