"""The owner's pipeline: claims, answers, roll-over, errors, stepping down (protocols.md 1)."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
import contextlib
from dataclasses import replace

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM, SmallCluster, draft, now_s, payloads
from tierlog.adapters.memory.faults import Faults
from tierlog.catalog import Catalog
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, RetryableError
from tierlog.model.ids import StreamName
from tierlog.model.ledger import LedgerState
from tierlog.model.policy import MIB, Policy
from tierlog.runtime.settings import OwnerSettings
from tierlog_ingest.streams.appends import QueueBudget
from tierlog_ingest.streams.owner import BACKOFF_S_MAX
from tierlog_ingest.streams.owners import Owners
from tierlog_ingest.streams.parts import OwnerParts

ONE = OwnerSettings(ensemble_size=1, write_quorum=1, ack_quorum=1, append_timeout_s=5.0)


def make_owners(cluster, name, *, catalog=None, settings=None, budget=1 << 20, **parts):
    catalog = catalog or cluster.catalog()
    return Owners(
        OwnerParts(
            node_id=name,
            catalog=catalog,
            nodes=cluster.directory(catalog),
            recovery=cluster.recovery(catalog),
            clock=cluster.clock,
            ids=cluster.ids,
            settings=settings or ONE,
            budget=QueueBudget(budget),
            **parts,
        )
    )


@contextlib.asynccontextmanager
async def running(*owners, drain=True):
    """Run owners; drain them at the end, or cut them off as a crash does."""
    async with asyncio.TaskGroup() as tasks:
        running_tasks = [tasks.create_task(one.run()) for one in owners]
        await asyncio.sleep(0)
        try:
            yield
            if drain:
                for one in owners:
                    await one.drain()
        finally:
            if not drain:
                for task in running_tasks:
                    task.cancel()


async def read_stream(cluster, name=STREAM):
    """Return the entries of all closed ledgers, in order."""
    catalog = cluster.catalog()
    snapshot = await catalog.streams.snapshot(name)
    entries = []
    for listed in snapshot.ledgers:
        assert listed.closed
        metadata = await catalog.ledgers.get(listed.ledger_id)
        handle = Tier1ReadHandle(listed.ledger_id, metadata, cluster.directory(catalog))
        runs = [run async for runs in handle.read_runs(0, listed.last_entry_id) for run in runs]
        assert sum(run.payload_len for run in runs) == listed.length == metadata.length
        entries += payloads(runs)
    return entries


def spans(ranges):
    return [(one.ledger_id, one.first_entry_id, one.last_entry_id) for one in ranges]


@pytest.mark.covers("A06", "D09", "D10")
def test_appends_get_their_places_in_the_order_in_which_they_came():
    async def main():
        cluster = SmallCluster()
        await cluster.start()
        owners = make_owners(cluster, "n1")
        async with running(owners):
            answers = [owners.submit(STREAM, draft(b"%d" % i, b"x")) for i in range(50)]
            ranges = [await answer for answer in answers]
            assert [spans(one) for one in ranges] == [[(0, 2 * i, 2 * i + 1)] for i in range(50)]
        assert await read_stream(cluster) == [
            entry for i in range(50) for entry in (b"%d" % i, b"x")
        ]
        # Small appends that wait are put together: far fewer runs than appends.
        assert len(cluster.nodes["n1"].runs[0]) < 10

    run_virtual(main())


@pytest.mark.covers("A06", "A03")
def test_ledgers_roll_by_entries_and_an_append_may_span_them():
    async def main():
        cluster = SmallCluster()
        await cluster.start(policy=Policy(ledger_entries_max=4))
        owners = make_owners(cluster, "n1")
        async with running(owners):
            ranges = await owners.submit(STREAM, draft(*[b"%d" % i for i in range(10)]))
            assert spans(ranges) == [(0, 0, 3), (1, 0, 3), (2, 0, 1)]
            ranges = await owners.submit(STREAM, draft(b"10"))
            assert spans(ranges) == [(2, 2, 2)]
        assert await read_stream(cluster) == [b"%d" % i for i in range(11)]

    run_virtual(main())


def test_ledgers_roll_by_size_and_never_hold_less_than_one_entry():
    async def main():
        cluster = SmallCluster()
        await cluster.start(policy=Policy(ledger_bytes_max=1000))
        owners = make_owners(cluster, "n1")
        async with running(owners):
            answers = [owners.submit(STREAM, draft(b"x" * 300)) for _ in range(8)]
            answers.append(owners.submit(STREAM, draft(b"y" * 5000)))
            for answer in answers:
                await answer
        ledgers = (await cluster.catalog().streams.snapshot(STREAM)).ledgers
        assert [one.length for one in ledgers] == [1200, 1200, 5000]

    run_virtual(main())


def test_a_ledger_rolls_by_age_without_another_append():
    async def main():
        cluster = SmallCluster()
        catalog = await cluster.start(policy=Policy(ledger_age_ms_max=60_000))
        owners = make_owners(cluster, "n1")
        async with running(owners):
            await owners.submit(STREAM, draft(b"a"))
            await asyncio.sleep(59)
            assert (await catalog.ledgers.get(0)).state is LedgerState.OPEN
            await asyncio.sleep(2)
            assert (await catalog.ledgers.get(0)).state is LedgerState.CLOSED

    run_virtual(main())


def test_a_ledger_that_was_opened_for_nothing_goes_by_its_age():
    async def main():
        cluster = SmallCluster()
        policy = Policy(ledger_age_ms_max=60_000, block_size=5 * MIB)
        catalog = await cluster.start(policy=policy)
        owners = make_owners(cluster, "n1", budget=1 << 26, entry_len_max=1 << 26)
        async with running(owners):
            # What fits no block is known to be too large once there is a ledger.
            with pytest.raises(RefusedError) as caught:
                await owners.submit(STREAM, draft(b"x" * 6 * MIB))
            assert caught.value.reason is Reason.TOO_LARGE
            await asyncio.sleep(59)
            assert [one.entry_count for one in await listed(catalog)] == [0]
            await asyncio.sleep(2)
            assert await listed(catalog) == ()
            await owners.submit(STREAM, draft(b"a"))
            await asyncio.sleep(61)
            assert [(one.closed, one.entry_count) for one in await listed(catalog)] == [(True, 1)]

    run_virtual(main())


async def listed(catalog):
    return (await catalog.streams.snapshot(STREAM)).ledgers


def test_an_open_ledger_is_sealed_by_an_age_that_was_set_since():
    async def main():
        cluster = SmallCluster()
        catalog = await cluster.start(policy=Policy(ledger_age_ms_max=3_600_000))
        owners = make_owners(cluster, "n1")
        async with running(owners), asyncio.TaskGroup() as tasks:
            following = tasks.create_task(owners.follow())
            await owners.submit(STREAM, draft(b"a"))
            await asyncio.sleep(100)
            for change in (
                catalog.streams.set_policy(STREAM, Policy(ledger_age_ms_max=200_000)),
                catalog.policies.set_level(None, Policy(ledger_entries_max=9)),
            ):
                await change
                await asyncio.sleep(10)
                assert (await catalog.ledgers.get(0)).state is LedgerState.OPEN
            await asyncio.sleep(85)
            assert (await catalog.ledgers.get(0)).state is LedgerState.CLOSED
            following.cancel()

    run_virtual(main())


def test_the_owner_of_a_stream_that_is_being_deleted_closes_it_for_good():
    async def main():
        cluster = SmallCluster()
        catalog = await cluster.start()
        owners = make_owners(cluster, "n1")
        async with running(owners), asyncio.TaskGroup() as tasks:
            following = tasks.create_task(owners.follow())
            await owners.submit(STREAM, draft(b"a"))
            await catalog.retention.begin_stream_deletion(STREAM)
            await asyncio.sleep(10)
            assert (await catalog.ledgers.get(0)).state is LedgerState.CLOSED
            with pytest.raises(RefusedError) as caught:
                await owners.submit(STREAM, draft(b"b"))
            assert caught.value.reason is Reason.STREAM_NOT_FOUND
            following.cancel()

    run_virtual(main())


def test_an_entry_that_no_frame_takes_to_another_node_is_refused_before_it_has_an_id():
    async def main():
        cluster = SmallCluster()
        await cluster.start()
        owners = make_owners(cluster, "n1", entry_len_max=1000)
        async with running(owners):
            await owners.submit(STREAM, draft(*[bytes(1000)] * 3))
            with pytest.raises(RefusedError) as caught:
                await owners.submit(STREAM, draft(b"a", bytes(1001)))
            assert caught.value.reason is Reason.TOO_LARGE
            assert caught.value.details["limit"] == "1000"
            assert "wire.frame_bytes_max" in caught.value.remedy
        assert [len(entry) for entry in await read_stream(cluster)] == [1000] * 3

    run_virtual(main())


def test_an_entry_that_fits_no_block_is_refused_at_exactly_the_limit():
    async def main():
        cluster = SmallCluster()
        await cluster.start(policy=Policy(block_size=5 * MIB))
        owners = make_owners(cluster, "n1", budget=64 * MIB)
        largest = 5 * MIB - 140
        async with running(owners):
            for first in (True, False):
                # The first append comes before the owner knows the stream's block size.
                with pytest.raises(RefusedError) as caught:
                    await owners.submit(STREAM, draft(b"a", bytes(largest + 1)))
                assert caught.value.reason is Reason.TOO_LARGE
                assert caught.value.details["limit"] == str(largest)
                assert first or owners.statistics()[0]["open_ledger"] is not None
                assert spans(await owners.submit(STREAM, draft(bytes(largest))))
        lens = [len(entry) for entry in await read_stream(cluster)]
        assert lens == [largest, largest]

    run_virtual(main())


def test_seal_closes_the_open_ledger_and_the_next_append_opens_another():
    async def main():
        cluster = SmallCluster()
        await cluster.start()
        owners = make_owners(cluster, "n1")
        async with running(owners):
            assert await owners.seal(STREAM) is None
            await owners.submit(STREAM, draft(b"a"))
            assert await owners.seal(STREAM) == 0
            assert await owners.seal(STREAM) is None
            assert spans(await owners.submit(STREAM, draft(b"b"))) == [(1, 0, 0)]
        assert await read_stream(cluster) == [b"a", b"b"]

    run_virtual(main())


def test_seal_is_answered_while_appends_wait_for_disks_that_are_full():
    async def main():
        cluster = SmallCluster()
        catalog = await cluster.start()
        owners = make_owners(cluster, "n1")
        async with running(owners):
            await owners.submit(STREAM, draft(b"a"))
            assert await owners.seal(STREAM) == 0
            await catalog.nodes.amend(replace(cluster.info("n1"), read_only=True))
            refused = owners.submit(STREAM, draft(b"refused"))
            begun_s = now_s()
            for waited_s in (1.0, 100.0):
                await asyncio.sleep(waited_s)
                asked_s = now_s()
                assert await owners.seal(STREAM) is None
                assert now_s() - asked_s <= BACKOFF_S_MAX
            assert now_s() - begun_s > ONE.append_timeout_s
            assert refused.exception().reason is Reason.READ_ONLY
            waiting = owners.submit(STREAM, draft(b"b"))
            await catalog.nodes.amend(cluster.info("n1"))
            assert len(spans(await waiting)) == 1
        assert await read_stream(cluster) == [b"a", b"b"]

    run_virtual(main())


def test_a_seal_that_takes_too_long_is_told_what_it_waits_for():
    async def main():
        cluster = SmallCluster()
        catalog = await cluster.start()
        faults = Faults(cluster.rng)
        owners = make_owners(cluster, "n1", catalog=cluster.catalog(faults))
        async with running(owners):
            await owners.submit(STREAM, draft(b"a"))
            faults.outages.add("metadata.")
            asked_s = now_s()
            with pytest.raises(RetryableError) as caught:
                async with asyncio.timeout(2 * ONE.seal_timeout_s):
                    await owners.seal(STREAM)
            assert now_s() - asked_s == pytest.approx(ONE.seal_timeout_s)
            assert "closing a ledger in the metadata" in str(caught.value)
            faults.outages.clear()
            assert await owners.seal(STREAM) == 0, "which went on"
            assert (await catalog.ledgers.get(0)).state is LedgerState.CLOSED

    run_virtual(main())


def test_an_append_to_no_stream_says_so():
    async def main():
        cluster = SmallCluster()
        await cluster.start()
        owners = make_owners(cluster, "n1")
        async with running(owners):
            with pytest.raises(RefusedError) as caught:
                await owners.submit(StreamName("other"), draft(b"a"))
            assert caught.value.reason is Reason.STREAM_NOT_FOUND
            await asyncio.sleep(1)
            assert owners.statistics() == []

    run_virtual(main())


def test_a_live_owner_elsewhere_is_named_with_its_addresses():
    async def main():
        cluster = SmallCluster(2)
        await cluster.start()
        one, two = make_owners(cluster, "n1"), make_owners(cluster, "n2")
        async with running(one, two):
            await one.submit(STREAM, draft(b"a"))
            with pytest.raises(RetryableError) as caught:
                await two.submit(STREAM, draft(b"b"))
            assert caught.value.reason is Reason.NOT_OWNER
            assert caught.value.details["owner"] == "n1"
            assert caught.value.details["wire_address"] == "n1:1"

    run_virtual(main())


@pytest.mark.covers("D18")
def test_a_deposed_owner_steps_down_and_its_successor_has_everything_acknowledged():
    async def main():
        cluster = SmallCluster(2)
        catalog = await cluster.start()
        one, two = make_owners(cluster, "n1"), make_owners(cluster, "n2")
        async with running(one, two):
            await one.submit(STREAM, draft(b"a"))
            # n2 believes n1 dead; n1 is only paused.
            stream = await catalog.streams.claim(STREAM, "n2")
            assert stream.owner_epoch == 2
            assert spans(await two.submit(STREAM, draft(b"b"))) == [(1, 0, 0)]
            with pytest.raises((IndeterminateError, RetryableError)) as caught:
                await one.submit(STREAM, draft(b"late"))
            assert caught.value.reason in {Reason.NOT_OWNER, Reason.APPEND_INDETERMINATE}
            with pytest.raises(RetryableError) as caught:
                await one.submit(STREAM, draft(b"later"))
            assert caught.value.reason is Reason.NOT_OWNER
        assert await read_stream(cluster) == [b"a", b"b"]

    run_virtual(main())


def test_an_append_that_can_not_be_confirmed_is_indeterminate_and_recovery_decides():
    async def main():
        cluster = SmallCluster()
        catalog = await cluster.start()
        node = cluster.nodes["n1"]
        owners = make_owners(cluster, "n1")
        async with running(owners):
            await owners.submit(STREAM, draft(b"a"))
            node.mute = True
            sent = owners.submit(STREAM, draft(b"b"))
            with pytest.raises(IndeterminateError):
                await sent
            node.mute = False
            await asyncio.sleep(1)
            ranges = await owners.submit(STREAM, draft(b"c"))
            assert spans(ranges) == [(1, 0, 0)]
            assert (await catalog.ledgers.get(0)).last_entry_id == 1
        assert await read_stream(cluster) == [b"a", b"b", b"c"]

    run_virtual(main())


def test_an_append_that_was_not_sent_in_time_happened_not_at_all():
    async def main():
        cluster = SmallCluster()
        await cluster.start()
        faults = Faults(cluster.rng)
        catalog = cluster.catalog(faults)
        owners = make_owners(cluster, "n1", catalog=catalog)
        async with running(owners):
            await owners.submit(STREAM, draft(b"a"))
            await owners.seal(STREAM)
            faults.outages.add("metadata.")
            with pytest.raises(RetryableError) as caught:
                await owners.submit(STREAM, draft(b"lost"), deadline_s=2.0)
            assert caught.value.reason is Reason.UNAVAILABLE
            assert "metadata" in str(caught.value)
            faults.outages.clear()
            await owners.submit(STREAM, draft(b"b"), deadline_s=60.0)
        assert await read_stream(cluster) == [b"a", b"b"]

    run_virtual(main())


@pytest.mark.covers("A03", "D09")
def test_after_a_crash_the_next_start_closes_the_open_ledger_without_an_append():
    async def main():
        cluster = SmallCluster()
        catalog = await cluster.start()
        before = make_owners(cluster, "n1")
        async with running(before, drain=False):
            answers = [before.submit(STREAM, draft(b"%d" % i)) for i in range(20)]
            for answer in answers[:10]:
                await answer
        cut_off = [answer for answer in answers if answer.done() and answer.exception()]
        assert (await catalog.ledgers.get(0)).state is LedgerState.OPEN
        after = make_owners(cluster, "n1")
        async with running(after):
            await after.recover_own()
            assert (await catalog.ledgers.get(0)).state is LedgerState.CLOSED
            await after.submit(STREAM, draft(b"z"))
        entries = await read_stream(cluster)
        acknowledged = [b"%d" % i for i in range(20 - len(cut_off))]
        assert entries[: len(acknowledged)] == acknowledged
        assert entries[-1] == b"z"
        assert len(entries) == len(set(entries))

    run_virtual(main())


def test_the_open_ledger_of_a_stream_that_is_deleted_is_closed_and_no_other_opened():
    async def main():
        cluster = SmallCluster()
        catalog = await cluster.start()
        before = make_owners(cluster, "n1")
        async with running(before, drain=False):
            await before.submit(STREAM, draft(b"a"))
        await catalog.retention.begin_stream_deletion(STREAM)
        after = make_owners(cluster, "n1")
        async with running(after):
            await after.recover_own()
            assert (await catalog.ledgers.get(0)).state is LedgerState.CLOSED
            with pytest.raises(RefusedError) as caught:
                await after.submit(STREAM, draft(b"b"))
            assert caught.value.reason is Reason.STREAM_NOT_FOUND
        assert await catalog.ledgers.list_ids() == [0]

    run_virtual(main())


def test_too_many_waiting_bytes_are_refused_and_room_is_waited_for():
    async def main():
        cluster = SmallCluster()
        await cluster.start()
        owners = make_owners(cluster, "n1", budget=10_000)
        async with running(owners):
            answers = [owners.submit(STREAM, draft(bytes(1000))) for _ in range(19)]
            with pytest.raises(RetryableError) as caught:
                owners.submit(STREAM, draft(bytes(2000)))
            assert caught.value.reason is Reason.RESOURCE_EXHAUSTED
            await owners.ready()
            answers.append(owners.submit(STREAM, draft(bytes(1000))))
            for answer in answers:
                await answer
        assert len(await read_stream(cluster)) == 20

    run_virtual(main())


def test_a_drain_answers_everything_and_leaves_no_open_ledger():
    async def main():
        cluster = SmallCluster()
        cluster.nodes["n1"].delay_s = 0.2
        await cluster.start()
        owners = make_owners(cluster, "n1")
        async with running(owners):
            answers = [owners.submit(STREAM, draft(b"%d" % i)) for i in range(5)]
            await asyncio.sleep(0.05)
        assert all(not answer.exception() for answer in answers)
        assert len(await read_stream(cluster)) == 5
        with pytest.raises(RetryableError):
            owners.submit(STREAM, draft(b"late"))

    run_virtual(main())


@pytest.mark.parametrize("seed", range(10))
def test_with_lost_answers_everywhere_nothing_acknowledged_is_lost_or_moved(seed):
    async def main():
        cluster = SmallCluster(seed=seed)
        await cluster.start(policy=Policy(ledger_entries_max=7))
        faults = Faults(cluster.rng)
        faults.rates_by_prefix["metadata."] = type(faults.rates)(
            refused=0.05, request_lost=0.05, reply_lost=0.05, delay_s_max=0.01
        )
        owners = make_owners(cluster, "n1", catalog=cluster.catalog(faults))
        confirmed = {}
        async with running(owners):
            for number in range(60):
                if cluster.rng.random() < 0.05:
                    cluster.nodes["n1"].mute = True
                try:
                    (one,) = await owners.submit(STREAM, draft(b"%d" % number))
                except (RetryableError, IndeterminateError):
                    cluster.nodes["n1"].mute = False
                    continue
                confirmed[one.ledger_id, one.first_entry_id] = b"%d" % number
            faults.rates_by_prefix.clear()
        catalog = cluster.catalog()
        assert len(confirmed) > 20
        for (ledger_id, entry_id), entry in confirmed.items():
            metadata = await catalog.ledgers.get(ledger_id)
            assert metadata.state is LedgerState.CLOSED
            handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog))
            async for (run,) in handle.read_runs(entry_id, entry_id):
                assert bytes(run.entry(entry_id)) == entry

    run_virtual(main())


@pytest.mark.covers("D03", "D14", "D18")
def test_a_dead_owners_stream_goes_to_another_node_with_everything_acknowledged():
    async def main():
        cluster = SmallCluster(3)
        cluster.names.remove("n3")
        await cluster.start()
        cluster.names.append("n3")
        settings = OwnerSettings(
            ensemble_size=3, write_quorum=3, ack_quorum=2, append_timeout_s=5.0
        )
        store = cluster.metadata.connect()
        mine = Catalog.over(store, clock=cluster.clock, ids=cluster.ids)
        await mine.nodes.announce(cluster.info("n3"))
        one = make_owners(cluster, "n3", catalog=mine, settings=settings)
        two = make_owners(cluster, "n1", settings=settings)
        confirmed = []
        async with running(two):
            async with running(one, drain=False):
                answers = [one.submit(STREAM, draft(b"%d" % i)) for i in range(30)]
                for answer in answers[:20]:
                    await answer
            confirmed = [i for i, answer in enumerate(answers) if not answer.exception()]
            # The machine is gone: its storage node too, and soon its registration.
            cluster.nodes["n3"].down = True
            store.expire_session()
            with pytest.raises(RetryableError) as caught:
                await two.submit(STREAM, draft(b"too few nodes"))
            assert caught.value.reason is Reason.UNAVAILABLE
            assert "storage node" in str(caught.value)
            two_of_three = settings.model_copy(
                update={"ensemble_size": 2, "write_quorum": 2, "ack_quorum": 2}
            )
            three = make_owners(cluster, "n2", settings=two_of_three)
            async with running(three):
                # n1 is alive and owns the stream now.
                with pytest.raises(RetryableError) as caught:
                    await three.submit(STREAM, draft(b"x"))
                assert caught.value.details["owner"] == "n1"
        entries = await read_stream(cluster)
        assert entries[: len(confirmed)] == [b"%d" % i for i in confirmed]

    run_virtual(main())
