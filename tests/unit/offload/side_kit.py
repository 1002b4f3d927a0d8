"""Copies with side objects, written by one offloader and read by another."""

import random
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple
from uuid import UUID

from tests.unit.offload.world import (
    BLOCK,
    CLUSTER,
    SMALL_RANGES,
    ListHandle,
    World,
    metadata_of,
)
from tierlog.adapters.memory.faults import Faults
from tierlog.format.frame import pack_entries
from tierlog.format.run import Run, build_run
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.offload import Tier2Copy
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.tier2_reader import Tier2Handle

LEDGER = LedgerId(7)
UUID_1 = UUID(int=1)
MIB = 1024 * 1024
ENTRIES = [bytes([65 + number]) * length for number, length in enumerate([60, 0, 200, 90, 5, 372])]


class TimedHandle(ListHandle):
    """A read handle whose runs have publish times, one of each entry."""

    times: Sequence[int] = ()
    entries_a_run = 3

    async def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0.0
    ) -> AsyncIterator[Sequence[Run]]:
        for start in range(0, len(self.entries), self.entries_a_run):
            stop = start + self.entries_a_run
            frames, offsets = pack_entries(self.entries[start:stop], start)
            times = self.times[start:stop]
            yield [
                build_run(
                    frames,
                    offsets,
                    ledger_id=LEDGER,
                    first_entry_id=start,
                    publish_ms_min=min(times),
                    publish_ms_max=max(times),
                )
            ]


class Copied(NamedTuple):
    """A handle of one offloader on the copy that another one wrote."""

    handle: Tier2Handle
    reading: BlockOffloader
    copy: Tier2Copy
    faults: Faults


async def written(world, entries, *, grain_len=64, block_size=BLOCK, times=(), **options):
    """Offload entries; return what an offloader says of its copy."""
    handle = TimedHandle(LEDGER, entries, metadata_of(entries, block_size=block_size))
    handle.times = times or [0] * len(entries)
    return await world.offloader(grain_len=grain_len, **options).offload(handle, UUID_1, {})


async def opened(world, copy, *, ranges=SMALL_RANGES, cache=None) -> Copied:
    """Open a copy with another offloader, whose calls are counted from then on."""
    faults = Faults(random.Random(1))
    faults.calls = []
    reading = BlockOffloader(
        world.bucket.connect(faults),
        Tier2Settings(bucket="b", cluster_id=CLUSTER, ranges=ranges),
        cache=cache,
    )
    handle = await reading.read_offloaded(LEDGER, UUID_1, copy=copy)
    return Copied(handle, reading, copy, faults)


async def copied(world, entries, *, ranges=SMALL_RANGES, cache=None, **options) -> Copied:
    return await opened(world, await written(world, entries, **options), ranges=ranges, cache=cache)


def data_of(world: World) -> bytes:
    return bytes(world.bucket.objects[f"{UUID_1}-ledger-7"][1])


def put_data(world: World, raw: bytes) -> None:
    info, _ = world.bucket.objects[f"{UUID_1}-ledger-7"]
    world.bucket.objects[f"{UUID_1}-ledger-7"] = (info, raw)
