"""Protocols.md section 1, "Fencing and recovery", and what must hold after it."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM, SmallCluster, draft, payloads
from tierlog.adapters.memory.faults import Faults, Outcome
from tierlog.format import paths
from tierlog.format.run import cut_runs
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.ledger.writer import LedgerWriter, WriterLimits
from tierlog.model.errors import CorruptError, Reason, RefusedError, TierlogError
from tierlog.model.ledger import LedgerState

LIMITS = WriterLimits(in_flight_bytes_max=1 << 20, append_timeout_s=5.0, run_bytes_max=64 * 1024)


def cut(ledger_id, first, *entries, lac=-1, length_before=0):
    """Return the one run of these entries, as their owner would have cut it."""
    one = draft(*entries)
    (run,) = cut_runs(
        one.frames,
        one.offsets,
        ledger_id=ledger_id,
        first_entry_id=first,
        last_add_confirmed=lac,
        owner_epoch=1,
        stripe_entries=2**40,
        length_before=length_before,
    )
    return run


async def left_behind(cluster, *, quorums, where):
    """Open a ledger and leave runs on nodes: ``where`` lists (run arguments, names of nodes)."""
    catalog = await cluster.start()
    claimed = await catalog.streams.claim(STREAM, cluster.names[0])
    ledger_id, metadata = await cluster.open_ledger(catalog, claimed, quorums=quorums)
    lengths = {first: sum(map(len, entries)) for (first, entries, _), _ in where}
    for (first, entries, lac), names in where:
        before = sum(length for start, length in lengths.items() if start < first)
        for name in names:
            run = cut(ledger_id, first, *entries, lac=lac, length_before=before)
            await cluster.nodes[name].add(run)
    return catalog, claimed, ledger_id, metadata


async def read_all(cluster, catalog, ledger_id):
    metadata = await catalog.ledgers.get(ledger_id)
    assert metadata.state is LedgerState.CLOSED
    handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog))
    return payloads(
        [run async for runs in handle.read_runs(0, metadata.last_entry_id) for run in runs]
    )


@pytest.mark.covers("D18")
def test_what_was_stored_behind_the_lac_is_kept_and_the_ledger_closed():
    async def main():
        cluster = SmallCluster()
        where = [((0, (b"a", b"bb"), -1), ["n1"]), ((2, (b"ccc",), 1), ["n1"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(1, 1, 1), where=where)
        closed = await cluster.recovery(catalog).recover(claimed, ledger_id)
        assert (closed.last_entry_id, closed.length) == (2, 6)
        assert await read_all(cluster, catalog, ledger_id) == [b"a", b"bb", b"ccc"]
        assert ledger_id in cluster.nodes["n1"].fenced
        with pytest.raises(RefusedError) as caught:
            await cluster.nodes["n1"].add(cut(ledger_id, 3, b"late"))
        assert caught.value.reason is Reason.FENCED

    run_virtual(main())


@pytest.mark.covers("D03")
def test_a_run_that_one_node_has_is_rewritten_to_the_others_with_its_header():
    async def main():
        cluster = SmallCluster(3)
        where = [
            ((0, (b"a",), -1), ["n1", "n2", "n3"]),
            ((1, (b"b",), 0), ["n3"]),
        ]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(3, 3, 2), where=where)
        cluster.nodes["n1"].down = True
        closed = await cluster.recovery(catalog).recover(claimed, ledger_id)
        assert closed.last_entry_id == 1
        original = cluster.nodes["n3"].runs[ledger_id][1]
        assert cluster.nodes["n2"].runs[ledger_id][1] == original

    run_virtual(main())


def test_only_what_lies_behind_the_lac_is_rewritten():
    async def main():
        cluster = SmallCluster(2)
        where = [
            ((0, (b"a",), -1), ["n1", "n2"]),
            ((1, (b"b",), 0), ["n1", "n2"]),
            ((2, (b"c",), 1), ["n1"]),
        ]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(2, 2, 2), where=where)
        await cluster.recovery(catalog).recover(claimed, ledger_id)
        again = [run.first_entry_id for run in cluster.nodes["n2"].recovery_adds]
        assert again == [2]

    run_virtual(main())


def test_silence_is_waited_for_and_reported_and_never_taken_for_absence():
    async def main():
        cluster = SmallCluster(3)
        where = [((0, (b"a",), -1), ["n1", "n2"]), ((1, (b"b",), -1), ["n2", "n3"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(3, 3, 2), where=where)
        cluster.nodes["n2"].down = cluster.nodes["n3"].down = True
        recovery = cluster.recovery(catalog)
        async with asyncio.TaskGroup() as tasks:
            recovering = tasks.create_task(recovery.recover(claimed, ledger_id))
            await asyncio.sleep(60)
            assert not recovering.done()
            assert "n2" in recovery.waiting[ledger_id]
            assert (await catalog.ledgers.get(ledger_id)).state is LedgerState.IN_RECOVERY
            cluster.nodes["n3"].down = False
        assert recovering.result().last_entry_id == 1
        assert recovery.waiting == {}

    run_virtual(main())


def test_a_damaged_run_is_unknown_and_another_replica_decides():
    async def main():
        cluster = SmallCluster(2)
        where = [((0, (b"a",), -1), ["n1", "n2"]), ((1, (b"b",), -1), ["n1", "n2"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(2, 2, 1), where=where)
        cluster.nodes["n1"].damaged.add((ledger_id, 1))
        closed = await cluster.recovery(catalog).recover(claimed, ledger_id)
        assert closed.last_entry_id == 1

    run_virtual(main())


def test_a_damaged_run_with_no_other_copy_holds_the_close_back():
    async def main():
        cluster = SmallCluster()
        where = [((0, (b"a",), -1), ["n1"]), ((1, (b"b",), -1), ["n1"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(1, 1, 1), where=where)
        cluster.nodes["n1"].damaged.add((ledger_id, 1))
        recovery = cluster.recovery(catalog)
        async with asyncio.TaskGroup() as tasks:
            recovering = tasks.create_task(recovery.recover(claimed, ledger_id))
            await asyncio.sleep(30)
            assert not recovering.done()
            assert "entry 1" in recovery.waiting[ledger_id]
            cluster.nodes["n1"].damaged.clear()
        assert recovering.result().last_entry_id == 1

    run_virtual(main())


def test_an_entry_below_the_lac_is_waited_for_even_when_all_nodes_deny_it():
    async def main():
        cluster = SmallCluster()
        where = [((0, (b"a",), -1), ["n1"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(1, 1, 1), where=where)
        cluster.nodes["n1"].lacs[ledger_id] = 3
        recovery = cluster.recovery(catalog)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await recovery.recover(claimed, ledger_id)
        assert (await catalog.ledgers.get(ledger_id)).state is LedgerState.IN_RECOVERY

    run_virtual(main())


def test_a_ledger_without_entries_leaves_the_list():
    async def main():
        cluster = SmallCluster()
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(1, 1, 1), where=[])
        recovery = cluster.recovery(catalog)
        assert await recovery.recover(claimed, ledger_id) is None
        assert (await catalog.streams.snapshot(STREAM)).ledgers == ()
        assert await recovery.recover(claimed, ledger_id) is None

    run_virtual(main())


@pytest.mark.parametrize("outcome", [Outcome.REQUEST_LOST, Outcome.REPLY_LOST])
def test_a_close_whose_answer_was_lost_is_read_back(outcome):
    async def main():
        cluster = SmallCluster()
        where = [((0, (b"a",), -1), ["n1"])]
        _, claimed, ledger_id, _ = await left_behind(cluster, quorums=(1, 1, 1), where=where)
        faults = Faults(cluster.rng)
        faults.next("metadata.transact", outcome)
        catalog = cluster.catalog(faults)
        closed = await cluster.recovery(catalog).recover(claimed, ledger_id)
        assert closed.last_entry_id == 0
        assert await read_all(cluster, catalog, ledger_id) == [b"a"]

    run_virtual(main())


@pytest.mark.parametrize("seed", range(20))
def test_two_recoveries_at_once_end_in_one_result(seed):
    async def main():
        cluster = SmallCluster(3, seed=seed)
        # Entry 1 is on one node of three: with a quorum of two it may be found or not.
        where = [((0, (b"a",), -1), ["n1", "n2"]), ((1, (b"b",), 0), ["n3"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(3, 3, 2), where=where)
        for node in cluster.nodes.values():
            node.delay_s = cluster.rng.uniform(0, 0.5)
        cluster.nodes[cluster.rng.choice(cluster.names)].down = True
        async with asyncio.TaskGroup() as tasks:
            both = [
                tasks.create_task(cluster.recovery(cluster.catalog()).recover(claimed, ledger_id))
                for _ in range(2)
            ]
            await asyncio.sleep(cluster.rng.uniform(0, 1))
            for node in cluster.nodes.values():
                node.down = False
        first, second = (task.result() for task in both)
        assert first == second
        assert first.last_entry_id in (0, 1)
        entries = await read_all(cluster, catalog, ledger_id)
        assert entries == [b"a", b"b"][: first.last_entry_id + 1]

    run_virtual(main())


@pytest.mark.covers("A03", "D18")
def test_a_deposed_owner_confirms_nothing_and_closes_nothing_after_the_fence():
    async def main():
        cluster = SmallCluster(3)
        catalog = await cluster.start()
        old = await catalog.streams.claim(STREAM, cluster.names[0])
        ledger_id, metadata = await cluster.open_ledger(catalog, old, quorums=(3, 3, 2))
        confirmed = []
        writer = LedgerWriter(
            ledger_id=ledger_id,
            metadata=metadata,
            owner_epoch=old.owner_epoch,
            nodes=dict(cluster.nodes),
            limits=LIMITS,
            on_confirmed=confirmed.append,
        )
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(writer.run())
            one = draft(b"a")
            writer.append(one.frames, one.offsets)
            await asyncio.sleep(0.1)
            new = await catalog.streams.claim(STREAM, cluster.names[1])
            closed = await cluster.recovery(catalog).recover(new, ledger_id)
            assert closed.last_entry_id == 0
            late = draft(b"late")
            writer.append(late.frames, late.offsets)
            await asyncio.sleep(0.1)
            assert writer.failure.reason is Reason.FENCED
            with pytest.raises(TierlogError) as caught:
                await catalog.ledgers.close(old, ledger_id, last_entry_id=1, length=5)
            assert caught.value.reason is Reason.FENCED
            writing.cancel()
        assert confirmed == [0]
        assert await read_all(cluster, catalog, ledger_id) == [b"a"]

    run_virtual(main())


@pytest.mark.parametrize("damage", ["gone", "garbage", "garbage while it waits"])
def test_metadata_that_something_else_has_changed_is_an_error_and_no_crash(damage):
    async def main():
        cluster = SmallCluster()
        where = [((0, (b"a",), -1), ["n1"])]
        catalog, claimed, ledger_id, _ = await left_behind(cluster, quorums=(1, 1, 1), where=where)
        cluster.nodes["n1"].down = True
        path = paths.ledger_path(ledger_id)

        async def spoil():
            if damage == "gone":
                await catalog.store.delete(path, version=-1)
            else:
                await catalog.store.set(path, b"garbage", version=-1)

        if "waits" not in damage:
            await spoil()
        async with asyncio.timeout(60):
            recovering = asyncio.create_task(cluster.recovery(catalog).recover(claimed, ledger_id))
            await asyncio.sleep(5)
            if "waits" in damage:
                await spoil()
            with pytest.raises(CorruptError):
                await recovering

    run_virtual(main())
