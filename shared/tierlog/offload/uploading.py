"""The blocks of one ledger as the parts of an upload, one being filled while others are sent.

Owns the order of requests and the memory of what is on its way. Does not own the layout of the
blocks (``tierlog.offload.blocks``), nor what else an object has.

Invariants:
    * Blocks that are filled or sent stay within one budget for all uploads of the process
      (``tierlog.offload.budget``); nothing else of a ledger is in memory.
    * A part that the store found damaged is sent again only if its bytes still have the checksum
      that they had when they were read.
    * After ``complete`` no other upload of the same key is open, if the store lets that be seen.
      Where it does not, the object is as good; what may be left is told, and is a scrub's to find.

Crash (leaks): at most one open upload, under a key that the metadata names.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from functools import partial
from typing import Final, NamedTuple

import structlog
from prometheus_client import Histogram

from tierlog.format import keys
from tierlog.format.checksum import Buffer, crc32c_of
from tierlog.model.errors import CorruptError, RefusedError, TierlogError
from tierlog.model.ids import EntryId
from tierlog.offload.blocks import PART_NUMBER_MAX, BlockFiller, FilledBlock
from tierlog.offload.budget import UploadBudget, UploadShare
from tierlog.offload.cleaning import LET_LIST, UNSEEN
from tierlog.offload.groups import plain_errors
from tierlog.offload.patient_store import Around, PatientStore
from tierlog.ports.objects import Part
from tierlog.ports.tracing import within

log = structlog.get_logger()

DAMAGED_SENDS_MAX: Final = 3
PART_SECONDS: Final = Histogram(
    "tierlog_offload_part_duration_seconds",
    "How long parts took to be sent, waits for another try included",
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
)


class SentBlock(NamedTuple):
    """Where a block of an upload begins, from the first block on, and with which entry."""

    first_entry_id: EntryId
    part_number: int
    offset: int


class BlockUpload:
    """One object as it is made: ``blocks`` and ``data_len`` say what was sent of its blocks."""

    def __init__(
        self, objects: PatientStore, budget: UploadBudget, key: str, *, part_delay_s: float
    ) -> None:
        self._objects = objects
        self._budget = budget
        self._part_delay_s = part_delay_s
        self.key: Final = key
        self._upload_id = ""
        self._sending: list[asyncio.Task[Part]] = []
        self.blocks: list[SentBlock] = []
        self.data_len = 0

    def __repr__(self) -> str:
        return f"<BlockUpload {self.key} {len(self.blocks)} blocks>"

    async def begin(self, metadata: Mapping[str, str]) -> None:
        """Open the upload."""
        self._upload_id = await self._objects.create_upload(
            self.key, metadata=metadata, content_type=keys.CONTENT_TYPE
        )

    async def send(
        self, filler: BlockFiller, took: Callable[[Sequence[Buffer]], None] | None = None
    ) -> None:
        """Send all blocks of a ledger; ``took`` sees each one's buffers, in order."""
        with plain_errors(), self._budget.share() as share:
            async with aclosing(filler.blocks()) as blocks, asyncio.TaskGroup() as group:
                # Room comes before the block is read, so that it counts while it is filled.
                while memory := filler.next_memory:
                    await share.take(memory)
                    block = await anext(blocks)
                    if block.part_number > PART_NUMBER_MAX:
                        raise self._too_many_blocks()
                    self._begun(block)
                    if took is not None:
                        took(block.buffers)
                    sending = self._send(block, share, partial(share.give_back, memory))
                    self._sending.append(group.create_task(sending))
                    # The task alone holds the block now, and gives it up when it was sent.
                    del block, sending
                # What is behind the last block shows whether the ledger is as it is said to be.
                surplus = await anext(blocks, None)
                assert surplus is None, "a block behind the last one"

    async def complete(self, *first: Part) -> None:
        """Make the object, of parts that were sent beside the blocks, and of the blocks."""
        parts = [*first, *(task.result() for task in self._sending)]
        await self._objects.complete_upload(self.key, self._upload_id, parts)
        await self._abort_others()

    async def send_beside(self, number: int, buffers: Sequence[Buffer], *, crc32c: int) -> Part:
        """Send a part that is none of the blocks, within the budget all the same."""
        with self._budget.share() as share:
            await share.take(sum(map(len, buffers)))
            async with share.sending() as leave:
                return await self.send_part(number, buffers, crc32c=crc32c, around_waits=leave.lent)

    async def send_part(
        self,
        number: int,
        buffers: Sequence[Buffer],
        *,
        crc32c: int,
        around_waits: Around = nullcontext,
    ) -> Part:
        """Send a part; again, where it was damaged on its way and is right here."""
        for left in reversed(range(DAMAGED_SENDS_MAX)):
            try:
                return await self._objects.upload_part(
                    self.key,
                    self._upload_id,
                    number,
                    buffers,
                    crc32c=crc32c,
                    around_waits=around_waits,
                )
            except CorruptError as error:
                if crc32c_of(buffers) != crc32c:
                    raise self._changed(number) from error
                if not left:
                    raise
                log.warning("part.damaged", key=self.key, part=number)
        raise AssertionError("the last try ends with an answer or an error")

    def _begun(self, block: FilledBlock) -> None:
        self.blocks.append(SentBlock(block.first_entry_id, block.part_number, block.offset))
        self.data_len = block.offset + block.length

    async def _send(self, block: FilledBlock, share: UploadShare, sent: Callable[[], None]) -> Part:
        try:
            async with share.sending() as leave:
                what = within("offload.part", part=block.part_number, bytes=block.length)
                with what, PART_SECONDS.time():
                    part = await self.send_part(
                        block.part_number,
                        block.buffers,
                        crc32c=block.crc32c,
                        around_waits=leave.lent,
                    )
                assert part.size == block.length
                # Its memory first, then the leave to fill another one.
                block.release()
                sent()
                log.debug("part.uploaded", key=self.key, part=part.number, length=part.size)
                if self._part_delay_s:
                    await asyncio.sleep(self._part_delay_s)
        finally:
            # A traceback may hold on to the block for as long as somebody looks at it.
            block.release()
        return part

    async def _abort_others(self) -> None:
        """Abort uploads that were begun by requests whose answer was lost: nobody else will."""
        try:
            for upload in await self._objects.list_uploads(self.key):
                if upload.key == self.key and upload.upload_id != self._upload_id:
                    await self._objects.abort_upload(self.key, upload.upload_id)
        except TierlogError as error:
            # The object is there for good: what can't be looked for takes nothing from that.
            UNSEEN.labels("upload").inc()
            log.warning("uploads.unseen", key=self.key, cause=str(error), remedy=LET_LIST)

    def _changed(self, number: int) -> CorruptError:
        offset = next((one.offset for one in self.blocks if one.part_number == number), 0)
        return CorruptError(
            f"part {number} of {self.key} changed in this process's memory after it was read",
            remedy="Check this machine's memory; the ledger is offloaded again",
            details={"object": self.key, "offset": str(offset)},
        )

    def _too_many_blocks(self) -> RefusedError:
        return RefusedError(
            f"object {self.key} needs more than {PART_NUMBER_MAX} parts, which S3 can't take",
            remedy="Roll ledgers earlier, or give the stream larger blocks",
            details={"object": self.key},
        )
