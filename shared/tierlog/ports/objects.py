"""The object store (S3): objects, ranged reads, multipart uploads.

Errors: ``RetryableError`` UNAVAILABLE (throttled, unreachable, 5xx after the adapter's own
bounded retries), ``RefusedError`` PERMISSION_DENIED and the like, ``CorruptError`` when the
store says that what arrived is not what was sent, or when an object is longer than ``bytes_max``,
``ObjectExistsError`` for If-None-Match.
A missing object is ``None`` or ``False``, never an error of another kind.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.scrub import REPAIR_COPY
from tierlog.ports.files import Buffer


class ObjectExistsError(RefusedError):
    """A conditional put found an object under its key."""


class NoSuchUploadError(RefusedError):
    """The multipart upload is not open (any more): completed, aborted or never begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object without its bytes. Metadata keys are lower-case."""

    key: str
    size: int
    etag: str
    metadata: Mapping[str, str]
    modified_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What an uploaded part is completed with. ``crc32c`` is checked by the store."""

    number: int
    etag: str
    crc32c: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenUpload:
    """A multipart upload that is neither completed nor aborted."""

    key: str
    upload_id: str
    initiated_ms: int


def check_length(key: str, size: int, bytes_max: int | None) -> None:
    """Raise ``CorruptError`` for an object that is longer than whoever gets it can use."""
    if bytes_max is not None and size > bytes_max:
        raise CorruptError(
            f"object {key} has {size} bytes, more than the {bytes_max} that it can have",
            remedy=REPAIR_COPY,
            details={"object": key, "offset": str(bytes_max)},
        )


class ObjectReads(Protocol):
    """Reads of one bucket's objects: all that the reader wants of a store."""

    async def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of an object, or None."""
        ...

    async def get(
        self, key: str, *, bytes_max: int | None = None
    ) -> tuple[ObjectInfo, bytes] | None:
        """Return a whole object (for small ones), or None.

        One longer than ``bytes_max`` is ``CorruptError``, and none of its bytes is waited for.
        """
        ...

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """Return exactly ``length`` bytes from ``start`` (fewer only at the object's end)."""
        ...

    async def get_range_into(
        self, key: str, start: int, targets: Sequence[memoryview]
    ) -> int | None:
        """Write the bytes from ``start`` on into ``targets``, back to back; return how many.

        As many as fit, fewer only at the object's end; None: there is no such object. What targets
        hold means something once this has returned, and nothing is written into them afterwards,
        however it ended.
        """
        ...


class ObjectStore(ObjectReads, Protocol):
    """One bucket."""

    async def put(
        self,
        key: str,
        body: bytes,
        *,
        metadata: Mapping[str, str],
        content_type: str = "application/octet-stream",
        if_none_match: bool = False,
    ) -> ObjectInfo:
        """Write a whole object, checked by the store against its CRC32C."""
        ...

    async def delete(self, key: str) -> None:
        """Delete an object; no error when there is none."""
        ...

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Iterate over objects in the order of keys; ``metadata`` is empty."""
        ...

    async def create_upload(
        self, key: str, *, metadata: Mapping[str, str], content_type: str
    ) -> str:
        """Begin a multipart upload and return its id."""
        ...

    async def upload_part(
        self, key: str, upload_id: str, number: int, body: Sequence[Buffer], *, crc32c: int
    ) -> Part:
        """Send one part (numbers from 1), its buffers back to back, without joining them."""
        ...

    async def complete_upload(self, key: str, upload_id: str, parts: Sequence[Part]) -> None:
        """Make the object of its parts. Recognises its own earlier success."""
        ...

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Give an upload up; no error when it is not open."""
        ...

    async def list_uploads(self, prefix: str = "") -> Sequence[OpenUpload]:
        """Return the open multipart uploads whose key begins with ``prefix``."""
        ...
