"""Workers (protocols.md 1, "Auto-recovery"): missing copies are made, nodes that are gone are
replaced, and no copy is given up before another one is there.
"""

# mypy: disable-error-code="arg-type,union-attr"

import asyncio
import contextlib
import random

import pytest

from tests.unit.catalog.world import on_virtual_time
from tests.unit.ledger.small_cluster import STREAM, now_s
from tests.unit.replication.kit import N1, N2, N3, N4, SETTINGS, LackingCluster
from tests.unit.storage.node_kit import make_run
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import LedgerMetadata, LedgerState, Segment
from tierlog.model.policy import MIB
from tierlog.model.replication import CopyTrouble
from tierlog_ingest.metrics import replication_metrics


async def _whole(cluster, catalog, ledger_id) -> bool:
    return not await cluster.lacks(catalog, ledger_id)


@pytest.mark.covers("D03", "D17")
@on_virtual_time
async def test_a_node_gets_what_it_lacks_and_nothing_else():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, lacking={N2})
    await cluster.nodes[N2].add(cluster.runs(N1, ledger_id)[4])
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.MISSING, nodes=[N2])
    await cluster.worker().round()
    assert await catalog.underreplicated.list() == []
    assert await _whole(cluster, catalog, ledger_id)
    assert [run.first_entry_id for run in cluster.nodes[N2].recovery_adds] == [0, 1, 2, 3, 5]
    assert all(
        mine.encoded == theirs.encoded
        for mine, theirs in zip(
            cluster.runs(N2, ledger_id), cluster.runs(N3, ledger_id), strict=True
        )
    ), "whole runs, header unchanged"
    assert not cluster.nodes[N1].recovery_adds
    assert not cluster.nodes[N3].recovery_adds


@pytest.mark.covers("D03", "D17")
@pytest.mark.parametrize(
    ("quorums", "stripe"), [((3, 3, 2), 2**40), ((3, 2, 2), 1), ((3, 2, 1), 2), ((3, 1, 1), 1)]
)
@on_virtual_time
async def test_another_node_takes_the_place_of_a_lost_one(quorums, stripe):
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, quorums=quorums, stripe_entries=stripe)
    await cluster.lose(catalog, N2)
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.LOST, nodes=[N2])
    await cluster.worker().round()
    if quorums[1] == 1:
        # Nobody else has them: nothing is changed, and it is said.
        (one,) = await catalog.underreplicated.list()
        assert "could not be read" in one.last_error
        assert N2 in (await cluster.metadata_of(catalog, ledger_id)).segments[0].ensemble
        return
    assert await catalog.underreplicated.list() == []
    metadata = await cluster.metadata_of(catalog, ledger_id)
    assert metadata.segments[0].ensemble == (N1, N4, N3), "in the lost one's place"
    assert await _whole(cluster, catalog, ledger_id)


@on_virtual_time
async def test_every_segment_that_names_the_lost_node_gets_another_one():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    claimed = await catalog.streams.claim(STREAM, N1)
    ledger_id, metadata = await cluster.open_ledger(catalog, claimed, quorums=(2, 2, 1))
    for entry, nodes in enumerate([(N1, N2), (N1, N2), (N3, N2)]):
        for name in nodes:
            await cluster.nodes[name].add(make_run(ledger_id, entry))
    tail = Segment(first_entry_id=EntryId(2), ensemble=(N3, N2))
    empty = Segment(first_entry_id=EntryId(3), ensemble=(N2, N4))
    await _publish(catalog, ledger_id, metadata, (metadata.segments[0], tail, empty))
    await catalog.ledgers.close(claimed, ledger_id, last_entry_id=EntryId(2), length=9)
    await cluster.lose(catalog, N2)
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.LOST, nodes=[N2])
    await cluster.worker().round()
    assert await catalog.underreplicated.list() == []
    found = await cluster.metadata_of(catalog, ledger_id)
    assert all(N2 not in one.ensemble for one in found.segments), "the empty one too"
    assert await _whole(cluster, catalog, ledger_id)


@pytest.mark.covers("D17")
@pytest.mark.parametrize("last", [(N3, N4), (N2, N3)])
@on_virtual_time
async def test_what_is_confirmed_of_an_open_ledger_is_mended_and_nobody_is_fenced(last):
    """All but the last segment; that one is its owner's, which writes on meanwhile."""
    cluster = LackingCluster(5)
    catalog = await cluster.begin()
    claimed = await catalog.streams.claim(STREAM, N1)
    ledger_id, metadata = await cluster.open_ledger(catalog, claimed, quorums=(2, 2, 1))
    for entry in range(3):
        for name in (N1, N2):
            await cluster.nodes[name].add(make_run(ledger_id, entry))
    tail = Segment(first_entry_id=EntryId(3), ensemble=last)
    await _publish(catalog, ledger_id, metadata, (metadata.segments[0], tail))
    await cluster.lose(catalog, N2)
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.LOST, nodes=[N2])
    await cluster.worker().round()
    found = await cluster.metadata_of(catalog, ledger_id)
    assert found.state is LedgerState.OPEN
    first, second = (one.ensemble for one in found.segments)
    assert (first[0], second) == (N1, last)
    assert first[1] != N2
    assert [run.first_entry_id for run in cluster.runs(first[1], ledger_id)] == [0, 1, 2]
    assert not any(ledger_id in node.fenced for node in cluster.nodes.values())
    assert len(await catalog.underreplicated.list()) == int(N2 in last)
    assert len(cluster.recovered) == int(N2 in last)


async def _publish(catalog, ledger_id, metadata: LedgerMetadata, segments) -> None:
    from dataclasses import replace

    from tierlog.format import ledger_metadata, paths

    data = ledger_metadata.encode_znode(replace(metadata, segments=segments))
    await catalog.store.set(paths.ledger_path(ledger_id), data, version=0)


@on_virtual_time
async def test_a_node_that_is_merely_away_is_waited_for():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, lacking={N2})
    await cluster.lose(catalog, N2)
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.MISSING, nodes=[N2])
    worker = cluster.worker()
    await worker.round()
    (one,) = await catalog.underreplicated.list()
    assert one.last_error.startswith("node n2 is away")
    await cluster.come_back(catalog, N2)
    await worker.round()
    assert len(await catalog.underreplicated.list()) == 1, "its back-off holds it"
    cluster.clock.advance(2)
    await worker.round()
    assert await catalog.underreplicated.list() == []
    assert await _whole(cluster, catalog, ledger_id)


@pytest.mark.covers("D03")
@on_virtual_time
async def test_damaged_runs_are_written_anew_from_a_good_copy():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog)
    cluster.nodes[N1].damaged |= {(ledger_id, EntryId(1)), (ledger_id, EntryId(2))}
    await catalog.underreplicated.add(
        ledger_id, reason=CopyTrouble.DAMAGED, nodes=[N1], entries=(EntryId(1), EntryId(2))
    )
    await cluster.worker().round()
    assert [run.first_entry_id for run in cluster.nodes[N1].recovery_adds] == [1, 2]
    assert await catalog.underreplicated.list() == []


@on_virtual_time
async def test_where_each_copy_lost_another_third_nothing_is_lost_and_all_are_mended():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog)
    first = [run.first_entry_id for run in cluster.runs(N1, ledger_id)]
    lost = {node: first[number::3] for number, node in enumerate((N1, N2, N3))}
    assert all(len(entries) == 2 for entries in lost.values()), "each run is bad in one copy"
    for node, entries in lost.items():
        cluster.nodes[node].damaged |= {(ledger_id, one) for one in entries}
        await catalog.underreplicated.add(
            ledger_id, reason=CopyTrouble.DAMAGED, nodes=[node], entries=tuple(entries)
        )
    worker = cluster.worker()
    for _ in lost:
        await worker.round()
    for node, entries in lost.items():
        added = {run.first_entry_id for run in cluster.nodes[node].recovery_adds}
        assert set(entries) <= added
    assert await catalog.underreplicated.list() == []
    assert await _whole(cluster, catalog, ledger_id)


@on_virtual_time
async def test_damage_that_is_met_while_copying_is_mended_too():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, lacking={N3})
    cluster.nodes[N1].damaged.add((ledger_id, EntryId(2)))
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.MISSING, nodes=[N3])
    worker = cluster.worker()
    await worker.round()
    assert await _whole(cluster, catalog, ledger_id)
    (one,) = await catalog.underreplicated.list()
    assert [(two.node_id, two.entries) for two in one.complaints if two.entries] == [(N1, (2, 2))]
    await worker.round()
    assert [run.first_entry_id for run in cluster.nodes[N1].recovery_adds] == [2]
    assert await catalog.underreplicated.list() == []


@on_virtual_time
async def test_a_node_that_is_emptied_gives_its_copies_away_while_it_lives():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ids = [await cluster.ledger(catalog, quorums=(3, 1, 1), stripe_entries=2) for _ in range(3)]
    await catalog.draining.begin(N2)
    for ledger_id in ids:
        await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.DRAINING, nodes=[N2])
    await cluster.worker().round()
    assert await catalog.underreplicated.list() == []
    for ledger_id in ids:
        metadata = await cluster.metadata_of(catalog, ledger_id)
        assert metadata.segments[0].ensemble == (N1, N4, N3)
        assert await _whole(cluster, catalog, ledger_id)


@on_virtual_time
async def test_no_copy_moves_to_a_node_that_is_emptied_too():
    cluster = LackingCluster(5)
    catalog = await cluster.begin()
    ids = [await cluster.ledger(catalog) for _ in range(6)]
    for name in (N2, N4):
        await catalog.draining.begin(name)
    for ledger_id in ids:
        await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.DRAINING, nodes=[N2])
    await cluster.worker().round()
    for ledger_id in ids:
        metadata = await cluster.metadata_of(catalog, ledger_id)
        assert metadata.segments[0].ensemble == (N1, "n5", N3)


@on_virtual_time
async def test_what_a_live_node_holds_is_unknown_while_it_can_not_say():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, lacking={N2})
    cluster.nodes[N2].down = True  # and registered all the same
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.MISSING, nodes=[N2])
    await cluster.worker().round()
    (one,) = await catalog.underreplicated.list()
    assert one.last_error == "node n2 can't say what it holds"


@on_virtual_time
async def test_without_another_node_the_ledger_stays_queued_and_says_why():
    cluster = LackingCluster(3)
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog)
    await cluster.lose(catalog, N3)
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.LOST, nodes=[N3])
    await cluster.worker().round()
    (one,) = await catalog.underreplicated.list()
    assert one.last_error == "no other node can take what n3 held"


@on_virtual_time
async def test_a_node_that_does_not_answer_gets_no_place():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog)
    await cluster.lose(catalog, N2)
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.LOST, nodes=[N2])
    cluster.nodes[N4].deaf = True
    await cluster.worker().round()
    (one,) = await catalog.underreplicated.list()
    assert "node n4 did not take a copy" in one.last_error
    metadata = await cluster.metadata_of(catalog, ledger_id)
    assert metadata.segments[0].ensemble == (N1, N2, N3)


@on_virtual_time
async def test_a_node_that_forgets_what_it_acknowledged_gets_no_place():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog)
    await cluster.lose(catalog, N2)
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.LOST, nodes=[N2])
    liar = cluster.nodes[N4]
    add = liar.add

    def forgetful(run, *, recovery=False):
        answer = add(run, recovery=recovery)
        liar.runs[ledger_id].pop(EntryId(3), None)
        return answer

    liar.add = forgetful  # type: ignore[method-assign]
    await cluster.worker().round()
    (one,) = await catalog.underreplicated.list()
    assert one.last_error == "node n4 still lacks 1 entries"
    assert N4 not in (await cluster.metadata_of(catalog, ledger_id)).segments[0].ensemble


@on_virtual_time
async def test_how_far_it_is_is_shown():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, lacking={N2})
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.MISSING, nodes=[N2])
    worker = cluster.worker()
    await worker.round()
    families = replication_metrics({"auditor": True, **worker.statistics()})
    shown = {one.name: one.value for family in families for one in family.samples}
    assert shown["tierlog_replication_auditor"] == 1
    assert shown["tierlog_replication_queue_ledgers"] == 1
    assert shown["tierlog_replication_made_whole_total"] == 1
    assert shown["tierlog_replication_copied_runs_total"] == 6
    assert shown["tierlog_replication_copied_bytes_total"] > 300


@on_virtual_time
async def test_copies_take_no_more_of_disks_and_network_than_they_may():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, lacking={N2}, entry_bytes=2 * MIB)
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.MISSING, nodes=[N2])
    settings = SETTINGS.model_copy(update={"bytes_per_s": MIB})
    begun_s = now_s()
    await cluster.worker(settings=settings).round()
    # 12 MiB at 1 MiB a second; the first 4 MiB are a burst.
    assert now_s() - begun_s >= 8
    assert await _whole(cluster, catalog, ledger_id)


@on_virtual_time
async def test_a_deleted_ledger_leaves_the_queue():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    await catalog.underreplicated.add(LedgerId(77), reason=CopyTrouble.LOST, nodes=[N2])
    await cluster.worker().round()
    assert await catalog.underreplicated.list() == []


@pytest.mark.parametrize(
    ("worker_on", "owner_lives", "nodes", "seals"),
    [(N1, True, 4, 1), (N3, True, 4, 0), (N3, False, 5, 1), (N1, True, 3, 0)],
)
@on_virtual_time
async def test_an_open_ledger_is_sealed_by_its_owner_where_that_helps(
    worker_on, owner_lives, nodes, seals
):
    """By its owner's process, or by any where nobody alive owns it; not for the same nodes."""
    cluster = LackingCluster(nodes)
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, closed=False)
    await _name_stream(catalog, ledger_id)
    await cluster.lose(catalog, N2)
    if not owner_lives:
        await cluster.lose(catalog, N1)
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.LOST, nodes=[N2])
    await cluster.worker(node_id=worker_on).round()
    assert cluster.sealed == [STREAM] * seals
    assert len(await catalog.underreplicated.list()) == 1, "it is mended once it is closed"
    metadata = await cluster.metadata_of(catalog, ledger_id)
    assert metadata.state is LedgerState.OPEN
    assert metadata.segments[0].ensemble == (N1, N2, N3)


@on_virtual_time
async def test_an_open_ledger_without_a_lost_node_is_left_alone():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, closed=False)
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.DAMAGED, nodes=[N2])
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.LOST, nodes=[N2])
    await cluster.worker().round()
    assert (cluster.sealed, cluster.recovered) == ([], [])
    (one,) = await catalog.underreplicated.list()
    assert one.last_error == "the ledger is not closed yet"


@on_virtual_time
async def test_a_bare_ledger_that_stands_open_on_a_lost_node_is_recovered():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, closed=False)
    await cluster.lose(catalog, N2)
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.LOST, nodes=[N2])
    await cluster.worker().round()
    assert (cluster.sealed, cluster.recovered) == ([], [ledger_id])


@on_virtual_time
async def test_the_writer_of_a_bare_ledger_has_the_grace_time_while_a_node_is_emptied():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, closed=False)
    await catalog.draining.begin(N2)
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.DRAINING, nodes=[N2])
    worker = cluster.worker()
    await worker.round()
    assert cluster.recovered == []
    (one,) = await catalog.underreplicated.list()
    assert one.last_error == "its writer may still close it"
    cluster.clock.advance(SETTINGS.grace_s + 1)
    await worker.round()
    assert cluster.recovered == [ledger_id]


@on_virtual_time
async def test_a_draining_that_was_called_off_closes_nothing_when_the_node_is_away_for_a_while():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, closed=False)
    await catalog.draining.begin(N2)
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.DRAINING, nodes=[N2])
    await catalog.draining.cancel(N2)
    await cluster.lose(catalog, N2)
    await cluster.worker().round()
    assert cluster.recovered == []
    (one,) = await catalog.underreplicated.list()
    assert one.last_error == "the ledger is not closed yet"
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.LOST, nodes=[N2])
    cluster.clock.advance(SETTINGS.backoff_s_max)
    await cluster.worker().round()
    assert cluster.recovered == [ledger_id], "it is lost, and its place is to be given away"


@on_virtual_time
async def test_a_node_that_is_being_emptied_since_the_round_began_takes_nobodys_place():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ids = [await cluster.ledger(catalog) for _ in range(3)]
    await cluster.lose(catalog, N2)
    for ledger_id in ids:
        await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.LOST, nodes=[N2])
    cluster.nodes[N4].delay_s = 1.0
    working = asyncio.create_task(cluster.worker().round())
    await asyncio.sleep(1.5)
    await catalog.draining.begin(N4)
    await working
    for ledger_id in ids:
        (segment,) = (await cluster.metadata_of(catalog, ledger_id)).segments
        assert N4 not in segment.ensemble
    assert {one.last_error for one in await catalog.underreplicated.list()} == {
        "node n4 is being emptied since it was chosen",
        "no other node can take what n2 held",
    }


@on_virtual_time
async def test_a_copy_that_is_refused_keeps_no_other_from_being_made():
    cluster = LackingCluster()
    catalog = await cluster.begin()
    ledger_id = await cluster.ledger(catalog, lacking={N1, N3})

    def refuse(run, *, recovery=False):
        del recovery
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(RefusedError(f"{run!r} was freed", reason=Reason.FENCED))
        return answer

    cluster.nodes[N1].add = refuse  # type: ignore[method-assign]
    await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.MISSING, nodes=[N1, N3])
    await cluster.worker().round()
    assert sorted(await cluster.lacks(catalog, ledger_id)) == [N1]
    (one,) = await catalog.underreplicated.list()
    assert "was freed" in one.last_error


async def _name_stream(catalog, ledger_id) -> None:
    from dataclasses import replace

    from tierlog.format import ledger_metadata, paths

    metadata = await catalog.ledgers.get(ledger_id)
    named = replace(metadata, custom={**metadata.custom, "tierlog/stream": STREAM.encode()})
    data = ledger_metadata.encode_znode(named)
    await catalog.store.set(paths.ledger_path(ledger_id), data, version=0)


async def _check_members(cluster, catalog, before) -> None:
    """Whoever joined an ensemble since ``before`` holds its whole share."""
    for ledger_id, ensemble in before.items():
        metadata = await cluster.metadata_of(catalog, ledger_id)
        joined = set(metadata.segments[0].ensemble) - set(ensemble)
        assert not joined.intersection(await cluster.lacks(catalog, ledger_id))


@pytest.mark.covers("D03", "D17")
@pytest.mark.parametrize("seed", range(20))
@on_virtual_time
async def test_whatever_fails_a_place_is_given_only_to_who_holds_all_of_it(seed):
    """Two workers, lost answers, nodes that come and go: in the end every ledger is whole, and
    all the while each new member of an ensemble holds its share.
    """
    cluster = LackingCluster(5, seed=seed)
    rng = random.Random(seed)
    catalog = await cluster.begin()
    ids = [
        await cluster.ledger(catalog, quorums=(3, 2, 1), stripe_entries=rng.choice([1, 2]))
        for _ in range(4)
    ]
    before = {one: (await cluster.metadata_of(catalog, one)).segments[0].ensemble for one in ids}
    await cluster.lose(catalog, N2)
    for ledger_id in ids:
        await catalog.underreplicated.add(ledger_id, reason=CopyTrouble.LOST, nodes=[N2])
    rates = FaultRates(refused=0.03, request_lost=0.03, reply_lost=0.03, delay_s_max=0.01)
    workers = [
        cluster.worker(node_id=name, faults=Faults(random.Random(f"{seed} {name}"), rates=rates))
        for name in (N1, N3)
    ]

    async def work(worker) -> None:
        for _ in range(60):
            with contextlib.suppress(RetryableError, IndeterminateError):
                await worker.round()
            await asyncio.sleep(2)

    async def disturb() -> None:
        for _ in range(20):
            node = cluster.nodes[rng.choice([N3, N4])]
            node.down = rng.random() < 0.5
            await asyncio.sleep(1)
            node.down = False
            await _check_members(cluster, catalog, before)

    async with asyncio.TaskGroup() as tasks:
        for worker in workers:
            tasks.create_task(work(worker))
        tasks.create_task(disturb())
    assert await catalog.underreplicated.list() == []
    for ledger_id in ids:
        assert await _whole(cluster, catalog, ledger_id)
        assert N2 not in (await cluster.metadata_of(catalog, ledger_id)).segments[0].ensemble
