"""What a write staged in vain goes with the next one of its writer to its stream, and no more."""

# mypy: disable-error-code="no-untyped-call"

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM
from tests.unit.streams.test_owner_attach import JOB, attached, attaching, events, stage
from tierlog.client.staging import number_update
from tierlog.model.ids import StreamName

BESIDE = StreamName("beside")


def test_a_commit_to_one_stream_takes_nothing_that_is_staged_under_its_number_for_another():
    """A job that writes two streams at once may name itself and the day the same in both."""

    async def main():
        async with attaching() as (cluster, _, _, staging):
            catalog = cluster.catalog()
            await catalog.streams.create(BESIDE)
            beside = await staging.stage(BESIDE, writer_id=JOB, number=1)
            first = events(b"z", updates=[number_update(JOB, 1)])
            await beside.send(first, publish_ms=1)
            lost = await stage(staging, b"x")
            await attached(staging, await stage(staging, b"a"))
            assert set(await catalog.bare.list_staging()) == {beside.ledger_id}
            assert await staging.sweep(STREAM, writer_id=JOB, through=9) == 0
            await beside.close()
            ids = [beside.ledger_id]
            assert lost not in await catalog.bare.list_staging()
            await staging.attach(BESIDE, ids, writer_id=JOB, number=1, size=100)
            snapshot = await catalog.streams.snapshot(BESIDE)
            assert [one.ledger_id for one in snapshot.ledgers] == ids

    run_virtual(main())
