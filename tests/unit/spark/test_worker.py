"""What a worker of Spark keeps between its tasks, and for whom.

Real clients of the S3 library are opened, and nothing is asked of them: which copies a bucket
has is shown where the servers are (tests/integration/test_spark_direct.py).
"""

import asyncio
import contextlib
import gc
import platform
import resource
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from pydantic import SecretStr
from pyspark import TaskContext

from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import Tier2Location
from tierlog.runtime.settings import S3Settings
from tierlog_spark import worker
from tierlog_spark.bucket import Bucket
from tierlog_spark.planning import StoredLedger
from tierlog_spark.worker import in_steps, opened_copy

S3 = S3Settings(
    endpoint_url="http://127.0.0.1:1",
    bucket="b",
    access_key="a",
    secret_key=SecretStr("one secret"),
)
Read = Callable[..., list[Any]]


def ledger(number: int) -> StoredLedger:
    location = Tier2Location(
        driver="aws-s3",
        endpoint_name="",
        bucket="b",
        data_key=f"{number}",
        index_key="",
        side_key="",
    )
    return StoredLedger(
        stream=StreamName("s"),
        raw=True,
        ledger_id=LedgerId(number),
        uuid=UUID(int=number),
        location=location,
        copy=None,
    )


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What is kept, empty at first, and closed behind the test."""
    found = worker._Kept()
    monkeypatch.setattr(worker, "_KEPT", found)
    # This process is no worker of Spark.
    monkeypatch.setattr(worker, "keep_freed_memory", lambda: None)
    # Not the heap of all other tests.
    monkeypatch.setattr(gc, "freeze", lambda: None)
    yield found
    if found.loop is not None:
        found.loop.begin(found.closing.aclose()).result()
        found.loop.close()


@pytest.fixture
def in_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TaskContext, "_taskContext", object.__new__(TaskContext))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, kept: Any) -> Read:
    """Read a ledger, and return what it was read from: the bucket, and the copy."""
    del kept

    async def opened(self: Bucket, found: StoredLedger) -> tuple[Bucket, StoredLedger, object]:
        return self, found, object()

    monkeypatch.setattr(Bucket, "open", opened)

    def one(number: int, s3: S3Settings = S3, *, fails: bool = False) -> list[Any]:
        async def batches() -> AsyncGenerator[Any, None]:
            async with opened_copy(ledger(number), s3, fetch_bytes=4096) as copy:
                yield copy
                if fails:
                    raise OSError("in the middle")

        return list(in_steps(batches()))

    return one


@pytest.mark.usefixtures("in_task")
def test_tasks_share_a_client_and_nothing_that_was_read(read: Read) -> None:
    (first,), (again,), (other,) = read(1), read(1), read(2)
    assert first[0].objects is again[0].objects is other[0].objects
    assert first[0] is not again[0]
    assert [one[1] for one in (first, again, other)] == [ledger(1), ledger(1), ledger(2)]


@pytest.mark.usefixtures("in_task")
def test_what_the_first_task_brought_is_looked_at_for_garbage_no_more(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark collects garbage behind each task: all modules, a tenth of what a task takes."""
    frozen: list[int] = []
    tasks: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(len(tasks)))
    for number in (1, 2, 3):
        tasks.append(number)
        read(number)
    assert frozen == [2]


@pytest.mark.usefixtures("in_task")
def test_other_keys_are_another_client_and_close_the_one_before(read: Read, kept: Any) -> None:
    (first,) = read(1)
    client = first[0].objects._requests._client
    (second,) = read(1, S3.model_copy(update={"secret_key": SecretStr("another")}))
    assert second[0].objects is not first[0].objects
    assert client._endpoint.http_session._sessions == {}
    assert kept.store is second[0].objects


@pytest.mark.usefixtures("in_task")
def test_two_at_once_do_not_share(read: Read) -> None:
    async def batches() -> AsyncGenerator[Any, None]:
        async with opened_copy(ledger(1), S3, fetch_bytes=4096) as copy:
            yield copy

    first = in_steps(batches())
    with contextlib.closing(first):
        (second,) = read(1, S3.model_copy(update={"secret_key": SecretStr("another")}))
        assert next(first)[0].objects is not second[0].objects
    # The first of them kept what it had.
    assert read(1)[0][0].objects is not second[0].objects


@pytest.mark.usefixtures("in_task")
def test_a_task_that_fails_leaves_the_client_to_the_next(read: Read) -> None:
    (first,) = read(1)
    with pytest.raises(OSError, match="in the middle"):
        read(2, fails=True)
    assert read(3)[0][0].objects is first[0].objects


def test_outside_of_tasks_nothing_is_kept(read: Read, kept: Any) -> None:
    assert read(1)[0][0].objects is not read(1)[0][0].objects
    assert kept.loop is None
    assert kept.store is None


def test_the_next_batch_is_made_while_one_is_taken() -> None:
    made, second = [0], threading.Event()

    async def batches() -> AsyncGenerator[int, None]:
        for number in range(4):
            made[0] = number
            if number == 1:
                second.set()
            yield number

    steps = in_steps(batches())
    assert next(steps) == 0
    assert second.wait(10)
    # And no further one before that is asked for.
    time.sleep(0.05)
    assert made == [1]
    assert list(steps) == [1, 2, 3]


def test_who_takes_no_more_ends_what_is_under_way() -> None:
    ended: list[str] = []

    async def batches() -> AsyncGenerator[int, None]:
        try:
            yield 0
            await asyncio.sleep(60)
            yield 1
        except asyncio.CancelledError:
            ended.append("in the middle")
            raise
        finally:
            ended.append("closed")

    steps = in_steps(batches())
    assert next(steps) == 0
    steps.close()
    assert ended == ["in the middle", "closed"]


def test_an_error_comes_behind_the_batches_before_it() -> None:
    async def batches() -> AsyncGenerator[int, None]:
        yield 0
        raise OSError("in the middle")

    steps = in_steps(batches())
    assert next(steps) == 0
    with pytest.raises(OSError, match="in the middle"):
        next(steps)


COUNTED_PAGES = """
import resource
from tierlog_spark.worker import keep_freed_memory
if {kept}:
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def ranges():
    before = faults()
    for _ in range(20):
        first, second = bytearray(8 << 20), bytearray(8 << 20)
        third = bytearray(8 << 20)
        del first, second, third
    return faults() - before
ranges()
print(ranges())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only GNU's C library is told")
def test_what_was_freed_is_used_again_without_new_pages():
    pages = 20 * 3 * (8 << 20) // resource.getpagesize()
    found = {}
    for kept in (False, True):
        code = COUNTED_PAGES.format(kept=kept)
        told = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
        )
        found[kept] = int(told.stdout)
    assert found[True] < pages / 50
    # It is what this is for: by itself the library gives them back each time.
    assert found[False] > pages / 4
