"""An object store that is asked again for as long as its caller is patient.

For uploads: what an attempt that fails throws away is gigabytes. The store's own adapter has its
short retries; these come on top of them.

Invariant: only what is ``RetryableError`` is sent again, each request by itself, as it was.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TypeVar

import structlog

from tierlog.model.errors import RetryableError
from tierlog.ports.files import Buffer
from tierlog.ports.objects import ObjectInfo, ObjectStore, OpenUpload, Part
from tierlog.ports.retrying import Retries

log = structlog.get_logger()

Answer = TypeVar("Answer")
Around = Callable[[], AbstractAsyncContextManager[None]]


class PatientStore:
    """The port ``ObjectStore`` over another one."""

    def __init__(self, store: ObjectStore, retries: Callable[[], Retries] | None) -> None:
        """Take what makes the retries of one request; None: there are none."""
        self._store = store
        self._retries = retries

    def __repr__(self) -> str:
        return f"PatientStore({self._store!r})"

    async def _patiently(
        self, once: Callable[[], Awaitable[Answer]], *, around_waits: Around = nullcontext
    ) -> Answer:
        if self._retries is None:
            return await once()
        retries = self._retries()
        while True:
            try:
                return await once()
            except RetryableError as error:
                wait_s = retries.wait_s(error.retry_after_s)
                if wait_s is None:
                    raise
                log.info("request.again", wait_s=round(wait_s, 3), cause=str(error))
                async with around_waits():
                    await asyncio.sleep(wait_s)

    async def put(
        self,
        key: str,
        body: bytes,
        *,
        metadata: Mapping[str, str],
        content_type: str = "application/octet-stream",
        if_none_match: bool = False,
    ) -> ObjectInfo:
        once = partial(
            self._store.put,
            key,
            body,
            metadata=metadata,
            content_type=content_type,
            if_none_match=if_none_match,
        )
        # Sent again here, it would meet its own success and take it for somebody else's.
        return await once() if if_none_match else await self._patiently(once)

    async def head(self, key: str) -> ObjectInfo | None:
        return await self._patiently(partial(self._store.head, key))

    async def get(
        self, key: str, *, bytes_max: int | None = None
    ) -> tuple[ObjectInfo, bytes] | None:
        return await self._patiently(partial(self._store.get, key, bytes_max=bytes_max))

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        return await self._patiently(partial(self._store.get_range, key, start, length))

    async def get_range_into(
        self, key: str, start: int, targets: Sequence[memoryview]
    ) -> int | None:
        return await self._patiently(partial(self._store.get_range_into, key, start, targets))

    async def delete(self, key: str) -> None:
        await self._patiently(partial(self._store.delete, key))

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        return self._store.list(prefix)

    async def create_upload(
        self, key: str, *, metadata: Mapping[str, str], content_type: str
    ) -> str:
        return await self._patiently(
            partial(self._store.create_upload, key, metadata=metadata, content_type=content_type)
        )

    async def upload_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        body: Sequence[Buffer],
        *,
        crc32c: int,
        around_waits: Around = nullcontext,
    ) -> Part:
        """Upload a part; each wait for another try happens within ``around_waits``."""
        return await self._patiently(
            partial(self._store.upload_part, key, upload_id, number, body, crc32c=crc32c),
            around_waits=around_waits,
        )

    async def complete_upload(self, key: str, upload_id: str, parts: Sequence[Part]) -> None:
        await self._patiently(partial(self._store.complete_upload, key, upload_id, parts))

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._patiently(partial(self._store.abort_upload, key, upload_id))

    async def list_uploads(self, prefix: str = "") -> Sequence[OpenUpload]:
        return await self._patiently(partial(self._store.list_uploads, prefix))
