"""What every driver must do (offload/interface.py), whichever layout it writes.

A module that runs the suite subclasses ``OffloaderContract`` and gives fixtures: ``driver``, with
which it is written and read; ``objects``, the bucket; ``block_size`` of the ledgers.
"""

import uuid
from dataclasses import replace

import pytest

from tests.unit.offload.world import ListHandle, entries_of, metadata_of
from tierlog.model.errors import CorruptError, Reason, RefusedError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import LedgerState
from tierlog.offload import LedgerOffloader
from tierlog.ports.objects import ObjectStore

LEDGER = LedgerId(7)


def entries_for(block_size: int) -> list[bytes]:
    """Return entries of a little more than two blocks, the largest that there can be among them."""
    step = block_size // 7
    lens = [0, 1, step, block_size - 140, 2, step, step // 3, 0, step, 3]
    return [bytes([number + 1]) * length for number, length in enumerate(lens)]


def handle_of(entries: list[bytes], block_size: int) -> ListHandle:
    """Return a sealed ledger in tier 1."""
    metadata = metadata_of(entries, block_size=block_size)
    return ListHandle(LEDGER, entries, metadata, run_bytes_max=max(200, block_size // 10))


class OffloaderContract:
    async def test_what_is_read_is_what_was_written(self, driver: LedgerOffloader, block_size: int):
        entries, attempt = entries_for(block_size), uuid.uuid4()
        handle = handle_of(entries, block_size)
        copy = await driver.offload(handle, attempt, {})
        assert copy.entry_count == len(entries)
        assert copy.block_count > 1
        place = driver.location(LEDGER, attempt)
        for where in (None, place):
            found = await driver.read_offloaded(LEDGER, attempt, where, copy=copy)
            assert found.ledger_id == LEDGER
            assert found.ledger_metadata == handle.ledger_metadata
            assert await found.last_add_confirmed() == len(entries) - 1
            assert await entries_of(found) == entries
            for first in range(len(entries)):
                for last in range(first, len(entries)):
                    assert await entries_of(found, first, last) == entries[first : last + 1]
            await found.close()
        await driver.verify(LEDGER, attempt, place, copy)

    async def test_attempts_of_one_ledger_do_not_touch_each_other(
        self, driver: LedgerOffloader, block_size: int
    ):
        first, second = uuid.uuid4(), uuid.uuid4()
        entries = [b"a", b"bc"]
        copies = [
            await driver.offload(handle_of(entries, block_size), one, {}) for one in (first, second)
        ]
        await driver.delete_offloaded(LEDGER, first, driver.location(LEDGER, first))
        await driver.delete_offloaded(LEDGER, first)
        with pytest.raises(TierlogError):
            await driver.verify(LEDGER, first, None, copies[0])
        with pytest.raises(RefusedError) as refused:
            await driver.read_offloaded(LEDGER, first, copy=copies[0])
        assert refused.value.reason is Reason.LEDGER_NOT_FOUND
        found = await driver.read_offloaded(LEDGER, second, copy=copies[1])
        assert await entries_of(found) == entries

    async def test_deleting_leaves_no_object_and_no_upload(
        self, driver: LedgerOffloader, objects: ObjectStore, block_size: int
    ):
        attempt = uuid.uuid4()
        place = driver.location(LEDGER, attempt)
        await driver.offload(handle_of([b"a"], block_size), attempt, {})
        await objects.create_upload(place.data_key, metadata={}, content_type="x")
        await driver.delete_offloaded(LEDGER, attempt, place)
        assert await objects.list_uploads(place.data_key) == []
        for key in place.keys:
            assert await objects.head(key) is None

    async def test_extra_metadata_is_written_and_never_read(
        self, driver: LedgerOffloader, objects: ObjectStore, block_size: int
    ):
        entries, attempt = [b"a", b"b"], uuid.uuid4()
        extra = {"ManagedLedgerName": "logs", "SoftwareVersion": "9.9", "Anything": "at all"}
        copy = await driver.offload(handle_of(entries, block_size), attempt, extra)
        place = driver.location(LEDGER, attempt)
        for key in place.keys:
            found = await objects.get(key)
            assert found is not None
            info, raw = found
            assert info.metadata["managedledgername"] == "logs"
            assert info.metadata["anything"] == "at all"
            assert info.metadata["s3managedledgeroffloadersoftwareversion"]
            other = {name: f"other {value}" for name, value in extra.items()}
            kept = ("role", "s3managedledgeroffloaderformatversion")
            own = {name: info.metadata[name] for name in kept}
            await objects.put(key, raw, metadata={**other, **own})
        found_handle = await driver.read_offloaded(LEDGER, attempt, place, copy=copy)
        assert await entries_of(found_handle) == entries
        metadata = handle_of(entries, block_size).ledger_metadata
        assert found_handle.ledger_metadata == metadata
        await driver.verify(LEDGER, attempt, place, copy)

    async def test_only_what_is_sealed_and_not_empty_is_copied(
        self, driver: LedgerOffloader, objects: ObjectStore, block_size: int
    ):
        attempt = uuid.uuid4()
        opened = handle_of([b"a"], block_size)
        opened.ledger_metadata = replace(opened.ledger_metadata, state=LedgerState.OPEN)
        empty = replace(opened.ledger_metadata, last_entry_id=EntryId(-1), length=0)
        for refused in (opened, ListHandle(LEDGER, [], replace(empty, state=LedgerState.CLOSED))):
            with pytest.raises(RefusedError):
                await driver.offload(refused, attempt, {})
        for key in driver.location(LEDGER, attempt).keys:
            assert await objects.head(key) is None

    async def test_a_ledger_that_is_not_what_its_metadata_say_is_not_copied(
        self, driver: LedgerOffloader, block_size: int
    ):
        for wrong in (-1, 1):
            handle = handle_of([b"abc", b"de", b"f"], block_size)
            metadata = handle.ledger_metadata
            handle.ledger_metadata = replace(metadata, length=metadata.length + wrong)
            with pytest.raises(CorruptError):
                await driver.offload(handle, uuid.uuid4(), {})

    async def test_a_copy_that_was_cut_or_replaced_is_found_out(
        self, driver: LedgerOffloader, objects: ObjectStore, block_size: int
    ):
        attempt = uuid.uuid4()
        copy = await driver.offload(handle_of([b"a" * 10, b"b"], block_size), attempt, {})
        key = driver.location(LEDGER, attempt).data_key
        found = await objects.get(key)
        assert found is not None
        info, raw = found
        for damaged in (raw[:-1], raw + b"x"):
            await objects.put(key, damaged, metadata=info.metadata)
            with pytest.raises(CorruptError):
                await driver.verify(LEDGER, attempt, None, copy)
        await objects.put(key, raw, metadata={})
        with pytest.raises(TierlogError):
            await driver.verify(LEDGER, attempt, None, copy)

    async def test_a_place_elsewhere_is_refused(self, driver: LedgerOffloader, block_size: int):
        attempt = uuid.uuid4()
        place = driver.location(LEDGER, attempt)
        copy = await driver.offload(handle_of([b"a"], block_size), attempt, {})
        for other in (
            replace(place, bucket="another"),
            replace(place, endpoint_name="another"),
            replace(place, driver="another"),
        ):
            with pytest.raises(RefusedError):
                await driver.read_offloaded(LEDGER, attempt, other, copy=copy)
            with pytest.raises(RefusedError):
                await driver.verify(LEDGER, attempt, other, copy)
            with pytest.raises(RefusedError):
                await driver.delete_offloaded(LEDGER, attempt, other)
