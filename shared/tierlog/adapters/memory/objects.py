"""The objects port in memory: one bucket, any number of clients of it.

Owns objects and open uploads with S3's rules: parts of any order completed in order, a part
re-sent replaces itself, a CRC32C that the store checks, If-None-Match, listing in key order,
a completed upload that is completed again. And that of some stores, that uploads which have ended
are listed for a while.

A change whose answer is lost is a ``RetryableError``, as with S3: each change can be sent again
as it is (and whoever put with If-None-Match then finds an object, perhaps its own).
"""

import base64
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

import crc32c

from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.model.errors import CorruptError, IndeterminateError, RefusedError, RetryableError
from tierlog.ports.clock import Clock
from tierlog.ports.files import Buffer
from tierlog.ports.filling import Filling
from tierlog.ports.objects import (
    NoSuchUploadError,
    ObjectExistsError,
    ObjectInfo,
    OpenUpload,
    Part,
    check_length,
)
from tierlog.ports.spending import CostMeter

T = TypeVar("T")

LIST_PAGE = 1000

# What S3 calls each of them.
_OPERATIONS: Final[Mapping[str, str]] = {
    "put": "put_object",
    "head": "head_object",
    "get": "get_object",
    "get_range": "get_object",
    "delete": "delete_object",
    "list": "list_objects_v2",
    "create_upload": "create_multipart_upload",
    "upload_part": "upload_part",
    "complete_upload": "complete_multipart_upload",
    "abort_upload": "abort_multipart_upload",
    "list_uploads": "list_multipart_uploads",
}


@dataclass(slots=True)
class _Upload:
    key: str
    number: int
    initiated_ms: int
    metadata: Mapping[str, str]
    parts: dict[int, tuple[Part, bytes]] = field(default_factory=dict)


class MemoryObjects:
    """The bucket. ``connect`` gives clients; a test may look at ``objects`` and ``uploads``."""

    def __init__(
        self, clock: Clock, *, part_bytes_min: int = 0, uploads_linger_s: float = 0.0
    ) -> None:
        self._clock = clock
        self._uploads_linger_s = uploads_linger_s
        self._ended: dict[str, tuple[float, _Upload]] = {}
        self._part_bytes_min = part_bytes_min
        self.objects: dict[str, tuple[ObjectInfo, bytes]] = {}
        self.uploads: dict[str, _Upload] = {}
        self._upload_number = 0

    def __repr__(self) -> str:
        return f"MemoryObjects(objects={len(self.objects)}, open_uploads={len(self.uploads)})"

    def connect(
        self, faults: Faults | None = None, *, meter: CostMeter | None = None
    ) -> "MemoryObjectsClient":
        """Return a client that suffers ``faults``; ``meter`` counts what it asks."""
        return MemoryObjectsClient(self, faults or no_faults(), meter or CostMeter())

    def damage(self, key: str, offset: int) -> None:
        """Flip the bits of one byte of an object, as a disk might."""
        info, body = self.objects[key]
        damaged = bytearray(body)
        damaged[offset] ^= 0xFF
        self.objects[key] = (info, bytes(damaged))

    # What clients do, each at one instant.

    def put(
        self, key: str, body: bytes, metadata: Mapping[str, str], *, if_none_match: bool
    ) -> ObjectInfo:
        if if_none_match and key in self.objects:
            raise ObjectExistsError(f"object {key} exists already")
        return self._store(key, body, metadata, etag=f'"{crc32c.crc32c(body):08x}"')

    def create_upload(self, key: str, metadata: Mapping[str, str]) -> str:
        self._upload_number += 1
        upload_id = f"upload-{self._upload_number}"
        self.uploads[upload_id] = _Upload(
            key, self._upload_number, self._clock.wall_ms(), _lower(metadata)
        )
        return upload_id

    def upload_part(self, key: str, upload_id: str, number: int, body: bytes, crc: int) -> Part:
        assert 1 <= number <= 10_000, "S3 numbers parts from 1 to 10,000"
        upload = self._open(key, upload_id)
        if crc32c.crc32c(body) != crc:
            raise CorruptError(
                f"part {number} of {key} arrived damaged",
                remedy="Send it again",
                details={"object": key},
            )
        part = Part(number=number, etag=f'"{crc:08x}"', crc32c=crc, size=len(body))
        upload.parts[number] = (part, body)
        return part

    def complete_upload(self, key: str, upload_id: str, parts: Sequence[Part]) -> None:
        etag = _composite(parts)
        found = self.objects.get(key)
        if upload_id not in self.uploads and found is not None and found[0].etag == etag:
            return  # our own earlier success
        upload = self._open(key, upload_id)
        numbers = [part.number for part in parts]
        if not parts or numbers != sorted(set(numbers)):
            raise RefusedError(f"the parts of {key} are not in order: {numbers}")
        for part in parts:
            if part.number not in upload.parts or upload.parts[part.number][0] != part:
                raise RefusedError(f"part {part.number} of {key} is not what was uploaded")
        if any(part.size < self._part_bytes_min for part in parts[:-1]):
            raise RefusedError(f"a part of {key} is smaller than {self._part_bytes_min} bytes")
        body = b"".join(upload.parts[number][1] for number in numbers)
        self._end(upload_id)
        self._store(key, body, upload.metadata, etag=etag)

    def abort_upload(self, key: str, upload_id: str) -> None:
        if upload_id in self.uploads:
            self._open(key, upload_id)
            self._end(upload_id)

    def listed_uploads(self) -> dict[str, _Upload]:
        """Return the uploads that are open, and those that ended a moment ago."""
        now_s = self._clock.monotonic_s()
        self._ended = {key: one for key, one in self._ended.items() if one[0] > now_s}
        return {**self.uploads, **{key: one[1] for key, one in self._ended.items()}}

    def page(self, prefix: str, after: str) -> tuple[ObjectInfo, ...]:
        """Return the next objects by key, without their metadata, as a listing has them."""
        keys = sorted(k for k in self.objects if k.startswith(prefix) and k > after)
        return tuple(replace(self.objects[k][0], metadata={}) for k in keys[:LIST_PAGE])

    def _store(
        self, key: str, body: bytes, metadata: Mapping[str, str], *, etag: str
    ) -> ObjectInfo:
        info = ObjectInfo(
            key=key,
            size=len(body),
            etag=etag,
            metadata=_lower(metadata),
            modified_ms=self._clock.wall_ms(),
        )
        self.objects[key] = (info, body)
        return info

    def _end(self, upload_id: str) -> None:
        upload = self.uploads.pop(upload_id)
        if self._uploads_linger_s:
            upload.parts.clear()
            self._ended[upload_id] = (self._clock.monotonic_s() + self._uploads_linger_s, upload)

    def _open(self, key: str, upload_id: str) -> _Upload:
        upload = self.uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise NoSuchUploadError(f"upload {upload_id} of {key} is not open")
        return upload


class MemoryObjectsClient:
    """One client: the port."""

    def __init__(self, bucket: MemoryObjects, faults: Faults, meter: CostMeter) -> None:
        self._bucket = bucket
        self._meter = meter
        self.faults = faults

    async def put(
        self,
        key: str,
        body: bytes,
        *,
        metadata: Mapping[str, str],
        content_type: str = "application/octet-stream",
        if_none_match: bool = False,
    ) -> ObjectInfo:
        return await self._change(
            "put",
            lambda: self._bucket.put(key, bytes(body), metadata, if_none_match=if_none_match),
        )

    async def head(self, key: str) -> ObjectInfo | None:
        found = await self._read("head", lambda: self._bucket.objects.get(key))
        return None if found is None else found[0]

    async def get(
        self, key: str, *, bytes_max: int | None = None
    ) -> tuple[ObjectInfo, bytes] | None:
        found = await self._read("get", lambda: self._bucket.objects.get(key))
        if found is not None:
            check_length(key, len(found[1]), bytes_max)
        return found

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        assert start >= 0, start
        assert length > 0, length
        found = await self._read("get_range", lambda: self._bucket.objects.get(key))
        return None if found is None else found[1][start : start + length]

    async def get_range_into(
        self, key: str, start: int, targets: Sequence[memoryview]
    ) -> int | None:
        # Half of it is there when it fails, or is given up.
        torn, found = Filling(targets), self._bucket.objects.get(key)
        if found is not None:
            torn.add(found[1][start : start + torn.length // 2])
        body = await self.get_range(key, start, torn.length)
        if body is None:
            return None
        Filling(targets).add(body)
        return len(body)

    async def delete(self, key: str) -> None:
        await self._change("delete", lambda: self._bucket.objects.pop(key, None))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        after = ""
        while True:
            page = await self._read("list", partial(self._bucket.page, prefix, after))
            for info in page:
                yield info
            if len(page) < LIST_PAGE:
                return
            after = page[-1].key

    async def create_upload(
        self, key: str, *, metadata: Mapping[str, str], content_type: str
    ) -> str:
        return await self._change(
            "create_upload", lambda: self._bucket.create_upload(key, metadata)
        )

    async def upload_part(
        self, key: str, upload_id: str, number: int, body: Sequence[Buffer], *, crc32c: int
    ) -> Part:
        return await self._change(
            "upload_part",
            lambda: self._bucket.upload_part(key, upload_id, number, b"".join(body), crc32c),
        )

    async def complete_upload(self, key: str, upload_id: str, parts: Sequence[Part]) -> None:
        await self._change(
            "complete_upload",
            lambda: self._bucket.complete_upload(key, upload_id, list(parts)),
        )

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._change("abort_upload", lambda: self._bucket.abort_upload(key, upload_id))

    async def list_uploads(self, prefix: str = "") -> Sequence[OpenUpload]:
        uploads = await self._read("list_uploads", self._bucket.listed_uploads)
        return [
            OpenUpload(key=upload.key, upload_id=upload_id, initiated_ms=upload.initiated_ms)
            for upload_id, upload in sorted(
                uploads.items(), key=lambda item: (item[1].key, item[1].number)
            )
            if upload.key.startswith(prefix)
        ]

    async def _read(self, verb: str, effect: Callable[[], T]) -> T:
        self._meter.count(_OPERATIONS[verb])
        return await self.faults.call(f"objects.{verb}", effect, changes=False)

    async def _change(self, verb: str, effect: Callable[[], T]) -> T:
        self._meter.count(_OPERATIONS[verb])
        try:
            return await self.faults.call(f"objects.{verb}", effect, changes=True)
        except IndeterminateError as error:
            raise RetryableError(error.message, remedy="Send it again") from error


def _composite(parts: Sequence[Part]) -> str:
    joined = b"".join(part.crc32c.to_bytes(4, "big") for part in parts)
    return f'"{base64.b16encode(joined).decode().lower()}-{len(parts)}"'


def _lower(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key.lower(): value for key, value in metadata.items()}
