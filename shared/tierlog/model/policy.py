"""Thresholds of a stream: when to roll, to offload, to delete locally, to trim (seeds/000).

Invariants (seeds/000, "Triggering offload"): ``offload_time < retention_time`` and
``offload_size < retention_size``, else data would be trimmed before it was offloaded.
"""

from dataclasses import dataclass, fields
from typing import Final, Self

from tierlog.model.errors import Reason, RefusedError

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
MIB: Final = 1024 * 1024

DELETION_LAG_DEFAULT_MS: Final = 4 * HOUR_MS
NEVER: Final = -1

BLOCK_SIZE_DEFAULT: Final = 64 * MIB
# S3's smallest part, but for the last one.
BLOCK_SIZE_MIN: Final = 5 * MIB
BLOCK_SIZE_MAX: Final = 2**31 - 1

READ_PRIORITIES: Final = ("tier2", "tier1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One level of thresholds; ``None`` leaves the choice to the level above it."""

    offload_time_ms: int | None = None
    offload_size_bytes: int | None = None
    retention_time_ms: int | None = None
    retention_size_bytes: int | None = None
    deletion_lag_ms: int | None = None
    ledger_bytes_max: int | None = None
    ledger_entries_max: int | None = None
    ledger_age_ms_max: int | None = None
    block_size: int | None = None
    offloaded_read_priority: str | None = None

    def __post_init__(self) -> None:
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and value < low:
                _refuse(name, f"{name} = {value} is below its lowest value {low}")
        if self.block_size is not None and self.block_size > BLOCK_SIZE_MAX:
            _refuse("block_size", f"block_size = {self.block_size} is above {BLOCK_SIZE_MAX}")
        priority = self.offloaded_read_priority
        if priority is not None and priority not in READ_PRIORITIES:
            _refuse("offloaded_read_priority", f"{priority!r} is not one of {READ_PRIORITIES}")
        for what in ("time_ms", "size_bytes"):
            offload, retention = (
                getattr(self, f"offload_{what}"),
                getattr(self, f"retention_{what}"),
            )
            if offload is not None and retention is not None and offload >= retention:
                _refuse(
                    f"offload_{what}",
                    f"offload_{what} = {offload} is not below retention_{what} = {retention}",
                )

    def over(self, lower: Self) -> Self:
        """Return this level laid over ``lower``; checks the result as a whole."""
        values = {}
        for item in fields(self):
            own = getattr(self, item.name)
            values[item.name] = own if own is not None else getattr(lower, item.name)
        return type(self)(**values)


_LOWEST: Final = {
    "offload_time_ms": 0,
    "offload_size_bytes": 0,
    "retention_time_ms": 0,
    "retention_size_bytes": 0,
    "deletion_lag_ms": NEVER,
    "ledger_bytes_max": 1,
    "ledger_entries_max": 1,
    "ledger_age_ms_max": 1,
    "block_size": BLOCK_SIZE_MIN,
}


def _refuse(bound: str, message: str) -> None:
    raise RefusedError(
        message,
        reason=Reason.POLICY_INVALID,
        remedy=f"Change {bound}; offload thresholds must lie below retention thresholds",
        details={"bound": bound},
    )


CLUSTER_DEFAULT: Final = Policy(
    deletion_lag_ms=DELETION_LAG_DEFAULT_MS,
    ledger_bytes_max=1024 * MIB,
    ledger_entries_max=2_000_000,
    ledger_age_ms_max=4 * HOUR_MS,
    block_size=BLOCK_SIZE_DEFAULT,
    offloaded_read_priority="tier2",
)
"""What holds where no level says otherwise: nothing is offloaded and nothing is trimmed."""
