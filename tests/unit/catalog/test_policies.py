"""Levels of thresholds in the metadata: what wins, and that no change at any level slips through.

seeds/000: "offloading can also be enabled to occur automatically for all topics within a
namespace"; offload thresholds lie below those of retention, whichever level says either.
"""

import asyncio
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import World
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.catalog import Catalog
from tierlog.format import paths, records
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import StreamName
from tierlog.model.policy import (
    BOUNDS,
    CLUSTER_DEFAULT,
    FORMER_NAMESPACES_MAX,
    NAMESPACES_MAX,
    NEVER,
    NO_LEVELS,
    Policy,
    PolicyLevels,
)

PAID = StreamName("shop.paid")
SENT = StreamName("shop.sent")
OTHER = StreamName("other")
MINUTE = 60_000


def said(name: str, value: int) -> Policy:
    values: dict[str, Any] = {name: value}
    return Policy(**values)


def levels(cluster: Policy | None = None, **namespaces: Policy) -> PolicyLevels:
    return PolicyLevels(cluster=cluster or Policy(), namespaces=namespaces)


@pytest.mark.covers("A34")
def test_for_each_value_alone_the_lowest_level_that_says_something_wins():
    above = levels(
        Policy(offload_time_ms=30 * MINUTE, deletion_lag_ms=7),
        shop=Policy(offload_time_ms=20 * MINUTE, retention_time_ms=60 * MINUTE),
    )
    own = Policy(offload_time_ms=10 * MINUTE)
    found = above.effective(PAID, own)
    assert found.offload_time_ms == 10 * MINUTE
    assert found.retention_time_ms == 60 * MINUTE
    assert found.deletion_lag_ms == 7
    assert found.block_size == CLUSTER_DEFAULT.block_size
    sources = above.sources(PAID, own)
    assert sources["offload_time_ms"] == "stream"
    assert sources["retention_time_ms"] == "namespace shop"
    assert sources["deletion_lag_ms"] == "cluster"
    assert sources["block_size"] == "default"
    assert sources["retention_size_bytes"] is None
    assert above.effective(OTHER, Policy()).offload_time_ms == 30 * MINUTE
    assert above.effective(OTHER, Policy()).retention_time_ms is None


values = st.none() | st.integers(NEVER, 5)
policies = st.builds(
    Policy,
    deletion_lag_ms=values,
    ledger_bytes_max=st.none() | st.integers(1, 5),
    data_sha256=st.none() | st.booleans(),
)


@given(policies, policies, policies)
def test_what_holds_is_what_the_named_source_says(own, namespace, cluster):
    above = levels(cluster, shop=namespace)
    layers = dict(above.layers(PAID, own))
    found, sources = above.effective(PAID, own), above.sources(PAID, own)
    for item in fields(Policy):
        source = sources[item.name]
        layer = None if source is None else layers.get(source)
        assert getattr(found, item.name) == (None if layer is None else getattr(layer, item.name))


def test_what_no_level_says_of_copies_is_left_to_the_settings():
    above = levels(Policy(data_sha256=True, read_back="full"), shop=Policy(data_sha256=False))
    sources = above.sources(PAID, Policy(read_back="sample"))
    assert (sources["data_sha256"], sources["read_back"]) == ("namespace shop", "stream")
    found = above.effective(PAID, Policy(read_back="sample"))
    assert (found.data_sha256, found.read_back) == (False, "sample")
    other = above.effective(OTHER, Policy())
    assert (other.data_sha256, other.read_back) == (True, "full")
    left = NO_LEVELS.effective(PAID, Policy())
    assert (left.data_sha256, left.read_back) == (None, None)
    sources = NO_LEVELS.sources(PAID, Policy())
    assert (sources["data_sha256"], sources["read_back"]) == ("settings", "settings")


def test_never_is_a_value_and_contradicts_nothing():
    above = levels(Policy(offload_time_ms=MINUTE, retention_time_ms=10 * MINUTE))
    assert not above.effective(PAID, Policy(offload_time_ms=NEVER)).offloads
    own = Policy(offload_time_ms=10 * MINUTE, retention_time_ms=NEVER)
    assert above.effective(PAID, own).offloads
    assert not Policy(offload_time_ms=NEVER, retention_size_bytes=NEVER).has_bounds
    assert all(said(name, 1).has_bounds for name in BOUNDS)


@given(st.dictionaries(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,9}", fullmatch=True), policies))
def test_levels_are_read_back_as_written(namespaces):
    found = PolicyLevels(cluster=Policy(block_size=2**23), namespaces=namespaces)
    assert records.decode_levels(records.encode_levels(found)) == found


async def opened(*names: StreamName) -> Catalog:
    catalog = World().catalog()
    for name in names:
        await catalog.streams.create(name)
    return catalog


def test_a_snapshot_holds_the_levels_above_it():
    async def main():
        catalog = await opened(PAID, OTHER)
        assert await catalog.policies.levels() == NO_LEVELS
        await catalog.policies.set_level("shop", Policy(offload_time_ms=MINUTE))
        await catalog.policies.set_level(None, Policy(offload_size_bytes=5))
        paid = (await catalog.streams.snapshot(PAID)).policy
        assert (paid.offload_time_ms, paid.offload_size_bytes) == (MINUTE, 5)
        assert (await catalog.streams.snapshot(OTHER)).policy.offload_time_ms is None
        assert (await catalog.policies.set_level("shop", Policy())).namespaces == {}
        assert (await catalog.streams.snapshot(PAID)).policy.offload_time_ms is None

    run_virtual(main())


@pytest.mark.covers("A36", "A38")
@pytest.mark.parametrize(
    ("offload", "retention"),
    [("offload_time_ms", "retention_time_ms"), ("offload_size_bytes", "retention_size_bytes")],
)
def test_a_change_above_that_breaks_a_stream_below_is_refused_and_names_it(offload, retention):
    async def main():
        catalog = await opened(PAID, SENT, OTHER)
        policies = catalog.policies
        await catalog.streams.set_policy(SENT, said(offload, 50))
        for namespace in ("shop", None):
            with pytest.raises(RefusedError) as caught:
                await policies.set_level(namespace, said(retention, 50))
            assert caught.value.reason is Reason.POLICY_INVALID
            assert caught.value.details["below"] == f"stream {SENT}"
            assert caught.value.details["bound"] == offload
            await policies.set_level(namespace, said(retention, 51))
            await policies.set_level(namespace, Policy())
        await policies.set_level("other", said(offload, 40))
        with pytest.raises(RefusedError) as caught:
            await policies.set_level(None, said(retention, 40))
        assert caught.value.details["below"] == "namespace other"
        # OTHER is in no namespace, and says nothing: the cluster alone counts there.
        await policies.set_level(None, said(retention, 51))

    run_virtual(main())


def test_what_a_stream_says_is_checked_against_all_levels_above():
    async def main():
        catalog = await opened(PAID)
        await catalog.policies.set_level("shop", Policy(retention_time_ms=MINUTE))
        for name in (PAID, SENT):
            wrong = Policy(offload_time_ms=MINUTE)
            streams = catalog.streams
            change = (
                streams.set_policy(name, wrong)
                if name == PAID
                else streams.create(name, policy=wrong)
            )
            with pytest.raises(RefusedError) as caught:
                await change
            assert caught.value.reason is Reason.POLICY_INVALID
        assert await catalog.streams.names() == [PAID]
        await catalog.streams.set_policy(PAID, Policy(offload_time_ms=MINUTE - 1))

    run_virtual(main())


def test_ledgers_of_too_many_parts_are_refused_at_every_door_and_stored_ones_are_read():
    async def main():
        catalog = await opened(PAID)
        streams, policies = catalog.streams, catalog.policies
        wrong = Policy(ledger_bytes_max=2**40)
        for change in (
            streams.set_policy(PAID, wrong),
            streams.create(SENT, policy=wrong),
            policies.set_level("shop", wrong),
            policies.set_level(None, wrong),
        ):
            with pytest.raises(RefusedError) as caught:
                await change
            assert caught.value.reason is Reason.POLICY_INVALID
        assert await streams.names() == [PAID]
        await streams.set_policy(PAID, Policy(ledger_bytes_max=2**40, block_size=2**29))
        # Names the stream below, whose blocks are large but whose entries would be too many.
        with pytest.raises(RefusedError) as caught:
            await policies.set_level(None, Policy(ledger_entries_max=2**62))
        assert caught.value.details["below"] == f"stream {PAID}"
        # As an older version left it: read by all, and put right by the next change.
        await streams.change(PAID, lambda one: replace(one, policy=wrong), applied=lambda _: True)
        assert (await streams.snapshot(PAID)).policy.ledger_bytes_max == 2**40
        await streams.set_policy(PAID, Policy(ledger_bytes_max=2**30))

    run_virtual(main())


@pytest.mark.parametrize("seed", range(30))
def test_changes_above_and_below_at_once_never_end_in_a_contradiction(seed):
    async def main():
        world = World(seed=seed)
        catalog = world.catalog()
        await catalog.streams.create(PAID)
        rates = FaultRates(refused=0.02, request_lost=0.02, reply_lost=0.02, delay_s_max=0.05)
        settled: list[str] = []

        async def change(namespace: str | StreamName | None, policy: Policy) -> None:
            own = world.catalog(Faults(world.rng, rates=rates))
            try:
                if namespace == PAID:
                    await own.streams.set_policy(PAID, policy)
                elif namespace == SENT:
                    await own.streams.create(SENT, policy=policy)
                else:
                    await own.policies.set_level(namespace, policy)
            except RefusedError as error:
                settled.append(error.reason.value)
            else:
                settled.append("")

        async with asyncio.TaskGroup() as group:
            group.create_task(change(PAID, Policy(offload_time_ms=10)))
            group.create_task(change(SENT, Policy(offload_time_ms=9)))
            group.create_task(change("shop", Policy(retention_time_ms=10)))
            group.create_task(change(None, Policy(retention_time_ms=8)))
        assert set(settled) <= {"", "POLICY_INVALID"}
        assert settled.count("") >= 2
        for name in await catalog.streams.names():
            assert isinstance((await catalog.streams.snapshot(name)).policy, Policy)

    run_virtual(main())


def test_a_stream_that_cannot_be_read_is_not_taken_for_one_that_agrees():
    async def main():
        world = World()
        await world.catalog().streams.create(PAID, policy=Policy(offload_time_ms=50))
        given = Faults(world.rng)
        cut_off = world.catalog(given)
        given.outages = {"metadata.get"}
        with pytest.raises(RetryableError):
            await cut_off.policies.set_level(None, Policy(retention_time_ms=50))
        assert await world.catalog().policies.levels() == NO_LEVELS

    run_virtual(main())


def test_bounds_of_the_levels_themselves():
    with pytest.raises(RefusedError):
        NO_LEVELS.with_level("a.b", Policy(offload_time_ms=1))
    with pytest.raises(RefusedError):
        NO_LEVELS.with_level(None, Policy(offload_time_ms=5, retention_time_ms=5))
    full = PolicyLevels(namespaces={f"n{i}": Policy(block_size=2**23) for i in range(2000)})
    assert len(full.namespaces) == NAMESPACES_MAX
    assert len(records.encode_levels(full)) < 100_000
    with pytest.raises(RefusedError):
        full.with_level("one-more", Policy(block_size=2**23))
    assert full.with_level("n7", Policy()).namespaces.keys() == full.namespaces.keys() - {"n7"}


def test_when_levels_were_changed_is_kept_and_of_former_namespaces_for_the_newest_alone():
    levels = NO_LEVELS
    for number in range(FORMER_NAMESPACES_MAX + 5):
        name = f"n{number}"
        levels = levels.with_level(name, Policy(block_size=2**23)).changed(name, 7)
        levels = levels.with_level(name, Policy()).changed(name, 7)
    levels = levels.with_level("here", Policy(block_size=2**23)).changed("here", 7)
    levels = levels.with_level(None, Policy(block_size=2**23)).changed(None, 7)
    stamps = levels.level_changed_ms
    assert {"", "here", f"n{FORMER_NAMESPACES_MAX + 4}"} < stamps.keys()
    assert len(stamps) == FORMER_NAMESPACES_MAX + 3
    assert max(stamps.values()) == stamps[""] == levels.changed_ms
    again = records.decode_levels(records.encode_levels(levels))
    assert (again, again.changed_ms, again.level_changed_ms) == (levels, levels.changed_ms, stamps)


def test_of_a_namespace_that_was_forgotten_it_is_known_that_it_says_nothing_any_more():
    """Many may go at once, before the next manifest, and all before the next copy of a bucket."""
    speak, own = NO_LEVELS, Policy(block_size=2**23)
    names = [f"n{number}" for number in range(FORMER_NAMESPACES_MAX + 5)]
    for name in names:
        speak = speak.with_level(name, own).changed(name, 7)
    silent = speak
    for name in names:
        silent = silent.with_level(name, Policy()).changed(name, 7)
    again = silent.with_level(names[-1], own).changed(names[-1], 7)
    assert names[0] not in silent.level_changed_ms
    for later in (silent, again):
        assert later.older_than(speak) is None
        assert "namespace n0 " in (speak.older_than(later) or "")
    # One that was made since was never known.
    assert "namespace new " in (
        silent.older_than(silent.with_level("new", own).changed("new", 7)) or ""
    )


def test_whoever_follows_the_levels_is_told_of_changes_below_that_matter():
    async def main():
        catalog = await opened(PAID)
        _, changed = await catalog.policies.watch()
        await catalog.streams.set_policy(PAID, Policy(ledger_bytes_max=5))
        assert not changed.is_set()
        for policy in (Policy(retention_time_ms=5), Policy(ledger_age_ms_max=5)):
            _, changed = await catalog.policies.watch()
            await catalog.streams.set_policy(PAID, policy)
            assert changed.is_set()
        found = await catalog.store.get(paths.POLICIES)
        assert found is not None

    run_virtual(main())
