"""Core attributes by name, and those that are derived on read: policies, the index's root.

Owns the names, and what the derived ones are. Does not own the policy (``policy``), the record that
has the root (``attribute_record``), nor the core attributes that appends change.

Invariants:
    * A derived attribute is kept nowhere, neither in a checkpoint nor in an owner's memory: it is
      made of the stream's policy, the levels above and the index's root whenever it is read, so
      that no second copy can tell otherwise.
    * A stream that has attributes has each of them.
    * Deriving never fails, also where levels of another moment contradict the stream's own policy.
"""

from collections.abc import Iterator, Mapping
from typing import Final
from uuid import UUID

from tierlog.model.attributes import (
    CREATION_TIME,
    EVENT_COUNT,
    INDEX_ROOT_LENGTH,
    INDEX_ROOT_OFFSET,
    ROLL_OVER_AGE_MS,
    ROLL_OVER_BYTES,
    ROLL_OVER_ENTRIES,
    SCALE_POLICY_RATE,
    SCALE_POLICY_SEGMENTS_MIN,
    SCALE_POLICY_TYPE,
    AttributeKey,
    IndexRoot,
)
from tierlog.model.ids import StreamName
from tierlog.model.policy import CLUSTER_DEFAULT, Policy, PolicyLevels

SCALE_FIXED: Final = 0
"""The type of a stream that does not scale by itself, as all do; its rate is 0."""
SEGMENTS: Final = 1
"""A stream that has entries, as each partition does, is one segment and stays one."""
NO_INDEX: Final = -1
"""The offset of the root of an index that has no attributes; its length is 0."""

_ROLL_OVER: Final[Mapping[AttributeKey, str]] = {
    ROLL_OVER_BYTES: "ledger_bytes_max",
    ROLL_OVER_ENTRIES: "ledger_entries_max",
    ROLL_OVER_AGE_MS: "ledger_age_ms_max",
}
# A limit is there always. The highest of entries and of age is that of a value, and no limit.
assert all(getattr(CLUSTER_DEFAULT, name) is not None for name in _ROLL_OVER.values())

CORE_NAMES: Final[Mapping[AttributeKey, str]] = {
    EVENT_COUNT: "event-count",
    CREATION_TIME: "creation-time",
    SCALE_POLICY_TYPE: "scale-policy-type",
    SCALE_POLICY_RATE: "scale-policy-rate",
    SCALE_POLICY_SEGMENTS_MIN: "scale-policy-segments-min",
    ROLL_OVER_BYTES: "roll-over-bytes",
    ROLL_OVER_ENTRIES: "roll-over-entries",
    ROLL_OVER_AGE_MS: "roll-over-age-ms",
    INDEX_ROOT_OFFSET: "index-root-offset",
    INDEX_ROOT_LENGTH: "index-root-length",
}
DERIVED: Final = frozenset(CORE_NAMES) - {EVENT_COUNT, CREATION_TIME}


def derived(
    name: StreamName, own: Policy, levels: PolicyLevels, root: IndexRoot
) -> dict[AttributeKey, int]:
    """Return the attributes in ``DERIVED`` of a stream that says ``own`` below these levels."""
    layers = [policy for _, policy in levels.layers(name, own)]

    def said(item: str) -> int:
        """Return what the first level says; not the whole policy, which could contradict itself."""
        values: Iterator[int | None] = (getattr(one, item) for one in layers)
        return next(value for value in values if value is not None)

    offset, length = (root.root_offset, root.root_length) if root.count else (NO_INDEX, 0)
    return {
        SCALE_POLICY_TYPE: SCALE_FIXED,
        SCALE_POLICY_RATE: 0,
        SCALE_POLICY_SEGMENTS_MIN: SEGMENTS,
        **{key: said(item) for key, item in _ROLL_OVER.items()},
        INDEX_ROOT_OFFSET: offset,
        INDEX_ROOT_LENGTH: length,
    }


def name_of(key: AttributeKey) -> str:
    """Return a core attribute's name, or its key as a UUID if it has none."""
    return CORE_NAMES.get(key) or str(UUID(bytes=bytes(key)))
