"""An owner whose storage nodes fail: appends go on, what lacks copies is told (ADR-0016)."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM, SmallCluster, draft, quorums
from tests.unit.streams.test_owners import make_owners, read_stream, running, spans
from tierlog.adapters.memory.faults import Faults
from tierlog.catalog.change import ensure_node
from tierlog.format import paths
from tierlog.model.errors import IndeterminateError, Reason, RetryableError

pytestmark = pytest.mark.covers("A01", "D03", "D14")

THREE = quorums(3, 3, 2)


async def no_answer(info):
    return False


def lone_owners(cluster, **parts):
    """Make the owners of n1, the only node that claims streams."""
    return make_owners(cluster, "n1", settings=THREE, answers=no_answer, **parts)


async def queued(cluster):
    found = await cluster.catalog().underreplicated.list()
    return [(one.ledger_id, sorted(c.node_id for c in one.complaints)) for one in found]


async def segments(cluster, ledger_id):
    metadata = await cluster.catalog().ledgers.get(ledger_id)
    return [(one.first_entry_id, set(one.ensemble)) for one in metadata.segments]


async def append(owners, number):
    return spans(await owners.submit(STREAM, draft(b"%d" % number)))


def test_a_failed_node_is_replaced_and_the_ledger_goes_on():
    async def main():
        cluster = SmallCluster(4)
        await cluster.start()
        owners = lone_owners(cluster)
        async with running(owners):
            assert await append(owners, 0) == [(0, 0, 0)]
            ((_, ensemble),) = await segments(cluster, 0)
            assert "n1" in ensemble, "the owner's own node is preferred"
            (spare,) = set(cluster.names) - ensemble
            gone = max(ensemble - {"n1"})
            cluster.nodes[gone].down = True
            assert await append(owners, 1) == [(0, 1, 1)]
            assert await append(owners, 2) == [(0, 2, 2)]
        found = await segments(cluster, 0)
        assert found[0] == (0, ensemble)
        assert found[-1][1] == ensemble - {gone} | {spare}
        cluster.nodes[gone].down = False
        assert await read_stream(cluster) == [b"0", b"1", b"2"]

    run_virtual(main())


@pytest.mark.parametrize(("fixed", "stripes"), [(None, [32, 32, 64]), (7, [7, 7, 7])])
def test_stripes_follow_the_size_of_what_is_appended(fixed, stripes):
    """The first ledger's by what waits, the next one's by the ledger before."""

    async def main():
        cluster = SmallCluster(3)
        await cluster.start()
        settings = quorums(3, 2, 2).model_copy(
            update={"stripe_bytes": 64 * 1024, "stripe_entries": fixed}
        )
        owners = make_owners(cluster, "n1", settings=settings, answers=no_answer)
        found = []
        async with running(owners):
            for payload in (bytes(2048), bytes(1024), bytes(9)):
                ((ledger_id, *_),) = spans(await owners.submit(STREAM, draft(payload)))
                metadata = await cluster.catalog().ledgers.get(ledger_id)
                found.append(metadata.stripe_entries)
                await owners.seal(STREAM)
        assert found == stripes

    run_virtual(main())


@pytest.mark.covers("D17")
def test_a_ledger_that_ends_with_copies_missing_is_queued_once_it_is_closed():
    async def main():
        cluster = SmallCluster(3)
        await cluster.start()
        owners = lone_owners(cluster)
        async with running(owners):
            await append(owners, 0)
            cluster.nodes["n3"].down = True
            await append(owners, 1)
            assert await queued(cluster) == []
            await owners.seal(STREAM)
            assert await queued(cluster) == [(0, ["n3"])]
            cluster.nodes["n3"].down = False
            assert await append(owners, 2) == [(1, 0, 0)]
        assert await queued(cluster) == [(0, ["n3"])], "the second one has all its copies"
        assert await read_stream(cluster) == [b"0", b"1", b"2"]

    run_virtual(main())


def test_two_of_three_go_on_with_a_placeholder_for_the_third():
    """Protocols.md: three nodes at 3/3/2 go on when one is gone, in new ledgers too."""

    async def main():
        cluster = SmallCluster(3)
        cluster.names.remove("n3")
        catalog = await cluster.start()
        cluster.names.append("n3")
        await ensure_node(catalog.store, paths.COOKIES)
        for name in cluster.names:
            await catalog.store.create(paths.cookie_path(name), b"")
        cluster.nodes["n3"].down = True
        owners = lone_owners(cluster)
        async with running(owners):
            assert await append(owners, 0) == [(0, 0, 0)]
            assert await segments(cluster, 0) == [(0, {"n1", "n2", "n3"})]
        assert await queued(cluster) == [(0, ["n3"])]
        assert await read_stream(cluster) == [b"0"]

    run_virtual(main())


def test_nothing_is_sent_below_an_ack_quorum_and_the_error_says_what_is_missing():
    async def main():
        cluster = SmallCluster(1)
        await cluster.start()
        owners = lone_owners(cluster)
        async with running(owners):
            with pytest.raises(RetryableError, match="needs 2 more storage node") as caught:
                await append(owners, 0)
            assert caught.value.reason is Reason.UNAVAILABLE
        assert cluster.nodes["n1"].add_count == 0

    run_virtual(main())


def test_what_was_sent_to_too_few_is_indeterminate_and_recovery_decides():
    async def main():
        cluster = SmallCluster(3)
        await cluster.start()
        owners = lone_owners(cluster)
        async with running(owners):
            await append(owners, 0)
            cluster.nodes["n2"].down = cluster.nodes["n3"].down = True
            with pytest.raises(IndeterminateError):
                await append(owners, 1)
            cluster.nodes["n2"].down = cluster.nodes["n3"].down = False
            await asyncio.sleep(10)
            ((ledger_id, first, _),) = await append(owners, 2)
            assert (ledger_id, first) == (1, 0)
        assert await read_stream(cluster) in ([b"0", b"2"], [b"0", b"1", b"2"])

    run_virtual(main())


def test_a_report_that_can_not_be_made_does_not_hold_the_stream_up():
    async def main():
        cluster = SmallCluster(3)
        await cluster.start()
        faults = Faults(cluster.rng)
        owners = lone_owners(cluster, catalog=cluster.catalog(faults))
        async with running(owners):
            await append(owners, 0)
            cluster.nodes["n3"].down = True
            await append(owners, 1)
            # Whatever stands there, it is no record of this version.
            store = cluster.metadata.connect()
            path = paths.underreplicated_path(0)
            await ensure_node(store, path)
            found = await store.get(path)
            await store.set(path, b"\xff\xff", version=found.version)
            await owners.seal(STREAM)
            cluster.nodes["n3"].down = False
            assert await append(owners, 2) == [(1, 0, 0)]
        assert await read_stream(cluster) == [b"0", b"1", b"2"]

    run_virtual(main())
