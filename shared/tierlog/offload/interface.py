"""What an offloader can do, whichever store is behind it (seeds/000, "LedgerOffloader interface").

Owns the interface and the default that refuses. Does not own when a ledger is offloaded: the
scheduler decides that, and the offloader service drives one attempt through its steps.

Invariant: every object of an attempt is found from its ledger id, its UUID and its location.
"""

from collections.abc import Mapping
from typing import NoReturn, Protocol
from uuid import UUID

from tierlog.ledger.reader import ReadHandle
from tierlog.model.errors import RefusedError
from tierlog.model.ids import LedgerId
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.offload.verify import ReadBack


class LedgerOffloader(Protocol):
    """Copies ledgers to tier 2, reads them there, deletes them there."""

    def location(self, ledger_id: LedgerId, uuid: UUID) -> Tier2Location:
        """Return where an attempt's objects will lie; stored before the attempt begins."""
        ...

    async def offload(
        self,
        handle: ReadHandle,
        uuid: UUID,
        extra_metadata: Mapping[str, str],
        *,
        data_sha256: bool | None = None,
    ) -> Tier2Copy:
        """Copy a sealed ledger, verify the copy, and say what was written.

        ``extra_metadata`` is put on the objects for whoever looks at them; it is never read back.
        ``data_sha256``: whether a SHA-256 of the data is kept; None: as the settings say.
        """
        ...

    async def read_offloaded(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None = None,
        *,
        copy: Tier2Copy | None = None,
    ) -> ReadHandle:
        """Return a handle that reads the copy; with ``copy`` the index's digest is checked."""
        ...

    async def verify(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None,
        copy: Tier2Copy,
        *,
        read_back: ReadBack | None = None,
    ) -> None:
        """Raise unless the objects are there, whole and as ``copy`` says.

        ``read_back``: how much of the data is compared too; None: as the settings say.
        """
        ...

    async def delete_offloaded(
        self, ledger_id: LedgerId, uuid: UUID, driver_metadata: Tier2Location | None = None
    ) -> None:
        """Delete every object of an attempt and abort its uploads; repeating it is legal."""
        ...


class UnconfiguredOffloader:
    """Driver ``none``, and what stands where no driver is named: refuses any use."""

    def location(self, ledger_id: LedgerId, uuid: UUID) -> Tier2Location:
        self._refuse()

    async def offload(
        self,
        handle: ReadHandle,
        uuid: UUID,
        extra_metadata: Mapping[str, str],
        *,
        data_sha256: bool | None = None,
    ) -> Tier2Copy:
        self._refuse()

    async def read_offloaded(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None = None,
        *,
        copy: Tier2Copy | None = None,
    ) -> ReadHandle:
        self._refuse()

    async def verify(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None,
        copy: Tier2Copy,
        *,
        read_back: ReadBack | None = None,
    ) -> None:
        self._refuse()

    async def delete_offloaded(
        self, ledger_id: LedgerId, uuid: UUID, driver_metadata: Tier2Location | None = None
    ) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RefusedError(
            "no offloader is configured",
            remedy="Set s3.driver to one that writes, as aws-s3, for offloaders and schedulers",
        )
