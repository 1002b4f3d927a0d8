"""Which entry logs go, which are compacted, and when (seeds/003, "Data compaction").

Owns: these decisions, as functions of values. Does not own carrying them out (``compaction``).

A log's runs are live (of ledgers that were not deleted) or garbage. Its live share is
live / (live + garbage); header and map are neither.

Invariants:
    * No log is chosen that is appended to.
    * A log without live bytes is removed, never copied.
    * A threshold or interval of 0 or less switches that compaction off; with both off, nothing is
      ever copied, also not for want of space.
    * Nothing is copied that frees nothing.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

from tierlog.format.run import RUN_HEADER_LEN
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.entrylog.entry_log_format import (
    LOG_HEADER_LEN,
    MAP_ROW_LEN,
    MAP_TRAILER_LEN,
)
from tierlog_ingest.storage.space import Level

LIVE_SHARE_MAX: Final = 0.95
"""Above it, not even a full disk is a reason to copy a log."""


class Trigger(Enum):
    """Why a compaction runs."""

    MINOR = "minor"
    MAJOR = "major"
    SPACE = "space"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Compact what is below ``threshold``, every ``interval_s``."""

    threshold: float
    interval_s: float

    @property
    def enabled(self) -> bool:
        """Whether this compaction takes place at all."""
        return self.threshold > 0 and self.interval_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Both compactions."""

    minor: Rule
    major: Rule

    @classmethod
    def of(cls, settings: StorageSettings) -> Self:
        """Return what the settings say."""
        return cls(
            minor=Rule(
                threshold=settings.minor_compaction_threshold,
                interval_s=settings.minor_compaction_interval_s,
            ),
            major=Rule(
                threshold=settings.major_compaction_threshold,
                interval_s=settings.major_compaction_interval_s,
            ),
        )

    def threshold(self, trigger: Trigger, level: Level = Level.OK) -> float:
        """Return the live share below which a log is worth its copying."""
        if trigger is not Trigger.SPACE:
            return (self.minor if trigger is Trigger.MINOR else self.major).threshold
        widest = max((one.threshold for one in (self.minor, self.major) if one.enabled), default=0)
        return LIVE_SHARE_MAX if widest > 0 and level is Level.READ_ONLY else widest


def due(rules: Rules, *, now_s: float, done_s: Mapping[Trigger, float]) -> Trigger | None:
    """Return the compaction whose time has come. A major one stands for a minor one, too."""
    for trigger, rule in ((Trigger.MAJOR, rules.major), (Trigger.MINOR, rules.minor)):
        if rule.enabled and now_s - done_s[trigger] >= rule.interval_s:
            return trigger
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogUse:
    """What of a log is in use."""

    log_id: int
    length: int
    """Where its runs end."""
    ended: bool
    """Nothing is appended to it any more: it is sealed, or could not be."""
    live_bytes: int

    @property
    def garbage_bytes(self) -> int:
        """What copying the log would free."""
        return max(0, self.length - LOG_HEADER_LEN - self.live_bytes)

    @property
    def copy_bytes(self) -> int:
        """What a copy takes, at most: each ledger of its map has a run, which is longer."""
        rows = self.live_bytes * MAP_ROW_LEN // RUN_HEADER_LEN
        return self.live_bytes + rows + LOG_HEADER_LEN + MAP_TRAILER_LEN

    @property
    def live_share(self) -> float:
        """How much of its runs is live, from 0 to 1."""
        return self.live_bytes / max(1, self.live_bytes + self.garbage_bytes)


def without_live_ledgers(logs: Iterable[LogUse]) -> list[int]:
    """Return the logs that can just go."""
    return [one.log_id for one in logs if one.ended and not one.live_bytes]


def below(logs: Iterable[LogUse], *, threshold: float, besides: Collection[int] = ()) -> list[int]:
    """Return the logs to compact, the cheapest gain first; ``besides`` whatever their share."""
    chosen = [
        one
        for one in logs
        if one.ended
        and one.live_bytes
        and (one.log_id in besides or (one.garbage_bytes and one.live_share < threshold))
    ]
    return [one.log_id for one in sorted(chosen, key=lambda one: (one.live_share, one.log_id))]


def for_space(logs: Iterable[LogUse], *, threshold: float, copy_bytes_max: int) -> int | None:
    """Return the log whose compaction frees something with the least copying, if it fits."""
    worth = {one.log_id: one for one in logs}
    fitting = [
        worth[log_id]
        for log_id in below(worth.values(), threshold=threshold)
        if worth[log_id].copy_bytes <= copy_bytes_max
    ]
    if not fitting:
        return None
    return min(fitting, key=lambda one: (one.live_bytes, one.log_id)).log_id
