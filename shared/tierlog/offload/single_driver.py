"""The offloader of single objects in a bucket (seeds/001, "S3 Implementation of SegmentOffloader").

Owns the order of one attempt: blocks as parts from 2 on, then the index as part 1, which makes the
object. Does not own the layout (``tierlog.format.single``), nor how blocks become parts
(``tierlog.offload.uploading``).

Invariants:
    * The object appears whole or not at all, its index with it.
    * Returning means: it was verified after it was written, and no other upload of its key is
      open.
    * The context has a digest of the index without its padding, and one of all blocks.

Crash (leaks): one open upload, or the object, under the key that the metadata names;
``delete_offloaded`` takes it away.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from uuid import UUID

import structlog

from tierlog.format import keys
from tierlog.format.checksum import Buffer, crc32c
from tierlog.format.keys import ObjectRole
from tierlog.format.single import INDEX_LEN_MIN, INDEX_PART, SingleIndex, index_of
from tierlog.format.versions import Format, current
from tierlog.ledger.reader import ReadHandle
from tierlog.model.ids import LedgerId
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.offload.blocks import (
    BlockFiller,
    SingleObjectLayout,
    block_size_of,
    check_offloadable,
)
from tierlog.offload.budget import UploadBudget
from tierlog.offload.cleaning import delete_attempt
from tierlog.offload.driver import Tier2Settings, check_here, stream_of, user_metadata
from tierlog.offload.index_loader import INDEX_TTL_S
from tierlog.offload.offsets import BYTES_MAX, OffsetsCache
from tierlog.offload.patient_store import PatientStore
from tierlog.offload.ranges import Ranges
from tierlog.offload.single_reader import SingleHandle, load_single_index
from tierlog.offload.uploading import BlockUpload
from tierlog.offload.verify import verify_copy
from tierlog.ports.cache import SharedCache
from tierlog.ports.objects import ObjectStore
from tierlog.ports.retrying import Retries
from tierlog.ports.spending import Cause, spending

log = structlog.get_logger()
SINGLE_DRIVER: Final = "aws-s3-single-object"


class SingleObjectOffloader:
    """``LedgerOffloader`` over a bucket; ``index_len_min``: S3 takes no smaller part 1."""

    def __init__(
        self,
        objects: ObjectStore,
        settings: Tier2Settings,
        *,
        cache: SharedCache | None = None,
        index_ttl_s: int = INDEX_TTL_S,
        index_len_min: int = INDEX_LEN_MIN,
        offsets_bytes_max: int = BYTES_MAX,
        budget: UploadBudget | None = None,
        retries: Callable[[], Retries] | None = None,
    ) -> None:
        self._objects = objects
        self._settings = settings
        self._cache = cache
        self._index_ttl_s = index_ttl_s
        self._index_len_min = index_len_min
        self._offsets = OffsetsCache(bytes_max=offsets_bytes_max)
        self._budget = budget if budget is not None else UploadBudget()
        self._patient = PatientStore(objects, retries)
        self.ranges = Ranges(objects, settings.ranges)

    def __repr__(self) -> str:
        return f"<SingleObjectOffloader {self._settings.endpoint_name}/{self._settings.bucket}>"

    def location(self, ledger_id: LedgerId, uuid: UUID) -> Tier2Location:
        key = keys.object_keys(self._settings.key_prefix, uuid, ledger_id).single
        return Tier2Location(
            driver=SINGLE_DRIVER,
            endpoint_name=self._settings.endpoint_name,
            bucket=self._settings.bucket,
            data_key=key,
            index_key=key,
            side_key="",
        )

    async def offload(
        self, handle: ReadHandle, uuid: UUID, extra_metadata: Mapping[str, str]
    ) -> Tier2Copy:
        with spending(Cause.OFFLOAD, stream_of(handle, extra_metadata)):
            return await self._offload(handle, uuid, extra_metadata)

    async def _offload(
        self, handle: ReadHandle, uuid: UUID, extra_metadata: Mapping[str, str]
    ) -> Tier2Copy:
        ledger_id, metadata = handle.ledger_id, handle.ledger_metadata
        check_offloadable(ledger_id, metadata)
        settings, location = self._settings, self.location(ledger_id, uuid)
        filler = BlockFiller(
            handle, SingleObjectLayout(), block_size=block_size_of(ledger_id, metadata)
        )
        whole = hashlib.sha256()

        def took(buffers: Sequence[Buffer]) -> None:
            for buffer in buffers:
                whole.update(buffer)

        upload = BlockUpload(
            self._patient, self._budget, location.data_key, part_delay_s=settings.part_delay_s
        )
        await upload.begin(user_metadata(settings, ObjectRole.SINGLE, handle, extra_metadata))
        await upload.send(filler, took)
        index = index_of(
            metadata,
            [(one.first_entry_id, one.offset) for one in upload.blocks],
            blocks_len=upload.data_len,
            index_len_min=self._index_len_min,
        )
        raw = index.encode()
        await upload.complete(await upload.send_part(INDEX_PART, [raw], crc32c=crc32c(raw)))
        copy = _copy_of(index, filler.entry_count, whole.digest())
        with spending(Cause.VERIFY):
            await verify_copy(self._patient, location, copy)
        return copy

    async def read_offloaded(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None = None,
        *,
        copy: Tier2Copy | None = None,
    ) -> SingleHandle:
        location = self._here(ledger_id, uuid, driver_metadata)
        index = await load_single_index(
            self._objects, location, copy=copy, cache=self._cache, ttl_s=self._index_ttl_s
        )
        return SingleHandle(ledger_id, location, index, ranges=self.ranges, offsets=self._offsets)

    async def verify(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None,
        copy: Tier2Copy,
    ) -> None:
        location, read_back = self._here(ledger_id, uuid, driver_metadata), self._settings.read_back
        with spending(Cause.VERIFY):
            await verify_copy(self._objects, location, copy, read_back=read_back)

    async def delete_offloaded(
        self, ledger_id: LedgerId, uuid: UUID, driver_metadata: Tier2Location | None = None
    ) -> None:
        location = self._here(ledger_id, uuid, driver_metadata)
        with spending(Cause.SWEEP):
            aborted = await delete_attempt(self._objects, location)
        log.info("attempt.cleaned", ledger_id=ledger_id, uuid=str(uuid), uploads_aborted=aborted)

    def _here(
        self, ledger_id: LedgerId, uuid: UUID, location: Tier2Location | None
    ) -> Tier2Location:
        if location is None:
            return self.location(ledger_id, uuid)
        check_here(self._settings, {SINGLE_DRIVER}, ledger_id, location)
        return location


def _copy_of(index: SingleIndex, entry_count: int, data_sha256: bytes) -> Tier2Copy:
    return Tier2Copy(
        format_version=current(Format.SINGLE_OBJECT),
        data_len=index.object_len,
        index_len=index.index_len,
        index_sha256=hashlib.sha256(index.encode_used()).digest(),
        entry_count=entry_count,
        block_count=len(index.entries),
        data_sha256=data_sha256,
    )
