"""The offloader of data and index objects in a bucket (seeds/000, "S3 Implementation").

Owns the upload of one attempt: blocks as parts, one being read while others are sent, the
index last, then verification. Does not own the attempt's place in the metadata.

Invariants:
    * At most ``parts_in_flight_max`` blocks are in memory, being filled or sent; nothing else of
      a ledger is.
    * An index object exists only after its data object is complete.
    * Returning means: both objects were verified after they were written.

Crash (leaks): an attempt that ends anywhere leaves at most one open upload and its two objects,
all under keys that the metadata names; ``delete_offloaded`` takes them away.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final
from uuid import UUID

import structlog

from tierlog.format import keys
from tierlog.format.index import BLOCK_COUNT_MAX, IndexEntry, ObjectIndex
from tierlog.format.keys import ObjectRole, Software
from tierlog.format.versions import Format, current
from tierlog.ledger.reader import ReadHandle
from tierlog.model.errors import RefusedError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.ledger import KEY_STREAM
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.offload.blocks import BlockFiller, FilledBlock, block_size_of, check_offloadable
from tierlog.offload.cleaning import delete_attempt
from tierlog.offload.groups import plain_errors
from tierlog.offload.index_loader import INDEX_TTL_S, load_index
from tierlog.offload.offsets import BYTES_MAX, OffsetsCache
from tierlog.offload.ranges import RangeLimits, Ranges
from tierlog.offload.tier2_reader import Tier2Handle
from tierlog.offload.verify import verify_copy
from tierlog.ports.cache import SharedCache
from tierlog.ports.objects import ObjectStore, Part

log = structlog.get_logger()

DRIVER: Final = "aws-s3"
# Names under which the same driver may stand in a location.
DRIVERS: Final = frozenset({DRIVER, "S3"})
PARTS_IN_FLIGHT: Final = 2
RANGE_LIMITS: Final = RangeLimits()
SOFTWARE: Final = Software(version=version("tierlog"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier2Settings:
    """Where objects go, who says so, and the limits of an upload."""

    bucket: str
    cluster_id: UUID
    endpoint_name: str = "default"
    key_prefix: str = ""
    cluster_name: str = "tierlog"
    software: Software = SOFTWARE
    parts_in_flight_max: int = PARTS_IN_FLIGHT
    part_delay_s: float = 0.0
    ranges: RangeLimits = RANGE_LIMITS


class BlockOffloader:
    """``LedgerOffloader`` over a bucket."""

    def __init__(
        self,
        objects: ObjectStore,
        settings: Tier2Settings,
        *,
        cache: SharedCache | None = None,
        index_ttl_s: int = INDEX_TTL_S,
        offsets_bytes_max: int = BYTES_MAX,
    ) -> None:
        self._objects = objects
        self._settings = settings
        self._cache = cache
        self._index_ttl_s = index_ttl_s
        self._offsets = OffsetsCache(bytes_max=offsets_bytes_max)
        self.ranges = Ranges(objects, settings.ranges)

    def __repr__(self) -> str:
        return f"<BlockOffloader {self._settings.endpoint_name}/{self._settings.bucket}>"

    def location(self, ledger_id: LedgerId, uuid: UUID) -> Tier2Location:
        named = keys.object_keys(self._settings.key_prefix, uuid, ledger_id)
        return Tier2Location(
            driver=DRIVER,
            endpoint_name=self._settings.endpoint_name,
            bucket=self._settings.bucket,
            data_key=named.data,
            index_key=named.index,
            side_key=named.side,
        )

    async def offload(
        self, handle: ReadHandle, uuid: UUID, extra_metadata: Mapping[str, str]
    ) -> Tier2Copy:
        ledger_id, metadata = handle.ledger_id, handle.ledger_metadata
        check_offloadable(ledger_id, metadata)
        filler = BlockFiller(handle, block_size=block_size_of(ledger_id, metadata))
        location = self.location(ledger_id, uuid)
        entries, data_len = await self._write_data(filler, handle, location, extra_metadata)
        index = ObjectIndex(data_len=data_len, metadata=metadata, entries=entries)
        raw = index.encode()
        await self._objects.put(
            location.index_key,
            raw,
            metadata=self._user_metadata(ObjectRole.INDEX, handle, extra_metadata),
            content_type=keys.CONTENT_TYPE,
        )
        copy = Tier2Copy(
            format_version=current(Format.DATA_OBJECT),
            data_len=data_len,
            index_len=len(raw),
            index_sha256=hashlib.sha256(raw).digest(),
            entry_count=filler.entry_count,
            block_count=len(entries),
        )
        await verify_copy(self._objects, location, copy)
        return copy

    async def _write_data(
        self,
        filler: BlockFiller,
        handle: ReadHandle,
        location: Tier2Location,
        extra_metadata: Mapping[str, str],
    ) -> tuple[tuple[IndexEntry, ...], int]:
        """Upload the data object; return where its blocks begin, and its length."""
        key = location.data_key
        upload_id = await self._objects.create_upload(
            key,
            metadata=self._user_metadata(ObjectRole.DATA, handle, extra_metadata),
            content_type=keys.CONTENT_TYPE,
        )
        slots = asyncio.Semaphore(self._settings.parts_in_flight_max)
        sending: list[asyncio.Task[Part]] = []
        entries: list[IndexEntry] = []
        data_len = 0

        async def send(block: FilledBlock) -> Part:
            try:
                return await self._send(key, upload_id, block)
            finally:
                slots.release()

        with plain_errors():
            async with aclosing(filler.blocks()) as blocks, asyncio.TaskGroup() as group:
                while True:
                    # Before the block is read, so that it counts as one of those in memory.
                    await slots.acquire()
                    block = await anext(blocks, None)
                    if block is None:
                        break
                    if block.part_number > BLOCK_COUNT_MAX:
                        raise _too_many_blocks(handle.ledger_id)
                    entries.append(
                        IndexEntry(
                            first_entry_id=block.first_entry_id,
                            part_number=block.part_number,
                            offset=block.offset,
                        )
                    )
                    data_len = block.offset + block.length
                    sending.append(group.create_task(send(block)))
                    # The task alone holds the block now, and gives it up when it was sent.
                    del block
        await self._objects.complete_upload(key, upload_id, [task.result() for task in sending])
        return tuple(entries), data_len

    async def _send(self, key: str, upload_id: str, block: FilledBlock) -> Part:
        part = await self._objects.upload_part(
            key, upload_id, block.part_number, block.buffers, crc32c=block.crc32c
        )
        assert part.size == block.length
        log.debug("part.uploaded", key=key, part=block.part_number, length=block.length)
        if self._settings.part_delay_s:
            await asyncio.sleep(self._settings.part_delay_s)
        return part

    def _user_metadata(
        self, role: ObjectRole, handle: ReadHandle, extra_metadata: Mapping[str, str]
    ) -> dict[str, str]:
        stream = handle.ledger_metadata.custom.get(KEY_STREAM, b"").decode("ascii", "replace")
        own = keys.object_metadata(
            role,
            stream=StreamName(extra_metadata.get("ManagedLedgerName", stream)),
            cluster_id=self._settings.cluster_id,
            cluster_name=self._settings.cluster_name,
            software=self._settings.software,
        )
        # What is said here wins over what a caller says beside it.
        return {**{name.lower(): value for name, value in extra_metadata.items()}, **own}

    async def read_offloaded(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None = None,
        *,
        copy: Tier2Copy | None = None,
    ) -> Tier2Handle:
        location = self._here(ledger_id, uuid, driver_metadata)
        index = await load_index(
            self._objects, location, copy=copy, cache=self._cache, ttl_s=self._index_ttl_s
        )
        return Tier2Handle(ledger_id, location, index, ranges=self.ranges, offsets=self._offsets)

    async def verify(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None,
        copy: Tier2Copy,
    ) -> None:
        await verify_copy(self._objects, self._here(ledger_id, uuid, driver_metadata), copy)

    async def delete_offloaded(
        self, ledger_id: LedgerId, uuid: UUID, driver_metadata: Tier2Location | None = None
    ) -> None:
        location = self._here(ledger_id, uuid, driver_metadata)
        aborted = await delete_attempt(self._objects, location)
        log.info("attempt.cleaned", ledger_id=ledger_id, uuid=str(uuid), uploads_aborted=aborted)

    def _here(
        self, ledger_id: LedgerId, uuid: UUID, location: Tier2Location | None
    ) -> Tier2Location:
        """Return the attempt's location, or raise when it isn't in this bucket."""
        if location is None:
            return self.location(ledger_id, uuid)
        here = (self._settings.endpoint_name, self._settings.bucket)
        if location.driver not in DRIVERS or (location.endpoint_name, location.bucket) != here:
            raise RefusedError(
                f"ledger {ledger_id} lies in bucket {location.bucket} of endpoint "
                f"{location.endpoint_name} ({location.driver}), and this process has "
                f"{here[1]} of {here[0]}",
                remedy="Start a process whose s3 settings name that bucket and endpoint",
                details={"ledger_id": str(ledger_id), "bucket": location.bucket},
            )
        return location


def _too_many_blocks(ledger_id: LedgerId) -> RefusedError:
    return RefusedError(
        f"ledger {ledger_id} needs more than {BLOCK_COUNT_MAX} blocks, which S3 can't take",
        remedy="Roll ledgers earlier, or give the stream larger blocks",
        details={"ledger_id": str(ledger_id)},
    )
