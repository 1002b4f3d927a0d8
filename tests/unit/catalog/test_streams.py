"""Protocols section 1: owner epochs; formats.md: a stream's znode, its pages, one moment's view."""

import pytest

from tests.unit.catalog.world import MIB, NODE, ORDERS, World, on_virtual_time, one_node
from tierlog.adapters.memory.faults import Outcome
from tierlog.catalog.ledgers import PAGE_LEDGERS, TAIL_LEDGERS_MAX
from tierlog.catalog.streams import check_owner
from tierlog.format import paths
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.partitions import partition_names, whole_of
from tierlog.model.policy import DELETION_LAG_DEFAULT_MS, Policy


@on_virtual_time
async def test_creating_is_told_apart_from_finding():
    streams = World().process().catalog.streams
    made, is_new = await streams.create(ORDERS)
    found, is_new_again = await streams.create(ORDERS)
    assert (is_new, is_new_again) == (True, False)
    assert found == made
    assert await streams.names() == [ORDERS]


@on_virtual_time
async def test_creating_whose_answer_was_lost_is_still_told_as_new():
    process = World().process()
    process.faults.next("metadata.create", Outcome.REPLY_LOST)
    _, is_new = await process.catalog.streams.create(ORDERS)
    assert is_new


@on_virtual_time
async def test_a_stream_of_that_name_and_another_shape_is_refused():
    streams = World().process().catalog.streams
    await streams.create(ORDERS)
    with pytest.raises(RefusedError, match="another shape"):
        await streams.create(ORDERS, raw=True)
    with pytest.raises(RefusedError, match="another shape"):
        await streams.create(ORDERS, policy=Policy(offload_size_bytes=0))


@on_virtual_time
async def test_a_stream_that_is_not_there_is_named_with_a_remedy():
    with pytest.raises(RefusedError, match="tierlog stream ls") as caught:
        await World().process().catalog.streams.snapshot(StreamName("nowhere"))
    assert caught.value.reason is Reason.STREAM_NOT_FOUND


@on_virtual_time
async def test_two_who_claim_get_two_epochs_and_the_later_one_owns():
    world = World()
    first, claimed = await world.owner()
    second = await world.process().catalog.streams.claim(ORDERS, NodeId("node-2"))
    assert second.owner_epoch == claimed.owner_epoch + 1
    stream = (await first.catalog.streams.snapshot(ORDERS)).stream
    assert stream.owner == second.owner != claimed.owner


@on_virtual_time
async def test_a_claim_over_an_owner_who_was_replaced_meanwhile_is_refused():
    world = World()
    first, _ = await world.owner()
    streams = first.catalog.streams
    seen = await streams.get(ORDERS)
    await world.process().catalog.streams.claim(ORDERS, NodeId("node-2"), over=seen)
    with pytest.raises(RefusedError) as caught:
        await streams.claim(ORDERS, NodeId("node-3"), over=seen)
    assert caught.value.reason is Reason.FENCED
    owner = (await streams.get(ORDERS)).owner
    assert owner is not None
    assert owner.node_id == "node-2"


@on_virtual_time
async def test_a_claim_whose_answer_was_lost_is_still_made_once():
    world = World()
    first, _ = await world.owner()
    seen = await first.catalog.streams.get(ORDERS)
    first.faults.next("metadata.set", Outcome.REPLY_LOST)
    claimed = await first.catalog.streams.claim(ORDERS, NODE, over=seen)
    assert claimed.owner_epoch == seen.owner_epoch + 1
    assert await first.catalog.streams.get(ORDERS) == claimed


@on_virtual_time
async def test_a_claim_is_released_once_and_never_anothers():
    world = World()
    first, claimed = await world.owner()
    streams = first.catalog.streams
    first.faults.next("metadata.set", Outcome.REPLY_LOST)
    assert (await streams.release(claimed)).owner is None
    second = await world.process().catalog.streams.claim(ORDERS, NodeId("node-2"))
    assert second.owner_epoch == claimed.owner_epoch + 1
    assert (await streams.release(claimed)).owner == second.owner
    with pytest.raises(RefusedError, match="another owner"):
        check_owner(await streams.get(ORDERS), claimed)


@on_virtual_time
async def test_a_deposed_owner_can_neither_open_nor_close_nor_change_the_list():
    world = World()
    first, claimed = await world.owner()
    ledgers = first.catalog.ledgers
    ledger_id = await ledgers.new_id()
    await ledgers.open(claimed, ledger_id, one_node(), block_size=5 * MIB)
    await world.process().catalog.streams.claim(ORDERS, NODE)
    before = world.server.dump()
    for change in (
        ledgers.open(claimed, await ledgers.new_id(), one_node(), block_size=5 * MIB),
        ledgers.close(claimed, ledger_id, last_entry_id=EntryId(2), length=30),
    ):
        with pytest.raises(RefusedError) as caught:
            await change
        assert caught.value.reason is Reason.FENCED
    after = world.server.dump()
    assert {path: after[path] for path in before} == before


@pytest.mark.covers("A36", "A38")
@on_virtual_time
async def test_thresholds_that_would_trim_before_they_offload_are_refused_with_the_bound():
    streams = World().process().catalog.streams
    await streams.create(ORDERS, policy=Policy(offload_time_ms=1, offload_size_bytes=1))
    for refused, bound in (
        ({"offload_time_ms": 60_000, "retention_time_ms": 60_000}, "offload_time_ms"),
        ({"offload_size_bytes": 2, "retention_size_bytes": 1}, "offload_size_bytes"),
    ):
        with pytest.raises(RefusedError) as caught:
            await streams.set_policy(ORDERS, Policy(**refused))  # type: ignore[arg-type]
        assert caught.value.reason is Reason.POLICY_INVALID
        assert caught.value.details == {"bound": bound}
    allowed = Policy(offload_time_ms=59_999, retention_time_ms=60_000)
    assert (await streams.set_policy(ORDERS, allowed)).policy == allowed


@pytest.mark.covers("A28")
@on_virtual_time
async def test_a_stream_that_says_nothing_deletes_locally_after_four_hours():
    streams = World().process().catalog.streams
    await streams.create(ORDERS)
    policy = (await streams.snapshot(ORDERS)).policy
    assert policy.deletion_lag_ms == DELETION_LAG_DEFAULT_MS == 4 * 60 * 60 * 1000
    assert policy.offload_time_ms is policy.offload_size_bytes is None


@pytest.mark.covers("A06")
@on_virtual_time
async def test_the_list_is_whole_ordered_and_closed_but_for_its_last_beyond_a_page():
    """A stream of 600 ledgers: oldest first, each once, all sealed but the one being written."""
    world = World()
    owner, claimed = await world.owner()
    count = TAIL_LEDGERS_MAX + 88
    made = [await world.closed_ledger(owner, claimed) for _ in range(count - 1)]
    last = await owner.catalog.ledgers.new_id()
    await owner.catalog.ledgers.open(claimed, last, one_node(), block_size=5 * MIB)
    snapshot = await world.process().catalog.streams.snapshot(ORDERS)
    assert [one.ledger_id for one in snapshot.ledgers] == [*made, last]
    assert [one.closed for one in snapshot.ledgers] == [True] * (count - 1) + [False]
    assert [page.ledger_count for page in snapshot.stream.pages] == [PAGE_LEDGERS]
    assert len(snapshot.stream.ledgers) == count - PAGE_LEDGERS <= TAIL_LEDGERS_MAX
    znode = world.server.get(paths.stream_path(ORDERS))
    assert znode is not None
    assert len(znode.data) < 64 * 1024


@on_virtual_time
async def test_a_snapshot_is_of_one_moment_though_the_list_is_paged_while_it_is_read():
    world = World()
    owner, claimed = await world.owner()
    for _ in range(TAIL_LEDGERS_MAX + PAGE_LEDGERS):
        await world.closed_ledger(owner, claimed)
    reader = world.process()
    moved = False

    class Paging:
        """Lets the owner move a page between the reader's look at the znode and at the pages."""

        def __getattr__(self, name):
            return getattr(reader.client, name)

        async def get(self, path):
            nonlocal moved
            if "/pages/" in path and not moved:
                moved = True
                await world.closed_ledger(owner, claimed)
            return await reader.client.get(path)

    reader.catalog.streams._store = Paging()
    snapshot = await reader.catalog.streams.snapshot(ORDERS)
    ids = [one.ledger_id for one in snapshot.ledgers]
    assert len(ids) == TAIL_LEDGERS_MAX + PAGE_LEDGERS + 1
    assert ids == sorted(set(ids))
    assert len(snapshot.stream.pages) == 2


@on_virtual_time
async def test_an_admins_wish_only_ever_reaches_further():
    world = World()
    process = world.process()
    streams = process.catalog.streams
    await streams.create(ORDERS)
    for outcome in (Outcome.REPLY_LOST, Outcome.REQUEST_LOST):
        process.faults.next("metadata.set", outcome)
        assert (await streams.want_offloaded(ORDERS, LedgerId(7))).offload_through == 7
    assert (await streams.want_offloaded(ORDERS, LedgerId(3))).offload_through == 7
    assert (await streams.snapshot(ORDERS)).stream.offload_through == 7


@on_virtual_time
async def test_a_catalog_says_whether_its_store_answers():
    process = World().process()
    assert await process.catalog.answers()
    process.faults.next("metadata.get", Outcome.REFUSED)
    with pytest.raises(RetryableError, match="could not reach"):
        await process.catalog.answers()
    # The list of all streams is not asked for: everybody may ask for this.
    process.faults.next("metadata.children", Outcome.REFUSED)
    assert await process.catalog.answers()


@pytest.mark.covers("A05")
@on_virtual_time
async def test_a_partitioned_stream_is_there_once_its_partitions_are():
    streams = World().process().catalog.streams
    policy = Policy(offload_size_bytes=0)
    made, is_new = await streams.create(ORDERS, raw=True, policy=policy, partitions=2)
    assert (is_new, made.partitions) == (True, 2)
    partitions = partition_names(ORDERS, 2)
    assert await streams.names() == [ORDERS, *partitions]
    for name in partitions:
        stream = (await streams.snapshot(name)).stream
        assert (stream.raw, stream.policy, stream.partitions) == (True, policy, 0)
    assert await streams.create(ORDERS, raw=True, partitions=2) == (made, False)


@on_virtual_time
async def test_creating_a_partitioned_stream_that_was_cut_short_goes_on():
    process = World().process()
    streams = process.catalog.streams
    await streams.create(partition_names(ORDERS, 3)[0])
    process.faults.next("metadata.create", Outcome.REPLY_LOST)
    assert (await streams.create(ORDERS, partitions=3))[1]
    assert len(await streams.names()) == 4


@on_virtual_time
async def test_the_count_of_partitions_is_part_of_the_shape():
    streams = World().process().catalog.streams
    await streams.create(ORDERS, partitions=2)
    for partitions, raw in ((3, False), (2, True), (0, True)):
        with pytest.raises(RefusedError, match="another shape"):
            await streams.create(ORDERS, raw=raw, partitions=partitions)
    with pytest.raises(RefusedError) as caught:
        await streams.create(ORDERS)
    assert (caught.value.reason, caught.value.details["partitions"]) == (Reason.PARTITIONED, "2")
    other = StreamName("plain")
    await streams.create(other)
    with pytest.raises(RefusedError, match="another shape"):
        await streams.create(other, partitions=2)
    assert await streams.names() == [ORDERS, *partition_names(ORDERS, 2), other]


@pytest.mark.parametrize("partitions", [-1, 1025])
def test_a_count_of_partitions_out_of_bounds_creates_nothing(partitions):
    @on_virtual_time
    async def test():
        streams = World().process().catalog.streams
        with pytest.raises(RefusedError, match="1 to 1024"):
            await streams.create(ORDERS, partitions=partitions)
        assert await streams.names() == []

    test()


def test_a_partition_says_by_its_name_which_stream_it_is_of():
    assert {whole_of(one) for one in partition_names(ORDERS, 12)} == {ORDERS}
    assert whole_of("a-partition-1-partition-0") == "a-partition-1"
    for name in (ORDERS, "a-partition1", "-partition-1"):
        assert whole_of(name) is None
