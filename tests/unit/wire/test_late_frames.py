"""The network in memory: what was sent before a cut is lost, or comes late, behind what its caller
has sent since by another connection; and never twice by one connection.
"""

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tierlog.adapters.memory.transport import MemoryNetwork
from tierlog.model.errors import RetryableError


class Late:
    """A caller and a node that notes what it gets, by connection."""

    def __init__(self, late_s: float | None) -> None:
        self.network = MemoryNetwork(latency_s=lambda: 0.5)
        self.network.lingers = lambda _caller, _called: late_s
        self.got: list[tuple[int, bytes]] = []
        self.ended: list[str] = []
        self._count = 0

    async def serve(self, channel) -> None:
        self._count += 1
        number = self._count
        try:
            while (frame := await channel.receive()) is not None:
                self.got.append((number, frame.header))
                channel.send(b"answer")
            self.ended.append("hung up")
        except RetryableError:
            self.ended.append("lost")

    async def begin(self):
        await self.network.transport("node").listen("node:1", self.serve)
        return await self.connect()

    async def connect(self):
        return await self.network.transport("caller").connect("node:1")


@pytest.mark.parametrize("late_s", [None, 3.0])
def test_what_was_on_its_way_at_a_cut_is_lost_or_comes_behind_what_was_sent_since(late_s):
    async def main():
        late = Late(late_s)
        channel = await late.begin()
        channel.send(b"one")
        await asyncio.sleep(1.5)
        channel.send(b"two")
        channel.send(b"three")
        late.network.cut("caller")
        answer = await channel.receive()
        assert answer is not None
        assert answer.header == b"answer"
        with pytest.raises(RetryableError):
            await channel.receive()
        again = await late.connect()
        again.send(b"two")
        await asyncio.sleep(10)
        expected = [(1, b"one"), (2, b"two")]
        if late_s is not None:
            expected += [(1, b"two"), (1, b"three")]
        assert late.got == expected
        assert late.ended == ["lost"]
        assert late.network.lingered == (0 if late_s is None else 2)
        again.close()
        await asyncio.sleep(2)
        assert late.ended == ["lost", "hung up"]

    run_virtual(main(), until_s=100)


def test_a_frame_whose_loss_cut_the_connection_may_come_late_too():
    async def main():
        late = Late(3.0)
        channel = await late.begin()
        channel.send(b"one")
        late.network.loses = lambda *_: True
        channel.send(b"two")
        late.network.loses = lambda *_: False
        with pytest.raises(RetryableError):
            channel.send(b"three")
        await asyncio.sleep(5)
        assert late.got == [(1, b"one"), (1, b"two")]

    run_virtual(main(), until_s=100)


@pytest.mark.parametrize("dies", ["node", "caller"])
def test_what_a_dead_caller_sent_comes_late_and_a_dead_node_gets_nothing(dies):
    async def main():
        late = Late(3.0)
        channel = await late.begin()
        channel.send(b"one")
        late.network.crash(dies)
        await asyncio.sleep(5)
        assert late.got == ([(1, b"one")] if dies == "caller" else [])
        late.network.cut("node")
        await asyncio.sleep(5)
        assert late.network.channels == {}

    run_virtual(main(), until_s=100)


def test_a_second_cut_takes_nothing_back():
    async def main():
        late = Late(3.0)
        channel = await late.begin()
        channel.send(b"one")
        channel.cut()
        late.network.cut("node")
        late.network.cut("caller")
        await asyncio.sleep(5)
        assert late.got == [(1, b"one")]

    run_virtual(main(), until_s=100)
