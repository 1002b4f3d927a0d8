"""ADR-0016, decommission: whoever chose a node before it was retired can't name it any more, at
whatever moment of its change that happens; for certain, and nothing else is changed by it.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from tests.unit.catalog.world import MIB, Process, World, on_virtual_time
from tierlog.adapters.memory.faults import Outcome
from tierlog.catalog.naming import NodeRetiredError
from tierlog.format import paths, records
from tierlog.model.errors import RefusedError
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.ledger import COMPONENT_BARE, KEY_COMPONENT, LedgerMetadata, Segment
from tierlog.model.node import Cookie
from tierlog.model.stream import Stream

pytestmark = pytest.mark.covers("D17")

OTHER = StreamName("other")
A, LEAVING = NodeId("a"), NodeId("z")


def on(*ensemble: NodeId) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(Segment(first_entry_id=EntryId(0), ensemble=ensemble),),
        custom={KEY_COMPONENT: COMPONENT_BARE},
    )


class Changing:
    """A process with a stream, and one ledger of each kind that lies on ``a``."""

    def __init__(self, owner: Process, claimed: Stream) -> None:
        self.owner = owner
        self.claimed = claimed
        self.ledger_id = self.bare_id = LedgerId(-1)

    @classmethod
    async def begin(cls, world: World) -> "Changing":
        owner, claimed = await world.owner()
        changing = cls(owner, claimed)
        cluster = await owner.catalog.nodes.ensure_cluster()
        for name in (A, LEAVING):
            cookie = Cookie(
                cluster_id=cluster.cluster_id, node_id=name, instance_id=owner.ids.uuid()
            )
            await owner.client.create(paths.cookie_path(name), records.encode_cookie(cookie))
        ledgers = owner.catalog.ledgers
        changing.ledger_id = await ledgers.new_id()
        await ledgers.open(claimed, changing.ledger_id, on(A), block_size=5 * MIB)
        await owner.catalog.streams.create(OTHER)
        await owner.catalog.streams.claim(OTHER, A)
        changing.bare_id = await owner.catalog.bare.create(on(A))
        return changing

    async def open(self) -> object:
        ledgers, streams = self.owner.catalog.ledgers, self.owner.catalog.streams
        new_id = await ledgers.new_id()
        claimed = (await streams.snapshot(OTHER)).stream
        return await ledgers.open(claimed, new_id, on(LEAVING), block_size=5 * MIB)

    async def create(self) -> object:
        return await self.owner.catalog.bare.create(on(LEAVING))

    async def change(self) -> object:
        change = self.owner.catalog.ledgers.change_ensemble
        return await change(self.claimed, self.ledger_id, on(A), on(LEAVING))

    async def replace(self) -> object:
        await self.owner.catalog.bare.close(self.bare_id, last_entry_id=EntryId(2), length=9)
        queue = self.owner.catalog.underreplicated
        return await queue.replace_member(
            self.bare_id, first_entry_id=EntryId(0), leaving=A, joining=LEAVING
        )

    async def close(self) -> object:
        await self.owner.catalog.ledgers.begin_recovery(self.ledger_id)
        return await self.owner.catalog.ledgers.close(
            self.claimed,
            self.ledger_id,
            last_entry_id=EntryId(2),
            length=9,
            segments=on(LEAVING).segments,
        )

    async def close_bare(self) -> object:
        await self.owner.catalog.ledgers.begin_recovery(self.bare_id)
        return await self.owner.catalog.bare.close(
            self.bare_id, last_entry_id=EntryId(2), length=9, segments=on(LEAVING).segments
        )

    async def named(self) -> list[LedgerId]:
        ledgers = self.owner.catalog.ledgers
        found = {one: await ledgers.get(one) for one in await ledgers.list_ids()}
        return [one for one, it in found.items() if it is not None and LEAVING in it.named_nodes]


CHANGES: dict[str, Callable[[Changing], Awaitable[object]]] = {
    "open": Changing.open,
    "create": Changing.create,
    "change": Changing.change,
    "replace": Changing.replace,
    "close": Changing.close,
    "close_bare": Changing.close_bare,
}
every_change = pytest.mark.parametrize("name", sorted(CHANGES))


async def retire(world: World) -> None:
    draining = world.process().catalog.draining
    await draining.begin(LEAVING)
    assert (await draining.retire(LEAVING)).is_retired


@every_change
@on_virtual_time
async def test_a_node_that_is_retired_is_named_by_no_change(name):
    world = World()
    changing = await Changing.begin(world)
    await retire(world)
    with pytest.raises(NodeRetiredError) as caught:
        await CHANGES[name](changing)
    assert caught.value.node_id == LEAVING
    assert await changing.named() == []


@every_change
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("call", ["get", "transact"])
@on_virtual_time
async def test_it_may_be_retired_at_any_moment_of_the_change(name, marked, call):
    """Between any two of the calls that a change makes of the store."""
    moment = 0
    while await _changed(name, call, moment, marked=marked):
        moment += 1
    assert moment >= 1


async def _changed(name: str, call: str, moment: int, *, marked: bool) -> bool:
    """Retire the node at one call of a change; False: the change makes fewer calls."""
    world = World()
    changing = await Changing.begin(world)
    if marked:
        await world.process().catalog.draining.begin(LEAVING)
    made, calls = getattr(changing.owner.client, call), 0

    async def late(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == moment + 1:
            await retire(world)
        return await made(*arguments, **named)

    refused = False
    with patch.object(changing.owner.client, call, late):
        try:
            await CHANGES[name](changing)
        except NodeRetiredError:
            refused = True
    was_retired = calls > moment
    assert refused is was_retired
    assert len(await changing.named()) == (0 if refused else 1)
    return was_retired


@every_change
@pytest.mark.parametrize("lost", [Outcome.REPLY_LOST, Outcome.REQUEST_LOST])
@on_virtual_time
async def test_a_change_whose_answer_was_lost_is_decided_by_what_stands(name, lost):
    world = World()
    changing = await Changing.begin(world)
    transact = changing.owner.client.transact

    async def then_retired(operations: Any) -> None:
        if not await changing.named() and len(operations) > 1:
            changing.owner.faults.next("metadata.transact", lost)
        try:
            await transact(operations)
        finally:
            if len(operations) > 1:
                await retire(world)

    with patch.object(changing.owner.client, "transact", then_retired):
        if lost is Outcome.REPLY_LOST:
            await CHANGES[name](changing)
        else:
            with pytest.raises(NodeRetiredError):
                await CHANGES[name](changing)
    assert len(await changing.named()) == (1 if lost is Outcome.REPLY_LOST else 0)


@on_virtual_time
async def test_what_names_the_node_already_may_still_be_changed():
    world = World()
    changing = await Changing.begin(world)
    await changing.change()
    await retire(world)
    owner, both = changing.owner, replace(on(LEAVING), ensemble_size=1)
    segments = (*both.segments, Segment(first_entry_id=EntryId(5), ensemble=(A,)))
    after = replace(both, segments=segments)
    await owner.catalog.ledgers.change_ensemble(changing.claimed, changing.ledger_id, both, after)
    found = await owner.catalog.ledgers.get(changing.ledger_id)
    assert found is not None
    assert found.segments == segments


@on_virtual_time
async def test_a_node_is_retired_once_and_for_all():
    world = World()
    changing = await Changing.begin(world)
    draining = changing.owner.catalog.draining
    with pytest.raises(RefusedError, match="not being emptied"):
        await draining.retire(LEAVING)
    await draining.begin(LEAVING)
    assert not await draining.is_retired(LEAVING)
    changing.owner.faults.next("metadata.transact", Outcome.REPLY_LOST)
    changing.owner.clock.advance(3)
    retired = await draining.retire(LEAVING)
    assert await draining.is_retired(LEAVING)
    changing.owner.clock.advance(3)
    assert await draining.retire(LEAVING) == retired
    with pytest.raises(RefusedError, match="frees what it holds") as caught:
        await draining.cancel(LEAVING)
    assert "node decommission" in caught.value.remedy
    done = await draining.finish(LEAVING, said_empty=True)
    assert (done.said_empty, done.retired_ms) == (True, retired.retired_ms)
    with pytest.raises(NodeRetiredError):
        await changing.create()
