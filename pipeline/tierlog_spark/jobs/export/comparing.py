"""Copies of raw ledgers in which a read finds no flipped byte, compared as a whole.

A single object has no checksum of its parts, and an entry of a raw stream has none of its own:
what an export made of damage would say for good that it is right. A read of all of such a copy
compares it itself (``tierlog_spark.reading``). Owns which are left, where batches take parts of
ledgers, and comparing these on executors.
"""

import functools
from collections.abc import Sequence
from typing import Any

from tierlog.runtime.settings import S3Settings
from tierlog_spark.bucket import opened_store
from tierlog_spark.jobs.fanout import run_tasks
from tierlog_spark.jobs.frame import JobRun
from tierlog_spark.planning import StoredLedger, StorePart
from tierlog_spark.reading import compare_copy


def uncompared(parts: Sequence[StorePart]) -> list[StoredLedger]:
    """Return the ledgers that must be compared and that no part compares, each once."""
    found = {one.ledger.location.data_key: one.ledger for one in parts}
    compared = {one.ledger.location.data_key for one in parts if one.compared}
    return [one for key, one in found.items() if one.needs_comparing and key not in compared]


def compare(run: JobRun, s3: S3Settings, parts: Sequence[StorePart]) -> None:
    """Raise ``CorruptError`` unless the copies are what was written; read again if need be."""
    tasks = [[one] for one in uncompared(parts)]
    if tasks:
        list(run_tasks(run, "compare copies", tasks, functools.partial(_compare_some, s3)))


async def _compare_some(s3: S3Settings, some: Sequence[StoredLedger]) -> list[Any]:
    async with opened_store(s3) as objects:
        for one in some:
            await compare_copy(objects, one)
    return []
