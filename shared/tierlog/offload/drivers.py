"""Drivers by name: one writes new copies, whoever wrote a copy reads and deletes it.

Owns the names, and which driver is asked. Does not own what a driver does.

    aws-s3                  data, index and side objects (``tierlog.offload.driver``); also: S3
    aws-s3-single-object    the layout of one object (``tierlog.offload.single_driver``)
    none                    refuses any use

Others come through the API: a name, and what makes a ``LedgerOffloader`` of ``DriverParts``. Its
``location`` must say that name, since the place that is kept of each attempt names its driver.

Invariants:
    * A copy is read, verified and deleted by the driver that its place names, whatever the
      settings say by then; a name that nobody has is refused, never taken for another.
    * A driver is made when it is first needed, once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from tierlog.ledger.reader import ReadHandle
from tierlog.model.errors import RefusedError
from tierlog.model.ids import LedgerId
from tierlog.model.offload import Tier2Copy, Tier2Location
from tierlog.offload.budget import UploadBudget
from tierlog.offload.driver import DRIVER, DRIVERS, BlockOffloader, Tier2Settings
from tierlog.offload.interface import LedgerOffloader, UnconfiguredOffloader
from tierlog.offload.single_driver import SINGLE_DRIVER, SingleObjectOffloader
from tierlog.offload.verify import ReadBack
from tierlog.ports.cache import SharedCache
from tierlog.ports.objects import ObjectStore
from tierlog.ports.retrying import Retries

NO_DRIVER: Final = "none"
TWO_OBJECTS: Final = "two-objects"
SINGLE_OBJECT: Final = "single-object"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverParts:
    """What a driver is made of."""

    objects: ObjectStore
    settings: Tier2Settings
    budget: UploadBudget | None = None
    retries: Callable[[], Retries] | None = None
    cache: SharedCache | None = None


MakeDriver = Callable[[DriverParts], LedgerOffloader]


def _block_driver(parts: DriverParts) -> LedgerOffloader:
    return BlockOffloader(
        parts.objects,
        parts.settings,
        budget=parts.budget,
        retries=parts.retries,
        cache=parts.cache,
    )


def _single_driver(parts: DriverParts) -> LedgerOffloader:
    return SingleObjectOffloader(
        parts.objects,
        parts.settings,
        budget=parts.budget,
        retries=parts.retries,
        cache=parts.cache,
    )


def _no_driver(_: DriverParts) -> LedgerOffloader:
    return UnconfiguredOffloader()


# Names that mean the same driver share it.
_SAME: Final = dict.fromkeys(DRIVERS, DRIVER)
BUILT_IN: Final[Mapping[str, MakeDriver]] = {
    DRIVER: _block_driver,
    SINGLE_DRIVER: _single_driver,
    NO_DRIVER: _no_driver,
}


def known_here(location: Tier2Location) -> bool:
    """Tell whether the layout of a copy is one of this module's, so that it can be judged."""
    return _SAME.get(location.driver, location.driver) in (DRIVER, SINGLE_DRIVER)


def driver_name(driver: str, layout: str) -> str:
    """Return the name of the driver that writes, as the settings say it in two words."""
    name = _SAME.get(driver, driver)
    if layout == TWO_OBJECTS:
        return name
    if layout != SINGLE_OBJECT or name not in (DRIVER, SINGLE_DRIVER):
        raise RefusedError(
            f"driver {driver!r} has no layout {layout!r}",
            remedy=f"Set s3.layout to {TWO_OBJECTS!r}, or s3.driver to {DRIVER!r}",
        )
    return SINGLE_DRIVER


class Drivers:
    """``LedgerOffloader`` over all that have a name; ``writes`` names the one for new copies."""

    def __init__(
        self,
        parts: DriverParts,
        *,
        writes: str = NO_DRIVER,
        others: Mapping[str, MakeDriver] | None = None,
    ) -> None:
        taken = sorted(name for name in others or {} if name in BUILT_IN or name in _SAME)
        if taken:
            raise RefusedError(
                f"driver {taken[0]!r} has a name that is taken",
                remedy="Give it another name: copies that exist name their driver",
            )
        self._parts = parts
        self._makers = {**BUILT_IN, **(others or {})}
        self._made: dict[str, LedgerOffloader] = {}
        self.writes: Final = writes
        # At once, so that a name that is mistyped is not found out by the first ledger.
        self._writer = self.named(writes)

    def __repr__(self) -> str:
        return f"<Drivers writes={self.writes} of {', '.join(self.names)}>"

    @property
    def names(self) -> list[str]:
        """All names that a setting may have."""
        return sorted({*self._makers, *_SAME})

    def named(self, name: str) -> LedgerOffloader:
        """Return the driver of that name, or raise ``RefusedError``."""
        name = _SAME.get(name, name)
        made = self._made.get(name)
        if made is None:
            maker = self._makers.get(name)
            if maker is None:
                raise RefusedError(
                    f"there is no driver {name[:100]!r}; there are {', '.join(self.names)}",
                    remedy="Set s3.driver to one of these, or pass the driver to the service",
                    details={"driver": name[:100]},
                )
            made = self._made[name] = maker(self._parts)
        return made

    def of(self, location: Tier2Location | None) -> LedgerOffloader:
        """Return the driver that wrote an attempt; None: the one that writes."""
        return self._writer if location is None else self.named(location.driver)

    def location(self, ledger_id: LedgerId, uuid: UUID) -> Tier2Location:
        return self._writer.location(ledger_id, uuid)

    async def offload(
        self,
        handle: ReadHandle,
        uuid: UUID,
        extra_metadata: Mapping[str, str],
        *,
        data_sha256: bool | None = None,
    ) -> Tier2Copy:
        return await self._writer.offload(handle, uuid, extra_metadata, data_sha256=data_sha256)

    async def read_offloaded(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None = None,
        *,
        copy: Tier2Copy | None = None,
    ) -> ReadHandle:
        driver = self.of(driver_metadata)
        return await driver.read_offloaded(ledger_id, uuid, driver_metadata, copy=copy)

    async def verify(
        self,
        ledger_id: LedgerId,
        uuid: UUID,
        driver_metadata: Tier2Location | None,
        copy: Tier2Copy,
        *,
        read_back: ReadBack | None = None,
    ) -> None:
        driver = self.of(driver_metadata)
        await driver.verify(ledger_id, uuid, driver_metadata, copy, read_back=read_back)

    async def delete_offloaded(
        self, ledger_id: LedgerId, uuid: UUID, driver_metadata: Tier2Location | None = None
    ) -> None:
        await self.of(driver_metadata).delete_offloaded(ledger_id, uuid, driver_metadata)
