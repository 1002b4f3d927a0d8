"""The scheduler's progress in the metadata store: monotonic time that outlives a leader.

Invariant: losing it, or a late write by a deposed leader, only makes waits longer: a ledger that
is not in it, or whose time lies ahead, waits for its whole lag from the next leader's start.
"""

from tierlog.catalog.change import settle
from tierlog.format import paths
from tierlog.format.progress import decode_progress, encode_progress
from tierlog.model.errors import CorruptError
from tierlog.model.offload import SchedulerProgress
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import MetadataStore


class ProgressCatalog:
    """One record for the whole cluster."""

    def __init__(self, store: MetadataStore, *, ids: Ids) -> None:
        self._store = store
        self._ids = ids

    async def load(self) -> SchedulerProgress:
        """Return the progress as of now (after ``sync``); none at all in a new cluster."""
        path = paths.SCHEDULER_PROGRESS
        await self._store.sync(path)
        found = await self._store.get(path)
        return SchedulerProgress() if found is None else decode_progress(found.data)

    async def save(self, progress: SchedulerProgress) -> None:
        """Replace the record, unless it is further on already: then another leader is at work."""
        path, data = paths.SCHEDULER_PROGRESS, encode_progress(progress)

        async def one_round() -> bool:
            found = await self._store.get(path)
            if found is None:
                await self._store.create(path, data)
                return True
            if found.data == data:
                return True
            if _progress_ms(found.data) > progress.progress_ms:
                return False
            await self._store.set(path, data, version=found.version)
            return True

        await settle(self._store, self._ids, path, one_round)


def _progress_ms(data: bytes) -> int:
    """Return how far on a record is; one that is damaged may be replaced."""
    try:
        return decode_progress(data).progress_ms
    except CorruptError:
        return -1
