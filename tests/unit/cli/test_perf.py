"""``tierlog perf`` over a client in memory: it ends with its time, and when a writer fails."""

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.client.test_partitioned import opened
from tierlog.adapters.memory.streams import MemoryAppendChannel
from tierlog.cli.perf import WriteLoad, write_load
from tierlog.model.errors import Reason, RefusedError, first_error


def test_producers_end_with_their_time_however_slow_their_rate_is():
    async def main():
        on, loop = opened(), asyncio.get_running_loop()
        begin_s = loop.time()
        # A batch of each in a hundred seconds.
        wanted = WriteLoad(stream="logs", producers=3, rate=3.0, duration_s=10, warmup_s=1)
        told = await write_load(on.client, wanted)
        assert loop.time() - begin_s < 15
        assert told["producers"] == 3

    run_virtual(main())


def test_a_writer_that_fails_ends_the_load_with_its_error(monkeypatch):
    async def main():
        on, count = opened(), 0

        async def append(self, stream, draft, *, deadline_s, condition=None):
            nonlocal count
            count += 1
            await asyncio.sleep(0.01)
            raise RefusedError("not any more", reason=Reason.PERMISSION_DENIED, remedy="Ask")

        monkeypatch.setattr(MemoryAppendChannel, "append", append)
        with pytest.raises(BaseExceptionGroup) as caught:
            async with asyncio.timeout(60):
                await write_load(on.client, WriteLoad(stream="logs", producers=2, window=2))
        error = first_error(caught.value)
        assert isinstance(error, RefusedError)
        assert error.reason is Reason.PERMISSION_DENIED
        assert count

    run_virtual(main())
