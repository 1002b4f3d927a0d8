"""Manifests that should be there: complete copies that none names, and the cluster's own.

Owns the second look before one is told to be missing. Does not own manifests that are there and
can't be read, nor what is done about a finding (``tierlog.offload.scrub``).

Invariants:
    * A copy that is younger than the safety age is not missed: the leader may be about to name it.
    * What is missed was read again, the manifest first and the ledger's context behind it: a copy
      that was named, trimmed or replaced meanwhile is none.
    * One finding for a stream, however many of its ledgers are not named.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final
from uuid import UUID

from tierlog.catalog import Catalog
from tierlog.format.manifest import clusters_folder, manifest_folder
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import copy_of
from tierlog.model.offload import OffloadContext
from tierlog.model.scrub import Finding, FindingKind
from tierlog.offload.manifests import KnownManifest, ManifestStore, Standing
from tierlog.ports.clock import Clock

NAMED_MS_MAX: Final = 600_000
"""So long a leader may take to name a copy, however low the safety age."""
UNNAMED_KEPT_MAX: Final = 1000
"""So many ledgers of a stream are looked at again; one that is not named is enough."""
REMEDY: Final = (
    "Find out what deleted it. The scheduler that leads writes it anew in its slow round "
    "(TIERLOG_SCHEDULER__REREAD_S); a restart makes the next leader do so at once"
)


class ManifestLook:
    """Looks for manifests that are not there. ``pay`` waits until one more request may be sent."""

    def __init__(
        self,
        *,
        manifests: ManifestStore,
        catalog: Catalog,
        cluster_id: UUID,
        key_prefix: str,
        clock: Clock,
        safety_ms: int,
        pay: Callable[[int], Awaitable[None]],
    ) -> None:
        self._manifests = manifests
        self._contexts = catalog.contexts
        self._cluster_id = cluster_id
        self._prefix = key_prefix
        self._clock = clock
        self._age_ms = max(safety_ms, NAMED_MS_MAX)
        self._pay = pay
        self._newest: KnownManifest | None = None
        self._unnamed: dict[LedgerId, UUID] = {}
        self._no_cluster = False

    def __repr__(self) -> str:
        return f"<ManifestLook unnamed={len(self._unnamed)}>"

    async def newest(self, name: StreamName, incarnation: UUID) -> KnownManifest:
        """Return the newest manifest; the last one that was read is read again if it moved."""
        kept = self._newest
        if kept is not None and (kept.stream, kept.incarnation) == (name, incarnation):
            await self._pay(0)
            if await self._manifests.standing(kept) is Standing.NEWEST:
                return kept
        await self._pay(0)
        self._newest = await self._manifests.newest(name, incarnation)
        return self._newest

    def see(self, known: KnownManifest, context: OffloadContext) -> None:
        """Note a complete copy that a manifest should name by now, and doesn't."""
        copy = copy_of(context)
        if copy is None or known.names(context.ledger_id, copy.uuid) or self._is_young(context):
            return
        if len(self._unnamed) < UNNAMED_KEPT_MAX:
            self._unnamed[context.ledger_id] = copy.uuid

    async def unnamed(self, name: StreamName, incarnation: UUID) -> Finding | None:
        """Look again at what was noted of a stream, and forget it."""
        noted, self._unnamed = self._unnamed, {}
        if not noted:
            return None
        known = await self.newest(name, incarnation)
        for ledger_id, uuid in noted.items():
            if known.names(ledger_id, uuid):
                continue
            again = await self._contexts.get(ledger_id)
            copy = copy_of(again) if again is not None else None
            if again is None or copy is None or self._is_young(again):
                continue
            if (again.incarnation, copy.uuid) == (incarnation, uuid):
                newest = (
                    f"{known.generation} is the newest" if known.generation else "none is there"
                )
                return Finding(
                    kind=FindingKind.MANIFEST_UNREADABLE,
                    stream=name,
                    key=manifest_folder(self._prefix, name, incarnation),
                    cause=f"a manifest is missing: {newest} and the complete copy of ledger "
                    f"{ledger_id} is not named: a restore would not bring it back",
                    remedy=REMEDY,
                )
        return None

    def _is_young(self, context: OffloadContext) -> bool:
        return self._clock.wall_ms() - context.timestamp_ms < self._age_ms

    async def cluster(self) -> None:
        """Read the cluster's own manifest, which a restore begins with; not there: not yet."""
        await self._pay(0)
        generation, _ = await self._manifests.cluster(self._cluster_id)
        self._no_cluster = not generation

    async def no_cluster(
        self,
        walked: Mapping[StreamName, tuple[UUID, int]],
        incarnations: Mapping[StreamName, Sequence[UUID]],
    ) -> Finding | None:
        """Look again for the cluster's manifest, where it was not and a stream has had its own.

        ``walked``: incarnation and time of creation of each stream. ``incarnations``: those that
        have manifests. A leader writes the cluster's before any stream's.
        """
        old_ms = self._clock.wall_ms() - self._age_ms
        due = any(
            created_ms <= old_ms and incarnation in incarnations.get(name, ())
            for name, (incarnation, created_ms) in walked.items()
        )
        missed = due and self._no_cluster
        if not missed:
            return None
        await self.cluster()
        if not self._no_cluster:
            return None
        return Finding(
            kind=FindingKind.MANIFEST_UNREADABLE,
            key=f"{clusters_folder(self._prefix)}{self._cluster_id}/",
            cause="the manifest of the cluster is not there: a restore would bring no policies of "
            "cluster and namespaces back",
            remedy=REMEDY,
        )
