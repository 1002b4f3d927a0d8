"""The queue of ledgers that lack copies (ADR-0016), and nodes that are to go: by compare-and-set,
a report is never lost, and a ledger is struck off only as its worker saw it.
"""

# mypy: disable-error-code="union-attr"

import pytest

from tests.unit.catalog.world import World, on_virtual_time, one_node
from tierlog.adapters.memory.faults import Outcome
from tierlog.catalog.underreplication import with_member
from tierlog.format import paths
from tierlog.model.errors import RefusedError
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState, Segment
from tierlog.model.node import Cookie
from tierlog.model.replication import Complaint, CopyTrouble

L7 = LedgerId(7)
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def span(first, last):
    return EntryId(first), EntryId(last)


@on_virtual_time
async def test_reports_merge_and_repeating_one_changes_nothing():
    world = World()
    process = world.process()
    queue = process.catalog.underreplicated
    await queue.add(L7, reason=CopyTrouble.DAMAGED, nodes=[A], entries=span(5, 6))
    await queue.add(L7, reason=CopyTrouble.DAMAGED, nodes=[A], entries=span(1, 2))
    await queue.add(L7, reason=CopyTrouble.LOST, nodes=[B, A])
    (one,) = await world.process().catalog.underreplicated.list()
    assert one.ledger_id == L7
    assert one.complaints == (
        Complaint(node_id=A, reason="damaged", entries=span(1, 6)),
        Complaint(node_id=A, reason="lost"),
        Complaint(node_id=B, reason="lost"),
    )
    assert (one.nodes, one.reasons) == ((A, B), ("damaged", "lost"))
    changes = world.server.changes
    for _ in range(3):
        await queue.add(L7, reason=CopyTrouble.LOST, nodes=[A])
        await queue.add(L7, reason=CopyTrouble.DAMAGED, nodes=[A], entries=span(2, 5))
    assert world.server.changes == changes


@pytest.mark.parametrize("outcome", [Outcome.REQUEST_LOST, Outcome.REPLY_LOST])
@on_virtual_time
async def test_a_report_whose_answer_was_lost_is_there_once(outcome):
    world = World()
    process = world.process()
    for call in ("metadata.create", "metadata.set"):
        process.faults.next(call, outcome)
        reason = CopyTrouble.LOST if call == "metadata.create" else CopyTrouble.MISSING
        await process.catalog.underreplicated.add(L7, reason=reason, nodes=[A])
    (one,) = await process.catalog.underreplicated.list()
    assert one.reasons == ("lost", "missing")


@on_virtual_time
async def test_a_report_that_comes_while_a_worker_is_at_it_keeps_the_ledger():
    world = World()
    worker, reader = world.process().catalog.underreplicated, world.process().catalog
    await reader.underreplicated.add(L7, reason=CopyTrouble.DAMAGED, nodes=[A], entries=span(1, 1))
    (one,) = await worker.list()
    begun = await worker.begin(one, worker="w")
    assert (begun.tries, begun.under_work, begun.last_worker) == (1, True, "w")
    # The very same report: it may be of damage since.
    await reader.underreplicated.add(L7, reason=CopyTrouble.DAMAGED, nodes=[A], entries=span(1, 1))
    assert not await worker.remove(L7, begun.version)
    (again,) = await worker.list()
    assert not again.under_work
    begun = await worker.begin(again, worker="w")
    assert await worker.remove(L7, begun.version)
    assert await worker.list() == []
    assert await worker.remove(L7, begun.version), "striking off twice is striking off once"
    assert await worker.begin(again, worker="w") is None
    assert await worker.fail(again, error="x") is None


@on_virtual_time
async def test_a_failure_is_kept_beside_the_ledger():
    world = World()
    process = world.process()
    queue = process.catalog.underreplicated
    await queue.add(L7, reason="of another kind", nodes=[A])
    (one,) = await queue.list()
    await queue.begin(one, worker="w")
    process.clock.advance(3)
    await queue.fail(one, error="x" * 5000)
    found = await queue.get(L7)
    assert (len(found.last_error), found.under_work, found.tries) == (2000, False, 1)
    assert found.last_error_ms == process.clock.wall_ms()
    assert found.reasons == ("of another kind",)


@on_virtual_time
async def test_a_record_that_can_not_be_read_stands_for_the_whole_ledger():
    world = World()
    process = world.process()
    await process.client.create(paths.underreplicated_path(L7), b"\xff")
    (one,) = await process.catalog.underreplicated.list()
    assert (one.ledger_id, one.complaints) == (L7, ())
    begun = await process.catalog.underreplicated.begin(one, worker="w")
    assert await process.catalog.underreplicated.remove(L7, begun.version)


@on_virtual_time
async def test_two_workers_do_not_take_the_same_ledger():
    world = World()
    first, second = world.process(), world.process()
    lock = first.catalog.underreplicated.lock(L7, first.ids.uuid())
    assert await lock.take()
    other = second.catalog.underreplicated.lock(L7, second.ids.uuid())
    assert not await other.take()
    await lock.release()
    assert await other.take()


def closed(*ensemble: NodeId, state: LedgerState = LedgerState.CLOSED) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=2,
        write_quorum=2,
        ack_quorum=1,
        segments=(
            Segment(first_entry_id=EntryId(0), ensemble=(A, B)),
            Segment(first_entry_id=EntryId(4), ensemble=ensemble),
        ),
        state=state,
        last_entry_id=EntryId(9) if state is LedgerState.CLOSED else EntryId(-1),
    )


def replaced(metadata: LedgerMetadata, *, first: int = 4, leaving=A, joining=C) -> LedgerMetadata:
    return with_member(
        L7, metadata, first_entry_id=EntryId(first), leaving=leaving, joining=joining
    )


@pytest.mark.parametrize("state", list(LedgerState))
def test_a_segment_before_the_last_is_replaced_whatever_the_state(state):
    changed = replaced(closed(A, B, state=state), first=0)
    assert [one.ensemble for one in changed.segments] == [(C, B), (A, B)]


def test_the_last_segment_is_replaced_only_of_a_closed_ledger():
    changed = replaced(closed(A, B))
    assert [one.ensemble for one in changed.segments] == [(A, B), (C, B)]
    assert replaced(changed) == changed, "repeating it changes nothing"
    assert replaced(closed(B, A)).segments[1].ensemble == (B, C), "in its place"
    for impossible in (
        closed(A, B, state=LedgerState.OPEN),
        closed(A, B, state=LedgerState.IN_RECOVERY),
        closed(A, C),
        closed(B, NodeId("d")),
    ):
        with pytest.raises(RefusedError, match="can't be replaced"):
            replaced(impossible)
    with pytest.raises(RefusedError, match="lies on nothing"):
        replaced(closed(A, B), first=5)


@pytest.mark.parametrize("outcome", [Outcome.REQUEST_LOST, Outcome.REPLY_LOST, None])
@on_virtual_time
async def test_a_closed_ledger_gets_another_node_by_compare_and_set(outcome):
    world = World()
    owner, claimed = await world.owner()
    ledger_id = await world.closed_ledger(owner, claimed)
    process = world.process()
    if outcome is not None:
        process.faults.next("metadata.set", outcome)
    (leaving,) = one_node().segments[0].ensemble
    await process.catalog.underreplicated.replace_member(
        ledger_id, first_entry_id=EntryId(0), leaving=leaving, joining=C
    )
    metadata = await owner.catalog.ledgers.get(ledger_id)
    assert metadata.segments[0].ensemble == (C,)
    assert (metadata.last_entry_id, metadata.state) == (2, LedgerState.CLOSED)
    gone = await process.catalog.underreplicated.replace_member(
        LedgerId(99), first_entry_id=EntryId(0), leaving=A, joining=C
    )
    assert gone is None


async def _known_node(process, name: NodeId) -> None:
    from tierlog.format import records

    cluster = await process.catalog.nodes.ensure_cluster()
    cookie = Cookie(cluster_id=cluster.cluster_id, node_id=name, instance_id=process.ids.uuid())
    await process.client.create(paths.cookie_path(name), records.encode_cookie(cookie))


@on_virtual_time
async def test_a_node_that_is_emptied_is_marked_and_in_the_end_barred():
    world = World()
    process = world.process()
    draining = process.catalog.draining
    await _known_node(process, A)
    await _known_node(process, B)
    assert list(await draining.known_nodes()) == [A, B]
    with pytest.raises(RefusedError, match="knows no storage node c"):
        await draining.begin(C)
    with pytest.raises(RefusedError, match="knows no storage node c"):
        await draining.cancel(C)
    with pytest.raises(RefusedError, match="not being emptied"):
        await draining.finish(A)
    found, changed = await draining.watch(A)
    assert found is None
    since = await draining.begin(A)
    assert changed.is_set()
    process.clock.advance(5)
    assert await draining.begin(A) == since, "beginning twice is beginning once"
    assert list(await draining.list()) == [A]
    await draining.cancel(A)
    assert await draining.list() == {}
    await draining.cancel(A)
    await draining.begin(A)
    process.faults.next("metadata.delete", Outcome.REPLY_LOST)
    done = await draining.finish(A)
    assert done.done_ms >= since.since_ms
    assert list(await draining.known_nodes()) == [B]
    assert (await draining.get(A)) == done
    with pytest.raises(RefusedError, match="was decommissioned"):
        await draining.cancel(A)


@on_virtual_time
async def test_the_time_of_the_last_check_outlives_an_auditor():
    world = World()
    assert await world.process().catalog.draining.last_check_ms() == 0
    await world.process().catalog.draining.note_check(5)
    await world.process().catalog.draining.note_check(7)
    assert await world.process().catalog.draining.last_check_ms() == 7
