"""The journal: records made durable in groups, one ``fdatasync`` for all that waited.

Owns: the segment that is written, group commit, and rolling. Does not own the files of segments
(``segments``), what records mean (``node``), nor reading them back (``replay``).

Invariants:
    * Records are numbered in the order of ``append`` and written in it. Those of one group share
      one future, which succeeds after the ``fdatasync`` that covers them.
    * At most one write is under way, so everything before it is durable; each group proves that.
    * ``durable_seq`` and ``durable_position`` belong together: what has a number up to the one
      (and was not rolled back) lies before the other.
    * When a group could not be written (a full disk), it and everything that waits behind it
      fail together, ``on_rollback`` is told at once, and its place is written over. Numbers are
      not given again.

Cancellation: who awaits a group's future and is cancelled leaves the others alone.

Crash: a group that was under way may be found whole or not at all; nobody was told. The last
group's damage can be told from a torn tail once the idle marker behind it is durable,
``idle_marker_s`` after it; before, it is taken for a torn tail. That window is documented.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Final, NamedTuple

import structlog

from tierlog.model.errors import IndeterminateError, RetryableError, TierlogError
from tierlog.ports.clock import Clock
from tierlog.ports.files import Buffer, File, Files
from tierlog.ports.ids import Ids
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.journal.format import (
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
from tierlog_ingest.storage.journal.segments import Segments

log = structlog.get_logger()

_JOINED_LEN_MAX: Final = 4096
"""Buffers that are shorter on average are joined: a system call pays for each buffer."""


class GroupFuture(asyncio.Future[None]):
    """The answer to all records of one group. Cancelling one who awaits it cancels only that."""

    def __await__(self) -> Generator[Any, None, None]:
        if self.done():
            self.result()
        else:
            yield from asyncio.shield(self).__await__()

    __iter__ = __await__

    def cancel(self, msg: Any | None = None) -> bool:  # noqa: ANN401 - as asyncio has it
        """Do nothing: others wait for it too."""
        return False


class Appended(NamedTuple):
    """A record's number, and when it is durable."""

    seq: int
    done: GroupFuture


class _Group:
    """Records that are written together."""

    __slots__ = ("done", "first_seq", "last_seq", "length", "records")

    def __init__(self, first_seq: int) -> None:
        self.first_seq = first_seq
        self.last_seq = first_seq - 1
        self.length = 0
        self.records: list[tuple[Kind, Sequence[Buffer], int]] = []
        self.done = GroupFuture(loop=asyncio.get_running_loop())

    def encode(self, position: JournalPosition, salt: int) -> list[Buffer]:
        header = GroupHeader(
            records_len=self.length, record_count=len(self.records), position=position
        )
        buffers: list[Buffer] = [header.pack(salt)]
        for kind, payload, payload_len in self.records:
            buffers.append(encode_record(kind, payload, payload_len, salt))
            buffers.extend(payload)
        buffers.append(bytes(header.end - position.offset - GROUP_HEADER_LEN - self.length))
        if self.length < _JOINED_LEN_MAX * len(self.records):
            return [b"".join(buffers)]
        return buffers


class Journal:
    """The writing side. ``start`` it once, then keep ``run`` going."""

    def __init__(self, files: Files, ids: Ids, clock: Clock, settings: StorageSettings) -> None:
        self._ids = ids
        self._clock = clock
        self._settings = settings
        self._segments = Segments(
            files,
            segment_bytes=settings.journal_segment_bytes,
            spares_max=settings.journal_spares_max,
            free_bytes_min=settings.free_bytes_min,
            direct_writes=settings.direct_writes,
        )
        self._queue: deque[_Group] = deque()
        self._last_seq = 0
        self._wanted = asyncio.Event()
        self._taken = asyncio.Event()
        self._taken.set()
        self._file: File | None = None
        self._salt = 0
        self._marker_due = False
        self._stopping = False
        self.durable_seq = 0
        """Every record up to this number is durable, or was rolled back."""
        self.durable_position = JournalPosition(0, 0)
        """Everything before it is durable; the next group begins here."""
        self.queued_bytes = 0
        self.written_bytes = 0
        self.group_count = 0
        self.sync_s_total = 0.0
        self.sync_s_max = 0.0
        self.slow_sync_count = 0
        self.on_rollback: Callable[[int], None] = lambda _seq: None

    def __repr__(self) -> str:
        return (
            f"<Journal at {tuple(self.durable_position)}, seq {self.durable_seq} of"
            f" {self._last_seq}, queued={len(self._queue)} groups/{self.queued_bytes} bytes>"
        )

    def watch_space(self, on_take: Callable[[int], Awaitable[object]]) -> None:
        """Have ``on_take`` called with the bytes that each segment is about to take of the disk."""
        self._segments.on_take = on_take

    @property
    def segment_id(self) -> int:
        """The segment that is written."""
        return self.durable_position.segment_id

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all segments, without spares."""
        return self._segments.bytes_on_disk

    def append(self, kind: Kind, payload: Sequence[Buffer]) -> Appended:
        """Queue a record. Its number counts up from 1; its future is that of its group."""
        payload_len = sum(map(len, payload))
        length = RECORD_HEADER_LEN + payload_len
        group = self._queue[-1] if self._queue else None
        if self._stopping:
            error = RetryableError("the node stops", remedy="Use another node")
            return Appended(self._last_seq + 1, _failed(_Group(0).done, error))
        if group is None or group.length + length > self._settings.group_bytes_max:
            group = _Group(self._last_seq + 1)
            self._queue.append(group)
            self._wanted.set()
        self._last_seq += 1
        group.last_seq = self._last_seq
        group.length += length
        group.records.append((kind, payload, payload_len))
        self.queued_bytes += length
        return Appended(self._last_seq, group.done)

    async def ready(self) -> None:
        """Wait until the queue takes more."""
        while self.queued_bytes >= self._settings.journal_queue_bytes_max:
            self._taken.clear()
            await self._taken.wait()

    async def start(self, segment_id: int, *, synced: JournalPosition) -> None:
        """Begin with a new segment; everything before ``synced`` is durable."""
        await self._segments.open()
        await self._begin_segment(segment_id, synced)

    async def run(self) -> None:
        """Write what is queued until ``stop``. ``DiskFailedError`` ends it, and the process."""
        try:
            async with asyncio.TaskGroup() as tasks:
                spares = tasks.create_task(self._segments.run(), name="journal spares")
                while await self._wait_for_work():
                    await self._write_next()
                spares.cancel()
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

    async def release_before(self, segment_id: int) -> None:
        """Give back the segments before ``segment_id``, which a durable mark made needless."""
        await self._segments.release_before(min(segment_id, self.segment_id))

    async def shed_spares(self) -> None:
        """Give back the space of segments that wait to be used: the disk is full."""
        await self._segments.shed_spares()

    # The writer

    async def _wait_for_work(self) -> bool:
        settings = self._settings
        while not self._queue:
            if self._stopping:
                return False
            self._wanted.clear()
            try:
                async with asyncio.timeout(settings.idle_marker_s if self._marker_due else None):
                    await self._wanted.wait()
            except TimeoutError:
                await self._write_marker()
        if settings.group_wait_ms and len(self._queue) == 1 and not self._stopping:
            await asyncio.sleep(settings.group_wait_ms / 1000)
        return True

    async def _write_next(self) -> None:
        if self._is_full(self._queue[0]):
            try:
                await self._begin_segment(self.segment_id + 1, self.durable_position)
            except TierlogError as error:
                self._roll_back(error)
                return
        group = self._queue.popleft()
        self.queued_bytes -= group.length
        try:
            await self._write(group)
        except TierlogError as error:
            self._put_back(group)
            self._roll_back(error)
            return
        except BaseException:
            # Failing or cancelled, the outcome is unknown: those who wait are told so in ``run``.
            self._put_back(group)
            raise
        self._marker_due = True
        self.durable_seq = group.last_seq
        group.done.set_result(None)
        self._taken.set()

    def _is_full(self, group: _Group) -> bool:
        offset = self.durable_position.offset
        end = align(offset + GROUP_HEADER_LEN + group.length)
        return end > self._segments.segment_bytes and offset > SEGMENT_HEADER_LEN

    def _put_back(self, group: _Group) -> None:
        self._queue.appendleft(group)
        self.queued_bytes += group.length

    async def _write_marker(self) -> None:
        self._marker_due = False
        try:
            await self._write(_Group(self._last_seq + 1))
        except TierlogError as error:
            log.warning("journal.marker_failed", cause=str(error))

    async def _write(self, group: _Group) -> None:
        """Make a group durable, and move the position behind it."""
        segment_id, offset = self.durable_position
        buffers = group.encode(self.durable_position, self._salt)
        assert self._file is not None
        began_s = self._clock.monotonic_s()
        await self._file.write_and_sync(offset, buffers)
        self._measure(self._clock.monotonic_s() - began_s)
        end = align(offset + GROUP_HEADER_LEN + group.length)
        self.durable_position = JournalPosition(segment_id, end)
        self._segments.note_written(segment_id, end)
        self.written_bytes += end - offset
        self.group_count += 1

    def _measure(self, sync_s: float) -> None:
        self.sync_s_total += sync_s
        self.sync_s_max = max(self.sync_s_max, sync_s)
        if sync_s > self._settings.slow_sync_s:
            self.slow_sync_count += 1
            log.warning("journal.slow_sync", seconds=round(sync_s, 3))

    async def _begin_segment(self, segment_id: int, synced: JournalPosition) -> None:
        header = SegmentHeader(
            segment_id=segment_id, generation=self._ids.uuid().int >> 65, synced=synced
        )
        before, self._file = self._file, await self._segments.begin(header)
        self._salt = header.salt
        self.durable_position = JournalPosition(segment_id, SEGMENT_HEADER_LEN)
        self._marker_due = False
        if before is not None:
            await before.close()

    # When it does not work

    def _roll_back(self, error: TierlogError) -> None:
        first_seq = self._queue[0].first_seq
        log.warning(
            "journal.write_failed", cause=str(error), records=self._last_seq + 1 - first_seq
        )
        self.on_rollback(first_seq)
        self._fail_all(error)

    def _fail_all(self, error: TierlogError) -> None:
        queue, self._queue, self.queued_bytes = self._queue, deque(), 0
        for group in queue:
            _failed(group.done, error)
        self._taken.set()


def _failed(done: GroupFuture, error: TierlogError) -> GroupFuture:
    done.set_exception(error)
    done.exception()  # whoever waits may be gone
    return done
