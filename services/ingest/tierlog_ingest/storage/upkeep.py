"""When the write buffer is flushed, and when the mark is moved.

Owns: the triggers, the two loops that act on them, and holding up those who add. Does not own
what a flush or a mark does (``store``, ``marking``).

    half of ``write_buffer_bytes_max`` in the buffer          a flush
    all of it                                                 ``ready`` waits
    ``checkpoint_interval_s`` since the last one              a mark
    more than ``checkpoint_journal_bytes`` of segments        a mark
    more than ``checkpoint_journal_records`` to replay        a mark
    a flush that met a damaged index                          a mark, which repairs it

Invariants:
    * Nobody who waits is forgotten: when nothing can be flushed, the node is read-only, or a
      flush is tried again.
    * A flush, or a mark, that has begun is not cut short by ``stop``.
"""

import asyncio
import contextlib
from typing import Final

import structlog

from tierlog.model.errors import Reason, TierlogError
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.journal.journal import GroupFuture, Journal
from tierlog_ingest.storage.marking import Marks
from tierlog_ingest.storage.space import SpaceWatch
from tierlog_ingest.storage.store import RunStore

log = structlog.get_logger()

_RETRY_S: Final = 1.0
_REPAIR_S: Final = 0.1
"""So long a flush leaves the mark alone that repairs what held it up."""


class Upkeep:
    """Runs beside the adds of one node."""

    def __init__(
        self,
        store: RunStore,
        marks: Marks,
        journal: Journal,
        space: SpaceWatch,
        settings: StorageSettings,
        *,
        journal_apart: bool,
    ) -> None:
        self._buffer = store.buffer
        self._store = store
        self._marks = marks
        self._journal = journal
        self._space = space
        self._settings = settings
        self._journal_apart = journal_apart
        """The journal lies elsewhere than logs and indexes."""
        self._flush_wanted = asyncio.Event()
        self._mark_wanted = asyncio.Event()
        self._moved = asyncio.Event()
        self._newest: GroupFuture | None = None
        self._stopping = False

    def __repr__(self) -> str:
        return f"<Upkeep buffered={self._buffer.bytes} journal={self._journal.bytes_on_disk}>"

    def note_appended(self, done: GroupFuture) -> None:
        """Take note of the newest record, and see whether anything is due."""
        self._newest = done
        if self._buffer.bytes >= self._settings.write_buffer_bytes_max // 2:
            self._flush_wanted.set()
        journal = self._journal
        if journal.segment_id > self._marks.mark_position.segment_id and (
            journal.bytes_on_disk > self._settings.checkpoint_journal_bytes
        ):
            self._mark_wanted.set()
        replayed = journal.durable_seq - self._marks.mark_seq
        if replayed > self._settings.checkpoint_journal_records:
            self._mark_wanted.set()

    async def ready(self) -> None:
        """Wait until journal and buffer take more."""
        await self._journal.ready()
        while self._buffer.bytes >= self._settings.write_buffer_bytes_max:
            if self._space.read_only or self._stopping:
                return  # refused at once, then
            self._flush_wanted.set()
            self._moved.clear()
            await self._moved.wait()

    def look_again(self) -> None:
        """Let those who wait see what changed."""
        self._moved.set()

    async def settled(self) -> None:
        """Wait until all that was appended by now is durable, or is known not to be."""
        if self._newest is not None and not self._newest.done():
            await asyncio.wait({self._newest})

    async def run(self) -> None:
        """Flush and mark until ``stop``."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._flush_loop(), name="flush")
            tasks.create_task(self._mark_loop(), name="mark")

    def stop(self) -> None:
        """Let ``run`` finish what it is at, and return."""
        self._stopping = True
        self._flush_wanted.set()
        self._mark_wanted.set()
        self._moved.set()

    async def _flush_loop(self) -> None:
        while True:
            await self._flush_wanted.wait()
            self._flush_wanted.clear()
            if self._stopping:
                return
            await self.settled()
            try:
                await self._space.look_ahead()
                if await self._store.flush(self._journal.durable_seq):
                    self._mark_wanted.set()
                    await asyncio.sleep(_REPAIR_S)
            except TierlogError as error:
                log.warning("flush.failed", cause=str(error))
                self._note_failure(error)
                await asyncio.sleep(_RETRY_S)
            if self._buffer.bytes >= self._settings.write_buffer_bytes_max:
                self._flush_wanted.set()
                await asyncio.sleep(0)
            self._moved.set()

    async def _mark_loop(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.checkpoint_interval_s):
                    await self._mark_wanted.wait()
            self._mark_wanted.clear()
            if self._stopping:
                return
            if self._marks.needless:
                continue
            try:
                await self._marks.mark()
            except TierlogError as error:
                log.warning("checkpoint.failed", cause=str(error))
                self._note_failure(error)
                await asyncio.sleep(_RETRY_S)
            self._moved.set()

    def _note_failure(self, error: TierlogError) -> None:
        if error.reason is not Reason.READ_ONLY:
            return
        # The journal may have room yet, and another directory may take the next log.
        is_stuck = self._buffer.bytes >= self._settings.write_buffer_bytes_max
        if is_stuck or not self._journal_apart:
            self._space.refused()
