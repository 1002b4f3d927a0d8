"""A sealed ledger becomes a data object of whole blocks and an index, and reads back the same.

seeds/000: "A single segment in bookkeeper maps to a two S3 objects"; each block is a part, all but
the last of one size; the attempt's UUID is in the keys; reading from the copy is identical.
"""

import hashlib
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden.objects import offload as golden_offload
from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import BLOCK, ListHandle, World, entries_of, metadata_of
from tierlog.adapters.memory.faults import Faults, Outcome
from tierlog.format.index import ObjectIndex
from tierlog.model.errors import CorruptError, Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import LedgerState
from tierlog.offload import UnconfiguredOffloader
from tierlog.offload.driver import DRIVER

LEDGER = LedgerId(7)
UUID_1 = UUID(int=1)
BIGGEST = BLOCK - 140

entry_lists = st.lists(
    st.integers(0, 40).map(bytes)
    | st.sampled_from([BIGGEST - 1, BIGGEST, 100, 116, 117, 118, 119, 130]).map(bytes),
    min_size=1,
    max_size=40,
)


def copied(entries, *, block_size=BLOCK, run_bytes_max=200):
    """Offload entries; return the world, the copy and the offloader."""

    async def main():
        world = World()
        offloader = world.offloader()
        handle = ListHandle(
            LEDGER,
            entries,
            metadata_of(entries, block_size=block_size),
            run_bytes_max=run_bytes_max,
        )
        copy = await offloader.offload(handle, UUID_1, {"ManagedLedgerName": "logs"})
        return world, copy, offloader

    return run_virtual(main())


@pytest.mark.covers("A11", "A39", "A40", "A42", "A44", "A71", "A72", "A73", "A75", "B24")
@settings(max_examples=80, deadline=None)
@given(entry_lists, st.integers(13, 700))
def test_objects_are_those_of_the_specification(entries, run_bytes_max):
    world, copy, offloader = copied(entries, run_bytes_max=run_bytes_max)
    location = offloader.location(LEDGER, UUID_1)
    expected = golden_offload(entries, BLOCK)
    data = world.bucket.objects[location.data_key][1]
    assert data == b"".join(expected.blocks)
    index = ObjectIndex.decode(world.bucket.objects[location.index_key][1])
    assert index.entries == expected.object_index.entries
    assert (copy.data_len, copy.entry_count) == (len(data), len(entries))
    assert copy.block_count == len(expected.blocks)
    assert copy.index_sha256 == hashlib.sha256(index.encode()).digest()
    assert not world.bucket.uploads


@pytest.mark.covers("A07", "A09", "A12", "A19")
@settings(max_examples=60, deadline=None)
@given(entry_lists, st.data())
def test_reading_the_copy_is_identical(entries, data):
    async def main():
        world = World()
        offloader = world.offloader()
        handle = ListHandle(LEDGER, entries)
        copy = await offloader.offload(handle, UUID_1, {})
        tier2 = await offloader.read_offloaded(LEDGER, UUID_1, copy=copy)
        assert await tier2.last_add_confirmed() == await handle.last_add_confirmed()
        assert tier2.ledger_metadata == handle.ledger_metadata
        assert await entries_of(tier2) == await entries_of(handle) == entries
        first = data.draw(st.integers(0, len(entries) - 1))
        last = data.draw(st.integers(first, len(entries) - 1))
        assert await entries_of(tier2, first, last) == entries[first : last + 1]
        with pytest.raises(RefusedError) as refused:
            await tier2.read_frames(EntryId(len(entries)), 100)
        assert refused.value.reason is Reason.NO_SUCH_ENTRY

    run_virtual(main())


@pytest.mark.covers("A17", "A41", "A69", "A70", "B14")
def test_names_and_user_metadata():
    world, _, offloader = copied([b"x" * 300] * 3)
    location = offloader.location(LEDGER, UUID_1)
    assert location.driver == DRIVER
    named = f"{UUID_1}-ledger-7"
    assert set(world.bucket.objects) == {named, f"{named}-index", f"{named}-side"}
    for key, role in zip(location.keys, ("data", "index", "side"), strict=True):
        metadata = world.bucket.objects[key][0].metadata
        assert metadata["role"] == role
        assert metadata["s3managedledgeroffloaderformatversion"] == "1"
        assert metadata["managedledgername"] == "logs"
        assert metadata["s3managedledgeroffloadersoftwareversion"]
    index = ObjectIndex.decode(world.bucket.objects[location.index_key][1])
    assert [one.part_number for one in index.entries] == [1, 2, 3]


@pytest.mark.covers("A18")
def test_extra_metadata_changes_nothing_that_is_read():
    async def main():
        world = World()
        offloader = world.offloader()
        entries = [b"a", b"b"]
        extra = {"ManagedLedgerName": "other", "role": "index", "Anything": "at all"}
        copy = await offloader.offload(ListHandle(LEDGER, entries), UUID_1, extra)
        tier2 = await offloader.read_offloaded(LEDGER, UUID_1, copy=copy)
        assert await entries_of(tier2) == entries
        found = world.bucket.objects[offloader.location(LEDGER, UUID_1).data_key][0]
        assert found.metadata["role"] == "data"
        assert found.metadata["anything"] == "at all"

    run_virtual(main())


@pytest.mark.covers("A13", "A20", "A14", "A16")
def test_delete_takes_one_attempt_and_its_open_uploads():
    async def main():
        world = World()
        offloader = world.offloader()
        first, second = UUID(int=1), UUID(int=2)
        for uuid in (first, second):
            await offloader.offload(ListHandle(LEDGER, [b"a"]), uuid, {})
        objects = world.bucket.connect()
        for uuid in (first, second):
            key = offloader.location(LEDGER, uuid).data_key
            await objects.create_upload(key, metadata={}, content_type="x")
            # The key of another ledger that begins the same.
            await objects.create_upload(f"{key}9", metadata={}, content_type="x")
        for _ in range(2):  # repeating it is legal
            await offloader.delete_offloaded(LEDGER, first)
        kept = offloader.location(LEDGER, second)
        assert set(world.bucket.objects) == set(kept.keys)
        left = sorted(upload.key for upload in await objects.list_uploads())
        gone = offloader.location(LEDGER, first).data_key
        assert left == sorted([f"{gone}9", kept.data_key, f"{kept.data_key}9"])
        with pytest.raises(RefusedError) as refused:
            await offloader.read_offloaded(LEDGER, first)
        assert refused.value.reason is Reason.LEDGER_NOT_FOUND

    run_virtual(main())


@pytest.mark.covers("A22", "B06")
def test_the_default_refuses_any_use():
    offloader = UnconfiguredOffloader()
    handle = ListHandle(LEDGER, [b"a"])
    _, copy, _ = copied([b"a"])
    with pytest.raises(RefusedError, match="no offloader"):
        offloader.location(LEDGER, UUID_1)
    for call in (
        offloader.offload(handle, UUID_1, {}),
        offloader.read_offloaded(LEDGER, UUID_1),
        offloader.verify(LEDGER, UUID_1, None, copy),
        offloader.delete_offloaded(LEDGER, UUID_1),
    ):
        with pytest.raises(RefusedError, match="no offloader"):
            run_virtual(call)


@pytest.mark.covers("A03", "A27")
def test_open_and_empty_ledgers_are_refused_before_anything_is_sent():
    async def main():
        from dataclasses import replace

        world = World()
        offloader = world.offloader()
        closed = metadata_of([b"a"])
        for metadata in (
            replace(closed, state=LedgerState.OPEN),
            replace(closed, state=LedgerState.IN_RECOVERY),
            replace(closed, last_entry_id=EntryId(-1), length=0),
        ):
            with pytest.raises(RefusedError):
                await offloader.offload(ListHandle(LEDGER, [b"a"], metadata), UUID_1, {})
        assert not world.bucket.objects
        assert not world.bucket.uploads

    run_virtual(main())


def test_an_entry_that_fits_no_block_is_refused_and_nothing_is_complete():
    async def main():
        world = World()
        entries = [b"a" * BIGGEST, b"b" * (BIGGEST + 1)]
        with pytest.raises(RefusedError) as refused:
            await world.offloader().offload(ListHandle(LEDGER, entries), UUID_1, {})
        assert refused.value.reason is Reason.TOO_LARGE
        assert not world.bucket.objects

    run_virtual(main())


@pytest.mark.parametrize("entry_shift", [-1, 0, 1])
@pytest.mark.parametrize("length_shift", [-700, -13, -1, 0, 1, 13, 700])
@pytest.mark.covers("A46", "A48", "A76")
def test_counts_are_of_what_was_read_and_never_of_the_metadata(entry_shift, length_shift):
    if entry_shift == length_shift == 0:
        return

    async def main():
        from dataclasses import replace

        world = World()
        entries = [bytes([number]) * 50 for number in range(30)]
        true = metadata_of(entries)
        wrong = replace(
            true,
            last_entry_id=EntryId(true.last_entry_id + entry_shift),
            length=true.length + length_shift,
        )
        with pytest.raises(CorruptError, match="is said to have"):
            await world.offloader().offload(ListHandle(LEDGER, entries, wrong), UUID_1, {})
        assert not world.bucket.objects

    run_virtual(main())


def test_a_gap_in_what_is_read_is_not_copied():
    class Gapped(ListHandle):
        async def read_runs(self, first, last, *, bytes_max=None, wait_s=0.0):
            runs = [run async for runs in ListHandle.read_runs(self, first, last) for run in runs]
            yield [runs[0], *runs[2:]]

    async def main():
        world = World()
        handle = Gapped(LEDGER, [b"x" * 60] * 20)
        with pytest.raises(CorruptError, match="where"):
            await world.offloader().offload(handle, UUID_1, {})
        assert not world.bucket.objects

    run_virtual(main())


@pytest.mark.parametrize("verb", ["create_upload", "upload_part", "complete_upload", "put", "head"])
def test_a_store_that_fails_leaves_no_index(verb):
    async def main():
        import random

        world = World()
        faults = Faults(random.Random(1))
        faults.next(f"objects.{verb}", Outcome.REFUSED)
        entries = [bytes(BIGGEST)] * 3
        with pytest.raises(RetryableError):
            await world.offloader(faults).offload(ListHandle(LEDGER, entries), UUID_1, {})
        if verb != "head":
            assert not [key for key in world.bucket.objects if key.endswith("-index")]

    run_virtual(main())


@pytest.mark.parametrize("what", ["data", "index", "side"])
def test_verification_sees_what_is_missing_cut_or_another_block(what):
    async def main():
        world = World()
        offloader = world.offloader()
        entries = [bytes(BIGGEST)] * 3
        copy = await offloader.offload(ListHandle(LEDGER, entries), UUID_1, {})
        location = offloader.location(LEDGER, UUID_1)
        await offloader.verify(LEDGER, UUID_1, location, copy)
        key = location.keys[["data", "index", "side"].index(what)]
        info, raw = world.bucket.objects[key]

        async def refused(damage):
            from dataclasses import replace

            world.bucket.objects[key] = (replace(info, size=len(damage)), damage)
            with pytest.raises(CorruptError):
                await offloader.verify(LEDGER, UUID_1, location, copy)

        await refused(raw[:-1])
        await refused(raw + b"\0")
        at = 2 * BLOCK + 20 if what == "data" else 40
        await refused(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        del world.bucket.objects[key]
        with pytest.raises(CorruptError):
            await offloader.verify(LEDGER, UUID_1, location, copy)

    run_virtual(main())


def test_verification_sees_the_same_bytes_in_another_number_of_parts():
    """Whoever put them there is not who made the copy."""

    async def main():
        from dataclasses import replace

        world = World()
        offloader = world.offloader()
        copy = await offloader.offload(ListHandle(LEDGER, [bytes(BIGGEST)] * 3), UUID_1, {})
        key = offloader.location(LEDGER, UUID_1).data_key
        info, raw = world.bucket.objects[key]
        for parts, right in ((3, True), (2, False), (30, False)):
            world.bucket.objects[key] = (replace(info, etag=f'"d41d8cd9-{parts}"'), raw)
            if right:
                await offloader.verify(LEDGER, UUID_1, None, copy)
                continue
            with pytest.raises(CorruptError, match=f"has {parts} parts and not 3"):
                await offloader.verify(LEDGER, UUID_1, None, copy)

    run_virtual(main())


def test_objects_in_another_bucket_are_not_touched():
    async def main():
        from dataclasses import replace

        world = World()
        offloader = world.offloader()
        copy = await offloader.offload(ListHandle(LEDGER, [b"a"]), UUID_1, {})
        here = offloader.location(LEDGER, UUID_1)
        for there in (
            replace(here, bucket="other"),
            replace(here, endpoint_name="elsewhere"),
            replace(here, driver="azureblob"),
        ):
            with pytest.raises(RefusedError, match="lies in bucket"):
                await offloader.delete_offloaded(LEDGER, UUID_1, there)
            with pytest.raises(RefusedError):
                await offloader.read_offloaded(LEDGER, UUID_1, there, copy=copy)
        assert set(world.bucket.objects) == set(here.keys)

    run_virtual(main())
