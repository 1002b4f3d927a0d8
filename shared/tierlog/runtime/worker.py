"""The loop of an event-driven service: take, handle, acknowledge; and end well.

Invariants:
    * At most ``in_flight_max`` events are being handled. The source is not asked for more.
    * An event is acknowledged only after its handler returned. A crash anywhere before that
      means redelivery, so handlers must be idempotent.
    * After ``stop`` no event is taken. Those begun get ``drain_s_max`` seconds to finish, then
      are cancelled, which a handler must survive as it survives a crash.

Time is the event loop's: a test on a virtual-time loop drains in no time at all.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.ports.events import Event, EventSource

log = structlog.get_logger()

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Every bound of the loop, in one place."""

    in_flight_max: int
    drain_s_max: float


async def run_worker(
    source: EventSource,
    handle: Callable[[Event], Awaitable[None]],
    *,
    stop: asyncio.Event,
    limits: WorkerLimits,
) -> None:
    """Handle events until ``stop`` is set, then drain. Raises only what is a bug."""
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(limits.in_flight_max)

    async def handle_one(event: Event) -> None:
        try:
            await handle(event)
        except (RetryableError, IndeterminateError) as error:
            log.warning("event.retry_later", cause=str(error), reason=error.reason.value)
            await source.retry_later(event)
        else:
            await source.ack(event)
        finally:
            slots.release()

    try:
        async with asyncio.timeout(None) as drain, asyncio.TaskGroup() as in_flight:
            while await unless_stopped(slots.acquire(), stop):
                event = await unless_stopped(source.take(), stop)
                if event is None:
                    break
                in_flight.create_task(handle_one(event))
            drain.reschedule(loop.time() + limits.drain_s_max)
    except TimeoutError:
        # Not a failure: what was not acknowledged will be redelivered, to us or to a peer.
        log.warning("worker.drain_cut_short", drain_s_max=limits.drain_s_max)


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
