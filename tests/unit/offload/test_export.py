"""Export copies: batches broken into single events, beside a ledger's own objects.

seeds/000: "break out batch messages into individual messages ... so that the object can be used
directly by some other system".
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import BOTH, REPAIR, SAFETY_S, kinds, scrub
from tests.unit.offload.test_drivers import DrivenWorld
from tests.unit.offload.test_scrub import write_manifest
from tests.unit.offload.world import (
    CLUSTER,
    SMALL_RANGES,
    ListHandle,
    World,
    entries_of,
    metadata_of,
)
from tierlog.adapters.memory.faults import Faults, Outcome, no_faults
from tierlog.adapters.memory.objects import MemoryObjects, MemoryObjectsClient
from tierlog.format.entry import StructuredEvent, encode_entry
from tierlog.format.export import lines_of
from tierlog.format.keys import ObjectRole, parse_key
from tierlog.format.run import Run
from tierlog.ledger.reader import ReadHandle
from tierlog.model.errors import CorruptError, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import KEY_RAW
from tierlog.model.offload import Tier2Copy
from tierlog.model.scrub import FindingKind
from tierlog.offload.budget import UploadBudget
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.export import Exporter, ExportingOffloader
from tierlog.offload.single_driver import SingleObjectOffloader
from tierlog.ports.spending import CostMeter

LEDGER = LedgerId(7)
UUID_1 = UUID(int=1)
WRITER = UUID(int=99)
KEY = f"{UUID_1}-ledger-7-export.ndjson"
BATCH = encode_entry(
    [b"one", b"two", b"\xff\x00"], publish_time_ms=1234, writer_id=WRITER, event_number=12
)
STRUCTURED = encode_entry(
    [
        StructuredEvent(payload=b"p", key=b"k", event_time_ms=5, properties={"b": "2", "a": "1"}),
        StructuredEvent(payload="ü".encode(), key=b"\xff"),
    ],
    publish_time_ms=1235,
)
ENTRIES = [
    BATCH,
    STRUCTURED,
    encode_entry([], publish_time_ms=1236),
    encode_entry([b""], publish_time_ms=7),
]
TIER2 = Tier2Settings(bucket="b", cluster_id=CLUSTER, ranges=SMALL_RANGES, grain_len=64)


def handle_of(entries: list[bytes], *, raw: bool = False) -> ListHandle:
    """Return a sealed ledger."""
    metadata = metadata_of(entries, block_size=2000)
    custom = {**metadata.custom, KEY_RAW: b"1" if raw else b"0"}
    return ListHandle(LEDGER, entries, replace(metadata, custom=custom))


def exporting(
    world: World, faults: Faults | None = None, *, single: bool = False, part_bytes: int = 100
) -> ExportingOffloader:
    """Return a driver that writes export copies too."""
    objects = world.bucket.connect(faults or no_faults())
    inner = (
        SingleObjectOffloader(objects, TIER2, index_len_min=600)
        if single
        else BlockOffloader(objects, TIER2)
    )
    return ExportingOffloader(inner, Exporter(objects, TIER2, part_bytes=part_bytes))


def exported(world: World, key: str = KEY) -> list[dict[str, object]]:
    """Return the lines of an export copy, as anybody would read them."""
    raw = world.bucket.objects[key][1]
    assert raw == b"" or raw.endswith(b"\n")
    return [json.loads(line) for line in raw.decode().splitlines()]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.covers("A23")
def test_batches_are_broken_into_single_events(single: bool):
    async def main():
        world = World()
        driver = exporting(world, single=single)
        copy = await driver.offload(handle_of(ENTRIES), UUID_1, {"ManagedLedgerName": "logs"})
        place, base = {"ledger_id": 7}, {"writer_id": str(WRITER), "publish_time_ms": 1234}
        assert exported(world) == [
            {**place, "entry_id": 0, "number": 0, "event_number": 10, **base, "value": "one"},
            {**place, "entry_id": 0, "number": 1, "event_number": 11, **base, "value": "two"},
            {
                **place,
                "entry_id": 0,
                "number": 2,
                "event_number": 12,
                **base,
                "value_base64": base64.b64encode(b"\xff\x00").decode(),
            },
            {
                **place,
                "entry_id": 1,
                "number": 0,
                "publish_time_ms": 1235,
                "event_time_ms": 5,
                "key": "k",
                "properties": {"a": "1", "b": "2"},
                "value": "p",
            },
            {
                **place,
                "entry_id": 1,
                "number": 1,
                "publish_time_ms": 1235,
                "key_base64": base64.b64encode(b"\xff").decode(),
                "value": "ü",
            },
            {**place, "entry_id": 3, "number": 0, "publish_time_ms": 7, "value": ""},
        ]
        # Never in the place of the ledger's own objects: these are as they would be without.
        assert (driver.exported, driver.failed) == (1, 0)
        found = await driver.read_offloaded(LEDGER, UUID_1, copy=copy)
        assert await entries_of(found) == ENTRIES
        plain = World()
        await exporting(plain, single=single)._offloader.offload(
            handle_of(ENTRIES), UUID_1, {"ManagedLedgerName": "logs"}
        )
        assert world.bucket.objects.keys() - plain.bucket.objects.keys() == {KEY}
        for key, (info, raw) in plain.bucket.objects.items():
            assert world.bucket.objects[key][1] == raw
            assert world.bucket.objects[key][0].metadata == info.metadata
        metadata = world.bucket.objects[KEY][0].metadata
        assert (metadata["role"], metadata["managedledgername"]) == ("export", "logs")
        parsed = parse_key("", KEY)
        assert parsed == (UUID_1, LEDGER, ObjectRole.EXPORT)

    run_virtual(main())


def test_an_entry_of_a_raw_stream_is_one_event():
    async def main():
        world = World()
        await exporting(world).offload(handle_of([BATCH, b"plain"], raw=True), UUID_1, {})
        first, second = exported(world)
        assert base64.b64decode(str(first["value_base64"])) == BATCH
        assert (second["value"], second["publish_time_ms"]) == ("plain", 0)

    run_virtual(main())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.binary(max_size=20), max_size=5), min_size=1, max_size=12),
    st.integers(1, 400),
)
def test_every_event_is_one_line_in_order_however_parts_fall(
    batches: list[list[bytes]], part_bytes: int
):
    async def main():
        world = World()
        entries = [encode_entry(events, publish_time_ms=1) for events in batches]
        driver = exporting(world, part_bytes=part_bytes)
        await driver.offload(handle_of(entries), UUID_1, {})
        found = [
            str(one["value"]).encode()
            if "value" in one
            else base64.b64decode(str(one["value_base64"]))
            for one in exported(world)
        ]
        assert found == [event for events in batches for event in events]
        places = [(one["entry_id"], one["number"]) for one in exported(world)]
        assert places == [
            (entry_id, number)
            for entry_id, events in enumerate(batches)
            for number in range(len(events))
        ]

    run_virtual(main())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_what_is_no_entry_is_corrupt(data: bytes):
    with pytest.raises((CorruptError, RefusedError)):
        list(lines_of(1, 2, data, raw=False))


def test_an_export_that_fails_leaves_the_copy_whole_and_nothing_open():
    async def main():
        world, faults = World(), no_faults()
        driver = exporting(world, faults)
        # An entry that is no batch: the export can't read it, the offload needs not.
        copy = await driver.offload(handle_of([b"not an entry"]), UUID_1, {})
        assert (driver.exported, driver.failed) == (0, 1)
        assert KEY not in world.bucket.objects
        assert not world.bucket.uploads
        await driver.verify(LEDGER, UUID_1, None, copy)
        attempt = UUID(int=2)
        before = len(faults.calls or [])
        faults.calls = []
        await exporting(world, faults).offload(handle_of(ENTRIES), attempt, {})
        # Each request of the export fails once.
        requests = len(faults.calls) - before
        own = World()
        counting = no_faults()
        counting.calls = []
        await exporting(own, counting)._offloader.offload(handle_of(ENTRIES), attempt, {})
        for number in range(len(counting.calls), requests):
            again = no_faults()
            for _ in range(number):
                again.next("", Outcome.ANSWERED)
            again.next("", Outcome.REFUSED)
            fresh = World()
            failing = exporting(fresh, again)
            whole = await failing.offload(handle_of(ENTRIES), attempt, {})
            assert failing.failed == 1
            assert f"{attempt}-ledger-7-export.ndjson" not in fresh.bucket.objects
            await failing.verify(LEDGER, attempt, None, whole)

    run_virtual(main())


class BrokenLater(ListHandle):
    """Gives a driver all its entries, and an export, which reads them again, a defect."""

    error: Exception | None = None

    async def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0
    ) -> AsyncIterator[Sequence[Run]]:
        async for runs in super().read_runs(first, last, bytes_max=bytes_max, wait_s=wait_s):
            yield runs
            if self.error is not None:
                raise self.error


@pytest.mark.parametrize("error", [ValueError("of a library"), TimeoutError("its own")])
def test_an_error_of_an_export_that_nobody_foresaw_leaves_the_copy_whole_and_nothing_open(
    error: Exception,
):
    class Inner(BlockOffloader):
        async def offload(self, handle: ReadHandle, *args: Any, **kwargs: Any) -> Tier2Copy:
            copy = await super().offload(handle, *args, **kwargs)
            broken.error = error
            return copy

    async def main():
        world = World()
        objects = world.bucket.connect()
        driver = ExportingOffloader(Inner(objects, TIER2), Exporter(objects, TIER2))
        with capture_logs() as lines:
            copy = await driver.offload(broken, UUID_1, {})
        await driver.verify(LEDGER, UUID_1, None, copy)
        assert (driver.exported, driver.failed) == (0, 1)
        assert KEY not in world.bucket.objects
        assert not world.bucket.uploads
        told = {line["event"]: line for line in lines if line["log_level"] in ("warning", "error")}
        assert told.keys() == {"unexpected_error", "export.failed"}
        assert told["unexpected_error"]["exc_info"] is error
        assert told["export.failed"]["cause"] == f"unexpected {type(error).__name__}: {error}"

    plain = handle_of(ENTRIES)
    broken = BrokenLater(LEDGER, plain.entries, plain.ledger_metadata)
    run_virtual(main())


def test_exports_are_made_one_at_a_time():
    """Each takes room that uploads want, however many ledgers are on their way."""

    class Watched(ListHandle):
        reading, most = 0, 0

        async def read_runs(
            self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0
        ) -> AsyncIterator[Sequence[Run]]:
            Watched.reading += 1
            Watched.most = max(Watched.most, Watched.reading)
            try:
                async for runs in super().read_runs(first, last):
                    yield runs
                    await asyncio.sleep(0)
            finally:
                Watched.reading -= 1

    async def main():
        world = World()
        exporter = Exporter(world.bucket.connect(), TIER2, part_bytes=100)
        driver = BlockOffloader(world.bucket.connect(), TIER2)
        plain = handle_of(ENTRIES)
        watched = Watched(LEDGER, plain.entries, plain.ledger_metadata)
        await asyncio.gather(
            *(
                exporter.export(watched, driver.location(LEDGER, UUID(int=number)))
                for number in range(1, 6)
            )
        )
        assert len([key for key in world.bucket.objects if key.endswith("export.ndjson")]) == 5
        assert Watched.most == 1

    run_virtual(main())


class PacedBucket(MemoryObjectsClient):
    """Takes a second for a part, and sees what is held, and sent at once, at each."""

    def __init__(self, bucket: MemoryObjects, budget: UploadBudget) -> None:
        super().__init__(bucket, no_faults(), CostMeter())
        self._budget = budget
        self.flying = self.flying_peak = 0
        self.held: dict[bool, list[int]] = {True: [], False: []}
        """By whether it was an export's part."""

    async def upload_part(self, key: str, upload_id: str, number: int, *args: Any, **named: Any):
        self.held[key.endswith("-export.ndjson")].append(self._budget.held_bytes)
        self.flying += 1
        self.flying_peak = max(self.flying_peak, self.flying)
        await asyncio.sleep(1.0)
        self.flying -= 1
        return await super().upload_part(key, upload_id, number, *args, **named)


def test_exports_and_uploads_together_keep_to_one_bound():
    """Of bytes, and of parts on their way; an export has its room before it is made."""

    async def main():
        world, budget = World(), UploadBudget(bytes_max=40_000_000, parts_max=2)
        objects = PacedBucket(world.bucket, budget)
        exporter = Exporter(objects, TIER2, part_bytes=100, budget=budget)
        driver = ExportingOffloader(BlockOffloader(objects, TIER2, budget=budget), exporter)
        plain = handle_of(ENTRIES)
        handles = [ListHandle(LedgerId(n), ENTRIES, plain.ledger_metadata) for n in range(20)]
        await asyncio.gather(*(driver.offload(one, world.ids.uuid(), {}) for one in handles))
        assert driver.exported == 20
        assert min(objects.held[True]) >= exporter.memory
        assert max(objects.held[False]) > exporter.memory, "uploads go on beside an export"
        assert budget.held_bytes_peak <= 40_000_000
        assert objects.flying_peak == 2
        assert budget.held_bytes == 0

    run_virtual(main())


@pytest.mark.parametrize("single", [False, True])
def test_an_export_goes_with_its_attempt(single: bool):
    async def main():
        world = World()
        driver = exporting(world, single=single)
        await driver.offload(handle_of(ENTRIES), UUID_1, {})
        await world.bucket.connect().create_upload(KEY, metadata={}, content_type="x")
        # By a process that knows nothing of exports.
        place = driver.location(LEDGER, UUID_1)
        await driver._offloader.delete_offloaded(LEDGER, UUID_1, place)
        assert (world.bucket.objects, world.bucket.uploads) == ({}, {})

    run_virtual(main())


def test_an_export_is_made_again_and_elsewhere_is_refused():
    async def main():
        world = World()
        driver = exporting(world)
        await driver.offload(handle_of(ENTRIES), UUID_1, {})
        place = driver.location(LEDGER, UUID_1)
        exporter = Exporter(world.bucket.connect(), TIER2)
        told = await exporter.export(handle_of(ENTRIES[:1]), place)
        assert (told.key, told.entry_count, told.event_count) == (KEY, 1, 3)
        assert told.length == len(world.bucket.objects[KEY][1])
        assert len(exported(world)) == 3
        with pytest.raises(RefusedError):
            await exporter.export(handle_of(ENTRIES), replace(place, bucket="another"))
        short = handle_of(ENTRIES)
        short.entries = short.entries[:2]
        with pytest.raises(CorruptError):
            await exporter.export(short, place)
        assert len(exported(world)) == 3

    run_virtual(main())


async def exported_stream(*, single: bool = False) -> tuple[World, LedgerId]:
    """Return a world with one ledger in tier 2, and its export copy."""
    world = DrivenWorld()
    world.driven_by = exporting(world, single=single)
    claimed = await world.stream()
    ledger_id = await world.seal(claimed, ENTRIES)
    await world.worker().handle(world.request(claimed, ledger_id))
    assert (await world.context(ledger_id)).complete
    await write_manifest(world)
    return world, ledger_id


@pytest.mark.parametrize("single", [False, True])
def test_a_scrub_knows_exports_and_does_not_want_them(single: bool):
    async def main():
        world, ledger_id = await exported_stream(single=single)
        world.clock.advance(10 * SAFETY_S)
        report = await scrub(world, BOTH, safety_age_s=0.001)
        assert kinds(report) == []
        assert report.counts[FindingKind.FOREIGN] == 0
        keys = [key for key in world.bucket.objects if key.endswith("-export.ndjson")]
        assert len(keys) == 1
        assert f"-ledger-{ledger_id}-" in keys[0]
        # Whoever deletes it does no harm.
        del world.bucket.objects[keys[0]]
        assert kinds(await scrub(world, BOTH, safety_age_s=0.001)) == []

    run_virtual(main())


def test_an_export_that_outlived_its_ledger_is_an_orphan():
    async def main():
        world, _ = await exported_stream()
        driver = exporting(world)
        exporter = Exporter(world.bucket.connect(), TIER2)
        await world.catalog().nodes.ensure_cluster(ledger_id_base=901)  # its id was given once
        gone = driver.location(LedgerId(900), UUID(int=5))
        told = await exporter.export(handle_of(ENTRIES), gone)
        world.clock.advance(SAFETY_S - 1)
        assert kinds(await scrub(world, REPAIR)) == []
        world.clock.advance(2)
        before = set(world.bucket.objects)
        report = await scrub(world, REPAIR)
        assert kinds(report) == ["orphan-objects"]
        assert before - set(world.bucket.objects) == {told.key}

    run_virtual(main())


def test_a_store_that_is_away_is_told_apart():
    async def main():
        world, faults = World(), no_faults()
        faults.outages.add("objects.")
        exporter = Exporter(world.bucket.connect(faults), TIER2)
        place = exporting(world).location(LEDGER, UUID_1)
        with pytest.raises(RetryableError):
            await exporter.export(handle_of(ENTRIES), place)

    run_virtual(main())
