"""What the ledger cache's tests share: a tiny cache on a memory disk, and short ways to ask."""

from __future__ import annotations

import random

from tierlog.adapters.memory.files import MemoryDisk
from tierlog_ingest.storage.index.index_format import PAGE_LEN, pack_slot
from tierlog_ingest.storage.index.ledger_cache import LedgerCache


def disk_of(seed=1, **kwargs):
    return MemoryDisk(random.Random(seed), **kwargs)


async def opened(*mounts, pages=4, files=2, headers=2):
    cache = LedgerCache(
        mounts, bytes_max=pages * PAGE_LEN, open_files_max=files, headers_max=headers
    )
    await cache.open()
    return cache


def slot(n):
    return pack_slot(1, n, 100)


async def put(cache, ledger, first, count, value, *, lac=-1):
    await cache.put(ledger, [(first, count, value)], last_add_confirmed=lac, create_in=0)


async def whole(cache, ledger, count):
    found, at = [], 0
    while at < count:
        part = await cache.slots(ledger, at, count - at)
        found += part.tolist()
        at += len(part)
    return found
