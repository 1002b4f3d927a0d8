"""Protocols.md section 1, "Add": ids, quorums, order of confirmation, deadline, broken writers."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
import contextlib

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM, SmallCluster, draft, payloads
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.ledger.writer import LedgerWriter, WriterLimits
from tierlog.model.errors import IndeterminateError, Reason, RefusedError

LIMITS = WriterLimits(in_flight_bytes_max=1 << 20, append_timeout_s=5.0, run_bytes_max=64 * 1024)


@contextlib.asynccontextmanager
async def writing(cluster, *, quorums=(1, 1, 1), stripe_entries=2**40, limits=LIMITS):
    """Give a running writer of a fresh ledger, what it confirmed, and the metadata."""
    catalog = await cluster.start()
    claimed = await catalog.streams.claim(STREAM, cluster.names[0])
    ledger_id, metadata = await cluster.open_ledger(
        catalog, claimed, quorums=quorums, stripe_entries=stripe_entries
    )
    confirmed = []
    ensemble = metadata.segments[0].ensemble
    writer = LedgerWriter(
        ledger_id=ledger_id,
        metadata=metadata,
        owner_epoch=claimed.owner_epoch,
        nodes={name: cluster.nodes[name] for name in ensemble},
        limits=limits,
        on_confirmed=confirmed.append,
    )
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(writer.run())
        yield writer, confirmed, metadata
        task.cancel()


def send(writer, *entries):
    one = draft(*entries)
    return writer.append(one.frames, one.offsets)


@pytest.mark.covers("D01", "D05", "D06", "D09")
def test_entries_get_growing_ids_and_are_confirmed_in_order():
    async def main():
        cluster = SmallCluster()
        async with writing(cluster) as (writer, confirmed, metadata):
            assert send(writer, b"a", b"b") == 1
            assert send(writer, b"c") == 2
            assert confirmed == []
            last, length = await writer.finish()
            assert (last, length) == (2, 3)
            assert confirmed[-1] == 2
            handle = Tier1ReadHandle(
                writer.ledger_id, metadata, cluster.directory(cluster.catalog())
            )
            assert await handle.last_add_confirmed() == 2
            runs = [run async for runs in handle.read_runs(0, 2) for run in runs]
            assert payloads(runs) == [b"a", b"b", b"c"]
            assert [run.header.last_add_confirmed for run in runs] == [-1, -1]

    run_virtual(main())


@pytest.mark.covers("D02", "D13", "D15", "D16")
def test_a_run_goes_to_the_write_set_of_its_stripe_and_nowhere_else():
    async def main():
        cluster = SmallCluster(3)
        async with writing(cluster, quorums=(3, 2, 2), stripe_entries=2) as (writer, _, metadata):
            send(writer, *[b"%d" % i for i in range(8)])
            await writer.finish()
            for name, node in cluster.nodes.items():
                held = node.runs[writer.ledger_id]
                expected = [i for i in range(0, 8, 2) if name in metadata.write_set(i)]
                assert sorted(held) == expected
                assert all(run.header.count == 2 for run in held.values())
            directory = cluster.directory(cluster.catalog())
            handle = Tier1ReadHandle(writer.ledger_id, metadata, directory)
            runs = [run async for runs in handle.read_runs(0, 7) for run in runs]
            assert payloads(runs) == [b"%d" % i for i in range(8)]

    run_virtual(main())


def test_an_ack_quorum_is_enough_and_a_lost_node_does_not_stop_it():
    async def main():
        cluster = SmallCluster(3)
        async with writing(cluster, quorums=(3, 3, 2)) as (writer, confirmed, _):
            cluster.nodes["n2"].down = True
            send(writer, b"a")
            await asyncio.sleep(1)
            assert confirmed == [0]
            assert writer.failure is None
            send(writer, b"b")
            await writer.finish()
            assert confirmed == [0, 1]

    run_virtual(main())


def test_a_late_run_holds_back_the_confirmation_of_those_behind_it():
    async def main():
        cluster = SmallCluster(2)
        async with writing(cluster, quorums=(2, 1, 1), stripe_entries=1) as (writer, confirmed, _):
            cluster.nodes["n1"].delay_s = 2.0
            send(writer, b"a", b"b")
            await asyncio.sleep(1)
            assert confirmed == []
            await asyncio.sleep(1.5)
            assert confirmed[-1] == 1

    run_virtual(main())


def test_what_is_not_confirmed_in_time_breaks_the_writer_for_good():
    async def main():
        cluster = SmallCluster()
        node = cluster.nodes["n1"]
        async with writing(cluster) as (writer, confirmed, _):
            node.delay_s = 6.0
            send(writer, b"a")
            await asyncio.sleep(5.5)
            assert isinstance(writer.failure, IndeterminateError)
            await asyncio.sleep(2.0)  # the late answer comes
            assert confirmed == []
            assert writer.last_add_confirmed == -1
            with pytest.raises(IndeterminateError):
                await writer.finish()

    run_virtual(main())


@pytest.mark.covers("D18")
def test_a_fenced_ledger_confirms_nothing_more():
    async def main():
        cluster = SmallCluster(3)
        async with writing(cluster, quorums=(3, 3, 2)) as (writer, confirmed, _):
            send(writer, b"a")
            await asyncio.sleep(0.1)
            await cluster.nodes["n3"].fence(writer.ledger_id)
            for name in ("n1", "n2"):
                cluster.nodes[name].delay_s = 0.05
            send(writer, b"b")
            await asyncio.sleep(0.1)
            assert confirmed == [0]
            assert isinstance(writer.failure, RefusedError)
            assert writer.failure.reason is Reason.FENCED

    run_virtual(main())


def test_losing_the_ack_quorum_breaks_the_writer():
    async def main():
        cluster = SmallCluster(2)
        async with writing(cluster, quorums=(2, 2, 2)) as (writer, confirmed, _):
            cluster.nodes["n2"].down = True
            send(writer, b"a")
            await asyncio.sleep(0.1)
            assert writer.failure is not None
            assert confirmed == []

    run_virtual(main())


def test_the_lac_goes_out_by_itself_when_nothing_follows():
    async def main():
        cluster = SmallCluster()
        async with writing(cluster) as (writer, _, _):
            send(writer, b"a")
            await asyncio.sleep(0.001)
            assert cluster.nodes["n1"].lacs[writer.ledger_id] == -1
            await asyncio.sleep(0.1)
            assert cluster.nodes["n1"].lacs[writer.ledger_id] == 0

    run_virtual(main())


def test_bytes_in_flight_are_bounded():
    async def main():
        cluster = SmallCluster()
        cluster.nodes["n1"].delay_s = 1.0
        limits = WriterLimits(in_flight_bytes_max=10_000, append_timeout_s=60.0, run_bytes_max=4096)
        async with writing(cluster, limits=limits) as (writer, _, _):
            for _ in range(40):
                await writer.wait_room(1200)
                assert writer.in_flight_bytes <= 10_000
                send(writer, b"x" * 1000)
            await writer.finish()
            assert asyncio.get_running_loop().time() > 3.0
            assert writer.in_flight_bytes == 0

    run_virtual(main())
