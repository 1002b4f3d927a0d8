"""The attribute index as objects in tier 2: written whole and once, read by ranges.

Owns how offsets of an index become objects and requests. Does not own pages (their checksums are
checked by who asks for them), nor which objects a record names.

Invariants:
    * An object is written with If-None-Match under a name that nobody else has; what is there
      under it is our own, and is compared.
    * What is read whole has the digest that its record, or its chunk's list, says.
    * Requests at once and lists in memory are bounded.
"""

import asyncio
import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final
from uuid import UUID

import structlog

from tierlog.format import attribute_objects as fmt
from tierlog.format import keys
from tierlog.model.attributes import Checkpoint, IndexChunk, IndexObject
from tierlog.model.errors import CorruptError
from tierlog.model.stream import Stream
from tierlog.ports.ids import Ids
from tierlog.ports.objects import ObjectExistsError, ObjectStore
from tierlog.ports.spending import spending_on

log = structlog.get_logger()

LISTS_MAX: Final = 64
"""Lists of chunks in memory: 512 objects each by default, about 150 KB."""
REMEDY: Final = (
    "Bring the object back from another copy of the bucket, see the how-to scrub-a-bucket; "
    "the attributes are also in the stream's entries"
)


class IndexObjectGoneError(CorruptError):
    """An object that a checkpoint needs is not there: swept since, or lost."""


class IndexObjects:
    """The attribute indexes below one key prefix of a bucket."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        cluster_id: UUID,
        ids: Ids,
        key_prefix: str = "",
        requests_in_flight_max: int = 16,
    ) -> None:
        self._objects = objects
        self._cluster_id = cluster_id
        self._ids = ids
        self._prefix = key_prefix
        self._slots = asyncio.Semaphore(requests_in_flight_max)
        self._lists: OrderedDict[str, tuple[IndexObject, ...]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<IndexObjects {self._prefix!r} of {self._cluster_id}>"

    def parse(self, key: str) -> fmt.AttributeObjectKey | None:
        """Return what the key of an object says; None: it is none of an index."""
        return fmt.parse_attribute_key(self._prefix, key)

    async def holder(self, checkpoint: Checkpoint, offset: int) -> IndexObject:
        """Return the object that holds a byte of a checkpoint's index."""
        objects: Sequence[IndexObject] = checkpoint.objects
        for chunk in checkpoint.chunks:
            if chunk.start <= offset < chunk.end:
                objects = await self.listed(chunk)
        at = bisect_right(objects, offset, key=lambda one: one.start) - 1
        if at < 0 or offset >= objects[at].end:
            raise CorruptError(
                f"no object of the attribute index holds byte {offset}",
                remedy=REMEDY,
                details={"offset": str(offset)},
            )
        return objects[at]

    async def listed(self, chunk: IndexChunk) -> tuple[IndexObject, ...]:
        """Return the objects of a closed chunk, checked."""
        kept = self._lists.get(chunk.key)
        if kept is not None:
            self._lists.move_to_end(chunk.key)
            return kept
        async with self._slots:
            with self._spending(chunk.key):
                found = await self._objects.get(chunk.key)
        if found is None:
            raise gone(chunk.key)
        raw = found[1]
        if hashlib.sha256(raw).digest() != chunk.sha256:
            raise _differs(chunk.key)
        listed = fmt.decode_list(raw, key=chunk.key)
        self._keep(chunk.key, listed)
        return listed

    def _spending(self, key: str) -> AbstractContextManager[None]:
        """Spend on the stream whose index is read: whoever asks names a checkpoint alone."""
        found = self.parse(key)
        return spending_on(found.stream) if found is not None else nullcontext()

    def _keep(self, key: str, listed: tuple[IndexObject, ...]) -> None:
        self._lists[key] = listed
        if len(self._lists) > LISTS_MAX:
            self._lists.popitem(last=False)

    async def read(self, one: IndexObject, offset: int, length: int) -> bytes:
        """Return bytes of the index that lie in one object."""
        async with self._slots:
            with self._spending(one.key):
                raw = await self._objects.get_range(one.key, offset - one.start, length)
        if raw is None:
            raise gone(one.key)
        if len(raw) != length:
            raise _differs(one.key, offset - one.start + len(raw))
        if length == one.length and hashlib.sha256(raw).digest() != one.sha256:
            raise _differs(one.key)
        return raw

    async def write(self, claimed: Stream, start: int, data: bytes) -> IndexObject:
        """Write one flush, whose bytes lie at ``start`` of the index."""
        folder = fmt.attributes_folder(self._prefix, claimed.name, claimed.incarnation)
        key = fmt.attribute_key(
            folder, start=start, owner_epoch=claimed.owner_epoch, suffix=self._ids.uuid()
        )
        await self._put(claimed, key, data, is_list=False)
        return IndexObject(
            key=key, start=start, length=len(data), sha256=hashlib.sha256(data).digest()
        )

    async def write_list(self, claimed: Stream, objects: Sequence[IndexObject]) -> IndexChunk:
        """Write what lists a chunk."""
        folder = fmt.attributes_folder(self._prefix, claimed.name, claimed.incarnation)
        start = objects[0].start
        key = fmt.list_key(
            folder, start=start, owner_epoch=claimed.owner_epoch, suffix=self._ids.uuid()
        )
        raw = fmt.encode_list(objects)
        await self._put(claimed, key, raw, is_list=True)
        self._keep(key, tuple(objects))
        return IndexChunk(
            key=key,
            sha256=hashlib.sha256(raw).digest(),
            start=start,
            end=objects[-1].end,
            object_count=len(objects),
        )

    async def _put(self, claimed: Stream, key: str, raw: bytes, *, is_list: bool) -> None:
        metadata = fmt.attribute_metadata(
            is_list=is_list, stream=claimed.name, cluster_id=self._cluster_id
        )
        try:
            async with self._slots:
                await self._objects.put(
                    key,
                    raw,
                    metadata=metadata,
                    content_type=keys.CONTENT_TYPE,
                    if_none_match=True,
                )
        except ObjectExistsError:
            # The answer of our own was lost: nobody else has this name.
            found = await self._objects.get(key)
            if found is None or found[1] != raw:
                raise _differs(key) from None
        log.info("attributes.written", stream=claimed.name, key=key, length=len(raw))


def gone(key: str) -> IndexObjectGoneError:
    """Say that an object of the index is not there."""
    return IndexObjectGoneError(
        f"object {key} of an attribute index is not there",
        remedy=REMEDY,
        details={"object": key, "offset": "0"},
    )


def _differs(key: str, offset: int = 0) -> CorruptError:
    return CorruptError(
        f"object {key} of an attribute index is not what was written",
        remedy=REMEDY,
        details={"object": key, "offset": str(offset)},
    )
