"""Sending many from a program without a loop: each once, whatever interrupts it."""

import asyncio
import signal
import threading

import pytest

from tests.unit.client.world import Service, resumed, writer_of
from tierlog.client.blocking import BACKGROUND, HOP_ITEMS, Blocking, send_all

COUNT = 2 * HOP_ITEMS + 100


def refusing_at(number):
    taken = []

    async def send(item):
        if item == number:
            raise ValueError("too large")
        taken.append(item)

    return taken, send


@pytest.mark.parametrize("number", [3, HOP_ITEMS - 1, HOP_ITEMS, COUNT - 1])
def test_what_came_before_an_item_that_is_refused_is_sent_once(number):
    taken, send = refusing_at(number)
    with pytest.raises(ValueError, match="too large"):
        send_all(iter(range(COUNT)), send)
    assert taken == list(range(number))


def test_what_came_before_an_item_that_can_not_be_given_is_sent():
    def items():
        yield from range(HOP_ITEMS + 5)
        raise OSError("the file ends badly")

    taken, send = refusing_at(-1)
    with pytest.raises(OSError, match="badly"):
        send_all(items(), send)
    assert taken == list(range(HOP_ITEMS + 5))


class Held(Blocking):
    """A writer's context, left as a program leaves it."""

    def __init__(self, writer):
        super().__init__()
        self.writer = self.enter(writer)


class Interrupting(Service):
    """Appends take their time; amid one of them the main thread is interrupted."""

    def __init__(self, at):
        super().__init__()
        self._at = at

    async def append(self, stream, draft, **how):
        await asyncio.sleep(0.002)
        self._at -= 1
        if self._at == 0:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGALRM)
        return await super().append(stream, draft, **how)


@pytest.fixture
def interruptible():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


async def made(make, *given, **how):
    return make(*given, **how)


@pytest.mark.parametrize("at", [1, 5, 25])
def test_an_interrupted_append_doubles_nothing_and_is_resumed_without_a_loss(interruptible, at):
    events = [b"event%05d" % number for number in range(COUNT)]
    service = BACKGROUND.run(made(Interrupting, at))
    writer = BACKGROUND.run(made(writer_of, service, batch_bytes=2000))
    with pytest.raises(KeyboardInterrupt), Held(writer) as held:
        send_all(iter(events), held.writer.send)
    landed = service.events()
    assert 0 < len(landed) < COUNT
    assert landed == events[: len(landed)]
    # The same input once more, as the command does it with its state.
    writer = BACKGROUND.run(resumed(service, batch_bytes=2000, from_start=True))
    with Held(writer) as held:
        send_all(iter(events), held.writer.send)
    assert service.events() == events
