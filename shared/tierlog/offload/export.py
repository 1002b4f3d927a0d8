"""Export copies beside a ledger's objects, batches broken up (seeds/000, "inspect and massage").

Owns the transforming wrapper around a driver, and the writing of one export copy out of any read
handle. Does not own its lines (``tierlog.format.export``).

Invariants:
    * A ledger's own objects are written, verified and read as if there were no export; an export
      that fails, for whatever reason, leaves the attempt as it is, and is made again by whoever
      wants it. So does one that takes longer than its own ``CopyTime``, waiting for its turn
      included.
    * An export is never read back, nothing depends on it, and it goes with its attempt: every
      deletion of an attempt takes its key along (``tierlog.offload.cleaning``).
    * It appears whole or not at all. What is being made takes at most two parts of memory (lines,
      and their body), what a run is received with, and the events of one entry, which compressed
      ones may make ``EVENTS_LEN_MAX``. One is made at a time, and all of that is room of the upload
      budget, which it waits for before it reads: uploads and exports together keep to one bound.

Crash (leaks): an open upload under the attempt's export key, which the attempt's deletion, or a
scrub, aborts. Who is cancelled, or out of time, tries to abort it.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import structlog
from prometheus_client import Counter

from tierlog.format import keys
from tierlog.format.checksum import crc32c
from tierlog.format.entry import Codec, Decompress
from tierlog.format.export import CONTENT_TYPE, lines_of
from tierlog.format.keys import ObjectRole
from tierlog.format.run import Run
from tierlog.ledger.reader import ReadHandle, closing_runs
from tierlog.model.errors import CorruptError, RefusedError, TierlogError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import KEY_RAW
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.offload.blocks import BESIDE_BYTES, PART_NUMBER_MAX
from tierlog.offload.budget import UploadBudget, UploadShare
from tierlog.offload.driver import Tier2Settings, stream_of, user_metadata
from tierlog.offload.groups import within
from tierlog.offload.interface import LedgerOffloader
from tierlog.offload.timed import CopyTime, OffloaderAround
from tierlog.ports.objects import ObjectStore, Part
from tierlog.ports.spending import Cause, spending

log = structlog.get_logger()

EXPORTS: Final = Counter(
    "tierlog_offload_exports_total", "Export copies that were written, or failed", ["outcome"]
)
PART_BYTES: Final = 8 * 1024 * 1024
EVENTS_LEN_MAX: Final = 32 * 1024 * 1024
LINES_A_TURN: Final = 500
"""Other tasks get a turn after so many: breaking events out is this process's own work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCopy:
    """What was written."""

    bucket: str
    key: str
    length: int
    entry_count: int
    event_count: int


class Exporter:
    """Writes export copies into one bucket."""

    def __init__(
        self,
        objects: ObjectStore,
        settings: Tier2Settings,
        *,
        part_bytes: int = PART_BYTES,
        decompressors: Mapping[Codec, Decompress] | None = None,
        budget: UploadBudget | None = None,
    ) -> None:
        self._objects = objects
        self._settings = settings
        self._part_bytes = part_bytes
        self._decompressors = decompressors
        self._budget = budget or UploadBudget()
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Exporter {self._settings.endpoint_name}/{self._settings.bucket}>"

    @property
    def memory(self) -> int:
        """The most that an export takes while it is made."""
        return 2 * self._part_bytes + EVENTS_LEN_MAX + BESIDE_BYTES

    async def export(
        self,
        handle: ReadHandle,
        location: Tier2Location,
        extra_metadata: Mapping[str, str] | None = None,
    ) -> ExportCopy:
        """Write a ledger's export copy beside the objects of an attempt, in turn; again: anew."""
        self._check_here(handle.ledger_id, location)
        extra = extra_metadata or {}
        key = keys.export_key(location)
        metadata = user_metadata(self._settings, ObjectRole.EXPORT, handle, extra)
        with spending(Cause.OFFLOAD, stream_of(handle, extra)):
            # In turn, so that one alone waits for room, behind the uploads that began before it.
            async with self._turn:
                with self._budget.share() as share:
                    await share.take(self.memory)
                    return await self._export(handle, key, metadata, share)

    async def _export(
        self, handle: ReadHandle, key: str, metadata: Mapping[str, str], share: UploadShare
    ) -> ExportCopy:
        upload_id = await self._objects.create_upload(
            key, metadata=metadata, content_type=CONTENT_TYPE
        )
        try:
            return await self._write(handle, key, upload_id, share)
        except (Exception, asyncio.CancelledError):
            await self._abort(key, upload_id)
            raise

    async def _abort(self, key: str, upload_id: str) -> None:
        """Abort an upload, if that works: why it is given up is what counts."""
        try:
            await self._objects.abort_upload(key, upload_id)
        except TierlogError as error:
            log.warning("export.abort_failed", key=key, cause=str(error))

    async def _write(
        self, handle: ReadHandle, key: str, upload_id: str, share: UploadShare
    ) -> ExportCopy:
        parts: list[Part] = []
        told = _Told()
        async with aclosing(self._parts(handle, told)) as bodies:
            async for body in bodies:
                number = len(parts) + 1
                if number > PART_NUMBER_MAX:
                    raise RefusedError(
                        f"the export of ledger {handle.ledger_id} needs more than "
                        f"{PART_NUMBER_MAX} parts of {self._part_bytes} bytes",
                        remedy="Roll ledgers earlier",
                    )
                async with share.sending():
                    part = await self._objects.upload_part(
                        key, upload_id, number, [body], crc32c=crc32c(body)
                    )
                parts.append(part)
        await self._objects.complete_upload(key, upload_id, parts)
        found = ExportCopy(
            bucket=self._settings.bucket,
            key=key,
            length=sum(part.size for part in parts),
            entry_count=told.entries,
            event_count=told.events,
        )
        log.info("export.written", ledger_id=handle.ledger_id, key=key, events=told.events)
        return found

    async def _parts(self, handle: ReadHandle, told: "_Told") -> AsyncGenerator[bytes, None]:
        """Iterate over the bodies of parts: full ones, then what is left, even if it is nothing."""
        last, raw = handle.ledger_metadata.last_entry_id, _is_raw(handle)
        lines, length = [], 0
        read = handle.read_runs(EntryId(0), last)
        async with closing_runs(read):
            async for runs in read:
                for line in self._lines(handle.ledger_id, runs, told, raw=raw):
                    lines.append(line)
                    length += len(line)
                    if length >= self._part_bytes:
                        yield b"".join(lines)
                        lines, length = [], 0
                    elif told.events % LINES_A_TURN == 0:
                        await asyncio.sleep(0)
        if told.entries != last + 1:
            raise CorruptError(
                f"ledger {handle.ledger_id} gave {told.entries} entries of {last + 1}",
                remedy="Keep the local copy, and verify the ledger's objects",
                details={"ledger_id": str(handle.ledger_id)},
            )
        yield b"".join(lines)

    def _lines(
        self, ledger_id: LedgerId, runs: Iterable[Run], told: "_Told", *, raw: bool
    ) -> Iterator[bytes]:
        for run in runs:
            for entry_id, data in enumerate(run.entries(), run.first_entry_id):
                told.entries += 1
                for line in lines_of(
                    ledger_id,
                    entry_id,
                    data,
                    raw=raw,
                    decompressors=self._decompressors,
                    events_len_max=EVENTS_LEN_MAX,
                ):
                    told.events += 1
                    yield line

    def _check_here(self, ledger_id: LedgerId, location: Tier2Location) -> None:
        here = (self._settings.endpoint_name, self._settings.bucket)
        if (location.endpoint_name, location.bucket) != here:
            raise RefusedError(
                f"ledger {ledger_id} lies in bucket {location.bucket} of endpoint "
                f"{location.endpoint_name}, and this process has {here[1]} of {here[0]}",
                remedy="Name that bucket and endpoint in the s3 settings",
                details={"ledger_id": str(ledger_id), "bucket": location.bucket},
            )


@dataclass(slots=True)
class _Told:
    entries: int = 0
    events: int = 0


class ExportingOffloader(OffloaderAround):
    """``LedgerOffloader`` around another one: each copy gets an export copy beside it.

    ``export_time``: how long that may take. The copy is whole before, so it is cut off alone.
    """

    def __init__(
        self, offloader: LedgerOffloader, exporter: Exporter, export_time: CopyTime | None = None
    ) -> None:
        super().__init__(offloader)
        self._exporter = exporter
        self._export_time = export_time
        self.exported = 0
        self.failed = 0

    def __repr__(self) -> str:
        return f"<ExportingOffloader {self._offloader!r} exported={self.exported}>"

    async def offload(
        self,
        handle: ReadHandle,
        uuid: UUID,
        extra_metadata: Mapping[str, str],
        *,
        data_sha256: bool | None = None,
    ) -> Tier2Copy:
        copy = await self._offloader.offload(handle, uuid, extra_metadata, data_sha256=data_sha256)
        location = self._offloader.location(handle.ledger_id, uuid)
        limit_s = self._limit_s(handle)
        patience = asyncio.timeout(limit_s)
        try:
            async with within(patience):
                await self._exporter.export(handle, location, extra_metadata)
        except TierlogError as error:
            self._note_failure(handle, str(error))
        except Exception as error:  # noqa: BLE001 - told: metric, log; no whole copy goes for it
            late = isinstance(error, TimeoutError) and patience.expired()
            self._note_failure(
                handle,
                f"it took longer than {limit_s:.0f} s" if late else _unforeseen(handle, error),
            )
        else:
            self.exported += 1
            EXPORTS.labels("written").inc()
        return copy

    def _limit_s(self, handle: ReadHandle) -> float | None:
        if self._export_time is None:
            return None
        return self._export_time.limit_s(handle.ledger_metadata.length)

    def _note_failure(self, handle: ReadHandle, cause: str) -> None:
        """Tell of it, and no more: the copy is whole, and that alone counts."""
        self.failed += 1
        EXPORTS.labels("failed").inc()
        log.warning("export.failed", ledger_id=handle.ledger_id, cause=cause)


def _unforeseen(handle: ReadHandle, error: Exception) -> str:
    """Log an error that is none of Tierlog's; return what is said of it."""
    said = f"unexpected {type(error).__name__}: {error}"
    log.error(
        "unexpected_error",
        work="export",
        ledger_id=handle.ledger_id,
        cause=said,
        exc_info=error,
    )
    return said


def _is_raw(handle: ReadHandle) -> bool:
    return handle.ledger_metadata.custom.get(KEY_RAW, b"0") == b"1"
