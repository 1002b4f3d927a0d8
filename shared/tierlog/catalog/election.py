"""One leader at a time, by ephemeral sequential nodes; and courtesy locks.

Leadership saves work and never proves anything: whoever acts on it changes metadata by
compare-and-set, so that two leaders at once do no harm.
"""

import asyncio
from uuid import UUID

import structlog

from tierlog.format import paths
from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import MetadataStore, NodeExistsError, NoNodeError
from tierlog.ports.waiting import first_of

log = structlog.get_logger()


class Election:
    """A candidate for one office."""

    def __init__(self, store: MetadataStore, ids: Ids, *, office: str) -> None:
        self._store = store
        self._root = f"{paths.ROOT}/election/{office}"
        self._candidate: UUID = ids.uuid()

    async def win(self) -> asyncio.Event:
        """Wait until this candidate leads; return the end of the session that it leads by."""
        while True:
            lost = self._store.session_lost
            mine = await self._stand()
            while not lost.is_set():
                names, changed = await self._store.watch_children(self._root)
                if not names or mine not in names:
                    break
                # The store's order of names is the order of their numbers.
                if min(names, key=_number) == mine:
                    return lost
                await first_of(changed, lost)
            await asyncio.sleep(0)

    async def resign(self) -> None:
        """Leave the office, or the queue for it; at the latest the session's end does that."""
        try:
            for name, data in await self._candidates():
                if data == self._candidate.bytes:
                    await self._store.delete(f"{self._root}/{name}", version=-1)
        except (IndeterminateError, RetryableError, NoNodeError) as error:
            log.warning("election.resign_unknown", office=self._root, cause=str(error))

    async def _stand(self) -> str:
        """Return the name of this candidate's node, made if need be."""
        for name, data in await self._candidates():
            if data == self._candidate.bytes:
                return name
        try:
            made = await self._store.create_ephemeral(
                f"{self._root}/candidate-", self._candidate.bytes, sequential=True
            )
        except IndeterminateError:
            # It may stand; the next look at the candidates tells.
            return await self._stand()
        return made.rpartition("/")[2]

    async def _candidates(self) -> list[tuple[str, bytes]]:
        names = await self._store.children(self._root) or []
        found = [(name, await self._store.get(f"{self._root}/{name}")) for name in names]
        return [(name, node.data) for name, node in found if node is not None]


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


class CourtesyLock:
    """Says "someone works on this" for as long as the session lives. Saves work, proves nothing."""

    def __init__(self, store: MetadataStore, path: str, holder: UUID) -> None:
        self._store = store
        self._path = path
        self._holder = holder

    async def take(self) -> bool:
        """Take the lock; False when someone else has it."""
        try:
            await self._store.create_ephemeral(self._path, self._holder.bytes)
        except NodeExistsError:
            found = await self._store.get(self._path)
            return found is not None and found.data == self._holder.bytes
        except IndeterminateError:
            found = await self._store.get(self._path)
            return found is None or found.data == self._holder.bytes
        return True

    async def release(self) -> bool:
        """Give the lock back, at the latest with the session; False: it may still be there."""
        try:
            found = await self._store.get(self._path)
            if found is not None and found.data == self._holder.bytes:
                await self._store.delete(self._path, version=-1)
        except NoNodeError:
            # It went with its session in between.
            return True
        except (IndeterminateError, RetryableError):
            log.warning("lock.release_unknown", path=self._path)
            return False
        return True
