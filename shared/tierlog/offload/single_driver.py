"""The offloader of single objects in a bucket (seeds/001, "S3 Implementation of SegmentOffloader").

Owns the order of one attempt: blocks as parts from 2 on, then the index as part 1, which makes the
object. Does not own the layout (``tierlog.format.single``), nor how blocks become parts
(``tierlog.offload.uploading``).

Invariants:
    * The object appears whole or not at all, its index with it.
    * Returning means: it was verified after it was written, and no other upload of its key is
      open.
    * The context has a digest of the index without its padding, and, whatever is wanted, one of all
      blocks: nothing else vouches for them.

Crash (leaks): one open upload, or the object, under the key that the metadata names;
``delete_offloaded`` takes it away.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, Unpack
from uuid import UUID

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
from tierlog.offload.driver import BucketOffloader, Tier2Settings, Tuning, user_metadata
from tierlog.offload.single_reader import SingleHandle, load_single_index
from tierlog.offload.verify import verify_copy
from tierlog.ports.objects import ObjectStore
from tierlog.ports.spending import Cause, spending
from tierlog.ports.tracing import within

SINGLE_DRIVER: Final = "aws-s3-single-object"


class SingleObjectOffloader(BucketOffloader):
    """``LedgerOffloader`` over a bucket; ``index_len_min``: S3 takes no smaller part 1."""

    NAMES = (SINGLE_DRIVER,)

    def __init__(
        self,
        objects: ObjectStore,
        settings: Tier2Settings,
        *,
        index_len_min: int = INDEX_LEN_MIN,
        **tuning: Unpack[Tuning],
    ) -> None:
        super().__init__(objects, settings, **tuning)
        self._index_len_min = index_len_min

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

    async def _offload(
        self,
        handle: ReadHandle,
        uuid: UUID,
        extra_metadata: Mapping[str, str],
        *,
        data_sha256: bool,
    ) -> Tier2Copy:
        ledger_id, metadata = handle.ledger_id, handle.ledger_metadata
        check_offloadable(ledger_id, metadata, SingleObjectLayout())
        settings, location = self._settings, self.location(ledger_id, uuid)
        filler = BlockFiller(
            handle, SingleObjectLayout(), block_size=block_size_of(ledger_id, metadata)
        )
        whole = hashlib.sha256()

        def took(buffers: Sequence[Buffer]) -> None:
            for buffer in buffers:
                whole.update(buffer)

        upload = self._upload(location)
        await upload.begin(user_metadata(settings, ObjectRole.SINGLE, handle, extra_metadata))
        await upload.send(filler, took)
        index = index_of(
            metadata,
            [(one.first_entry_id, one.offset) for one in upload.blocks],
            blocks_len=upload.data_len,
            index_len_min=self._index_len_min,
        )
        raw = index.encode()
        await upload.complete(await upload.send_beside(INDEX_PART, [raw], crc32c=crc32c(raw)))
        copy = _copy_of(index, filler.entry_count, whole.digest())
        with spending(Cause.VERIFY), within("offload.verify"):
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
