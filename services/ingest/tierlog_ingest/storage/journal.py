"""The journal: records made durable in groups, one ``fdatasync`` for all that waited.

Owns: the segment that is written, group commit, rolling, and removal of segments below the mark.
Does not own what records mean (``node``) nor reading them back (``replay``).

Invariants:
    * Records are written in the order of ``append``, and their futures succeed in that order,
      each only after the ``fdatasync`` that covers it.
    * At most one write is under way, so everything before it is durable; each group names that.
    * When a group could not be written (a full disk), it and everything that waits behind it
      fail together, ``on_rollback`` is told at once, and its place is written over.
    * A segment is used only after its header and its name are durable.

Crash: a group that was under way may be found whole, in part or not at all; nobody was told.
The last group's damage can be told from a torn tail once the idle marker behind it is durable,
``idle_marker_s`` after it; before, it is taken for a torn tail. That window is documented.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from tierlog.model.errors import IndeterminateError, RetryableError, TierlogError
from tierlog.ports.files import Buffer, File, Files
from tierlog.ports.ids import Ids
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.journal_format import (
    GROUP_HEADER_LEN,
    RECORD_HEADER_LEN,
    SEGMENT_HEADER_LEN,
    GroupHeader,
    JournalPosition,
    Kind,
    SegmentHeader,
    align,
    encode_record,
)

log = structlog.get_logger()

JOURNAL_DIRECTORY: Final = "journal"
_SUFFIX: Final = ".journal"


@dataclass(slots=True, eq=False)
class _Item:
    """A record that waits, or (kind None) the wish to roll."""

    kind: Kind | None
    payload: Sequence[Buffer]
    length: int
    done: asyncio.Future[Any]
    tag: object = None


class Journal:
    """The writing side. ``start`` it once, then keep ``run`` going."""

    def __init__(self, files: Files, ids: Ids, settings: StorageSettings) -> None:
        self._files = files
        self._ids = ids
        self._settings = settings
        self._queue: deque[_Item] = deque()
        self._wanted = asyncio.Event()
        self._taken = asyncio.Event()
        self._taken.set()
        self._file: File | None = None
        self._segment_id = 0
        self._salt = 0
        self._offset = 0
        self._synced = JournalPosition(0, 0)
        self._marker_due = False
        self._stopping = False
        self.queued_bytes = 0
        self.written_bytes = 0
        self.group_count = 0
        self.on_durable: Callable[[list[object]], None] = lambda _tags: None
        self.on_rollback: Callable[[list[object]], None] = lambda _tags: None

    def __repr__(self) -> str:
        return (
            f"<Journal segment {self._segment_id} at {self._offset},"
            f" queued={len(self._queue)}/{self.queued_bytes} bytes>"
        )

    @property
    def segment_id(self) -> int:
        """The segment that is written."""
        return self._segment_id

    def append(
        self, kind: Kind, payload: Sequence[Buffer], *, tag: object = None
    ) -> "asyncio.Future[None]":
        """Queue a record; the future succeeds once it is durable.

        Before anyone hears, ``on_durable`` or ``on_rollback`` gets its ``tag``.
        """
        length = RECORD_HEADER_LEN + sum(map(len, payload))
        return self._push(_Item(kind, payload, length, _future(), tag))

    def roll(self) -> "asyncio.Future[int]":
        """Begin a new segment behind all that is queued; the future brings its id."""
        return self._push(_Item(None, (), 0, _future()))

    async def ready(self) -> None:
        """Wait until the queue takes more."""
        while self.queued_bytes >= self._settings.journal_queue_bytes_max:
            self._taken.clear()
            await self._taken.wait()

    async def start(self, segment_id: int, *, synced: JournalPosition) -> None:
        """Begin with a new segment; everything before ``synced`` is durable."""
        self._synced = synced
        await self._begin_segment(segment_id)

    async def run(self) -> None:
        """Write what is queued until ``stop``. ``DiskFailedError`` ends it, and the process."""
        try:
            while await self._wait_for_work():
                await self._write_group()
        finally:
            # After ``stop`` nothing is left. Otherwise a write may have been under way.
            self._stopping = True
            self._fail_all(
                IndeterminateError(
                    "the node ended before this was known to be durable",
                    remedy="Recover the ledger",
                )
            )
            if self._file is not None:
                await self._file.close()

    def stop(self) -> None:
        """Let ``run`` write what is queued, and return."""
        self._stopping = True
        self._wanted.set()

    async def remove_before(self, segment_id: int) -> None:
        """Remove the segments before ``segment_id``, which a durable mark has made needless."""
        removed = False
        for found in await list_segments(self._files):
            if found < segment_id:
                await self._files.remove(segment_path(found))
                removed = True
        if removed:
            await self._files.sync_directory(JOURNAL_DIRECTORY)

    # The writer

    def _push(self, item: _Item) -> "asyncio.Future[Any]":
        if self._stopping:
            item.done.set_exception(RetryableError("the node stops", remedy="Use another node"))
            item.done.exception()
            return item.done
        self._queue.append(item)
        self.queued_bytes += item.length
        self._wanted.set()
        return item.done

    async def _wait_for_work(self) -> bool:
        while not self._queue:
            if self._stopping:
                return False
            self._wanted.clear()
            try:
                async with asyncio.timeout(
                    self._settings.idle_marker_s if self._marker_due else None
                ):
                    await self._wanted.wait()
            except TimeoutError:
                await self._write_marker()
        if self._settings.group_wait_ms and not self._stopping:
            await asyncio.sleep(self._settings.group_wait_ms / 1000)
        return True

    async def _write_group(self) -> None:
        if self._queue[0].kind is None:
            await self._roll(self._queue.popleft())
            return
        if self._offset >= self._settings.journal_segment_bytes:
            await self._guarded(self._begin_segment(self._segment_id + 1))
            return
        items, records_len = self._take_items()
        header = GroupHeader(records_len=records_len, record_count=len(items), synced=self._synced)
        buffers: list[Buffer] = [header.pack(self._salt)]
        for item in items:
            assert item.kind is not None
            buffers.extend(encode_record(item.kind, item.payload, self._salt))
        assert self._file is not None
        try:
            await self._file.write_and_sync(self._offset, buffers)
        except TierlogError as error:
            self._queue.extendleft(reversed(items))
            self.queued_bytes += records_len
            self._roll_back(error)
            return
        except BaseException:
            # Failing or cancelled, the outcome is unknown: those who wait are told so in ``run``.
            self._queue.extendleft(reversed(items))
            self.queued_bytes += records_len
            raise
        self._advance(GROUP_HEADER_LEN + records_len)
        self._marker_due = True
        self.on_durable([item.tag for item in items if item.tag is not None])
        for item in items:
            if not item.done.done():
                item.done.set_result(None)
        self._taken.set()

    def _take_items(self) -> tuple[list[_Item], int]:
        items: list[_Item] = []
        length = 0
        while self._queue and self._queue[0].kind is not None:
            if items and length + self._queue[0].length > self._settings.group_bytes_max:
                break
            item = self._queue.popleft()
            items.append(item)
            length += item.length
        self.queued_bytes -= length
        return items, length

    def _advance(self, length: int) -> None:
        self._offset = align(self._offset + length)
        self._synced = JournalPosition(self._segment_id, self._offset)
        self.written_bytes += length
        self.group_count += 1

    async def _write_marker(self) -> None:
        header = GroupHeader(records_len=0, record_count=0, synced=self._synced)
        assert self._file is not None
        self._marker_due = False
        try:
            await self._file.write_and_sync(self._offset, [header.pack(self._salt)])
        except TierlogError as error:
            log.warning("journal.marker_failed", cause=str(error))
            return
        self._advance(GROUP_HEADER_LEN)

    async def _roll(self, item: _Item) -> None:
        try:
            await self._begin_segment(self._segment_id + 1)
        except TierlogError as error:
            self._queue.appendleft(item)
            self._roll_back(error)
            return
        item.done.set_result(self._segment_id)

    async def _guarded(self, work: Any) -> None:  # noqa: ANN401 - any coroutine
        try:
            await work
        except TierlogError as error:
            self._roll_back(error)

    async def _begin_segment(self, segment_id: int) -> None:
        header = SegmentHeader(
            segment_id=segment_id,
            generation=self._ids.uuid().int >> 65,
            synced=self._synced,
        )
        await self._files.make_directory(JOURNAL_DIRECTORY)
        file = await self._files.open(segment_path(segment_id), create=True)
        try:
            await file.truncate(0)  # a try of before may have left something
            await file.write_and_sync(0, [header.pack()])
            await self._files.sync_directory(JOURNAL_DIRECTORY)
        except BaseException:
            await file.close()
            raise
        before, self._file = self._file, file
        self._segment_id, self._salt = segment_id, header.salt
        self._offset = SEGMENT_HEADER_LEN
        self._synced = JournalPosition(segment_id, self._offset)
        self._marker_due = False
        if before is not None:
            await before.close()

    # When it does not work

    def _roll_back(self, error: TierlogError) -> None:
        log.warning("journal.write_failed", cause=str(error), records=len(self._queue))
        self.on_rollback([item.tag for item in self._queue if item.tag is not None])
        self._fail_all(error)

    def _fail_all(self, error: TierlogError) -> None:
        queue, self._queue, self.queued_bytes = self._queue, deque(), 0
        for item in queue:
            if not item.done.done():
                item.done.set_exception(error)
                item.done.exception()  # whoever waits may be gone
        self._taken.set()


def segment_path(segment_id: int) -> str:
    """Return a segment's file name."""
    return f"{JOURNAL_DIRECTORY}/{segment_id:016x}{_SUFFIX}"


async def list_segments(files: Files) -> list[int]:
    """Return the ids of the segments that exist, in order."""
    found = []
    for name in await files.list(JOURNAL_DIRECTORY):
        stem, dot, _ = name.partition(_SUFFIX)
        if dot and len(stem) == 16:
            found.append(int(stem, 16))
    return sorted(found)


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()
