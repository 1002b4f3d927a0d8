"""Copies verified with their side objects (not at all, in samples, every byte), and their times."""

import hashlib
from dataclasses import replace

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.side_kit import ENTRIES, LEDGER, UUID_1, copied, data_of, put_data, written
from tests.unit.offload.world import World
from tierlog.format.side import SideObject
from tierlog.model.errors import CorruptError
from tierlog.model.ids import EntryId
from tierlog.offload.side_reader import check_side_header
from tierlog.offload.verify import SAMPLED_GRAINS, ReadBack, sampled, verify_copy


class TestVerification:
    @staticmethod
    async def refused(world, copy, read_back, match):
        location = world.offloader().location(LEDGER, UUID_1)
        with pytest.raises(CorruptError, match=match):
            await verify_copy(world.bucket.connect(), location, copy, read_back=read_back)

    def test_reading_back_in_full_finds_every_flipped_byte(self):
        async def main():
            world = World()
            copy = await written(world, ENTRIES)
            whole = data_of(world)
            location = world.offloader().location(LEDGER, UUID_1)
            for offset in range(0, len(whole), 5):
                put_data(world, whole[:offset] + bytes([whole[offset] ^ 2]) + whole[offset + 1 :])
                with pytest.raises(CorruptError) as found:
                    await verify_copy(
                        world.bucket.connect(), location, copy, read_back=ReadBack.FULL
                    )
                assert found.value.details["object"] == location.data_key
            put_data(world, whole)
            await verify_copy(world.bucket.connect(), location, copy, read_back=ReadBack.FULL)

        run_virtual(main(), until_s=1000)

    def test_a_sample_looks_at_its_grains_and_no_others(self):
        async def main():
            world = World()
            copy = await written(world, [bytes(200)] * 40)
            whole, location = data_of(world), world.offloader().location(LEDGER, UUID_1)
            count = SideObject.decode(world.bucket.objects[location.side_key][1]).header.grain_count
            picked = sampled(count, copy.side_sha256)
            assert {0, count - 1} < set(picked)
            assert SAMPLED_GRAINS // 2 < len(picked) <= SAMPLED_GRAINS
            for grain in range(count):
                at = grain * 64 + 40
                if at >= len(whole):
                    continue
                put_data(world, whole[:at] + b"\xee" + whole[at + 1 :])
                if grain in picked:
                    await self.refused(world, copy, ReadBack.SAMPLE, f"grain {grain}")
                else:
                    await verify_copy(
                        world.bucket.connect(), location, copy, read_back=ReadBack.SAMPLE
                    )

        run_virtual(main(), until_s=1000)

    def test_the_digest_of_the_data_is_kept_and_compared_where_asked_for(self):
        async def main():
            world = World()
            copy = await written(world, ENTRIES, data_sha256=True)
            assert copy.data_sha256 == hashlib.sha256(data_of(world)).digest()
            assert (await written(World(), ENTRIES)).data_sha256 == b""
            wrong = replace(copy, data_sha256=bytes(32))
            await self.refused(world, wrong, ReadBack.FULL, "another digest")

        run_virtual(main())

    def test_a_side_object_and_an_index_that_disagree_are_refused(self):
        async def main():
            world = World()
            copy = await written(world, ENTRIES)
            other = World()
            # As many entries in as many bytes, of which the second block begins with another.
            shifted = [bytes(length) for length in (350, 1, 2, 3, 4, 372)]
            theirs = await written(other, shifted)
            assert theirs.data_len == copy.data_len
            key = f"{UUID_1}-ledger-7-side"
            world.bucket.objects[key] = other.bucket.objects[key]
            mixed = replace(
                copy,
                side_len=theirs.side_len,
                side_sha256=theirs.side_sha256,
                side_header_sha256=theirs.side_header_sha256,
            )
            await self.refused(world, mixed, ReadBack.NONE, "entry 3 elsewhere than the index")

        run_virtual(main())

    def test_one_that_agrees_not_with_its_index_or_its_context_is_refused(self):
        async def main():
            world = World()
            handle, _, copy, _ = await copied(world, ENTRIES)
            assert handle._side is not None
            header, location = handle._side.header, handle.location
            longer = replace(copy, side_len=copy.side_len + 1)
            with pytest.raises(CorruptError, match=f"says {copy.side_len} bytes where"):
                check_side_header(header, location, handle.index, longer)
            other = (await copied(World(), [*ENTRIES, b""])).handle.index
            with pytest.raises(CorruptError, match="is of 6 entries in"):
                check_side_header(header, location, other, copy)

        run_virtual(main())


def test_runs_of_a_copy_have_the_times_that_are_known_of_their_grains():
    async def main():
        times = [0, 0, 0, 5000, 6000, 7000]
        found = await copied(World(), [bytes(100)] * 6, times=times, block_size=4096)
        reading = found.handle.read_runs(EntryId(0), EntryId(5))
        headers = [run.header async for runs in reading for run in runs]
        assert {(one.publish_ms_min, one.publish_ms_max) for one in headers} == {(5000, 7000)}

    run_virtual(main())
