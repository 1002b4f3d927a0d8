"""What a worker process of Spark keeps from one task to the next.

A task of 64 MiB takes a fifth of a second, and so long does the S3 library take to open a client
and to learn an index. Spark gives a worker one task after the other, of the same read mostly.

Owns the loop on which batches are made, the bucket that was read last, and the last copy in it.

Invariants:
    * Only tasks keep anything: elsewhere all is closed behind each read.
    * What is kept is one bucket and one copy; they are used again only for the same settings,
      keys included, and only where no other read of this process is in them.
    * Nothing here outlives the process, whose end closes it.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any, Final

from pyspark import TaskContext

from tierlog.offload.tier2_reader import ObjectHandle
from tierlog.runtime.settings import S3Settings
from tierlog_spark.bucket import Bucket, opened
from tierlog_spark.planning import StoredLedger

Batches = AsyncGenerator[Any, None]


class _Kept(threading.local):
    """What this thread's tasks share; a loop belongs to the thread that runs it."""

    runner: asyncio.Runner | None = None
    wanted: tuple[S3Settings, int] | None = None
    bucket: Bucket | None = None
    copy: tuple[StoredLedger, ObjectHandle[Any]] | None = None
    in_use = False

    def __init__(self) -> None:
        self.closing = contextlib.AsyncExitStack()


_KEPT: Final = _Kept()


def in_steps(batches: Batches) -> Generator[Any]:
    """Iterate over batches on a loop that runs while one is waited for."""

    async def step() -> Any:  # noqa: ANN401 - pyarrow ships no types
        return await anext(batches, None)

    with _runner() as runner:
        try:
            while (batch := runner.run(step())) is not None:
                yield batch
        finally:
            runner.run(batches.aclose())


@contextlib.contextmanager
def _runner() -> Iterator[asyncio.Runner]:
    if TaskContext.get() is None:
        with asyncio.Runner() as runner:
            yield runner
        return
    if _KEPT.runner is None:
        _KEPT.runner = asyncio.Runner()
    yield _KEPT.runner


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
        bucket = await _kept_bucket((s3, fetch_bytes))
        if _KEPT.copy is None or _KEPT.copy[0] != ledger:
            _KEPT.copy = None
            _KEPT.copy = (ledger, await bucket.open(ledger))
        yield _KEPT.copy[1]
    finally:
        _KEPT.in_use = False


async def _kept_bucket(wanted: tuple[S3Settings, int]) -> Bucket:
    if _KEPT.bucket is not None and _KEPT.wanted == wanted:
        return _KEPT.bucket
    _KEPT.bucket = _KEPT.copy = None
    await _KEPT.closing.aclose()
    s3, fetch_bytes = wanted
    bucket = opened(s3, fetch_bytes=fetch_bytes)
    _KEPT.bucket = await _KEPT.closing.enter_async_context(bucket)
    _KEPT.wanted = wanted
    return _KEPT.bucket
