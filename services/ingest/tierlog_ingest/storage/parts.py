"""What a storage node is made of, as its settings size it."""

from collections.abc import Sequence
from typing import Final

from tierlog.ports.clock import Clock
from tierlog.ports.files import Files
from tierlog.ports.ids import Ids
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.compaction.throttle import TokenBucket
from tierlog_ingest.storage.entrylog.entry_log import EntryLogs
from tierlog_ingest.storage.index.ledger_cache import LedgerCache

_COMPACTION_BURST: Final = 4 * 1024 * 1024


def logs_and_cache(
    directories: Sequence[Files], ids: Ids, settings: StorageSettings
) -> tuple[EntryLogs, LedgerCache]:
    """Return the logs and the index, which share the open files."""
    open_files_max = max(1, settings.open_files_max // 2)
    logs = EntryLogs(
        directories,
        ids,
        log_bytes_max=settings.entry_log_bytes_max,
        open_files_max=open_files_max,
        direct_writes=settings.direct_writes,
    )
    cache = LedgerCache(
        directories,
        bytes_max=settings.ledger_cache_bytes_max,
        open_files_max=open_files_max,
    )
    return logs, cache


def compaction_bucket(clock: Clock, settings: StorageSettings) -> TokenBucket:
    """Return what holds compaction back."""
    return TokenBucket(
        clock, bytes_per_s=settings.compaction_bytes_per_s, burst_bytes=_COMPACTION_BURST
    )
