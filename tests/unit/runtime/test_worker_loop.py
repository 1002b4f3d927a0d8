"""The worker loop: bounded, acknowledged only when handled, and drained with a deadline."""

import asyncio
from collections import deque

import pytest

from tests.simulation.virtual_loop import run_virtual
from tierlog.model.errors import IndeterminateError, RefusedError, RetryableError
from tierlog.ports.events import Event
from tierlog.runtime.worker import WorkerLimits, run_worker

LIMITS = WorkerLimits(in_flight_max=2, drain_s_max=10)


class Source:
    """Events in memory; notes what became of each."""

    def __init__(self, count: int) -> None:
        self.waiting = deque(
            Event(topic="t", key=b"", value=b"%d" % i, headers={}) for i in range(count)
        )
        self.acked: list[bytes] = []
        self.later: list[bytes] = []
        self.taken = 0

    async def take(self) -> Event:
        while not self.waiting:
            await asyncio.sleep(3600)
        self.taken += 1
        return self.waiting.popleft()

    async def ack(self, event: Event) -> None:
        self.acked.append(event.value)

    async def retry_later(self, event: Event) -> None:
        self.later.append(event.value)


def _run(source: Source, handle, *, stop_after_s: float, limits: WorkerLimits = LIMITS) -> float:
    async def main() -> float:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.call_later(stop_after_s, stop.set)
        await run_worker(source, handle, stop=stop, limits=limits)  # type: ignore[arg-type]
        return loop.time()

    return run_virtual(main(), until_s=10_000)


def test_no_more_is_taken_than_is_handled_at_once():
    source, most = Source(20), 0

    async def handle(event: Event) -> None:
        nonlocal most
        most = max(most, source.taken - len(source.acked))
        await asyncio.sleep(1)

    _run(source, handle, stop_after_s=100)
    assert most == LIMITS.in_flight_max
    assert sorted(source.acked, key=int) == [b"%d" % i for i in range(20)]


def test_what_may_succeed_later_is_given_back_and_not_acknowledged():
    source = Source(3)

    async def handle(event: Event) -> None:
        if event.value == b"0":
            raise RetryableError("not now")
        if event.value == b"1":
            raise IndeterminateError("who knows")

    _run(source, handle, stop_after_s=1)
    assert (sorted(source.later), source.acked) == ([b"0", b"1"], [b"2"])


def test_after_stop_nothing_is_taken_and_what_was_begun_ends():
    source = Source(10)

    async def handle(event: Event) -> None:
        await asyncio.sleep(5)

    assert _run(source, handle, stop_after_s=1) == 5
    assert source.taken == 2
    assert len(source.acked) == 2


def test_what_takes_too_long_is_given_up_unacknowledged():
    source = Source(1)

    async def handle(event: Event) -> None:
        await asyncio.sleep(500)

    assert _run(source, handle, stop_after_s=1) == 11
    assert source.acked == source.later == []


def test_a_timeout_of_the_handlers_own_is_a_bug_of_it():
    async def handle(event: Event) -> None:
        raise TimeoutError

    with pytest.raises(ExceptionGroup):
        _run(Source(1), handle, stop_after_s=100)


def test_who_cleans_up_for_too_long_is_told_again_that_it_is_over():
    source = Source(2)

    async def handle(event: Event) -> None:
        told = 0
        while told < 3:
            try:
                await asyncio.sleep(10**6)
            except asyncio.CancelledError:
                told += 1

    limits = WorkerLimits(in_flight_max=2, drain_s_max=10, give_up_s_max=3)
    # At 11 s for the first time, at 14 s again, and then each second.
    assert _run(source, handle, stop_after_s=1, limits=limits) == 15


def test_a_bug_ends_the_loop():
    async def handle(event: Event) -> None:
        raise RefusedError("nobody expected this")

    with pytest.raises(ExceptionGroup):
        _run(Source(1), handle, stop_after_s=100)
