"""A limit on how long a copy may take, around a driver.

Owns the limit, and what is told when it is over. Does not own what becomes of the attempt: to
whoever asked for the copy it is a failure as any other (``tierlog.offload.attempting``).

Invariant: the limit is the driver's alone. What is done behind a whole copy, such as its export,
lies outside of it: a copy that was verified is never thrown away for that.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from tierlog.ledger.reader import ReadHandle
from tierlog.model.errors import RetryableError
from tierlog.model.ids import LedgerId
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.offload.groups import within
from tierlog.offload.interface import LedgerOffloader
from tierlog.offload.verify import ReadBack


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTime:
    """How long a copy may be read and written: so long, and as its bytes take at this pace."""

    base_s: float
    bytes_per_s_min: float

    def limit_s(self, length: int) -> float:
        """Return the limit for a ledger with so many bytes."""
        return self.base_s + length / self.bytes_per_s_min


class OffloaderAround:
    """Does all that another ``LedgerOffloader`` does, for those who add to its ``offload``."""

    def __init__(self, offloader: LedgerOffloader) -> None:
        self._offloader = offloader

    def location(self, ledger_id: LedgerId, uuid: UUID) -> Tier2Location:
        return self._offloader.location(ledger_id, uuid)

    async def read_offloaded(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None = None,
        *,
        copy: Tier2Copy | None = None,
    ) -> ReadHandle:
        return await self._offloader.read_offloaded(ledger_id, uuid, driver_metadata, copy=copy)

    async def verify(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None,
        copy: Tier2Copy,
        *,
        read_back: ReadBack | None = None,
    ) -> None:
        await self._offloader.verify(ledger_id, uuid, driver_metadata, copy, read_back=read_back)

    async def delete_offloaded(
        self, ledger_id: LedgerId, uuid: UUID, driver_metadata: Tier2Location | None = None
    ) -> None:
        await self._offloader.delete_offloaded(ledger_id, uuid, driver_metadata)


class TimedOffloader(OffloaderAround):
    """``LedgerOffloader`` around another one: a copy that takes too long is cut off, and fails."""

    def __init__(self, offloader: LedgerOffloader, copy_time: CopyTime) -> None:
        super().__init__(offloader)
        self._copy_time = copy_time

    def __repr__(self) -> str:
        return f"<TimedOffloader {self._offloader!r} {self._copy_time}>"

    async def offload(
        self,
        handle: ReadHandle,
        uuid: UUID,
        extra_metadata: Mapping[str, str],
        *,
        data_sha256: bool | None = None,
    ) -> Tier2Copy:
        length = handle.ledger_metadata.length
        limit_s = self._copy_time.limit_s(length)
        patience = asyncio.timeout(limit_s)
        try:
            async with within(patience):
                return await self._offloader.offload(
                    handle, uuid, extra_metadata, data_sha256=data_sha256
                )
        except TimeoutError as error:
            if not patience.expired():
                raise
            raise RetryableError(
                f"the copy of ledger {handle.ledger_id} ({length} bytes) took longer than "
                f"{limit_s:.0f} s",
                remedy="See whether tier 1, the store or a throttle (s3.bytes_per_s_max, "
                "s3.namespace_bytes_per_s_max) is slow; offloader.request_s_max gives it more time",
                details={"ledger_id": str(handle.ledger_id), "length": str(length)},
            ) from error
