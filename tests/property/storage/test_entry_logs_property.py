"""Entry logs against a model, over any order of steps, full disks, crashes and restarts.

The model is a list of (run, place); ``state`` is what the node would have written durably.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.log_kit import State, all_runs, make_logs, read_run, runs_of
from tests.unit.storage.node_kit import make_run
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.format.run import Run
from tierlog.model.errors import RetryableError
from tierlog_ingest.storage.entrylog.entry_log import Location

LEDGERS = (1, 2, 3, 4)

writers = st.sampled_from(["flush", "compaction"])
runs = st.lists(
    st.tuples(st.sampled_from(LEDGERS), st.sampled_from([0, 30, 200, 900])), min_size=1, max_size=8
)
steps = st.lists(
    st.tuples(st.just("append"), writers, runs)
    | st.tuples(st.just("seal"), writers)
    | st.tuples(st.just("mark"))
    | st.tuples(st.just("forget"), st.sampled_from(LEDGERS))
    | st.tuples(st.just("remove"), st.integers(0, 5))
    | st.tuples(st.just("crash"), st.booleans())
    | st.tuples(st.just("room"), st.sampled_from([0, 100, 1000, 2**40])),
    max_size=25,
)


class Placed(NamedTuple):
    run: Run
    place: Location


class World:
    def __init__(self, seed: int) -> None:
        self.disks = [MemoryDisk(random.Random(seed + at)) for at in range(2)]
        self.state = State([[], []], {})
        self.marked: list[Placed] = []
        """What ``state`` covers."""
        self.placed: list[Placed] = []
        self.forgotten: set[int] = set()
        """Since the last start: a node tells the logs again what it freed."""
        self.next_entry = 0

    async def start(self) -> None:
        self.logs = make_logs(*(disk.mount() for disk in self.disks), log_bytes_max=2000)
        assert await self.logs.open(*self.state) == []
        self.placed = list(self.marked)
        self.logs.forget_ledgers(self.forgotten)

    async def append(self, writer, shapes) -> None:
        shapes = [one for one in shapes if one[0] not in self.forgotten]
        new = []
        for ledger_id, size in shapes:
            new.append(make_run(ledger_id, self.next_entry, size=size))
            self.next_entry += 1
        try:
            places = await self.logs.append(new, writer=writer)
        except RetryableError:
            return
        self.placed += map(Placed, new, places)

    async def seal(self, writer) -> None:
        await self.logs.seal(writer)

    async def mark(self) -> None:
        await self.logs.sync()
        self.state, self.marked = State.of(self.logs, 2), list(self.placed)

    async def forget(self, ledger_id) -> None:
        self.logs.forget_ledger(ledger_id)
        self.forgotten.add(ledger_id)

    async def remove(self, number) -> None:
        sealed = [one for one in self.logs.logs() if one.sealed]
        if number >= len(sealed):
            return
        log_id = sealed[number].log_id
        self.logs.retire(log_id)
        self.placed = [one for one in self.placed if one.place.log_id != log_id]
        await self.mark()
        await self.logs.remove(log_id)

    async def crash(self, power_lost) -> None:
        for disk in self.disks:
            disk.crash(power_lost=power_lost)
            disk.capacity_bytes = 2**40
        await self.start()

    async def room(self, room) -> None:
        for disk in self.disks:
            disk.capacity_bytes = disk.used_bytes + room

    async def check(self) -> None:
        live = [one for one in self.placed if one.run.header.ledger_id not in self.forgotten]
        for one in self.placed:
            assert await read_run(self.logs, one.place) == one.run
        for info in self.logs.logs():
            own = sorted((one.place.offset, one.run) for one in self.placed
                         if one.place.log_id == info.log_id)  # fmt: skip
            assert await runs_of(self.logs, info.log_id) == [run for _, run in own]
            sizes = [one.place.length for one in live if one.place.log_id == info.log_id]
            assert info.live_bytes == self.logs.live_bytes(info.log_id) == sum(sizes)
        for ledger_id in LEDGERS:
            logs = {one.place.log_id for one in live if one.run.header.ledger_id == ledger_id}
            assert self.logs.logs_of(ledger_id) == sorted(logs)
        assert self.logs.ledger_ids() == {one.run.header.ledger_id for one in live}
        assert self.logs.damaged_logs == {}
        assert self.logs.unmapped == set()
        assert len(await all_runs(self.logs)) == len(self.placed)


async def live(plan, seed):
    world = World(seed)
    await world.start()
    for name, *arguments in plan:
        await getattr(world, name)(*arguments)
        await world.check()
    await world.crash(True)
    await world.check()


@settings(max_examples=80)
@given(steps, st.integers(0, 1000))
def test_entry_logs(plan, seed):
    run_virtual(live(plan, seed))
