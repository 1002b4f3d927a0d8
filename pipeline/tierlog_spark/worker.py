"""What a worker process of Spark keeps from one task to the next, and who makes its batches.

A task of 64 MiB takes a fifth of a second, and so long does the S3 library take to open a client.
Spark gives a worker one task after the other, of the same bucket mostly.

Owns the thread on whose loop batches are made, one ahead of what Spark takes, and the client of
the bucket that was read last.

Invariants:
    * Only tasks keep anything: elsewhere all is closed behind each read.
    * A client is used again only for the same settings, keys included. Nothing that it read is
      kept: each task finds the bucket as it is by then.
    * At most one batch waits for Spark, while it is given another one.
    * Nothing here outlives the process, whose end closes it.
"""

import asyncio
import contextlib
import ctypes
import gc
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Iterator
from concurrent.futures import Future
from typing import Any, Final

from pyspark import TaskContext

from tierlog.offload.tier2_reader import ObjectHandle
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.settings import S3Settings
from tierlog_spark.bucket import Bucket, opened, opened_store
from tierlog_spark.planning import StoredLedger

Batches = AsyncGenerator[Any, None]

# Parameters of the C library's malloc, as its malloc.h has them.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_KEPT_BYTES: Final = 32 * 1024 * 1024
FREED_KEPT_BYTES: Final = 64 * 1024 * 1024
"""So much memory that was freed a worker keeps for what it fetches next."""


class _LoopThread:
    """A loop that runs on a thread of its own."""

    def __init__(self) -> None:
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=_run_loop, args=[started], daemon=True)
        self._thread.start()
        self._loop, self._over = started.result()

    def begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Do something on it, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End it, and what still runs on it."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


def _run_loop(started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    async def until_over() -> None:
        over = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), over))
        await over.wait()

    asyncio.run(until_over())


class _Kept:
    """What the tasks of a process share. Spark gives it one at a time."""

    def __init__(self) -> None:
        self.loop: _LoopThread | None = None
        self.s3: S3Settings | None = None
        self.store: ObjectStore | None = None
        self.in_use = False
        self.settled = False
        self.closing = contextlib.AsyncExitStack()


_KEPT: Final = _Kept()


def in_steps(batches: Batches) -> Generator[Any]:
    """Iterate over batches; the next is made while Spark takes the one before."""
    stepping: asyncio.Task[Any] | None = None

    async def step() -> Any:  # noqa: ANN401 - pyarrow ships no types
        nonlocal stepping
        stepping = asyncio.current_task()
        return await anext(batches, None)

    async def end() -> None:
        if stepping is not None and not stepping.done():
            stepping.cancel()
            await asyncio.wait({stepping})
        await batches.aclose()

    with _loop() as loop:
        ahead = loop.begin(step())
        try:
            while (batch := ahead.result()) is not None:
                ahead = loop.begin(step())
                yield batch
        finally:
            loop.begin(end()).result()


@contextlib.contextmanager
def _loop() -> Iterator[_LoopThread]:
    if TaskContext.get() is not None:
        if _KEPT.loop is None:
            keep_freed_memory()
            _KEPT.loop = _LoopThread()
        elif not _KEPT.settled:
            # Spark collects garbage behind each task, and would look at all modules each time; the
            # first task has brought them all.
            gc.freeze()
            _KEPT.settled = True
        yield _KEPT.loop
        return
    loop = _LoopThread()
    try:
        yield loop
    finally:
        loop.close()


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, up to a bound; nothing where it is another than GNU's.

    Each range is as large as one that was just let go. Given back to the system between, its pages
    come anew and empty: a fifth of what reading costs.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, FREED_KEPT_BYTES)


@contextlib.asynccontextmanager
async def opened_copy(
    ledger: StoredLedger, s3: S3Settings, *, fetch_bytes: int
) -> AsyncIterator[ObjectHandle[Any]]:
    """Give a ledger's copy in the bucket of the settings."""
    if TaskContext.get() is None or _KEPT.in_use:
        async with opened(s3, fetch_bytes=fetch_bytes) as bucket:
            yield await bucket.open(ledger)
        return
    _KEPT.in_use = True
    try:
        bucket = Bucket(await _kept_store(s3), s3, fetch_bytes=fetch_bytes)
        yield await bucket.open(ledger)
    finally:
        _KEPT.in_use = False


async def _kept_store(s3: S3Settings) -> ObjectStore:
    if _KEPT.store is not None and _KEPT.s3 == s3:
        return _KEPT.store
    _KEPT.store = None
    await _KEPT.closing.aclose()
    _KEPT.store = await _KEPT.closing.enter_async_context(opened_store(s3))
    _KEPT.s3 = s3
    return _KEPT.store
