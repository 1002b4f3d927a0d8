"""The memory twins with a watcher: told of each change of metadata and bucket, as it happens.

What a watcher sees is the server's truth, at the instant after the change; it changes nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.ports.clock import Clock
from tierlog.ports.metadata import Versioned
from tierlog.ports.objects import ObjectInfo

T = TypeVar("T")

Changes = Mapping[str, Versioned | None]
"""Paths that one change touched, with what was there before."""


class Watcher(Protocol):
    """Who is told."""

    def metadata_changed(self, before: Changes) -> None:
        """Take note of a change of metadata; the server has what is there now."""

    def upload_begun(self, key: str) -> None:
        """Take note of a multipart upload."""

    def object_stored(self, key: str, before: bytes | None, body: bytes) -> None:
        """Take note of a new, or replaced, object."""

    def object_deleted(self, key: str) -> None:
        """Take note of an object that is gone."""


class WatchedMetadata(MemoryMetadata):
    """The metadata server."""

    def __init__(self, *, session_timeout_s: float = 6.0) -> None:
        super().__init__(session_timeout_s=session_timeout_s)
        self.watcher: Watcher | None = None
        self._touched: dict[str, Versioned | None] = {}

    def change(self, apply: Callable[[], T]) -> T:
        self._touched = {}
        result = super().change(apply)
        touched, self._touched = self._touched, {}
        if self.watcher is not None and touched:
            self.watcher.metadata_changed(touched)
        return result

    def create(self, path: str, data: bytes, **how: Any) -> str:
        made = super().create(path, data, **how)
        self._touched.setdefault(made, None)
        return made

    def put(self, path: str, data: bytes, version: int) -> int:
        before = self.get(path)
        made = super().put(path, data, version)
        self._touched.setdefault(path, before)
        return made

    def _delete(self, path: str, version: int) -> None:
        before = self.get(path)
        super()._delete(path, version)
        self._touched.setdefault(path, before)


class _WatchedObjects(dict[str, tuple[ObjectInfo, bytes]]):
    """The bucket's objects, whose removal is told."""

    def __init__(self, bucket: "WatchedBucket") -> None:
        super().__init__()
        self._bucket = bucket

    def pop(self, key: str, *default: Any) -> Any:
        found = key in self
        result = super().pop(key, *default)
        if found and self._bucket.watcher is not None:
            self._bucket.watcher.object_deleted(key)
        return result


class WatchedBucket(MemoryObjects):
    """The bucket."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.watcher: Watcher | None = None
        self.objects = _WatchedObjects(self)

    def create_upload(self, key: str, metadata: Mapping[str, str]) -> str:
        upload_id = super().create_upload(key, metadata)
        if self.watcher is not None:
            self.watcher.upload_begun(key)
        return upload_id

    def _store(
        self, key: str, body: bytes, metadata: Mapping[str, str], *, etag: str
    ) -> ObjectInfo:
        before = self.objects.get(key)
        info = super()._store(key, body, metadata, etag=etag)
        if self.watcher is not None:
            self.watcher.object_stored(key, before[1] if before else None, body)
        return info
