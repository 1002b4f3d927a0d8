"""What is left of a data object: every entry whose bytes are good, and no other."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import BLOCK, ListHandle, World, metadata_of
from tierlog.format.checksum import crc32c
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.format.index import ObjectIndex
from tierlog.format.side import SideObject
from tierlog.model.errors import CorruptError, RetryableError
from tierlog.model.ids import LedgerId
from tierlog.offload.salvage import GrainSource, Layout, Lost, Piece, Salvage
from tierlog.ports.throttle import TokenBucket

GRAIN = 64
LEDGER = LedgerId(7)

entries = st.lists(st.integers(0, 300).map(bytes), min_size=1, max_size=40)


@dataclass
class Written:
    """A ledger's objects in the world's bucket."""

    world: World
    entries: list[bytes]
    key: str
    side: SideObject
    index: ObjectIndex

    @classmethod
    async def of(cls, wanted: Sequence[bytes], uuid: int = 1) -> "Written":
        world = World()
        return await cls.into(world, wanted, uuid)

    @classmethod
    async def into(cls, world: World, wanted: Sequence[bytes], uuid: int) -> "Written":
        offloader, number = world.offloader(), UUID(int=uuid)
        location = offloader.location(LEDGER, number)
        handle = ListHandle(LEDGER, wanted, metadata_of(wanted))
        await offloader.offload(handle, number, {})
        _, side = world.bucket.objects[location.side_key]
        _, index = world.bucket.objects[location.index_key]
        return cls(
            world,
            list(wanted),
            location.data_key,
            SideObject.decode(side),
            ObjectIndex.decode(index),
        )

    @property
    def layout(self) -> Layout:
        header = self.side.header
        return Layout(
            data_len=header.data_len,
            block_size=BLOCK,
            entry_count=header.entry_count,
            grain_len=header.grain_len,
            columns=self.side.columns,
        )

    def places(self) -> list[tuple[int, int]]:
        """Return where each frame begins and ends, found by another way than the walk."""
        found = []
        for block in self.index.blocks():
            at = block.offset + self.index.data_header_len
            for entry_id in range(block.first_entry_id, block.last_entry_id + 1):
                end = at + FRAME_HEADER_LEN + len(self.entries[entry_id])
                found.append((at, end))
                at = end
        return found

    def source(self, *keys: str, store=None) -> GrainSource:
        pace = TokenBucket(self.world.clock, per_s=1e12)
        store = store or self.world.bucket.connect()
        return GrainSource(store, [self.key, *keys], self.layout, pace)

    async def read(self, *keys: str) -> tuple[dict[int, bytes], list[tuple[int, int]]]:
        """Return the entries that are there, and those that are not."""
        there: dict[int, bytes] = {}
        lost: list[tuple[int, int]] = []
        behind = 0
        async for one in Salvage(self.source(*keys), self.layout).read():
            assert one.first_entry_id == behind, "without a gap"
            if isinstance(one, Lost):
                lost.append((one.first_entry_id, one.last_entry_id))
                behind = one.last_entry_id + 1
                continue
            assert isinstance(one, Piece)
            ends = [*one.offsets.tolist(), len(one.frames)]
            for begin, end in pairwise(ends):
                there[behind] = bytes(one.frames[begin + FRAME_HEADER_LEN : end])
                behind += 1
        assert behind == len(self.entries)
        return there, lost


@given(wanted=entries, data=st.data())
def test_every_entry_whose_grains_are_good_is_there_and_no_other(wanted, data):
    async def main():
        written = await Written.of(wanted)
        layout = written.layout
        bad = data.draw(st.sets(st.integers(0, layout.grain_count - 1)))
        cut = data.draw(st.none() | st.integers(0, layout.data_len - 1))
        for grain in bad:
            written.world.bucket.damage(written.key, grain * GRAIN)
        if cut is not None:
            info, body = written.world.bucket.objects[written.key]
            written.world.bucket.objects[written.key] = (info, body[:cut])
            bad |= set(range(cut // GRAIN, layout.grain_count))
        there, lost = await written.read()
        good = {
            entry_id
            for entry_id, (begin, end) in enumerate(written.places())
            if not bad & set(range(begin // GRAIN, (end - 1) // GRAIN + 1))
        }
        assert set(there) == good
        assert all(there[one] == wanted[one] for one in good)
        named = {one for first, last in lost for one in range(first, last + 1)}
        assert named == set(range(len(wanted))) - good

    run_virtual(main())


@given(wanted=entries, data=st.data())
def test_a_grain_that_is_bad_here_is_taken_from_another_attempts_object(wanted, data):
    async def main():
        first = await Written.of(wanted)
        second = await Written.into(first.world, wanted, 2)
        count = first.layout.grain_count
        bad = [data.draw(st.sets(st.integers(0, count - 1))) for _ in range(2)]
        for one, grains in zip((first, second), bad, strict=True):
            for grain in grains:
                first.world.bucket.damage(one.key, grain * GRAIN)
        there, _ = await first.read(second.key)
        both = bad[0] & bad[1]
        for entry_id, (begin, end) in enumerate(first.places()):
            lost = bool(both & set(range(begin // GRAIN, (end - 1) // GRAIN + 1)))
            assert (entry_id in there) is not lost

    run_virtual(main())


def test_pieces_have_the_times_of_their_grain_and_lie_where_they_say():
    async def main():
        written = await Written.of([bytes(30)] * 40)
        columns = written.layout.columns
        low = np.arange(len(columns.crcs)) + 100
        timed = columns._replace(publish_ms_min=low, publish_ms_max=low + 5)
        layout = written.layout
        layout = Layout(
            data_len=layout.data_len,
            block_size=BLOCK,
            entry_count=layout.entry_count,
            grain_len=GRAIN,
            columns=timed,
        )
        places = written.places()
        async for one in Salvage(written.source(), layout).read():
            assert isinstance(one, Piece)
            grain = one.place // GRAIN
            assert one.times == (100 + grain, 105 + grain)
            assert one.place == places[one.first_entry_id][0]
            last = places[one.first_entry_id + len(one.offsets) - 1]
            assert last[0] // GRAIN == grain

    run_virtual(main())


def test_checksums_that_are_right_for_bytes_that_are_no_entries_are_told():
    async def main():
        written = await Written.of([bytes(100)] * 10)
        for offset in (130 + 4, 0):
            info, body = written.world.bucket.objects[written.key]
            changed = bytearray(body)
            changed[offset] ^= 1
            written.world.bucket.objects[written.key] = (info, bytes(changed))
            crcs = written.layout.columns.crcs
            for grain in range(len(crcs)):
                crcs[grain] = crc32c(bytes(changed[grain * GRAIN : (grain + 1) * GRAIN]))
            with pytest.raises(CorruptError):
                await written.read()

    run_virtual(main())


def test_a_store_that_does_not_answer_is_no_loss():
    class Silent:
        async def get_range(self, key: str, start: int, length: int) -> bytes | None:
            raise RetryableError(f"no answer for {key} {start} {length}")

    async def main():
        written = await Written.of([bytes(10)])
        source = written.source(store=Silent())
        with pytest.raises(RetryableError):
            async for _ in Salvage(source, written.layout).read():
                pass

    run_virtual(main())
