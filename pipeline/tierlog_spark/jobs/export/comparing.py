"""Copies of raw ledgers in which a read finds no flipped byte, compared as a whole.

A single object has no checksum of its parts, and an entry of a raw stream has none of its own:
what an export made of damage would say for good that it is right. Owns which copies these are, and
comparing them on executors. Does not own how a copy is compared (``tierlog.offload.verify``).
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from tierlog.model.errors import CorruptError
from tierlog.model.scrub import REPAIR_COPY
from tierlog.offload.verify import ReadBack, is_read_whole, verify_copy
from tierlog.runtime.settings import S3Settings
from tierlog_spark.bucket import opened_store
from tierlog_spark.jobs.fanout import run_tasks
from tierlog_spark.jobs.frame import JobRun
from tierlog_spark.planning import StoredLedger


def uncompared(ledgers: Iterable[StoredLedger]) -> list[StoredLedger]:
    """Return those of which only a look at all of the copy tells whether it is right, each once."""
    found = {}
    for one in ledgers:
        if not one.raw or one.copy is None or one.copy.side_len:
            continue
        # Where nothing says what the data must be, there is nothing to compare.
        if is_read_whole(one.location, one.copy):
            found[one.location.data_key] = one
    return list(found.values())


def compare(run: JobRun, s3: S3Settings, ledgers: Iterable[StoredLedger]) -> None:
    """Raise ``CorruptError`` unless the copies are what was written; read again if need be."""
    tasks = [[one] for one in uncompared(ledgers)]
    if tasks:
        list(run_tasks(run, "compare copies", tasks, functools.partial(_compare_some, s3)))


async def _compare_some(s3: S3Settings, some: Sequence[StoredLedger]) -> list[Any]:
    async with opened_store(s3) as objects:
        for one in some:
            assert one.copy is not None
            try:
                await verify_copy(objects, one.location, one.copy, read_back=ReadBack.FULL)
            except CorruptError as error:
                raise CorruptError(
                    f"ledger {one.ledger_id} of stream {one.stream}: {error.message}",
                    remedy=REPAIR_COPY,
                    details=error.details,
                ) from error
    return []
