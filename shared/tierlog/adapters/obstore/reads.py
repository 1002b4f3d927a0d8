"""Objects and ranges by obstore: less CPU for each byte than the SDK, and reading alone.

Owns how answers map to the port. Does not own when a request is sent again: the library does that,
within the settings' bounds.

Invariants:
    * Ranges are exactly what was asked for, or what is left before the object's end.
    * "There is no such object" is said only of a bucket that is there.
    * A request is given up when it takes longer than the settings allow for its length.

What it lacks beside the SDK: keys that were replaced are not read again while a process runs, and
tries that the library repeats count, and are timed, as one request.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

from obstore.exceptions import (
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.ports.clock import Clock
from tierlog.ports.filling import Filling
from tierlog.ports.objects import ObjectInfo
from tierlog.ports.spending import CostMeter
from tierlog.runtime.settings import S3Settings

T = TypeVar("T")

# Some of the library's errors are Python's own.
NOT_FOUND: Final = (NotFoundError, FileNotFoundError)
DENIED: Final = (PermissionDeniedError, PermissionError)
TROUBLE: Final = (BaseError, OSError)
OPERATION: Final = "get_object"
# Of a body so much at least is waited for before it is copied.
PIECE_BYTES_MIN: Final = 128 * 1024
# The library tells of these by their text alone.
_NO_BUCKET: Final = "NoSuchBucket"
_BEYOND_END: Final = ("416", "InvalidRange", "Range Not Satisfiable", "starts at")
_OWN_ATTRIBUTES: Final = frozenset(
    {"cache-control", "content-disposition", "content-encoding", "content-language"}
    | {"content-type", "storage-class"}
)


def open_obstore(settings: S3Settings, *, meter: CostMeter, clock: Clock) -> "ObstoreReads":
    """Return reads of the bucket of ``settings``; nothing is connected yet."""
    config: dict[str, Any] = {"region": settings.region}
    if settings.endpoint_url is not None:
        config["endpoint"] = settings.endpoint_url
        config["virtual_hosted_style_request"] = False
    if settings.access_key is not None and settings.secret_key is not None:
        config["access_key_id"] = settings.access_key
        config["secret_access_key"] = settings.secret_key.get_secret_value()
    store = S3Store(
        settings.bucket,
        config=config,
        client_options={
            "allow_http": (settings.endpoint_url or "").startswith("http://"),
            "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
            "timeout": timedelta(seconds=settings.request_s_max),
        },
        retry_config={
            "max_retries": settings.attempts_max - 1,
            "retry_timeout": timedelta(seconds=settings.retry_s_max),
            "backoff": {
                "init_backoff": timedelta(seconds=settings.retry_wait_s_first),
                "max_backoff": timedelta(seconds=settings.retry_wait_s_max),
                "base": 2,
            },
        },
    )
    return ObstoreReads(store, settings, meter=meter, clock=clock)


class ObstoreReads:
    """The port ``ObjectReads`` over a store of obstore."""

    def __init__(
        self, store: S3Store, settings: S3Settings, *, meter: CostMeter, clock: Clock
    ) -> None:
        self._store = store
        self._settings = settings
        self._meter = meter
        self._clock = clock

    def __repr__(self) -> str:
        return f"ObstoreReads(bucket={self._settings.bucket!r})"

    async def head(self, key: str) -> ObjectInfo | None:
        """See ``ObjectReads``."""
        try:
            asked = self._store.get_async(key, options={"head": True})
            with self._timed("head_object"):
                answer = await self._sent(asked, 0, operation="head_object")
        except NOT_FOUND as error:
            self._check_bucket(error, key)
            # An answer to HEAD has no body that could say which of the two is missing.
            await self.get_range(key, 0, 1)
            return None
        except TROUBLE as error:
            raise self._mapped(error, key) from error
        return _info(key, answer)

    async def get(self, key: str) -> tuple[ObjectInfo, bytes] | None:
        """See ``ObjectReads``."""
        try:
            with self._timed(OPERATION):
                answer = await self._sent(self._store.get_async(key), 0)
                length = int(answer.meta["size"])
                body = bytes(await self._sent(answer.bytes_async(), length, requests=0))
        except NOT_FOUND as error:
            self._check_bucket(error, key)
            return None
        except TROUBLE as error:
            raise self._mapped(error, key) from error
        self._meter.count(OPERATION, requests=0, received=len(body))
        return _info(key, answer), body

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """See ``ObjectReads``."""
        assert start >= 0, start
        assert length > 0, length
        asked = self._store.get_range_async(key, start=start, length=length)
        try:
            with self._timed(OPERATION):
                body = bytes(await self._sent(asked, length))
        except NOT_FOUND as error:
            self._check_bucket(error, key)
            return None
        except TROUBLE as error:
            if any(told in str(error) for told in _BEYOND_END):
                return b""
            raise self._mapped(error, key) from error
        self._meter.count(OPERATION, requests=0, received=len(body))
        return body

    async def get_range_into(
        self, key: str, start: int, targets: Sequence[memoryview]
    ) -> int | None:
        """See ``ObjectReads``."""
        filling = Filling(targets)
        assert start >= 0, start
        assert filling.length > 0, filling
        asked = self._store.get_async(key, options={"range": (start, start + filling.length)})
        try:
            with self._timed(OPERATION):
                answer = await self._sent(asked, filling.length)
                expected = min(filling.length, int(answer.meta["size"]) - start)
                body = self._fill(filling, answer, expected, key)
                await self._sent(body, filling.length, requests=0)
        except NOT_FOUND as error:
            self._check_bucket(error, key)
            return None
        except TROUBLE as error:
            if any(told in str(error) for told in _BEYOND_END):
                return 0
            raise self._mapped(error, key) from error
        finally:
            self._meter.count(OPERATION, requests=0, received=filling.filled)
        return filling.filled

    async def _fill(
        self,
        filling: Filling,
        answer: Any,  # noqa: ANN401 - the library's own
        expected: int,
        key: str,
    ) -> None:
        """Take a body piece by piece, which are copied: the library never sees the targets."""
        came = 0
        async for piece in answer.stream(min_chunk_size=PIECE_BYTES_MIN):
            came += len(piece)
            if came > expected:
                break
            filling.add(memoryview(piece))
        if came != expected:
            raise RetryableError(
                f"get {self._settings.bucket}/{key}: {came} bytes arrived of {expected}",
                remedy="Check that the object store is reachable and healthy; it is tried again",
                details={"bucket": self._settings.bucket, "object": key},
            )

    @contextlib.contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        """Count how long a request took, its body with it, and how it ended."""
        begun_s, code = self._clock.monotonic_s(), "cancelled"
        try:
            yield
            code = "ok"
        except (*TROUBLE, TierlogError) as error:
            late = isinstance(error.__cause__, TimeoutError)
            code = "timeout" if late else type(error).__name__
            raise
        finally:
            took_s = self._clock.monotonic_s() - begun_s
            self._meter.answered(operation, code=code, took_s=took_s)

    async def _sent(
        self, asked: Awaitable[T], length: int, *, requests: int = 1, operation: str = OPERATION
    ) -> T:
        self._meter.count(operation, requests=requests)
        try:
            async with asyncio.timeout(self._settings.longest_request_s(length)):
                return await asked
        except TimeoutError as error:
            raise RetryableError(
                f"bucket {self._settings.bucket} did not answer in time",
                remedy="Check that the object store is reachable and healthy; it is tried again",
                details={"bucket": self._settings.bucket},
            ) from error

    def _check_bucket(self, error: Exception, key: str) -> None:
        if _NO_BUCKET in str(error):
            raise RefusedError(
                f"get {self._settings.bucket}/{key}: there is no such bucket",
                remedy="Create the bucket, or correct s3.bucket in the settings",
                details={"bucket": self._settings.bucket},
            ) from error

    def _mapped(self, error: Exception, key: str) -> TierlogError:
        message = f"get {self._settings.bucket}/{key}: {str(error).splitlines()[0][:300]}"
        details = {"bucket": self._settings.bucket, "object": key}
        if isinstance(error, (*DENIED, UnauthenticatedError)):
            denied = isinstance(error, DENIED)
            return RefusedError(
                message,
                reason=Reason.PERMISSION_DENIED if denied else Reason.UNAUTHENTICATED,
                remedy="Check s3.endpoint_url, s3.bucket and the keys in the settings",
                details=details,
            )
        return RetryableError(
            message,
            remedy="Check that the object store is reachable and healthy; it is tried again",
            details=details,
        )


def _info(key: str, answer: Any) -> ObjectInfo:  # noqa: ANN401 - the library's own
    meta = answer.meta
    return ObjectInfo(
        key=key,
        size=int(meta["size"]),
        etag=str(meta.get("e_tag") or ""),
        metadata=_metadata_of(answer.attributes),
        modified_ms=int(meta["last_modified"].timestamp() * 1000),
    )


def _metadata_of(attributes: Mapping[str, str]) -> dict[str, str]:
    """Return what whoever put an object said of it, without what every object has."""
    named = {name.lower(): str(value) for name, value in attributes.items()}
    return {name: value for name, value in named.items() if name not in _OWN_ATTRIBUTES}
