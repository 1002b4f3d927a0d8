"""Retention waits for checkpoints of attributes; what no checkpoint needs goes, and all at the end.

Must hold: no ledger goes whose entries are in no checkpoint, nor one with a copy that is not in the
checkpoint that the manifest names, and people are told which of the two it is.
"""

from dataclasses import replace
from uuid import UUID

import pytest

from tests.contracts.attributes_suite import all_of, at, key_of
from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.test_attribute_restore import Life, index_of
from tests.unit.offload.world import STREAM
from tests.unit.scheduler.test_policy import DELAYS, ledger, stream
from tests.unit.scheduler.test_retention import NOW, S
from tierlog.model.attribute_record import AttributesRecord, KeptRoot
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.policy import Policy
from tierlog.model.position import Position
from tierlog.offload.attribute_sweep import AttributeSweeper
from tierlog.ports.spending import Cause
from tierlog_scheduler.explain import What, explain
from tierlog_scheduler.manifests import BucketManifests
from tierlog_scheduler.mirror import slim_attributes
from tierlog_scheduler.retention import SweepAttributes, decide, trimmable
from tierlog_scheduler.scheduler import Scheduler, SchedulerLimits

ALL = Policy(retention_size_bytes=0)


def record_at(through: Position | None) -> AttributesRecord:
    return AttributesRecord(incarnation=UUID(int=1), newest=KeptRoot(through=through))


@pytest.mark.parametrize(
    ("through", "gone"),
    [
        (None, []),
        (at(1, 8), []),
        (at(1, 9), [1]),
        (at(2, 8), [1]),
        (at(2, 9), [1, 2]),
        (at(3, 0), [1, 2]),
        (at(7, 0), [1, 2, 3]),
    ],
)
def test_a_ledger_goes_once_a_checkpoint_has_its_last_entry(through, gone) -> None:
    view = stream(ledger(1), ledger(2), ledger(3), policy=ALL, attributes=record_at(through))
    assert trimmable(view, NOW) == gone
    assert trimmable(replace(view, attributes=None), NOW) == [1, 2, 3]
    assert trimmable(replace(view, deleting=True), NOW) == [1, 2, 3]
    held = [one for one in explain(view, NOW, DELAYS) if one.what is What.TRIM][len(gone) :]
    assert all(one.in_ms is None for one in held)
    if held:
        assert "the newest checkpoint of the stream's attributes" in held[0].why
        assert str(through).lower() in held[0].why


@pytest.mark.parametrize(("named", "gone"), [(None, []), (at(1, 9), [1]), (at(2, 9), [1, 2])])
def test_one_with_a_copy_goes_once_the_manifests_checkpoint_has_it(named, gone) -> None:
    view = stream(
        ledger(1, state=S.COMPLETE),
        ledger(2, state=S.TIER1_DELETED),
        policy=replace(ALL, offload_time_ms=1),
        attributes=record_at(at(5, 0)),
        attributes_named=named,
    )
    assert trimmable(view, NOW) == gone
    unwanted = stream(*view.ledgers, policy=ALL, attributes=view.attributes)
    assert trimmable(unwanted, NOW) == [1, 2]
    held = [one for one in explain(view, NOW, DELAYS) if one.what is What.TRIM][len(gone) :]
    if held:
        assert "that the manifest names" in held[0].why


def test_indexes_are_swept_at_their_pace_and_not_while_all_goes() -> None:
    view = stream(attributes=record_at(None))
    assert decide(view, NOW, DELAYS) == [SweepAttributes()]
    just = replace(view, attributes_swept_ms=NOW.progress_ms - DELAYS.sweep_attributes_ms + 1)
    assert decide(just, NOW, DELAYS) == []
    due = replace(view, attributes_swept_ms=NOW.progress_ms - DELAYS.sweep_attributes_ms)
    assert decide(due, NOW, DELAYS) == [SweepAttributes()]
    for other in (replace(due, paused=True), replace(due, attributes=None)):
        assert SweepAttributes() not in decide(other, NOW, DELAYS)
    assert SweepAttributes() not in decide(replace(due, deleting=True), NOW, DELAYS)


def test_of_a_record_the_mirror_keeps_what_decisions_ask() -> None:
    assert slim_attributes(None) is None
    slim = slim_attributes(record_at(at(3, 3)))
    assert slim is not None
    assert slim.newest.through == at(3, 3)


def leader_of(life: Life, *, safety_ms: int = 1000) -> Scheduler:
    world, catalog = life.site.world, life.site.world.catalog()
    assert life.site.cluster is not None
    manifests = life.site.store()
    return Scheduler(
        catalog=catalog,
        offloader=world.offloader(),
        publisher=world.queue.publisher(),
        stationery=world.stationery,
        manifests=BucketManifests(manifests, catalog),
        clock=world.clock,
        ids=world.ids,
        limits=SchedulerLimits(sweep_attributes_s=60),
        sweeper=AttributeSweeper(
            objects=world.bucket.connect(meter=world.meter),
            catalog=catalog,
            manifests=manifests,
            cluster_id=life.site.cluster.cluster_id,
            key_prefix="",
            clock=world.clock,
            safety_ms=safety_ms,
        ),
    )


def indexes(life: Life, name: StreamName = STREAM) -> list[str]:
    return [key for key in life.site.world.bucket.objects if f"/{name}/" in key and "/attr" in key]


async def listed(life: Life) -> list[LedgerId]:
    snapshot = await life.site.world.catalog().streams.snapshot(STREAM)
    return [one.ledger_id for one in snapshot.ledgers]


async def passes(life: Life, leader: Scheduler, count: int = 3) -> None:
    for _ in range(count):
        life.site.world.clock.advance(100)
        await leader.run_pass()


@pytest.mark.parametrize("jump_s", [5 * 3600, -5 * 3600])
def test_a_leader_sweeps_by_its_progress_and_not_by_the_wall_clock(jump_s) -> None:
    async def main() -> None:
        life = Life()
        await life.start()
        for number in range(3):
            await life.ledger(number)
        leader = leader_of(life, safety_ms=3_600_000)
        await leader.begin()
        await passes(life, leader, 1)
        before = indexes(life)
        life.site.world.clock.jump_wall(jump_s)
        await passes(life, leader, 30)
        assert indexes(life) == before
        await passes(life, leader, 10)
        assert len(indexes(life)) < len(before)
        assert await all_of(index_of(life.site), life.base) == life.values

    run_virtual(main(), until_s=100_000)


def test_a_leader_trims_behind_the_checkpoints_sweeps_and_removes_all() -> None:
    async def main() -> None:
        life = Life()
        await life.start()
        catalog = life.site.world.catalog()
        # A ledger without a copy: its state is in no manifest's checkpoint yet.
        first = [await life.ledger(number) for number in range(3)]
        await catalog.streams.set_policy(
            STREAM, Policy(offload_time_ms=5, retention_time_ms=10, deletion_lag_ms=1)
        )
        leader = leader_of(life)
        await leader.begin()
        # Closed, copied, and with entries behind the newest checkpoint.
        late = await life.site.copied(life.claimed, [b"later"] * 9)
        before = len(indexes(life))
        await passes(life, leader, 8)
        assert len(indexes(life)) < before, "what no checkpoint needs is swept"
        assert await listed(life) == [late], "all but the one that no checkpoint has"
        memory, now = await leader.remembered()
        _, view = await leader.look_at(STREAM, memory)
        (held,) = [one for one in explain(view, now, DELAYS) if one.what is What.TRIM]
        assert "the newest checkpoint" in held.why
        assert await all_of(index_of(life.site), life.base) == life.values
        life.base = await index_of(life.site).load(life.claimed)
        await life.checkpoint(at(late, 8), [1, 2, 3])
        await passes(life, leader, 8)
        assert await listed(life) == [], f"{first} and {late} are gone"
        found = await index_of(life.site).load(life.claimed)
        assert await all_of(index_of(life.site), found) == life.values
        assert await index_of(life.site).get(found, [key_of(1)]) == {key_of(1): late * 1000 + 8}
        await catalog.retention.begin_stream_deletion(STREAM)
        await passes(life, leader, 8)
        assert STREAM not in await catalog.streams.names()
        assert indexes(life) == []
        spent = life.site.world.meter.amounts
        assert {one.stream for one in spent} == {STREAM}
        assert Cause.OTHER not in {one.cause for one in spent}

    run_virtual(main(), until_s=100_000)


def test_the_index_of_a_deleted_stream_goes_bit_by_bit_and_the_stream_behind_it(monkeypatch):
    monkeypatch.setattr("tierlog_scheduler.actions.INDEX_OBJECTS_MAX", 2)

    async def main() -> None:
        life = Life()
        await life.start()
        for number in range(3):
            await life.ledger(number)
        catalog = life.site.world.catalog()
        leader = leader_of(life)
        await leader.begin()
        await passes(life, leader, 1)
        await catalog.retention.begin_stream_deletion(STREAM)
        left = [len(indexes(life))]
        assert left[0] > 4
        while left[-1]:
            await passes(life, leader, 1)
            left.append(len(indexes(life)))
            assert left[-2] - left[-1] <= 2
            assert STREAM in await catalog.streams.names() or not left[-1]
        await passes(life, leader, 1)
        assert STREAM not in await catalog.streams.names()

    run_virtual(main(), until_s=100_000)
