"""Protocols.md section 1, "Node failure while writing": the compare-and-set of an ensemble."""

from dataclasses import replace

import pytest

from tests.unit.catalog.world import MIB, ORDERS, Process, World, on_virtual_time
from tierlog.adapters.memory.faults import Outcome
from tierlog.format import ledger_metadata, paths
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata, LedgerState, Segment
from tierlog.model.stream import Stream

pytestmark = pytest.mark.covers("D19")


def segment(first: int, names: str) -> Segment:
    return Segment(first_entry_id=EntryId(first), ensemble=tuple(map(NodeId, names)))


METADATA = LedgerMetadata(
    ensemble_size=3, write_quorum=3, ack_quorum=2, segments=(segment(0, "abc"),)
)
CHANGED = replace(METADATA, segments=(segment(0, "abc"), segment(7, "abd")))


async def opened(world: World) -> tuple[Process, Stream, LedgerId]:
    owner, claimed = await world.owner()
    ledger_id = await owner.catalog.ledgers.new_id()
    await owner.catalog.ledgers.open(claimed, ledger_id, METADATA, block_size=5 * MIB)
    return owner, claimed, ledger_id


@on_virtual_time
async def test_a_segment_is_added_or_the_last_one_replaced():
    owner, claimed, ledger_id = await opened(World())
    change = owner.catalog.ledgers.change_ensemble
    assert await change(claimed, ledger_id, METADATA, CHANGED) == CHANGED
    again = replace(METADATA, segments=(segment(0, "abc"), segment(7, "abe")))
    assert await change(claimed, ledger_id, CHANGED, again) == again
    assert await owner.catalog.ledgers.get(ledger_id) == again


@pytest.mark.parametrize("outcome", [Outcome.REPLY_LOST, Outcome.REQUEST_LOST, Outcome.REFUSED])
@on_virtual_time
async def test_a_lost_answer_is_decided_by_reading_back(outcome):
    owner, claimed, ledger_id = await opened(World())
    owner.faults.next("metadata.transact", outcome)
    changed = await owner.catalog.ledgers.change_ensemble(claimed, ledger_id, METADATA, CHANGED)
    assert changed == CHANGED
    assert await owner.catalog.ledgers.get(ledger_id) == CHANGED


@pytest.mark.covers("D18")
@pytest.mark.parametrize("lost", [False, True])
@on_virtual_time
async def test_nothing_is_changed_once_someone_recovers_the_ledger(lost):
    world = World()
    owner, claimed, ledger_id = await opened(world)
    other = world.process()
    before = await other.catalog.ledgers.begin_recovery(ledger_id)
    if lost:
        owner.faults.next("metadata.transact", Outcome.REQUEST_LOST)
    with pytest.raises(RefusedError) as caught:
        await owner.catalog.ledgers.change_ensemble(claimed, ledger_id, METADATA, CHANGED)
    assert caught.value.reason is Reason.FENCED
    assert await other.catalog.ledgers.get(ledger_id) == before


@on_virtual_time
async def test_a_deposed_owner_changes_nothing():
    world = World()
    owner, claimed, ledger_id = await opened(world)
    other = world.process()
    await other.catalog.streams.claim(ORDERS, NodeId("node-2"))
    with pytest.raises(RefusedError) as caught:
        await owner.catalog.ledgers.change_ensemble(claimed, ledger_id, METADATA, CHANGED)
    assert caught.value.reason is Reason.FENCED
    assert await other.catalog.ledgers.get(ledger_id) == METADATA


@on_virtual_time
async def test_another_last_ensemble_than_was_meant_is_left_alone():
    owner, claimed, ledger_id = await opened(World())
    ledgers = owner.catalog.ledgers
    await ledgers.change_ensemble(claimed, ledger_id, METADATA, CHANGED)
    stale = replace(METADATA, segments=(segment(0, "abc"), segment(7, "abe")))
    with pytest.raises(RefusedError) as caught:
        await ledgers.change_ensemble(claimed, ledger_id, METADATA, stale)
    assert caught.value.reason is Reason.FENCED
    assert await ledgers.get(ledger_id) == CHANGED


@on_virtual_time
async def test_earlier_segments_may_have_moved_meanwhile():
    """Auto-recovery changes all but the last ensemble of a ledger that is open."""
    owner, claimed, ledger_id = await opened(World())
    ledgers, path = owner.catalog.ledgers, paths.ledger_path(ledger_id)
    await ledgers.change_ensemble(claimed, ledger_id, METADATA, CHANGED)
    moved = replace(CHANGED, segments=(segment(0, "abx"), segment(7, "abd")))
    found = await owner.client.get(path)
    assert found is not None
    data = ledger_metadata.encode_znode(moved)
    await owner.client.set(path, data, version=found.version)
    wanted = replace(CHANGED, segments=(*CHANGED.segments, segment(9, "abe")))
    published = await ledgers.change_ensemble(claimed, ledger_id, CHANGED, wanted)
    assert published.segments == (segment(0, "abx"), segment(7, "abd"), segment(9, "abe"))


@on_virtual_time
async def test_a_bare_ledger_needs_its_own_znode_alone():
    world = World()
    owner, _, ledger_id = await opened(world)
    await owner.catalog.streams.claim(ORDERS, NodeId("node-2"))
    change = owner.catalog.ledgers.change_ensemble
    assert await change(None, ledger_id, METADATA, CHANGED) == CHANGED
    await owner.catalog.ledgers.begin_recovery(ledger_id)
    again = replace(METADATA, segments=(segment(0, "abc"), segment(7, "abe")))
    with pytest.raises(RefusedError) as caught:
        await change(None, ledger_id, CHANGED, again)
    assert caught.value.reason is Reason.FENCED
    found = await owner.catalog.ledgers.get(ledger_id)
    assert found == CHANGED.moved_to(LedgerState.IN_RECOVERY)
