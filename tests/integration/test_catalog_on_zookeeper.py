"""The catalog's transactions on a real ZooKeeper: what lies where, and who wins (seeds/003)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from uuid import UUID, uuid4

import pytest

from tests.contracts.proxy import Proxy
from tests.unit.catalog.world import COPY, MIB, NODE, location, one_node
from tierlog.adapters.system import SystemClock, SystemIds
from tierlog.adapters.zookeeper.metadata import ZooKeeperMetadata
from tierlog.catalog import Catalog, ledgers
from tierlog.catalog.election import Election
from tierlog.format import ledger_metadata, paths, records
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.ledger import LedgerState
from tierlog.model.node import NodeInfo
from tierlog.model.offload import OffloadState
from tierlog.model.policy import Policy
from tierlog.model.position import Position
from tierlog.model.stream import Stream
from tierlog.model.trimming import TrimGrounds
from tierlog.ports.metadata import Create, Versioned

pytestmark = pytest.mark.integration
STREAM = StreamName("orders")
Connect = Callable[[], Awaitable[Catalog]]


@pytest.fixture
async def connect(zookeeper_corner) -> AsyncIterator[Connect]:
    """Connect catalogs to a folder of ZooKeeper that is this test's alone."""
    async with AsyncExitStack() as stack:

        async def connect() -> Catalog:
            store = await ZooKeeperMetadata.connect(zookeeper_corner)
            stack.push_async_callback(store.close)
            return Catalog.over(store, clock=SystemClock(), ids=SystemIds())

        yield connect


async def _owned(catalog: Catalog) -> Stream:
    await catalog.nodes.ensure_cluster()
    await catalog.streams.ensure_roots()
    await catalog.streams.create(STREAM)
    return await catalog.streams.claim(STREAM, NODE)


async def _opened(catalog: Catalog, claimed: Stream) -> LedgerId:
    ledger_id = await catalog.ledgers.new_id()
    await catalog.ledgers.open(claimed, ledger_id, one_node(), block_size=5 * MIB)
    return ledger_id


@pytest.mark.covers("D19", "D49", "D50", "D54")
async def test_a_ledgers_life_and_what_lies_where(connect):
    """Ledgers' metadata, hierarchical in folders, and live nodes lie where BookKeeper has them."""
    catalog = await connect()
    claimed = await _owned(catalog)
    ledger_id = await _opened(catalog, claimed)
    digits = f"{ledger_id:010d}"
    path = f"/ledgers/{digits[:2]}/{digits[2:6]}/L{digits[6:]}"
    found = await catalog.store.get(path)
    assert found is not None
    assert found.data.startswith(b"BookieMetadataFormatVersion\t3\n")
    assert ledger_metadata.decode_znode(found.data).state is LedgerState.OPEN
    await catalog.nodes.announce(
        NodeInfo(node_id=NODE, wire_address="h:1", grpc_address="h:2", http_address="h:3")
    )
    assert await catalog.store.children("/ledgers/available") == [NODE]
    layout = await catalog.store.get(paths.LAYOUT)
    assert layout is not None
    assert layout.data == b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1"
    await catalog.ledgers.close(claimed, ledger_id, last_entry_id=EntryId(2), length=30)
    assert await catalog.ledgers.list_ids() == [ledger_id]
    uuid = uuid4()
    contexts = catalog.contexts
    await contexts.begin_attempt(
        ledger_id, uuid=uuid, location=location(uuid, ledger_id), worker="w"
    )
    await contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)
    deleting = await contexts.begin_tier1_deletion(ledger_id, uuid=uuid)
    deleted = await catalog.ledgers.delete_tier1(ledger_id, deleting)
    assert deleted.state is OffloadState.TIER1_DELETED
    assert await catalog.store.get(path) is None
    assert await contexts.get(ledger_id) == deleted
    snapshot = await (await connect()).streams.snapshot(STREAM)
    assert [(one.ledger_id, one.last_entry_id) for one in snapshot.ledgers] == [(ledger_id, 2)]


async def test_what_is_trimmed_is_still_ordered_in_the_transaction_itself(connect, monkeypatch):
    """The levels above are checked in it, whether anybody ever said anything there or not."""
    catalog, admin = await connect(), await connect()
    claimed = await _owned(catalog)
    made = []
    for _ in range(2):
        ledger_id = await _opened(catalog, claimed)
        await catalog.ledgers.close(claimed, ledger_id, last_entry_id=EntryId(2), length=30)
        made.append(ledger_id)
    transact = catalog.store.transact

    async def after_a_change(operations):
        monkeypatch.setattr(catalog.store, "transact", transact)
        await admin.policies.set_level(None, Policy(retention_size_bytes=10**9))
        await transact(operations)

    async def trim(ledger_id: LedgerId, grounds: TrimGrounds) -> int:
        taken: int = await catalog.retention.begin_trim(
            STREAM, claimed.incarnation, [ledger_id], grounds=grounds
        )
        return taken

    async def grounds() -> TrimGrounds:
        return TrimGrounds.of(await admin.streams.get(STREAM), await admin.policies.levels())

    assert await admin.store.get(paths.POLICIES) is None
    assert await trim(made[0], await grounds()) == 1
    decided = await grounds()
    monkeypatch.setattr(catalog.store, "transact", after_a_change)
    with pytest.raises(RefusedError, match="was changed since that was decided"):
        await trim(made[1], decided)
    stream = await admin.streams.get(STREAM)
    assert (stream.deleting, stream.trimmed_end) == ((made[0],), Position(made[0], EntryId(3)))
    assert await trim(made[1], await grounds()) == 1


async def test_two_who_claim_at_once_get_two_epochs_and_one_may_open(connect):
    first, second = await connect(), await connect()
    await _owned(first)
    claims: list[tuple[Catalog, Stream]] = []

    async def claim(catalog: Catalog, node: str) -> None:
        claims.append((catalog, await catalog.streams.claim(STREAM, NodeId(node))))

    async with asyncio.TaskGroup() as group:
        group.create_task(claim(first, "node-1"))
        group.create_task(claim(second, "node-2"))
    claims.sort(key=lambda one: one[1].owner_epoch)
    (loser, deposed), (winner, owner) = claims
    assert owner.owner_epoch == deposed.owner_epoch + 1
    with pytest.raises(RefusedError) as caught:
        await _opened(loser, deposed)
    assert caught.value.reason is Reason.FENCED
    ledger_id = await _opened(winner, owner)
    assert await winner.ledgers.list_ids() == [ledger_id]


async def test_workers_at_once_leave_one_newest_attempt(connect):
    catalog = await connect()
    claimed = await _owned(catalog)
    ledger_id = await _opened(catalog, claimed)
    await catalog.ledgers.close(claimed, ledger_id, last_entry_id=EntryId(2), length=30)

    async def begin() -> None:
        uuid = uuid4()
        worker = await connect()
        await worker.contexts.begin_attempt(
            ledger_id, uuid=uuid, location=location(uuid, ledger_id), worker="w"
        )

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(begin())
    context = await catalog.contexts.get(ledger_id)
    assert context is not None
    assert context.attempt_count == 4
    assert len({context.uuid} | {one.uuid for one in context.abandoned}) == 4


Change = Callable[[Catalog, LedgerId, UUID], Awaitable[object]]


async def _begin(catalog: Catalog, ledger_id: LedgerId, uuid: UUID) -> None:
    where = location(uuid, ledger_id)
    await catalog.contexts.begin_attempt(ledger_id, uuid=uuid, location=where, worker="w")


async def _complete(catalog: Catalog, ledger_id: LedgerId, uuid: UUID) -> None:
    await catalog.contexts.complete_attempt(ledger_id, uuid=uuid, copy=COPY)


@pytest.mark.parametrize("change", [_begin, _complete])
async def test_who_reads_what_was_true_decides_nothing(
    connect, zookeeper_corner, monkeypatch, change: Change
):
    """A read is on its way for so long that others have completed the ledger meanwhile."""
    catalog = await connect()
    claimed = await _owned(catalog)
    ledger_id = await _opened(catalog, claimed)
    await catalog.ledgers.close(claimed, ledger_id, last_entry_id=EntryId(2), length=30)
    mine, theirs = uuid4(), uuid4()
    if change is _complete:
        await _begin(catalog, ledger_id, mine)
    hosts, _, root = zookeeper_corner.partition("/")
    async with Proxy(hosts) as proxy:
        store = await ZooKeeperMetadata.connect(f"{proxy.address}/{root}")
        late = Catalog.over(store, clock=SystemClock(), ids=SystemIds())
        get, answers = store.get, []

        async def noting(path: str) -> Versioned | None:
            answers.append(await get(path))
            return answers[-1]

        monkeypatch.setattr(store, "get", noting)
        proxy.hold()
        async with asyncio.TaskGroup() as group:
            changing = group.create_task(_refused(change(late, ledger_id, mine)))
            await proxy.held.wait()
            await _begin(catalog, ledger_id, theirs)
            await _complete(catalog, ledger_id, theirs)
            assert not changing.done()
            proxy.restore()
        await store.close()
    assert answers[0] is not None
    told = records.decode_context(answers[0].data)
    assert (told.complete, told.uuid) == (False, mine if change is _complete else None)
    assert changing.result(), "it was to be refused"
    context = await catalog.contexts.get(ledger_id)
    assert context is not None
    assert (context.state, context.uuid) == (OffloadState.COMPLETE, theirs)


async def _refused(work: Awaitable[object]) -> bool:
    try:
        await work
    except RefusedError:
        return True
    return False


async def test_a_list_longer_than_a_page_is_read_whole(connect, monkeypatch):
    monkeypatch.setattr(ledgers, "TAIL_LEDGERS_MAX", 4)
    monkeypatch.setattr(ledgers, "PAGE_LEDGERS", 2)
    catalog = await connect()
    claimed = await _owned(catalog)
    made = []
    for _ in range(9):
        made.append(await _opened(catalog, claimed))
        await catalog.ledgers.close(claimed, made[-1], last_entry_id=EntryId(0), length=1)
    snapshot = await (await connect()).streams.snapshot(STREAM)
    assert [one.ledger_id for one in snapshot.ledgers] == made
    assert len(snapshot.stream.pages) == 3
    assert len(snapshot.stream.ledgers) == 3


async def test_the_next_candidate_leads_when_the_leader_goes(connect):
    first, second = await connect(), await connect()
    leading = Election(first.store, SystemIds(), office="test")
    await leading.win()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        waiting = group.create_task(Election(second.store, SystemIds(), office="test").win())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await first.store.close()


@pytest.mark.covers("D51", "D56")
async def test_more_than_fifty_thousand_ledgers_are_listed_whole(connect):
    """Five folders of 10,000 and one of the next; none has more children than that."""
    catalog = await connect()
    count, at_once = 50_500, 500
    data = ledger_metadata.encode_znode(one_node())
    for first in range(0, count, at_once):
        made = [paths.ledger_path(one) for one in range(first, first + at_once)]
        if first % paths.CHILDREN_MAX == 0:
            await catalog.store.create(made[0].rpartition("/")[0], b"")
        await catalog.store.transact([Create(path, data) for path in made])
    assert await catalog.ledgers.list_ids() == list(range(count))
    folders = await catalog.store.children("/ledgers/00")
    assert folders == [f"{number:04d}" for number in range(6)]
    sizes = [len(await catalog.store.children(f"/ledgers/00/{one}") or []) for one in folders]
    assert sizes == [10_000] * 5 + [500]
