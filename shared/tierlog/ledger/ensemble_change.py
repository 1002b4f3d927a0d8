"""Opens ensembles, and puts other nodes in the place of those that failed (ADR-0016).

Owns finding and reaching the nodes, and what a change does to the metadata. Does not own when a
change is due nor which acknowledgements count: the writer does. Nor the compare-and-set: whoever
opened the ledger gives it as ``publish``.

Invariants:
    * Nothing is published before every new node of the change was reached.
    * A change touches the last ensemble alone; who stays in it keeps its place.
    * Where the new segment begins with the last one, it takes its place: none of its entries
      was confirmed.
    * A connection that failed, and one that was too slow, is not used again for the same ledger.

Cancellation leaves nothing, or a change that was published and that nobody uses: recovery takes
the ensembles from the metadata.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from tierlog.catalog import Catalog
from tierlog.catalog.naming import NodeRetiredError
from tierlog.ledger.directory import LiveNodes, NodeDirectory
from tierlog.ledger.placement import choose_ensemble, choose_replacement
from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.ledger import LedgerMetadata, Segment
from tierlog.model.node import NodeInfo
from tierlog.ports.storage_node import StorageNodeClient

log = structlog.get_logger()

FAILED_LATELY_SHARE: Final = 0.25

Clients = dict[NodeId, StorageNodeClient]

Publish = Callable[[LedgerMetadata, LedgerMetadata], Awaitable[LedgerMetadata]]
"""Before and after, to what stands then; a refusal or an unknown end breaks the writer."""


class NodesRefuseError(RetryableError):
    """Too few nodes are left, since some refuse who asks; ``refusal`` is what one of them said.

    To an owner it is what too few nodes are at any time. Who writes by itself tells the refusal.
    """

    def __init__(self, error: RetryableError, refusal: RefusedError) -> None:
        super().__init__(
            f"{error.message}; one says: {refusal.message}",
            reason=error.reason,
            remedy=error.remedy,
            details=error.details,
        )
        self.refusal = refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleLimits:
    """Every bound of finding nodes."""

    connect_s_max: float = 1.0
    find_s_max: float = 2.0
    """So long confirmations may stand still for the search, before anything is published."""
    return_s_min: float = 1.0
    """A node that failed is asked back after so long at the earliest."""


def with_replacements(
    metadata: LedgerMetadata, replacements: Mapping[NodeId, NodeId], first_entry_id: EntryId
) -> LedgerMetadata:
    """Return the ledger with other nodes in its last ensemble from ``first_entry_id`` on."""
    last = metadata.segments[-1]
    assert first_entry_id >= last.first_entry_id
    ensemble = tuple(replacements.get(node_id, node_id) for node_id in last.ensemble)
    assert len(set(ensemble)) == len(ensemble)
    if ensemble == last.ensemble:
        return metadata
    kept = metadata.segments
    if first_entry_id == last.first_entry_id:
        kept = kept[:-1]
    changed = Segment(first_entry_id=first_entry_id, ensemble=ensemble)
    return replace(metadata, segments=(*kept, changed))


class Ensembles:
    """The ensembles that one process opens; ``preferred``: the storage node beside it."""

    def __init__(
        self,
        catalog: Catalog,
        nodes: NodeDirectory[StorageNodeClient],
        *,
        preferred: NodeId | None = None,
        limits: EnsembleLimits | None = None,
    ) -> None:
        self._catalog = catalog
        self._nodes = nodes
        self._preferred = preferred
        self._limits = limits or EnsembleLimits()

    def __repr__(self) -> str:
        return f"<Ensembles over {self._nodes!r}>"

    async def open(
        self,
        *,
        ensemble_size: int,
        write_quorum: int,
        ack_quorum: int,
        seed: bytes,
        retired: Collection[NodeId] = (),
    ) -> tuple[tuple[NodeId, ...], Clients]:
        """Choose an ensemble and reach its nodes; placeholders have no client.

        ``retired``: nodes that the caller knows to be so; they are not even placeholders.
        Raises UNAVAILABLE or READ_ONLY, as ``choose_ensemble`` does.
        """
        found = await self._catalog.nodes.live()
        live = {node_id: info for node_id, info in found.items() if node_id not in retired}
        known: Collection[NodeId] = ()
        if sum(_serves(info) for info in live.values()) < ensemble_size:
            known = await self._known(retired)
        failed: set[NodeId] = set()
        refusals: list[RefusedError] = []
        while True:
            try:
                ensemble = choose_ensemble(
                    live.values(),
                    ensemble_size=ensemble_size,
                    seed=seed,
                    preferred=self._preferred,
                    excluded=failed,
                    known=known,
                    placeholders_max=write_quorum - ack_quorum,
                )
            except RetryableError as error:
                if not refusals:
                    raise
                raise NodesRefuseError(error, refusals[0]) from error
            wanted = [one for one in ensemble if one not in failed and _serves(live.get(one))]
            clients = await self._reach_all(wanted, refusals)
            if len(clients) == len(wanted):
                return ensemble, clients
            failed.update(one for one in wanted if one not in clients)
            known = known or await self._known(retired)

    async def _known(self, retired: Collection[NodeId]) -> Collection[NodeId]:
        """Return the nodes that may stand in; those that are being emptied if no other is left."""
        draining = await self._catalog.draining.list()
        known = [
            one
            for one in await self._catalog.draining.known_nodes()
            if one not in retired and not (one in draining and draining[one].is_retired)
        ]
        return [one for one in known if one not in draining] or known

    async def _reach_all(self, wanted: Sequence[NodeId], refusals: list[RefusedError]) -> Clients:
        reached: Clients = {}

        async def one(node_id: NodeId) -> None:
            client = await reach(
                self._nodes, node_id, self._limits.connect_s_max, refusals=refusals
            )
            if client is not None:
                reached[node_id] = client

        async with asyncio.TaskGroup() as tasks:
            for node_id in wanted:
                tasks.create_task(one(node_id))
        return reached

    def changer(
        self, ledger_id: LedgerId, clients: Mapping[NodeId, StorageNodeClient], publish: Publish
    ) -> "EnsembleChanger":
        """Return what changes the ensemble of one ledger that is written over ``clients``."""
        return EnsembleChanger(
            ledger_id,
            clients,
            publish,
            nodes=self._nodes,
            live=self._catalog.nodes.live,
            limits=self._limits,
        )


@dataclass(frozen=True, slots=True)
class _Failure:
    """When a node failed, and the client that is of no use any more; None: any other is."""

    at_s: float
    useless: StorageNodeClient | None = None


class EnsembleChanger:
    """Changes the ensemble of one open ledger: ``replace`` and ``note_failed`` are a writer's."""

    def __init__(
        self,
        ledger_id: LedgerId,
        clients: Mapping[NodeId, StorageNodeClient],
        publish: Publish,
        *,
        nodes: NodeDirectory[StorageNodeClient],
        live: LiveNodes,
        limits: EnsembleLimits,
    ) -> None:
        self._ledger_id = ledger_id
        self._seed = f"{ledger_id}".encode()
        self._given = dict(clients)
        self._publish = publish
        self._nodes = nodes
        self._live = live
        self._limits = limits
        self._failures: dict[NodeId, _Failure] = {}
        self._to_drop: dict[NodeId, StorageNodeClient] = {}

    def __repr__(self) -> str:
        return f"<EnsembleChanger {self._ledger_id} failed={sorted(self._failures)}>"

    def note_failed(self, node_id: NodeId, error: TierlogError) -> None:
        """Learn that a node answered with ``error``, or not at all."""
        client = self._given.get(node_id)
        self._failures[node_id] = _Failure(asyncio.get_running_loop().time())
        gone = error.reason is Reason.UNAVAILABLE or isinstance(error, IndeterminateError)
        if client is not None and gone:
            self._to_drop[node_id] = client

    async def replace(
        self, metadata: LedgerMetadata, failed: frozenset[NodeId], first_entry_id: EntryId
    ) -> tuple[LedgerMetadata, Clients] | None:
        """Find others for the ``failed``, and publish the ensemble; None: nothing has changed."""
        now_s = asyncio.get_running_loop().time()
        for node_id in failed:
            if node_id not in self._failures:
                # It is slow, or was never reached; another client of it may be asked at once.
                self._failures[node_id] = _Failure(
                    now_s - self._limits.return_s_min, self._given.get(node_id)
                )
        await self._drop_failed()
        found: dict[NodeId, tuple[NodeId, StorageNodeClient]] = {}
        try:
            async with asyncio.timeout(self._limits.find_s_max):
                await self._find(metadata, failed, found)
        except TimeoutError:
            log.warning("ensemble.search_cut_short", ledger_id=self._ledger_id, found=len(found))
        except (RetryableError, IndeterminateError) as error:
            log.warning("ensemble.not_changed", ledger_id=self._ledger_id, cause=str(error))
        if not found:
            return None
        return await self._change(metadata, found, first_entry_id)

    async def _change(
        self,
        metadata: LedgerMetadata,
        found: Mapping[NodeId, tuple[NodeId, StorageNodeClient]],
        first_entry_id: EntryId,
    ) -> tuple[LedgerMetadata, Clients] | None:
        replacements = {old: new for old, (new, _) in found.items()}
        changed = with_replacements(metadata, replacements, first_entry_id)
        if changed != metadata:
            try:
                changed = await self._publish(metadata, changed)
            except (RetryableError, NodeRetiredError) as error:
                # Nothing was published, and confirmations may go on as before.
                log.warning("ensemble.not_changed", ledger_id=self._ledger_id, cause=str(error))
                return None
        clients = dict(found.values())
        for node_id, client in clients.items():
            self._given[node_id] = client
            self._failures.pop(node_id, None)
        return changed, clients

    async def _drop_failed(self) -> None:
        """Have the directory connect anew to those whose connection is gone."""
        while self._to_drop:
            node_id, client = self._to_drop.popitem()
            await self._nodes.report_failed(node_id, client)

    async def _find(
        self,
        metadata: LedgerMetadata,
        failed: Collection[NodeId],
        found: dict[NodeId, tuple[NodeId, StorageNodeClient]],
    ) -> None:
        """Add to ``found`` whom it finds, and reaches, for each node that failed."""
        live = await self._live()
        ensemble = list(metadata.segments[-1].ensemble)
        for at, old in enumerate(metadata.segments[-1].ensemble):
            if old in failed:
                one = await self._find_one(live, ensemble, at, metadata.write_quorum)
                if one is not None:
                    found[old] = one
                    ensemble[at] = one[0]

    async def _find_one(
        self, live: Mapping[NodeId, NodeInfo], ensemble: Sequence[NodeId], at: int, quorum: int
    ) -> tuple[NodeId, StorageNodeClient] | None:
        """Another node first; else the same one if it is back; else one that failed and is."""
        tried = set(self._failures)
        while True:
            candidate = choose_replacement(
                live.values(),
                ensemble,
                at,
                write_quorum=quorum,
                seed=self._seed,
                excluded=tried,
            )
            if candidate is None:
                break
            tried.add(candidate)
            client = await reach(self._nodes, candidate, self._limits.connect_s_max)
            if client is not None:
                return candidate, client
        others = sorted(one for one in self._failures if one not in ensemble)
        for node_id in (ensemble[at], *others):
            client = await self._returned(node_id, live.get(node_id))
            if client is not None:
                return node_id, client
        return None

    async def _returned(self, node_id: NodeId, info: NodeInfo | None) -> StorageNodeClient | None:
        """Return a fresh client of a node that failed and is back."""
        failure = self._failures[node_id]
        away_s = asyncio.get_running_loop().time() - failure.at_s
        if not _serves(info) or away_s < self._limits.return_s_min:
            return None
        client = await reach(self._nodes, node_id, self._limits.connect_s_max)
        return None if client is failure.useless else client


async def reach(
    nodes: NodeDirectory[StorageNodeClient],
    node_id: NodeId,
    seconds_max: float,
    *,
    refusals: list[RefusedError] | None = None,
) -> StorageNodeClient | None:
    """Return a client of a node, or None when it can't be reached in that time.

    A node that failed lately gets a part of it: others wait meanwhile. ``refusals`` takes what a
    node says that is there and refuses who asks.
    """
    if nodes.failed_lately(node_id):
        seconds_max *= FAILED_LATELY_SHARE
    try:
        async with asyncio.timeout(seconds_max):
            return await nodes.client(node_id)
    except (TierlogError, TimeoutError) as error:
        if refusals is not None and isinstance(error, RefusedError):
            refusals.append(error)
        nodes.failed(node_id)
        log.info("ensemble.node_not_reached", node_id=node_id, cause=str(error))
        return None


def _serves(info: NodeInfo | None) -> bool:
    return info is not None and not info.read_only and not info.draining
