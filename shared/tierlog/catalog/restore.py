"""Records of a cluster that comes back from its bucket, into a metadata store that has none.

Owns the order in which they are made, and what is refused. Does not own what they hold: that is
planned from manifests.

Invariants:
    * Nothing that is there is ever changed: a record is made, or found to be the very same. Where
      the cluster's identity is, none is made: whatever lacks beside it did not go with the disks.
    * While a restore is under way, or was interrupted, no service starts: the mark is made first
      and goes, in one transaction, as the cluster's identity comes.
    * Another mark comes with the identity: as long as it is there no scrub by schedule deletes
      what the metadata do not name, since that may be what did not come back.
    * A ledger's context is there before a stream lists it, and its attributes before an owner can
      rebuild them from less.

Crash: the same restore begun again makes what lacks, and ends the same.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tierlog.catalog.change import ensure_node, settle
from tierlog.catalog.ledgers import PAGE_LEDGERS, TAIL_LEDGERS_MAX
from tierlog.format import paths, records
from tierlog.format.attribute_records import encode_attributes
from tierlog.model.attribute_record import AttributesRecord
from tierlog.model.errors import RefusedError
from tierlog.model.node import Cluster
from tierlog.model.offload import OffloadContext
from tierlog.model.policy import NO_LEVELS, PolicyLevels
from tierlog.model.stream import LedgerPageRef, ListedLedger, Stream
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import Create, Delete, MetadataStore, NodeExistsError, Operation

CREATES_IN_FLIGHT_MAX: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredStream:
    """A stream without its list, the list, and the context of each of its ledgers."""

    stream: Stream
    ledgers: tuple[ListedLedger, ...]
    contexts: tuple[OffloadContext, ...]
    attributes: AttributesRecord | None = None

    def __post_init__(self) -> None:
        assert [one.ledger_id for one in self.ledgers] == [
            one.ledger_id for one in self.contexts
        ], "each listed ledger has a context"


class RestoreCatalog:
    """Makes a cluster's records anew."""

    def __init__(self, store: MetadataStore, *, ids: Ids) -> None:
        self._store = store
        self._ids = ids
        self._only_compares = False

    async def begin(self, cluster: Cluster) -> bool:
        """Mark that this cluster is being restored; False: it is there already.

        Raises ``RefusedError`` unless the store is empty, or the same restore was interrupted.
        With False the records that follow are compared, and must be there and the same: the store
        may also be an old backup of the cluster, which has no mark of what does not come back.
        """

        async def one_round() -> bool:
            mark = await self._store.get(paths.RESTORING)
            if mark is not None:
                _check_same_cluster(records.decode_cluster(mark.data), cluster, "is being restored")
                return True
            found = await self._store.get(paths.CLUSTER)
            if found is not None:
                _check_same_cluster(records.decode_cluster(found.data), cluster, "is there")
                return False
            for root in (paths.STREAMS, paths.CONTEXTS):
                if await self._store.children(root):
                    raise _not_empty(f"there is something below {root}")
            for child in await self._store.children(paths.LEDGERS_ROOT) or []:
                if paths.is_hierarchy_name(child, level=1):
                    raise _not_empty(f"there are ledgers below {paths.LEDGERS_ROOT}")
            await ensure_node(self._store, paths.ROOT)
            await self._store.create(paths.RESTORING, records.encode_cluster(cluster))
            return True

        anew = await settle(self._store, self._ids, paths.RESTORING, one_round)
        self._only_compares = not anew
        return anew

    async def put_levels(self, levels: PolicyLevels) -> None:
        """Make the policies above streams."""
        if levels != NO_LEVELS:
            await self._make(paths.POLICIES, records.encode_levels(levels))

    async def put_stream(self, restored: RestoredStream) -> None:
        """Make a stream, its pages, contexts and attributes, the stream's own node last."""
        name = restored.stream.name
        slots = asyncio.Semaphore(CREATES_IN_FLIGHT_MAX)

        async def put(context: OffloadContext) -> None:
            async with slots:
                path = paths.context_path(context.ledger_id)
                await self._make(path, records.encode_context(context))

        async with asyncio.TaskGroup() as group:
            for context in restored.contexts:
                group.create_task(put(context))
        refs, tail = await self._put_pages(restored)
        if restored.attributes is not None:
            await self._make(paths.attributes_path(name), encode_attributes(restored.attributes))
        stream = _with_list(restored.stream, refs, tail)
        await self._make(paths.stream_path(name), records.encode_stream(stream))

    async def _put_pages(
        self, restored: RestoredStream
    ) -> tuple[tuple[LedgerPageRef, ...], tuple[ListedLedger, ...]]:
        """Make the pages of a list that is too long for the stream's node; return what stays."""
        left = restored.ledgers
        refs: list[LedgerPageRef] = []
        while len(left) > TAIL_LEDGERS_MAX:
            page, left = left[:PAGE_LEDGERS], left[PAGE_LEDGERS:]
            ref = LedgerPageRef(
                page_number=len(refs),
                first_ledger_id=page[0].ledger_id,
                last_ledger_id=page[-1].ledger_id,
                ledger_count=len(page),
            )
            path = paths.page_path(restored.stream.name, ref.page_number)
            await self._make(path, records.encode_page(page))
            refs.append(ref)
        return tuple(refs), left

    async def end(self, cluster: Cluster) -> Cluster:
        """Give the cluster its identity, and take the mark away; services may start then.

        Its ledger ids go on above ``ledger_id_base``, which is raised where one is there already.
        """
        data = records.encode_cluster(cluster)
        await self._make(paths.LAYOUT, paths.LAYOUT_DATA)

        async def one_round() -> Cluster:
            mark = await self._store.get(paths.RESTORING)
            found = await self._store.get(paths.CLUSTER)
            if found is not None:
                there = records.decode_cluster(found.data)
                _check_same_cluster(there, cluster, "is there")
                if there.ledger_id_base >= cluster.ledger_id_base:
                    return there
                await self._store.set(paths.CLUSTER, data, version=found.version)
                return cluster
            if mark is None:
                raise _not_empty("the mark of this restore has gone")
            operations: list[Operation] = [
                Create(paths.CLUSTER, data),
                Delete(paths.RESTORING, mark.version),
            ]
            if await self._store.get(paths.RESTORED) is None:
                # Else by a storage node that found the store empty.
                operations.append(Create(paths.RESTORED, b""))
            await self._store.transact(operations)
            return cluster

        return await settle(self._store, self._ids, paths.CLUSTER, one_round)

    async def check_only(self, names: Sequence[str]) -> None:
        """Raise ``RefusedError`` when there are streams beside those."""
        there = await self._store.children(paths.STREAMS) or []
        others = sorted(set(there) - set(names))
        if others:
            raise _not_empty(f"stream {others[0]} is not in the bucket")

    async def _make(self, path: str, data: bytes) -> None:
        """Make a node, or find that it is there and the same."""

        async def one_round() -> None:
            found = await self._store.get(path)
            if self._only_compares and (found is None or not found.data):
                raise _not_empty(f"the cluster is there, and {path} is not")
            if found is None:
                try:
                    await self._store.create(path, data)
                except NodeExistsError:
                    found = await self._store.get(path)
            if found is not None and not found.data:
                # Made empty, as the parent of its pages.
                await self._store.set(path, data, version=found.version)
            elif found is not None and found.data != data:
                raise _not_empty(f"{path} is there, and is not what the bucket says")

        await settle(self._store, self._ids, path, one_round)


def _with_list(
    stream: Stream, refs: tuple[LedgerPageRef, ...], tail: tuple[ListedLedger, ...]
) -> Stream:
    return replace(stream, pages=refs, ledgers=tail)


def _check_same_cluster(there: Cluster, wanted: Cluster, what: str) -> None:
    if there.cluster_id != wanted.cluster_id:
        raise _not_empty(f"cluster {there.cluster_id} {what}, and not {wanted.cluster_id}")


def _not_empty(what: str) -> RefusedError:
    return RefusedError(
        f"the metadata store is not empty: {what}",
        remedy="Restore into an empty ZooKeeper, or a root of its own in "
        "TIERLOG_ZOOKEEPER__HOSTS, before any service starts",
    )
