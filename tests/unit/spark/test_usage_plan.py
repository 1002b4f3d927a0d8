"""Each object of a bucket is counted once, under what it is; prices are sums done by hand."""

from typing import Any
from uuid import UUID

import pytest

from tests.unit.format.test_manifest import ledger
from tierlog.format.attribute_objects import attribute_key, attributes_folder
from tierlog.format.keys import object_keys
from tierlog.format.manifest import cluster_key, manifest_key
from tierlog.model.errors import RefusedError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import ManifestHead
from tierlog.model.policy import NEVER, Policy, PolicyLevels
from tierlog.model.prices import GB, Prices, offload_requests
from tierlog.ports.objects import ObjectInfo
from tierlog_spark.jobs.cost import WhatIf, predicted
from tierlog_spark.jobs.cost_plan import Past, past_of, steady_of
from tierlog_spark.jobs.usage import StreamLedgers
from tierlog_spark.jobs.usage_plan import (
    DAY_MS,
    Kind,
    NamedLedger,
    Place,
    Sums,
    Used,
    add,
    age_of,
    count,
    named_ledger,
    names_of,
    shard_weight,
    shards,
)

MIB = 1024 * 1024
NOW_MS = 1000 * DAY_MS
LOGS, UUID_1 = StreamName("logs"), UUID(int=1)
LEDGER = NamedLedger(
    ledger_id=LedgerId(7),
    uuid=UUID_1,
    opened_ms=NOW_MS - 4 * DAY_MS,
    closed_ms=NOW_MS - 3 * DAY_MS,
    length=11 * MIB,
    entries=40,
    data_len=12 * MIB,
    block_size=5 * MIB,
    block_count=3,
)
NAMED = names_of([(LOGS, [LEDGER, LEDGER._replace(ledger_id=LedgerId(8), uuid=None)])])
KEYS = object_keys("p", UUID_1, LedgerId(7))


def info(key: str, size: int = 10, *, days: float = 0.5) -> ObjectInfo:
    return ObjectInfo(
        key=key, size=size, etag="", metadata={}, modified_ms=NOW_MS - round(days * DAY_MS)
    )


@pytest.mark.parametrize(
    ("key", "place"),
    [
        (KEYS.data, Place("logs", Kind.COPY, "1 to 7 d")),
        (KEYS.index, Place("logs", Kind.COPY, "1 to 7 d")),
        (KEYS.export, Place("logs", Kind.EXPORT, "1 to 7 d")),
        (object_keys("p", UUID(int=2), LedgerId(7)).data, Place("", Kind.UNNAMED, "0 to 1 d")),
        (object_keys("p", UUID_1, LedgerId(8)).data, Place("", Kind.UNNAMED, "0 to 1 d")),
        (object_keys("", UUID_1, LedgerId(7)).data, Place("", Kind.FOREIGN, "0 to 1 d")),
        (manifest_key("p", LOGS, UUID_1, 3), Place("logs", Kind.MANIFEST, "0 to 1 d")),
        (cluster_key("p", UUID_1, 3), Place("", Kind.MANIFEST, "0 to 1 d")),
        (
            attribute_key(
                attributes_folder("p", LOGS, UUID_1), start=0, owner_epoch=1, suffix=UUID_1
            ),
            Place("logs", Kind.ATTRIBUTES, "0 to 1 d"),
        ),
        ("p/holiday.jpg", Place("", Kind.FOREIGN, "0 to 1 d")),
    ],
)
def test_an_object_is_counted_under_what_it_is(key, place):
    found, used = count(info(key), NAMED, prefix="p", now_ms=NOW_MS)
    assert found == place
    assert (used.objects, used.bytes) == (1, 10)


def test_a_copy_has_the_requests_of_its_offload_once():
    sums: Sums = {}
    for key in (KEYS.data, KEYS.index, KEYS.side):
        add(sums, *count(info(key, 100), NAMED, prefix="p", now_ms=NOW_MS))
    asked = sum(offload_requests(12 * MIB, 5 * MIB).values())
    assert sums == {
        Place("logs", Kind.COPY, "1 to 7 d"): Used(
            ledgers=1, entries=40, objects=3, bytes=300, requests=asked
        )
    }


def test_a_copy_that_is_one_object_has_the_requests_of_that_layout():
    place, used = count(info(KEYS.single, 100), NAMED, prefix="p", now_ms=NOW_MS)
    # The upload with its list and the index, a part a block, two heads, three gets: no puts.
    assert (place.kind, used.ledgers, used.requests) == (Kind.COPY, 1, 4 + 3 + 2 + 3)


def test_every_key_is_below_exactly_one_beginning():
    beginnings = shards("p")
    for key in (KEYS.data, "p/streams/x", "p/cluster/x", "p/~", "p/ ", "p/Zoo", "p/0"):
        assert sum(key.startswith(one) for one in beginnings) == 1
    assert not any("q/x".startswith(one) for one in beginnings)
    # Of what nobody but strangers puts there some is in no list, as the how-to says.
    assert not any(key.startswith(one) for one in beginnings for key in ("p/été", "p/\t"))
    heavy = [one for one in beginnings if shard_weight(one) > 1]
    assert sorted(heavy) == [f"p/{sign}" for sign in "0123456789abcdefs"]


def test_ages_meet_without_a_gap():
    days = [0, 0.99, 1, 6.9, 7, 30, 90, 364, 365, 9999]
    assert [age_of(NOW_MS - round(day * DAY_MS), NOW_MS) for day in days] == [
        "0 to 1 d",
        "0 to 1 d",
        "1 to 7 d",
        "1 to 7 d",
        "7 to 30 d",
        "30 to 90 d",
        "90 to 365 d",
        "90 to 365 d",
        "over 365 d",
        "over 365 d",
    ]


def test_a_ledger_of_a_manifest_keeps_what_is_counted():
    bare = named_ledger(ledger(7))
    assert bare == NamedLedger(LedgerId(7), None, 1, 2, 7, 2, 0, 3, 0)
    assert names_of([(LOGS, [bare])]) == {}


PRICES = Prices(
    write_per_1000=5.0, read_per_1000=0.4, received_per_gb=0.0, stored_per_gb_month=0.02
)
# A GB a day, in ledgers of 1 GB, for 100 days.
PAST = Past(bytes_per_day=GB, ledger_bytes=GB, kept_bytes=100 * GB)


def steady(**thresholds: Any) -> tuple[float, float]:
    policy = Policy(block_size=64 * MIB, **thresholds)
    found = steady_of(PAST, policy, PRICES, range_bytes=MIB, reads=0)
    return round(found.tier1_bytes / GB, 3), round(found.tier2_bytes / GB, 3)


@pytest.mark.parametrize(
    ("thresholds", "expected"),
    [
        # Nothing is offloaded: all stays where it is.
        ({}, (100, 0)),
        ({"retention_time_ms": 10 * DAY_MS}, (10, 0)),
        # Two days wait, half a day more is in both.
        ({"offload_time_ms": 2 * DAY_MS, "deletion_lag_ms": DAY_MS // 2}, (2.5, 98)),
        # The threshold that is reached first counts.
        (
            {"offload_time_ms": 2 * DAY_MS, "offload_size_bytes": GB, "deletion_lag_ms": 0},
            (1, 99),
        ),
        (
            {
                "offload_size_bytes": GB,
                "retention_size_bytes": 30 * GB,
                "retention_time_ms": 40 * DAY_MS,
                "deletion_lag_ms": 0,
            },
            (1, 29),
        ),
        # Local copies that never go.
        ({"offload_size_bytes": GB, "deletion_lag_ms": NEVER}, (100, 99)),
        # All is trimmed before it would be offloaded.
        ({"offload_time_ms": NEVER, "offload_size_bytes": 200 * GB}, (100, 0)),
    ],
)
def test_thresholds_make_of_a_stream_what_can_be_done_by_hand(thresholds, expected):
    assert steady(**thresholds) == expected


def test_a_month_is_priced_by_the_same_list_as_cost_what_if():
    policy = Policy(offload_size_bytes=0, deletion_lag_ms=0, block_size=64 * MIB)
    found = steady_of(PAST, policy, PRICES, range_bytes=MIB, reads=2)
    each = offload_requests(GB, 64 * MIB)
    writes = 30 * sum(number for (cause, _), number in each.items() if cause == "offload")
    verified = sum(number for (cause, _), number in each.items() if cause == "verify")
    # The second verification reads eight grains back.
    verifies = 30 * (2 * verified + 8)
    reads = 2 * 30 * GB / MIB
    # What goes is swept twice: uploads are listed, and four keys deleted.
    assert found.requests == pytest.approx(writes + verifies + reads + 30 * 2 * 5)
    asked = (writes + 30 * 2) / 1000 * 5.0 + (verifies + reads) / 1000 * 0.4
    assert found.price_of_requests == pytest.approx(asked)
    assert found.price == pytest.approx(asked + 100 * 0.02)


def test_how_much_is_read_back_is_the_policys_word_before_the_settings():
    def requests(policy: str | None, settings: str) -> float:
        made = Policy(offload_size_bytes=0, deletion_lag_ms=0, read_back=policy)
        return steady_of(PAST, made, PRICES, range_bytes=MIB, reads=0, read_back=settings).requests

    assert requests(None, "sample") - requests(None, "none") == pytest.approx(30 * 8)
    assert requests("sample", "full") == pytest.approx(requests(None, "sample"))


def test_what_came_in_the_last_month_says_how_much_comes_a_day():
    ledgers = [
        LEDGER._replace(ledger_id=LedgerId(number), closed_ms=NOW_MS - days * DAY_MS, length=GB)
        for number, days in enumerate((1, 2, 3, 40, 90))
    ]
    found = past_of(ledgers, created_ms=0, now_ms=NOW_MS)
    assert found == Past(bytes_per_day=3 * GB / 30, ledger_bytes=GB, kept_bytes=5 * GB)
    young = past_of(ledgers[:1], created_ms=NOW_MS - DAY_MS // 24, now_ms=NOW_MS)
    assert young.bytes_per_day == GB, "an hour's is not taken for a day's"
    empty = past_of([], created_ms=0, now_ms=NOW_MS)
    assert steady_of(
        empty, Policy(offload_size_bytes=0), PRICES, range_bytes=MIB, reads=1
    ).price == pytest.approx(0)


def test_what_was_trimmed_is_not_taken_for_days_on_which_nothing_came():
    ends = [NOW_MS - days * DAY_MS for days in range(3)]
    ledgers = [
        LEDGER._replace(opened_ms=closed_ms - DAY_MS, closed_ms=closed_ms, length=GB)
        for closed_ms in ends
    ]

    def rate(some: list[NamedLedger], *, trimmed: bool = True) -> float:
        return past_of(some, created_ms=0, now_ms=NOW_MS, trimmed=trimmed).bytes_per_day

    # Three days are kept of a stream that is much older.
    assert rate(ledgers) == GB
    assert rate(ledgers, trimmed=False) == 3 * GB / 30
    # What is older than a month does not count, whatever was trimmed before it.
    old = LEDGER._replace(opened_ms=NOW_MS - 90 * DAY_MS, closed_ms=NOW_MS - 60 * DAY_MS)
    assert rate([old, *ledgers]) == 3 * GB / 30
    assert rate([ledgers[0]._replace(opened_ms=NOW_MS - 1)]) == GB, "no less than a day"
    assert rate([]) == 0


def test_a_stream_is_under_the_thresholds_of_its_own_cluster():
    ledgers = tuple(
        LEDGER._replace(opened_ms=closed_ms - DAY_MS, closed_ms=closed_ms, length=GB)
        for closed_ms in (NOW_MS, NOW_MS - DAY_MS)
    )
    head = ManifestHead(stream=LOGS, incarnation=UUID_1, created_ms=0, trimmed_through=LedgerId(3))
    levels: dict[UUID | None, PolicyLevels] = {
        UUID(int=number): PolicyLevels(
            cluster=Policy(offload_size_bytes=0, retention_time_ms=number * DAY_MS)
        )
        for number in (10, 20)
    }

    def kept(cluster_id: UUID | None) -> dict[str, Any]:
        stream = StreamLedgers(head, ledgers, cluster_id)
        return predicted(stream, levels, PRICES, WhatIf(), NOW_MS, read_back="sample")

    assert kept(UUID(int=10))["bytes_per_day"] == GB
    assert [kept(one)["if_tier2_bytes"] for one in levels] == [10 * GB, 20 * GB]
    assert kept(UUID(int=30))["if_tier2_bytes"] == 0, "its manifest is not there"


def test_thresholds_that_contradict_what_holds_are_refused():
    with pytest.raises(RefusedError, match="not below"):
        Policy(offload_time_ms=DAY_MS).over(Policy(retention_time_ms=DAY_MS))
