"""A limit of bytes a second out of tier 2: catching up waits for it, the tail does not; it is said.

And no read fails for it: all that was asked for comes.
"""

import asyncio

import pytest

from tests.unit.reader.test_tail import tails_of
from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, on_virtual_time, payloads
from tierlog.offload.pacing import ReadPace
from tierlog.offload.ranges import RangeLimits
from tierlog_reader.trace import Step, TracedPace, tracing

ENTRIES = [b"%04d" % number * 25_000 for number in range(40)]
RATE = 500_000


@on_virtual_time
async def test_who_catches_up_waits_and_who_follows_does_not():
    world = ReaderWorld(block_size=8 * 1024 * 1024)
    await world.start()
    ledger = await world.sealed(ENTRIES, run_bytes_max=1_000_000)
    await world.offloaded(ledger)
    await world.gone_locally(ledger)
    tail = await world.opened([b"newest"])
    loop = asyncio.get_running_loop()
    limits = RangeLimits(range_bytes=65_536, in_flight_max=4, kept_bytes_max=1 << 20)
    pace = TracedPace(ReadPace(world.clock, world.meter, per_s=RATE))
    async with world.reader(limits=limits, pace=pace, tails=tails_of()) as source:
        begun_s, found, where = loop.time(), list[bytes](), at(ledger, 0)
        waits: list[Step] = []
        while len(found) < len(ENTRIES):
            with tracing() as trace:
                answer = await source.read(STREAM, where, budget(size=400_000))
            waits += [one for one in trace.steps if one.what == "throttle"]
            found += payloads(answer)
            assert answer.chunk is not None
            where = answer.chunk.end
            if len(found) > len(ENTRIES) // 2 > len(found) - answer.chunk.count:
                beside_s = loop.time()
                assert payloads(await source.read(STREAM, at(tail, 0), budget())) == [b"newest"]
                assert loop.time() - beside_s < 0.05
        assert found == ENTRIES
    # 4 MB, of which a burst of 1 MiB comes at once.
    assert loop.time() - begun_s == pytest.approx((4e6 - 2**20) / RATE, rel=0.15)
    assert max(one.took_us for one in waits) > 50_000
    assert {one.where for one in waits} == {"reader.tier2_bytes_per_s_max"}
