"""ADR-0016, "Recovery": what suffices is enough, and who fails at re-writing is replaced.

Nodes that fail while runs are re-written are replaced in a segment that only the closing
compare-and-set publishes; a ledger that ends with runs that lack a copy is reported.
"""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,call-overload,union-attr,var-annotated,assignment"

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import THREE, SmallCluster, bare_metadata, now_s, payloads
from tests.unit.ledger.test_recovery import cut, left_behind, read_all
from tierlog.ledger.rewriting import _Batch
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ledger import LedgerMetadata, LedgerState, Segment
from tierlog.model.replication import CopyTrouble

TWO_RUNS = [((0, (b"a",), -1), THREE), ((1, (b"bb",), 0), ["n1", "n2"])]


async def leave(cluster, where, *, quorums=(3, 3, 2)):
    return await left_behind(cluster, quorums=quorums, where=where)


def complaints(queue):
    return [(one.node_id, one.reason, one.entries) for q in queue for one in q.complaints]


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("switch", ["hung", "down"])
def test_one_node_that_gives_no_answer_holds_nothing_up(name, switch):
    async def main():
        cluster = SmallCluster(3)
        catalog, claimed, ledger_id, _ = await leave(cluster, TWO_RUNS)
        setattr(cluster.nodes[name], switch, True)
        begun_s = now_s()
        closed = await cluster.recovery(catalog).recover(claimed, ledger_id)
        assert (closed.last_entry_id, closed.length) == (1, 3)
        assert now_s() - begun_s < 0.6
        queued = await catalog.underreplicated.list()
        assert {node_id for node_id, _, _ in complaints(queued)} == {name}
        assert len(asyncio.all_tasks()) == 1
        setattr(cluster.nodes[name], switch, False)
        assert await read_all(cluster, catalog, ledger_id) == [b"a", b"bb"]

    run_virtual(main())


def test_with_every_node_well_nothing_is_reported_to_lack_copies():
    async def main():
        cluster = SmallCluster(4)
        for number, node in enumerate(cluster.nodes.values()):
            node.delay_s = 0.02 * number
        catalog, claimed, ledger_id, before = await leave(cluster, TWO_RUNS)
        await cluster.recovery(catalog).recover(claimed, ledger_id)
        assert await catalog.underreplicated.list() == []
        assert (await catalog.ledgers.get(ledger_id)).segments == before.segments
        assert all(1 in cluster.nodes[name].runs[ledger_id] for name in THREE)

    run_virtual(main())


@pytest.mark.covers("D03", "D14")
@pytest.mark.parametrize("switch", ["down", "hung", "mute"])
def test_who_fails_at_re_writing_is_replaced_from_there_on(switch):
    async def main():
        cluster = SmallCluster(4)
        catalog, claimed, ledger_id, _ = await leave(cluster, TWO_RUNS)
        setattr(cluster.nodes["n3"], switch, True)
        closed = await cluster.recovery(catalog).recover(claimed, ledger_id)
        assert closed.last_entry_id == 1
        metadata = await catalog.ledgers.get(ledger_id)
        assert metadata.segments == (
            Segment(first_entry_id=0, ensemble=("n1", "n2", "n3")),
            Segment(first_entry_id=1, ensemble=("n1", "n2", "n4")),
        )
        assert list(cluster.nodes["n4"].runs[ledger_id]) == [1]
        for name in ("n1", "n2"):
            cluster.nodes[name].damaged.add((ledger_id, 1))
        assert await read_all(cluster, catalog, ledger_id) == [b"a", b"bb"]

    run_virtual(main())


def test_a_segment_of_which_nothing_is_confirmed_is_replaced_and_not_added_to():
    async def main():
        cluster = SmallCluster(4)
        catalog, claimed, ledger_id, _ = await leave(cluster, [((0, (b"a",), -1), ["n1", "n3"])])
        cluster.nodes["n2"].down = True
        await cluster.recovery(catalog).recover(claimed, ledger_id)
        metadata = await catalog.ledgers.get(ledger_id)
        assert metadata.segments == (Segment(first_entry_id=0, ensemble=("n1", "n4", "n3")),)
        assert 0 in cluster.nodes["n4"].runs[ledger_id]

    run_virtual(main())


def test_nobody_learns_of_another_ensemble_before_the_close():
    async def main():
        cluster = SmallCluster(5)
        catalog, claimed, ledger_id, before = await leave(cluster, TWO_RUNS)
        for name in ("n2", "n3", "n4", "n5"):
            cluster.nodes[name].deaf = True
        async with asyncio.TaskGroup() as tasks:
            recovering = tasks.create_task(cluster.recovery(catalog).recover(claimed, ledger_id))
            await asyncio.sleep(20)
            assert not recovering.done()
            now = await catalog.ledgers.get(ledger_id)
            assert (now.state, now.segments) == (LedgerState.IN_RECOVERY, before.segments)
            cluster.nodes["n5"].deaf = False
        metadata = await catalog.ledgers.get(ledger_id)
        assert "n5" in metadata.segments[-1].ensemble
        assert 1 in cluster.nodes["n5"].runs[ledger_id]

    run_virtual(main())


def test_without_another_node_the_ledger_ends_on_its_ack_quorum_and_is_reported():
    async def main():
        cluster = SmallCluster(3)
        catalog, claimed, ledger_id, before = await leave(cluster, TWO_RUNS)
        cluster.nodes["n3"].mute = True
        cluster.nodes["n3"].deaf = True
        await cluster.recovery(catalog).recover(claimed, ledger_id)
        assert (await catalog.ledgers.get(ledger_id)).segments == before.segments
        queued = await catalog.underreplicated.list()
        assert complaints(queued) == [("n3", CopyTrouble.MISSING, None)]

    run_virtual(main())


def test_a_node_that_never_answered_the_fence_is_looked_into_even_if_nothing_was_written():
    async def main():
        cluster = SmallCluster(3)
        catalog, claimed, ledger_id, _ = await leave(cluster, TWO_RUNS[:1])
        for name in ("n1", "n2"):
            cluster.nodes[name].confirm(ledger_id, 0)
        cluster.nodes["n3"].down = True
        await cluster.recovery(catalog).recover(claimed, ledger_id)
        assert all(node.recovery_adds == [] for node in cluster.nodes.values())
        queued = await catalog.underreplicated.list()
        assert complaints(queued) == [("n3", CopyTrouble.MISSING, None)]

    run_virtual(main())


def test_a_copy_that_misses_what_was_confirmed_long_ago_is_found_when_its_writer_is_gone():
    async def main():
        cluster = SmallCluster(3)
        where = [((0, (b"a",), -1), THREE), ((1, (b"b",), 0), ["n1", "n2"])]
        where += [((2, (b"c",), 1), THREE), ((3, (b"d",), 2), THREE)]
        catalog, claimed, ledger_id, _ = await leave(cluster, where)
        # Away while one run was written, and back since.
        await cluster.recovery(catalog).recover(claimed, ledger_id)
        queued = await catalog.underreplicated.list()
        assert complaints(queued) == [("n3", CopyTrouble.MISSING, None)]

    run_virtual(main())


def test_nothing_is_read_before_enough_nodes_of_each_write_set_are_fenced():
    async def main():
        cluster = SmallCluster(3)
        catalog, claimed, ledger_id, _ = await leave(cluster, TWO_RUNS)
        cluster.nodes["n2"].hung = cluster.nodes["n3"].down = True
        recovery = cluster.recovery(catalog)
        async with asyncio.TaskGroup() as tasks:
            recovering = tasks.create_task(recovery.recover(claimed, ledger_id))
            await asyncio.sleep(20)
            assert recovery.waiting[ledger_id].startswith("fence: n2: ")
            assert "n3" in recovery.waiting[ledger_id]
            cluster.nodes["n2"].hung = False
        assert recovering.result().last_entry_id == 1

    run_virtual(main())


def test_an_entry_is_not_absent_because_one_node_of_three_denies_it():
    async def main():
        cluster = SmallCluster(3)
        where = [((0, (b"a",), -1), THREE), ((1, (b"b",), 0), ["n2", "n3"])]
        catalog, claimed, ledger_id, _ = await leave(cluster, where)
        # Fenced, all of them, but two can't be read from.
        cluster.nodes["n2"].read_delay_s = cluster.nodes["n3"].read_delay_s = 3600
        recovery = cluster.recovery(catalog)
        async with asyncio.TaskGroup() as tasks:
            recovering = tasks.create_task(recovery.recover(claimed, ledger_id))
            await asyncio.sleep(60)
            assert recovery.waiting[ledger_id].startswith("entry 1: n2: ")
            cluster.nodes["n3"].read_delay_s = 0
        assert recovering.result().last_entry_id == 1

    run_virtual(main())


def test_segments_that_changed_meanwhile_are_not_taken_back_by_the_close():
    """Only the last segment is a recovery's to change."""
    ended = (
        Segment(first_entry_id=0, ensemble=("n1",)),
        Segment(first_entry_id=5, ensemble=("n1",)),
        Segment(first_entry_id=7, ensemble=("n3",)),
    )
    now = LedgerMetadata(
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(
            Segment(first_entry_id=0, ensemble=("n9",)),
            Segment(first_entry_id=5, ensemble=("n1",)),
        ),
    )
    assert now.with_tail(ended).segments == (now.segments[0], *ended[1:])


def test_an_acknowledgement_of_a_replaced_node_does_not_count():
    run = cut(1, 0, b"a", length_before=0)
    batch = _Batch([run])
    batch.acks[0].update({"n1", "n2"})
    metadata = LedgerMetadata(
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        segments=(Segment(first_entry_id=0, ensemble=("n1", "n2", "n3")),),
    )
    assert batch.count_min(metadata) == 2
    changed = metadata.with_tail((Segment(first_entry_id=0, ensemble=("n1", "n4", "n3")),))
    assert batch.count_min(changed) == 1
    assert [at for at, _ in batch.owed("n4", changed)] == [0]
    assert batch.owed("n2", changed) == []


def test_striped_over_more_nodes_than_hold_a_run_each_write_set_is_asked():
    async def main():
        cluster = SmallCluster(4)
        catalog = await cluster.start()
        claimed = await catalog.streams.claim("logs", "n1")
        ledger_id, metadata = await cluster.open_ledger(
            catalog, claimed, quorums=(4, 2, 2), stripe_entries=1
        )
        length = 0
        for entry_id in range(6):
            data = bytes([65 + entry_id]) * (entry_id + 1)
            run = cut(ledger_id, entry_id, data, lac=max(-1, entry_id - 3), length_before=length)
            length += len(data)
            # The last one never reached its quorum.
            for name in metadata.write_set(entry_id)[: 1 if entry_id == 5 else 2]:
                await cluster.nodes[name].add(run)
        closed = await cluster.recovery(catalog).recover(claimed, ledger_id)
        assert (closed.last_entry_id, closed.length) == (5, length)
        for entry_id in range(6):
            for name in metadata.write_set(entry_id):
                assert entry_id in cluster.nodes[name].runs[ledger_id]

    run_virtual(main())


@pytest.mark.parametrize("seed", range(30))
def test_what_the_published_metadata_says_holds_whoever_fails_meanwhile(seed):
    """Two recover at once over five nodes of which two fail now and then, in each way."""

    async def main():
        cluster = SmallCluster(5, seed=seed)
        rng = cluster.rng
        where = [((0, (b"a",), -1), THREE), ((1, (b"b",), 0), rng.sample(THREE, 2))]
        where += [((2, (b"c",), 0), rng.sample(THREE, 1))]
        catalog, claimed, ledger_id, _ = await leave(cluster, where)
        for node in cluster.nodes.values():
            node.delay_s, node.read_delay_s = rng.uniform(0, 0.5), rng.uniform(0, 0.5)

        async def disturb():
            for _ in range(8):
                node = cluster.nodes[rng.choice(cluster.names)]
                switch = rng.choice(["down", "mute", "deaf", "read_only"])
                setattr(node, switch, True)
                await asyncio.sleep(rng.uniform(0, 1.0))
                setattr(node, switch, False)

        async with asyncio.TaskGroup() as tasks:
            both = [
                tasks.create_task(cluster.recovery(cluster.catalog()).recover(claimed, ledger_id))
                for _ in range(2)
            ]
            tasks.create_task(disturb())
        first, second = (task.result() for task in both)
        assert first == second
        assert first.last_entry_id in (1, 2)
        metadata = await catalog.ledgers.get(ledger_id)
        for entry_id in range(first.last_entry_id + 1):
            copies = [
                name
                for name in metadata.write_set(entry_id)
                if entry_id in cluster.nodes[name].runs.get(ledger_id, {})
            ]
            assert len(copies) >= metadata.ack_quorum, (entry_id, metadata.segments)
        assert (
            await read_all(cluster, catalog, ledger_id)
            == [b"a", b"b", b"c"][: first.last_entry_id + 1]
        )

    run_virtual(main())


def test_a_recovery_that_waits_learns_that_another_one_closed_the_ledger():
    async def main():
        cluster = SmallCluster(3)
        catalog, claimed, ledger_id, _ = await leave(cluster, TWO_RUNS)
        cluster.nodes["n1"].down = cluster.nodes["n2"].down = True
        recovery = cluster.recovery(catalog)
        async with asyncio.TaskGroup() as tasks:
            recovering = tasks.create_task(recovery.recover(claimed, ledger_id))
            await asyncio.sleep(10)
            assert not recovering.done()
            await cluster.catalog().ledgers.close(claimed, ledger_id, last_entry_id=1, length=3)
        assert recovering.result().last_entry_id == 1
        assert recovery.waiting == {}

    run_virtual(main())


@pytest.mark.covers("D18")
def test_a_bare_ledger_is_recovered_by_whoever_wants_it_closed():
    async def main():
        cluster = SmallCluster(4)
        catalog = await cluster.start()
        metadata = bare_metadata({0: ["n1", "n2", "n3"]}, (3, 3, 2))
        ledger_id = await catalog.bare.create(metadata)
        for name in ("n1", "n2"):
            await cluster.nodes[name].add(cut(ledger_id, 0, b"abc"))
        cluster.nodes["n3"].down = True
        closed = await cluster.recovery(catalog).recover(None, ledger_id)
        assert closed == await catalog.ledgers.get(ledger_id)
        assert (closed.state, closed.last_entry_id, closed.length) == (LedgerState.CLOSED, 0, 3)
        assert closed.segments[-1].ensemble == ("n1", "n2", "n4")
        assert await cluster.recovery(catalog).recover(None, ledger_id) == closed
        assert await read_all(cluster, catalog, ledger_id) == [b"abc"]
        with pytest.raises(RefusedError) as caught:
            await cluster.recovery(catalog).recover(None, ledger_id + 1)
        assert caught.value.reason is Reason.LEDGER_NOT_FOUND

    run_virtual(main())


def test_the_length_is_right_where_nothing_lies_behind_the_lac():
    async def main():
        cluster = SmallCluster(3)
        where = [((0, (b"a",), -1), THREE), ((1, (b"bb", b"cc"), 0), THREE)]
        catalog, claimed, ledger_id, _ = await leave(cluster, where)
        cluster.nodes["n2"].confirm(ledger_id, 2)
        closed = await cluster.recovery(catalog).recover(claimed, ledger_id)
        assert (closed.last_entry_id, closed.length) == (2, 5)
        assert all(node.recovery_adds == [] for node in cluster.nodes.values())

    run_virtual(main())


def test_a_segment_before_the_last_one_is_read_from_its_own_nodes():
    async def main():
        cluster = SmallCluster(4)
        catalog = await cluster.start()
        metadata = bare_metadata({0: ["n1", "n2"], 1: ["n3", "n4"]}, (2, 2, 1))
        ledger_id = await catalog.bare.create(metadata)
        await cluster.nodes["n1"].add(cut(ledger_id, 0, b"abc"))
        # What a replaced node took and nobody counted is no part of the answer.
        await cluster.nodes["n1"].add(cut(ledger_id, 1, b"late", length_before=3))
        closed = await cluster.recovery(catalog).recover(None, ledger_id)
        assert (closed.last_entry_id, closed.length) == (0, 3)
        assert payloads([cluster.nodes["n1"].runs[ledger_id][0]]) == [b"abc"]

    run_virtual(main())


def test_what_was_moved_to_another_node_meanwhile_is_read_from_there():
    async def main():
        cluster = SmallCluster(3)
        catalog = await cluster.start()
        metadata = bare_metadata({0: ["n1"], 1: ["n2"]})
        ledger_id = await catalog.bare.create(metadata)
        await cluster.nodes["n3"].add(cut(ledger_id, 0, b"abc"))
        cluster.nodes["n1"].down = True
        recovery = cluster.recovery(catalog)
        async with asyncio.TaskGroup() as tasks:
            recovering = tasks.create_task(recovery.recover(None, ledger_id))
            await asyncio.sleep(20)
            assert recovery.waiting[ledger_id].startswith("entry 0: n1: ")
            await cluster.catalog().underreplicated.replace_member(
                ledger_id, first_entry_id=0, leaving="n1", joining="n3"
            )
        closed = recovering.result()
        assert (closed.last_entry_id, closed.length) == (0, 3)
        assert [one.ensemble for one in closed.segments] == [("n3",), ("n2",)]

    run_virtual(main())
