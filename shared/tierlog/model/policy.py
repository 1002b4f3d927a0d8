"""Thresholds of a stream: when to roll, to offload, to delete locally, to trim (seeds/000).

Also how much of its copies is kept and looked at: digests, read-back.

Levels: what a stream says itself, its namespace (the part of its name before the first dot), the
cluster, the defaults; the first that says something wins, for each value alone (ADR-0021). What
no level says of copies, the settings of the process say that writes or verifies them.

Invariants (seeds/000, "Triggering offload"): ``offload_time < retention_time`` and
``offload_size < retention_size``, else data would be trimmed before it was offloaded. They hold
for what comes out of all levels together.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Final, Self

from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import INT64_MAX, StreamName, namespace_of

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
MIB: Final = 1024 * 1024

DELETION_LAG_DEFAULT_MS: Final = 4 * HOUR_MS
NEVER: Final = -1
"""A threshold that is never reached, whatever the level above says."""

BLOCK_SIZE_DEFAULT: Final = 64 * MIB
# S3's smallest part, but for the last one.
BLOCK_SIZE_MIN: Final = 5 * MIB
BLOCK_SIZE_MAX: Final = 2**31 - 1
OBJECT_BLOCKS_MAX: Final = 9_999
"""S3 takes 10,000 parts, and the index of a single object is one of them."""
BLOCK_OVERHEAD: Final = 128
ENTRY_OVERHEAD: Final = 12
"""Bytes of a block and of an entry beside the entry's own, in the larger of both layouts."""

READ_PRIORITIES: Final = ("tier2", "tier1")
READ_BACKS: Final = ("sample", "full")
_CHOICES: Final = {"offloaded_read_priority": READ_PRIORITIES, "read_back": READ_BACKS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One level of thresholds; ``None`` leaves the choice to the level above it.

    -1 of an offload or retention threshold, or of the deletion lag: never. ``data_sha256``: a
    SHA-256 of each data object is kept. ``read_back``: so much of a copy is read and compared
    before the local one goes, a sample of it or the full copy.
    """

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
    data_sha256: bool | None = None
    read_back: str | None = None

    def __post_init__(self) -> None:
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and value < low:
                _refuse(name, f"{name} = {value} is below its lowest value {low}")
            if value is not None and value > INT64_MAX:
                _refuse(name, f"{name} = {value} is above {INT64_MAX}")
        if self.block_size is not None and self.block_size > BLOCK_SIZE_MAX:
            _refuse("block_size", f"block_size = {self.block_size} is above {BLOCK_SIZE_MAX}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                _refuse(name, f"{name} = {value[:100]!r} is not one of {', '.join(choices)}")
        for what in ("time_ms", "size_bytes"):
            offload, retention = (
                getattr(self, f"offload_{what}"),
                getattr(self, f"retention_{what}"),
            )
            if NEVER in {offload, retention}:
                continue
            if offload is not None and retention is not None and offload >= retention:
                _refuse(
                    f"offload_{what}",
                    f"offload_{what} = {offload} is not below retention_{what} = {retention}",
                    remedy=f"Choose offload_{what} below retention_{what}, or unset one of them",
                )

    def over(self, lower: Self) -> Self:
        """Return this level laid over ``lower``; checks the result as a whole."""
        values = {}
        for item in fields(self):
            own = getattr(self, item.name)
            values[item.name] = own if own is not None else getattr(lower, item.name)
        return type(self)(**values)

    @property
    def has_bounds(self) -> bool:
        """Whether a value of another level can contradict this one."""
        return any(getattr(self, name) not in {None, NEVER} for name in BOUNDS)

    @property
    def offloads(self) -> bool:
        """Whether ledgers are offloaded without being asked for."""
        return threshold(self.offload_time_ms) is not None or (
            threshold(self.offload_size_bytes) is not None
        )

    @property
    def trims(self) -> bool:
        """Whether retention takes ledgers, by their age or by what is sealed behind them."""
        return threshold(self.retention_time_ms) is not None or (
            threshold(self.retention_size_bytes) is not None
        )


_LOWEST: Final = {
    "offload_time_ms": NEVER,
    "offload_size_bytes": NEVER,
    "retention_time_ms": NEVER,
    "retention_size_bytes": NEVER,
    "deletion_lag_ms": NEVER,
    "ledger_bytes_max": 1,
    "ledger_entries_max": 1,
    "ledger_age_ms_max": 1,
    "block_size": BLOCK_SIZE_MIN,
}


BOUNDS: Final = (
    "offload_time_ms",
    "offload_size_bytes",
    "retention_time_ms",
    "retention_size_bytes",
)
LEDGER_BOUNDS: Final = ("ledger_bytes_max", "ledger_entries_max", "block_size")


def threshold(value: int | None) -> int | None:
    """Return a threshold, or None when it is never reached."""
    return None if value == NEVER else value


def ledger_bytes_highest(block_size: int, entries_max: int) -> int:
    """Return the highest ``ledger_bytes_max`` whose ledgers fit an object, however they are cut.

    A block and the first entry of the next are more than a block holds, or the entry would be in
    the first one: n blocks have frames of more than ``(n - 1) / 2`` blocks. The last entry of a
    ledger begins below its limit, and may fill a block. Each entry has a header, and is taken to
    have a byte at least.
    """
    frames_max = (OBJECT_BLOCKS_MAX + 1) // 2 * (block_size - BLOCK_OVERHEAD) - 1
    by_entries = frames_max - ENTRY_OVERHEAD * entries_max
    length_max = max(by_entries, frames_max // (ENTRY_OVERHEAD + 1))
    return length_max + 1 - (block_size - BLOCK_OVERHEAD - ENTRY_OVERHEAD)


def check_ledger_bounds(policy: Policy) -> None:
    """Refuse a policy, with every value set, whose ledgers an object may not hold.

    Not a part of ``Policy`` itself: what was stored before stays readable.
    """
    bytes_max, entries_max = policy.ledger_bytes_max, policy.ledger_entries_max
    block_size = policy.block_size
    assert bytes_max is not None
    assert entries_max is not None
    assert block_size is not None
    highest = ledger_bytes_highest(block_size, entries_max)
    if bytes_max > highest:
        _refuse(
            "ledger_bytes_max",
            f"ledger_bytes_max = {bytes_max} is above {highest}: with block_size = {block_size} "
            f"and ledger_entries_max = {entries_max} a ledger may need more parts than S3 takes",
            remedy="Lower ledger_bytes_max or ledger_entries_max, or raise block_size",
        )


def _refuse(bound: str, message: str, *, remedy: str = "") -> None:
    raise RefusedError(
        message,
        reason=Reason.POLICY_INVALID,
        remedy=remedy or f"Give another value for {bound}",
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

CLUSTER_LEVEL: Final = "cluster"
NAMESPACE_LEVEL: Final = "namespace"
STREAM_LEVEL: Final = "stream"
DEFAULT_LEVEL: Final = "default"
SETTINGS_LEVEL: Final = "settings"
LEFT_TO_SETTINGS: Final = {"data_sha256": "s3.data_sha256", "read_back": "s3.read_back"}
"""Which settings of a process say what no level does."""
assert all(getattr(CLUSTER_DEFAULT, name) is None for name in LEFT_TO_SETTINGS)

FORMER_NAMESPACES_MAX: Final = 200
"""Of so many namespaces that say nothing any more it is known when they last said something."""
_FORMER: Final = "*"
"""No namespace: of those of which that is not known any more, when the newest of them did."""
NAMESPACES_MAX: Final = 2000
"""Namespaces with thresholds of their own: they share one node of the metadata store."""
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,126}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLevels:
    """What is said above all streams.

    ``changed_ms``: of two that say something else the newer one's is higher. It says nothing.
    ``level_changed_ms``: of each level by itself, by namespace; "": the cluster's; "*": of all
    namespaces that say nothing and have none of their own, the newest.
    """

    cluster: Policy = Policy()
    namespaces: Mapping[str, Policy] = field(default_factory=dict)
    changed_ms: int = field(default=0, compare=False)
    level_changed_ms: Mapping[str, int] = field(default_factory=dict, compare=False)

    def changed(self, namespace: str | None, now_ms: int) -> Self:
        """Return the levels as one was changed now, whatever the clock said at changes before."""
        at_ms = max(now_ms, self.changed_ms + 1)
        stamps = {**self.level_changed_ms, namespace or "": at_ms}
        former = stamps.keys() - self.namespaces.keys() - {"", _FORMER}
        for one in sorted(former, key=stamps.__getitem__)[:-FORMER_NAMESPACES_MAX]:
            stamps[_FORMER] = stamps.pop(one)
        return replace(self, changed_ms=at_ms, level_changed_ms=stamps)

    def knowing(self, before: Self) -> Self:
        """Return the same, and of what is as it was before when that was changed.

        A release that does not know that forgets it.
        """
        stamps = dict(self.level_changed_ms)
        for one, at_ms in before.level_changed_ms.items():
            speaks = not one or one in self.namespaces
            if speaks and self.level(one or None) == before.level(one or None):
                stamps[one] = max(at_ms, stamps.get(one, 0))
        return replace(self, level_changed_ms=stamps)

    def older_than(self, other: Self) -> str | None:
        """Say which level says what was said before the other ones; None: none does.

        A level that was changed since makes no other one newer.
        """
        for one in sorted({"", *self.namespaces, *other.namespaces}):
            at_ms, there_ms = self._changed_ms(one), other._changed_ms(one)
            if at_ms < there_ms and self.level(one or None) != other.level(one or None):
                what = f"namespace {one}" if one else "the cluster"
                return f"the policy of {what} was changed at {there_ms} there, and at {at_ms} here"
        return None

    def _changed_ms(self, one: str) -> int:
        """Return when a level was changed; one that is not known was by then, if ever."""
        known = not one or one in self.namespaces or one in self.level_changed_ms
        return self.level_changed_ms.get(one if known else _FORMER, 0)

    def effective(self, name: StreamName, own: Policy) -> Policy:
        """Return what holds for a stream that says ``own``, every value that has a default set.

        Raises POLICY_INVALID when the levels contradict each other.
        """
        found = own
        for _, policy in list(self.layers(name, own))[1:]:
            found = found.over(policy)
        return found

    def layers(self, name: StreamName, own: Policy) -> Iterator[tuple[str, Policy]]:
        """Iterate over the levels of a stream, the one that wins first, with their names."""
        yield STREAM_LEVEL, own
        namespace = namespace_of(name)
        if namespace in self.namespaces:
            yield f"{NAMESPACE_LEVEL} {namespace}", self.namespaces[namespace]
        yield CLUSTER_LEVEL, self.cluster
        yield DEFAULT_LEVEL, CLUSTER_DEFAULT

    def sources(self, name: StreamName, own: Policy) -> dict[str, str | None]:
        """Return which level gives each value; None: no level says anything.

        Of a value that is left to the settings of a process that is said, and no value.
        """
        layers = list(self.layers(name, own))
        return {
            item.name: next(
                (level for level, policy in layers if getattr(policy, item.name) is not None),
                SETTINGS_LEVEL if item.name in LEFT_TO_SETTINGS else None,
            )
            for item in fields(Policy)
        }

    def level(self, namespace: str | None) -> Policy:
        """Return what a namespace says, or, for None, the cluster."""
        if namespace is None:
            return self.cluster
        return self.namespaces.get(namespace, Policy())

    def with_level(self, namespace: str | None, policy: Policy) -> Self:
        """Return the levels with one replaced (None: the cluster's); checks them by themselves."""
        if namespace is None:
            planned = replace(self, cluster=policy)
        else:
            others = {key: one for key, one in self.namespaces.items() if key != namespace}
            kept = {} if policy == Policy() else {check_namespace(namespace): policy}
            planned = replace(self, namespaces=others | kept)
        if len(planned.namespaces) > NAMESPACES_MAX:
            _refuse(
                "namespaces",
                f"more than {NAMESPACES_MAX} namespaces have thresholds",
                remedy="Unset the thresholds of a namespace first, or set the cluster's",
            )
        top = planned.cluster.over(CLUSTER_DEFAULT)
        check_ledger_bounds(top)
        for key, one in planned.namespaces.items():
            try:
                check_ledger_bounds(one.over(top))
            except RefusedError as error:
                raise breaks_below(f"namespace {key}", error) from error
        return planned

    def check(self, name: StreamName, own: Policy) -> None:
        """Refuse what a stream says, or is to say, where the levels together don't hold.

        What a stream does not say itself is not its fault: its ledgers are rolled in time
        whatever is stored (``ledger_bytes_highest``).
        """
        found = self.effective(name, own)
        if any(getattr(own, one) is not None for one in LEDGER_BOUNDS):
            check_ledger_bounds(found)


NO_LEVELS: Final = PolicyLevels()


def check_namespace(text: str) -> str:
    """Check ``text`` as the name of a namespace, or raise ``RefusedError``."""
    if _NAMESPACE.fullmatch(text) is None:
        raise RefusedError(
            f"namespace {text[:140]!r} is not allowed",
            remedy="Give what stands before the first dot of a stream's name",
        )
    return text


def breaks_below(what: str, error: RefusedError) -> RefusedError:
    """Say that a change would contradict what a level below says."""
    return RefusedError(
        f"{what} would no longer hold together: {error.message}",
        reason=Reason.POLICY_INVALID,
        remedy=f"Change the thresholds of {what} first, or choose others here",
        details={**error.details, "below": what},
    )
