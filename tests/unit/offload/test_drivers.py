"""Drivers have names: one writes, and whoever wrote a copy reads and deletes it."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import CLUSTER, SMALL_RANGES, ListHandle, World, entries_of
from tests.unit.reader.world import STREAM, ReaderWorld, at, budget, payloads
from tierlog.format.run import Run
from tierlog.ledger.reader import ReadHandle
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.offload import LedgerOffloader, ReadBack
from tierlog.offload.driver import DRIVER, Tier2Settings
from tierlog.offload.drivers import DriverParts, Drivers, driver_name
from tierlog.offload.frames import FramesOfRuns
from tierlog.offload.single_driver import SINGLE_DRIVER

LEDGER = LedgerId(7)
ENTRIES = [bytes([number]) * (number * 37 % 60) for number in range(1, 20)]


class Shelf:
    """A driver of somebody else's, that keeps entries where nobody looks."""

    name = "shelf"

    def __init__(self) -> None:
        self.kept: dict[UUID, ReadHandle] = {}
        self.extra: Mapping[str, str] = {}

    def location(self, ledger_id: LedgerId, uuid: UUID) -> Tier2Location:
        return Tier2Location(
            driver=self.name,
            endpoint_name="cellar",
            bucket="shelf-3",
            data_key=f"{uuid}",
            index_key="",
            side_key="",
        )

    async def offload(
        self,
        handle: ReadHandle,
        uuid: UUID,
        extra_metadata: Mapping[str, str],
        *,
        data_sha256: bool | None = None,
    ) -> Tier2Copy:
        entries = await entries_of(handle)
        self.kept[uuid] = ListHandle(handle.ledger_id, entries, handle.ledger_metadata)
        self.extra = extra_metadata
        return Tier2Copy(
            format_version=1,
            data_len=1,
            index_len=1,
            index_sha256=b"",
            entry_count=len(entries),
            block_count=1,
        )

    async def read_offloaded(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None = None,
        *,
        copy: Tier2Copy | None = None,
    ) -> ReadHandle:
        return self.kept[uuid]

    async def verify(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None,
        copy: Tier2Copy,
        *,
        read_back: ReadBack | None = None,
    ) -> None:
        assert uuid in self.kept

    async def delete_offloaded(
        self, ledger_id: LedgerId, uuid: UUID, driver_metadata: Tier2Location | None = None
    ) -> None:
        self.kept.pop(uuid, None)


class DrivenWorld(World):
    """A world whose workers have other drivers."""

    driven_by: LedgerOffloader

    def offloader(self, *_: Any, **__: Any) -> Any:
        return self.driven_by


class DrivenReaderWorld(ReaderWorld, DrivenWorld):
    """The same with a reader."""


def drivers_of(world: World, writes: str, shelf: Shelf | None = None) -> Drivers:
    """Return the drivers of a process whose settings name this one."""
    settings = Tier2Settings(bucket="b", cluster_id=CLUSTER, ranges=SMALL_RANGES, grain_len=64)
    others = {Shelf.name: lambda _: shelf} if shelf is not None else None
    return Drivers(
        DriverParts(objects=world.bucket.connect(), settings=settings),
        writes=writes,
        others=others,
    )


def test_a_name_that_nobody_has_is_refused_with_those_that_there_are():
    with pytest.raises(RefusedError) as refused:
        drivers_of(World(), "aws-s4")
    for name in ("aws-s4", DRIVER, "S3", SINGLE_DRIVER, "none"):
        assert name in refused.value.message


@pytest.mark.covers("A22", "B06")
def test_none_refuses_any_use():
    with pytest.raises(RefusedError, match="no offloader"):
        drivers_of(World(), "none").location(LEDGER, UUID(int=1))


def test_a_name_that_is_taken_is_refused():
    parts = drivers_of(World(), DRIVER)._parts
    for name in (DRIVER, "S3", SINGLE_DRIVER, "none"):
        with pytest.raises(RefusedError, match="taken"):
            Drivers(parts, writes=DRIVER, others={name: lambda _: Shelf()})


def test_what_the_settings_say_in_two_words():
    assert driver_name("aws-s3", "two-objects") == driver_name("S3", "two-objects") == DRIVER
    assert driver_name("aws-s3", "single-object") == SINGLE_DRIVER
    assert driver_name(SINGLE_DRIVER, "single-object") == SINGLE_DRIVER
    assert driver_name(SINGLE_DRIVER, "two-objects") == SINGLE_DRIVER
    assert driver_name("shelf", "two-objects") == "shelf"
    with pytest.raises(RefusedError):
        driver_name("shelf", "single-object")


@pytest.mark.covers("A21")
@pytest.mark.parametrize(("before", "after"), [(DRIVER, SINGLE_DRIVER), (SINGLE_DRIVER, DRIVER)])
def test_whoever_wrote_a_copy_reads_and_deletes_it_after_the_setting_changed(
    before: str, after: str
):
    async def main():
        world, shelf = World(), Shelf()
        for number, name in enumerate((before, Shelf.name)):
            attempt = UUID(int=number)
            writing = drivers_of(world, name, shelf)
            place = writing.location(LEDGER, attempt)
            assert place.driver == name
            copy = await writing.offload(ListHandle(LEDGER, ENTRIES), attempt, {"a": "b"})
            later = drivers_of(world, after, shelf)
            found = await later.read_offloaded(LEDGER, attempt, place, copy=copy)
            assert await entries_of(found) == ENTRIES
            await later.verify(LEDGER, attempt, place, copy)
            await later.delete_offloaded(LEDGER, attempt, place)
        assert (world.bucket.objects, world.bucket.uploads, shelf.kept) == ({}, {}, {})
        assert shelf.extra == {"a": "b"}

    run_virtual(main())


def test_a_copy_of_a_driver_that_is_not_here_is_refused_and_not_touched():
    async def main():
        world, shelf = World(), Shelf()
        attempt = UUID(int=1)
        writing = drivers_of(world, Shelf.name, shelf)
        copy = await writing.offload(ListHandle(LEDGER, ENTRIES), attempt, {})
        place, without = writing.location(LEDGER, attempt), drivers_of(world, DRIVER)
        for call in (
            without.read_offloaded(LEDGER, attempt, place, copy=copy),
            without.verify(LEDGER, attempt, place, copy),
            without.delete_offloaded(LEDGER, attempt, place),
        ):
            with pytest.raises(RefusedError, match="there is no driver 'shelf'"):
                await call
        assert attempt in shelf.kept

    run_virtual(main())


def test_frames_of_a_driver_that_knows_runs_alone():
    async def main():
        handle = ListHandle(LEDGER, ENTRIES, run_bytes_max=100)
        frames = FramesOfRuns(handle)
        for first in range(len(ENTRIES)):
            for size, some in ((1, None), (150, None), (10**6, None), (10**6, 3)):
                read = await frames.read_frames(EntryId(first), size, entries_max=some)
                ends = [*read.offsets[1:].tolist(), len(read.frames)]
                found = [
                    bytes(read.frames[start + 12 : end])
                    for start, end in zip(read.offsets.tolist(), ends, strict=True)
                ]
                assert found == ENTRIES[first : read.last_entry_id + 1]
                assert found
                # Runs come whole, two of them at once.
                assert len(read.frames) < size + 2 * 100
        with pytest.raises(RefusedError) as refused:
            await frames.read_frames(EntryId(len(ENTRIES)), 10)
        assert refused.value.reason is Reason.NO_SUCH_ENTRY
        metadata = handle.ledger_metadata
        longer = replace(metadata, last_entry_id=EntryId(metadata.last_entry_id + 5))
        handle.ledger_metadata = longer
        with pytest.raises(CorruptError):
            await frames.read_frames(EntryId(len(ENTRIES) + 1), 10)

    run_virtual(main())


class Lent:
    """A handle that holds something until it is closed, and takes its time."""

    def __init__(self, handle: ReadHandle) -> None:
        self._handle = handle
        self.ledger_id, self.ledger_metadata = handle.ledger_id, handle.ledger_metadata
        self.closed = 0

    async def last_add_confirmed(self) -> EntryId:
        return self.ledger_metadata.last_entry_id

    async def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0.0
    ) -> AsyncGenerator[Sequence[Run], None]:
        async for runs in self._handle.read_runs(first, last, bytes_max=bytes_max, wait_s=wait_s):
            await asyncio.sleep(1)
            assert not self.closed, "closed while it is read"
            yield runs

    async def close(self) -> None:
        self.closed += 1


def test_readers_close_what_a_driver_opened_once_nobody_reads_it():
    async def main():
        world, shelf = DrivenReaderWorld(), Shelf()
        await world.start()
        world.driven_by = drivers_of(world, Shelf.name, shelf)
        ledger_ids = []
        for _ in range(6):
            ledger_ids.append(await world.sealed(ENTRIES))
            await world.offloaded(ledger_ids[-1])
            await world.gone_locally(ledger_ids[-1])
        lent: list[Lent] = []

        async def open_other(context):
            lent.append(Lent(shelf.kept[context.uuid]))
            return lent[-1]

        async with world.reader(open_other=open_other) as source:
            async with asyncio.TaskGroup() as group:
                reads = [
                    group.create_task(source.read(STREAM, at(one, 0), budget()))
                    for one in ledger_ids
                ]
            assert [payloads(read.result()) for read in reads] == [ENTRIES] * 6
            assert [one.closed for one in lent] == [1, 1, 0, 0, 0, 0]
        assert [one.closed for one in lent] == [1] * 6

    run_virtual(main())


def test_a_copy_of_a_driver_that_ends_elsewhere_than_its_ledger_is_closed_and_told():
    async def main():
        world, shelf = DrivenReaderWorld(), Shelf()
        await world.start()
        world.driven_by = drivers_of(world, Shelf.name, shelf)
        ledger_id = await world.sealed(ENTRIES)
        await world.offloaded(ledger_id)
        await world.gone_locally(ledger_id)
        shorter = ListHandle(ledger_id, ENTRIES[:-1])

        async def open_other(_):
            return shorter

        async with world.reader(open_other=open_other) as source:
            with pytest.raises(CorruptError):
                await source.read(STREAM, at(ledger_id, 0), budget())
            assert shorter.closed

    run_virtual(main())


@pytest.mark.parametrize("name", [DRIVER, SINGLE_DRIVER, Shelf.name])
def test_readers_serve_what_any_driver_wrote(name: str):
    async def main():
        world, shelf = DrivenReaderWorld(), Shelf()
        await world.start()
        drivers = world.driven_by = drivers_of(world, name, shelf)
        for entries in (ENTRIES, [b"second"]):
            ledger_id = await world.sealed(entries)
            await world.offloaded(ledger_id)
            await world.gone_locally(ledger_id)

        async def open_other(context):
            return await drivers.read_offloaded(
                context.ledger_id, context.uuid, context.location, copy=context.copy
            )

        async with world.reader(open_other=open_other) as source:
            assert await world.read_all(source, size=90) == [*ENTRIES, b"second"]
        if name == Shelf.name:
            async with world.reader() as source:
                with pytest.raises(RefusedError, match="driver 'shelf'"):
                    await world.read_all(source)

    run_virtual(main())


def test_what_a_driver_gave_before_a_bad_place_is_read_and_then_it_is_told():
    class Torn(ListHandle):
        async def read_runs(self, first, last, **how):
            async for runs in super().read_runs(first, last, **how):
                for run in runs:
                    if run.first_entry_id >= bad:
                        raise CorruptError("torn", remedy="")
                    yield [run]

    async def main():
        frames = FramesOfRuns(Torn(LEDGER, ENTRIES, run_bytes_max=100))
        read = await frames.read_frames(EntryId(0), 10**6)
        assert 0 < read.last_entry_id < bad + 1 < len(ENTRIES)
        with pytest.raises(CorruptError, match="torn"):
            await frames.read_frames(EntryId(read.last_entry_id + 1), 10**6)

    bad = 3
    run_virtual(main())


def test_an_entry_that_a_driver_leaves_out_is_told_and_no_other_is_given_for_it():
    class Gapped(ListHandle):
        async def read_runs(self, first, last, **how):
            async for runs in super().read_runs(first, last, **how):
                yield [run for run in runs if not run.first_entry_id <= lost <= run.last_entry_id]

    async def main():
        frames = FramesOfRuns(Gapped(LEDGER, ENTRIES, run_bytes_max=100))
        read = await frames.read_frames(EntryId(0), 10**6)
        assert 0 <= read.last_entry_id < lost
        with pytest.raises(CorruptError, match=f"lacks entry {read.last_entry_id + 1}"):
            await frames.read_frames(EntryId(read.last_entry_id + 1), 10**6)

    lost = 7
    run_virtual(main())
