"""Core attributes that are derived: what holds for a stream now, and nothing else."""

from uuid import UUID

from tierlog.model.attributes import (
    INDEX_ROOT_LENGTH,
    INDEX_ROOT_OFFSET,
    KEY_LEN,
    ROLL_OVER_AGE_MS,
    ROLL_OVER_BYTES,
    ROLL_OVER_ENTRIES,
    AttributeKey,
    IndexRoot,
    is_core,
)
from tierlog.model.core_attributes import CORE_NAMES, DERIVED, derived, name_of
from tierlog.model.ids import StreamName
from tierlog.model.policy import NO_LEVELS, Policy, PolicyLevels

NAME = StreamName("orders.paid")


def test_each_has_an_id_of_its_own_that_stays_and_a_name():
    assert {UUID(bytes=bytes(key)).int: name for key, name in CORE_NAMES.items()} == {
        1: "event-count",
        2: "creation-time",
        3: "scale-policy-type",
        4: "scale-policy-rate",
        5: "scale-policy-segments-min",
        6: "roll-over-bytes",
        7: "roll-over-entries",
        8: "roll-over-age-ms",
        9: "index-root-offset",
        10: "index-root-length",
    }
    assert all(is_core(key) and len(key) == KEY_LEN for key in CORE_NAMES)
    assert derived(NAME, Policy(), NO_LEVELS, IndexRoot()).keys() == DERIVED
    other = AttributeKey(UUID(int=11).bytes)
    assert [name_of(one) for one in (ROLL_OVER_BYTES, other)] == [
        "roll-over-bytes",
        "00000000-0000-0000-0000-00000000000b",
    ]


def test_limits_are_those_of_the_policy_that_holds_level_by_level():
    levels = PolicyLevels(
        cluster=Policy(ledger_bytes_max=1, ledger_entries_max=2),
        namespaces={"orders": Policy(ledger_entries_max=3)},
    )
    own = Policy(ledger_age_ms_max=4)
    found = derived(NAME, own, levels, IndexRoot())
    policy = levels.effective(NAME, own)
    said = [policy.ledger_bytes_max, policy.ledger_entries_max, policy.ledger_age_ms_max]
    keys = (ROLL_OVER_BYTES, ROLL_OVER_ENTRIES, ROLL_OVER_AGE_MS)
    assert [found[key] for key in keys] == said == [1, 3, 4]


def test_levels_of_another_moment_that_contradict_the_stream_stand_in_no_way():
    levels = PolicyLevels(cluster=Policy(offload_time_ms=10, ledger_bytes_max=5))
    own = Policy(retention_time_ms=10)
    assert derived(NAME, own, levels, IndexRoot())[ROLL_OVER_BYTES] == 5


def test_the_root_is_where_it_lies_and_an_index_without_attributes_has_none():
    keys = (INDEX_ROOT_OFFSET, INDEX_ROOT_LENGTH)
    # An index that was made anew of nothing lies behind the one before it.
    for root, wanted in (
        (IndexRoot(), [-1, 0]),
        (IndexRoot(root_offset=90, start=90, end=90), [-1, 0]),
        (IndexRoot(root_offset=0, root_length=70, end=70, count=1), [0, 70]),
        (IndexRoot(root_offset=90, root_length=70, start=7, end=160, count=9), [90, 70]),
    ):
        found = derived(NAME, Policy(), NO_LEVELS, root)
        assert [found[key] for key in keys] == wanted
