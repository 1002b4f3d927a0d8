"""Storage nodes that are being emptied, and when all copies were last looked at (ADR-0016).

Invariants:
    * A node is retired for good: from then on no change of metadata makes a ledger name it
      (``tierlog.catalog.naming``). What named it before then still does.
    * A node's identity is removed only once no ledger names it; its id then stays barred.
    * A mark is removed only before the node is retired.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from tierlog.catalog.change import settle
from tierlog.format import paths, records
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import NodeId, node_id
from tierlog.model.replication import Draining
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import MetadataStore, NoNodeError, Operation, Put


class DrainingCatalog:
    """The nodes of a cluster that are to go."""

    def __init__(self, store: MetadataStore, *, clock: Clock, ids: Ids) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids

    async def known_nodes(self) -> Sequence[NodeId]:
        """Return every node that has an identity in the cluster, live or not."""
        await self._store.sync(paths.COOKIES)
        return [node_id(name) for name in await self._store.children(paths.COOKIES) or []]

    async def list(self) -> dict[NodeId, Draining]:
        """Return the nodes that are being emptied, or were, as of now (after ``sync``)."""
        await self._store.sync(paths.DRAINING)
        found: dict[NodeId, Draining] = {}
        for name in await self._store.children(paths.DRAINING) or []:
            one = await self.get(node_id(name))
            if one is not None:
                found[one.node_id] = one
        return found

    async def get(self, node: NodeId) -> Draining | None:
        """Return what stands of a node; None: it is not to go."""
        found = await self._store.get(paths.draining_path(node))
        return None if found is None else records.decode_draining(found.data)

    async def is_retired(self, node: NodeId) -> bool:
        """Tell whether no ledger can be made to name a node any more, as of now (after ``sync``).

        Once it is so it stays so.
        """
        await self._store.sync(paths.draining_path(node))
        found = await self.get(node)
        return found is not None and found.is_retired

    async def watch(self, node: NodeId) -> tuple[Draining | None, asyncio.Event]:
        """Return what stands of a node, and an event that is set once that changes."""
        found, changed = await self._store.watch(paths.draining_path(node))
        return (None if found is None else records.decode_draining(found.data)), changed

    async def begin(self, node: NodeId) -> Draining:
        """Mark a node as being emptied: no new ledger gets it, and what it holds moves."""
        path = paths.draining_path(node)
        wanted = Draining(node_id=node, since_ms=self._clock.wall_ms())

        async def one_round() -> Draining:
            found = await self._store.get(path)
            if found is not None:
                return records.decode_draining(found.data)
            await self._check_known(node)
            await self._store.create(path, records.encode_draining(wanted))
            return wanted

        return await settle(self._store, self._ids, path, one_round)

    async def retire(self, node: NodeId) -> Draining:
        """Let no ledger be made to name a node that is being emptied; there is no way back."""
        path, now_ms = paths.draining_path(node), self._clock.wall_ms()

        async def one_round() -> Draining:
            found = await self._store.get(path)
            if found is None:
                raise _not_emptied(node)
            draining = records.decode_draining(found.data)
            if draining.is_retired:
                return draining
            draining = replace(draining, retired_ms=now_ms)
            operations: list[Operation] = [
                Put(path, records.encode_draining(draining), found.version)
            ]
            cookie = await self._store.get(paths.cookie_path(node))
            if cookie is not None:
                # The same again: its version is what who chose the node before now checks.
                operations.append(Put(paths.cookie_path(node), cookie.data, cookie.version))
            await self._store.transact(operations)
            return draining

        return await settle(self._store, self._ids, path, one_round)

    async def cancel(self, node: NodeId) -> None:
        """Let a node serve on; refused once it is retired: it frees what it holds."""
        path = paths.draining_path(node)

        async def one_round() -> None:
            found = await self._store.get(path)
            if found is None:
                await self._check_known(node)
                return
            draining = records.decode_draining(found.data)
            if draining.done_ms:
                raise RefusedError(
                    f"storage node {node} was decommissioned",
                    remedy="Format its directories and start it with a new node id",
                )
            if draining.is_retired:
                raise RefusedError(
                    f"no ledger names storage node {node} any more, and it frees what it holds",
                    remedy="End it with: tierlog node decommission; then format its directories "
                    "and start it with a new node id",
                )
            await self._store.delete(path, version=found.version)

        await settle(self._store, self._ids, path, one_round)

    async def finish(self, node: NodeId, *, said_empty: bool = False) -> Draining:
        """Bar the node's id and remove its identity. The caller knows that no ledger names it."""
        path = paths.draining_path(node)
        now_ms = self._clock.wall_ms()

        async def one_round() -> Draining:
            found = await self._store.get(path)
            if found is None:
                raise _not_emptied(node)
            draining = records.decode_draining(found.data)
            if not draining.done_ms:
                draining = replace(draining, done_ms=now_ms, said_empty=said_empty)
                data = records.encode_draining(draining)
                await self._store.set(path, data, version=found.version)
            # Barred first: a node that starts in between is refused either way.
            try:
                await self._store.delete(paths.cookie_path(node), version=-1)
            except NoNodeError:
                return draining
            return draining

        return await settle(self._store, self._ids, path, one_round)

    async def _check_known(self, node: NodeId) -> None:
        if await self._store.get(paths.cookie_path(node)) is None:
            raise RefusedError(
                f"the cluster knows no storage node {node}",
                reason=Reason.INVALID_ARGUMENT,
                remedy="List the nodes with: tierlog cluster nodes",
            )

    async def last_check_ms(self) -> int:
        """Return when every copy of every ledger was last looked at; 0: never."""
        found = await self._store.get(paths.AUDIT)
        return 0 if found is None else records.decode_audit(found.data)

    async def note_check(self, checked_ms: int) -> None:
        """Note that every copy was looked at; two at once do no harm."""
        data = records.encode_audit(checked_ms)

        async def one_round() -> None:
            found = await self._store.get(paths.AUDIT)
            if found is None:
                await self._store.create(paths.AUDIT, data)
            elif found.data != data:
                await self._store.set(paths.AUDIT, data, version=found.version)

        await settle(self._store, self._ids, paths.AUDIT, one_round)


def _not_emptied(node: NodeId) -> RefusedError:
    return RefusedError(
        f"storage node {node} is not being emptied",
        remedy="Begin with: tierlog node decommission",
    )
