"""Objects and ranges by obstore: less CPU for each byte than the SDK, and reading alone.

Owns how answers map to the port, and when a request is sent again, its body with it: the library,
which would not ask again for a body that breaks, sends each once.

Invariants:
    * Ranges are exactly what was asked for, or what is left before the object's end: a body that
      is shorter or longer is asked for again.
    * A request is sent again exactly when its error is ``RetryableError``, within the settings'
      bounds, after capped exponential back-off with full jitter. Each try is counted and timed.
    * "There is no such object" is said only where the store says so.
    * A request is given up when it takes longer than the settings allow for its length.
    * Each try waits for ``pace`` before it is begun: the SDK's requests beside it wait for it too.

What it lacks beside the SDK: keys that were replaced are not read again while a process runs, and
what a store asks for by Retry-After is not known.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
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
from tierlog.ports.filling import Filling, length_of
from tierlog.ports.ids import Ids
from tierlog.ports.objects import ObjectInfo, check_length
from tierlog.ports.retrying import Retries, RetryLimits
from tierlog.ports.spending import CostMeter
from tierlog.ports.throttle import TokenBucket, requests_pace
from tierlog.runtime.settings import S3Settings

T = TypeVar("T")

# Some of the library's errors are Python's own.
NOT_FOUND: Final = (NotFoundError, FileNotFoundError)
DENIED: Final = (PermissionDeniedError, PermissionError)
TROUBLE: Final = (BaseError, OSError)
OPERATION: Final = "get_object"
# Of a body so much at least is waited for before it is copied.
PIECE_BYTES_MIN: Final = 128 * 1024
# The longest object that a store takes.
OBJECT_BYTES_MAX: Final = 5 * 1024**4
# The library tells of these by its error's text alone, which names the object, too.
_NO_BUCKET: Final = "NoSuchBucket"
_NO_KEY: Final = "NoSuchKey"
_STATUS: Final = re.compile(r"status code: (\d{3})\b", re.ASCII)
_CODE: Final = re.compile(r"<Code>(\w+)</Code>", re.ASCII)
_BEYOND_END: Final = 416
_TOO_MANY: Final = 429
# 4xx that a later try may pass.
_SEND_AGAIN: Final = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
    | {"OperationAborted", "RequestTimeout", "RequestTimeTooSkewed"}
)
_OWN_ATTRIBUTES: Final = frozenset(
    {"cache-control", "content-disposition", "content-encoding", "content-language"}
    | {"content-type", "storage-class"}
)


def open_obstore(
    settings: S3Settings,
    *,
    meter: CostMeter,
    clock: Clock,
    ids: Ids,
    pace: TokenBucket | None = None,
) -> "ObstoreReads":
    """Return reads of the bucket of ``settings``; nothing is connected yet. ``pace``: see S3's."""
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
            # Of any body, however long; what each may take, by its length, is watched here.
            "timeout": timedelta(seconds=settings.longest_request_s(OBJECT_BYTES_MAX)),
        },
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=settings.retry_s_max)},
    )
    return ObstoreReads(store, settings, meter=meter, clock=clock, ids=ids, pace=pace)


class ObstoreReads:
    """The port ``ObjectReads`` over a store of obstore."""

    def __init__(
        self,
        store: S3Store,
        settings: S3Settings,
        *,
        meter: CostMeter,
        clock: Clock,
        ids: Ids,
        pace: TokenBucket | None = None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._meter = meter
        self._clock = clock
        self._ids = ids
        self._pace = pace or requests_pace(clock, per_s_max=settings.requests_per_s_max)
        self._limits = RetryLimits(
            tries_max=settings.attempts_max,
            time_s_max=settings.retry_s_max,
            wait_s_first=settings.retry_wait_s_first,
            wait_s_max=settings.retry_wait_s_max,
        )

    def __repr__(self) -> str:
        return f"ObstoreReads(bucket={self._settings.bucket!r})"

    async def head(self, key: str) -> ObjectInfo | None:
        """See ``ObjectReads``."""

        async def once() -> ObjectInfo:
            asked = self._store.get_async(key, options={"head": True})
            with self._timed("head_object"):
                return _info(key, await self._sent(asked, 0, operation="head_object"))

        found = await self._tried(key, once, says_what=False)
        # An answer to HEAD has no body that could say what is missing, if the store said it.
        if found is None and await self.get_range(key, 0, 1) is not None:
            raise RetryableError(
                f"head {self._settings.bucket}/{key}: 404, and the object is there",
                remedy="Check what stands between Tierlog and the object store; it is tried again",
                details={"bucket": self._settings.bucket, "object": key},
            )
        return found

    async def get(
        self, key: str, *, bytes_max: int | None = None
    ) -> tuple[ObjectInfo, bytes] | None:
        """See ``ObjectReads``."""

        async def once() -> tuple[ObjectInfo, bytes]:
            with self._timed(OPERATION):
                answer = await self._sent(self._store.get_async(key), 0)
                length = int(answer.meta["size"])
                check_length(key, length, bytes_max)
                body = bytes(await self._sent(answer.bytes_async(), length, requests=0))
            self._meter.count(OPERATION, requests=0, received=len(body))
            return _info(key, answer), body

        return await self._tried(key, once)

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """See ``ObjectReads``."""
        body = memoryview(bytearray(length))
        found = await self.get_range_into(key, start, [body])
        return None if found is None else bytes(body[:found])

    async def get_range_into(
        self, key: str, start: int, targets: Sequence[memoryview]
    ) -> int | None:
        """See ``ObjectReads``."""
        length = length_of(targets)
        assert start >= 0, start
        assert length > 0, targets

        async def once() -> int:
            # Each try begins with the first byte: what one before it wrote is overwritten.
            filling = Filling(targets)
            asked = self._store.get_async(key, options={"range": (start, start + length)})
            try:
                with self._timed(OPERATION):
                    answer = await self._sent(asked, length)
                    expected = min(length, int(answer.meta["size"]) - start)
                    body = self._fill(filling, answer, expected, key)
                    await self._sent(body, length, requests=0)
            finally:
                self._meter.count(OPERATION, requests=0, received=filling.filled)
            return filling.filled

        return await self._tried(key, once, beyond_end=0)

    async def _tried(
        self,
        key: str,
        once: Callable[[], Awaitable[T]],
        *,
        beyond_end: T | None = None,
        says_what: bool = True,
    ) -> T | None:
        """Return what ``once`` does, tried again where that may help; None: no such object.

        ``says_what``: the store says that it is the object that is not there, or it is not known.
        """
        retries = Retries(self._limits, clock=self._clock, ids=self._ids)
        while True:
            # Before it is asked for: the library sends at once, awaited or not.
            if self._pace is not None:
                await self._pace.take(1)
            try:
                return await once()
            except RetryableError:
                wait_s = retries.wait_s()
                if wait_s is None:
                    raise
            except TROUBLE as error:
                if self._is_missing(error, key, says_what=says_what):
                    return None
                if _status_of(error) == _BEYOND_END:
                    return beyond_end
                mapped = self._mapped(error, key)
                wait_s = retries.wait_s() if isinstance(mapped, RetryableError) else None
                if wait_s is None:
                    raise mapped from error
            await asyncio.sleep(wait_s)

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

    def _is_missing(self, error: Exception, key: str, *, says_what: bool) -> bool:
        """Tell whether it is the object that is not there; refuse where it is the bucket."""
        if not isinstance(error, NOT_FOUND):
            return False
        self._check_bucket(error, key)
        return not says_what or _NO_KEY in str(error)

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
        if _is_for_good(error):
            reason = Reason.PERMISSION_DENIED if isinstance(error, DENIED) else None
            if isinstance(error, UnauthenticatedError):
                reason = Reason.UNAUTHENTICATED
            return RefusedError(
                message,
                reason=reason,
                remedy="Check s3.endpoint_url, s3.bucket and the keys in the settings",
                details=details,
            )
        return RetryableError(
            message,
            remedy="Check that the object store is reachable and healthy; it is tried again",
            details=details,
        )


def _status_of(error: Exception) -> int:
    """Return the status of an answer that became an error; 0: there was none."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match is not None else 0


def _is_for_good(error: Exception) -> bool:
    """Say whether the store refused a request that it will refuse again."""
    if isinstance(error, NOT_FOUND):
        return False  # what is not there it does not say, as a balancer without a store behind it
    # An answer to HEAD has no body that could name its code: it may be one of those that pass.
    match = _CODE.search(str(error))
    if match is None:
        return isinstance(error, (*DENIED, UnauthenticatedError))
    status = _status_of(error)
    return 400 <= status < 500 and status != _TOO_MANY and match[1] not in _SEND_AGAIN


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
