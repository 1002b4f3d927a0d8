"""What the bucket says of a stream, over REST: whether it could be restored as of now.

Any scheduler answers, leader or not: the newest manifest is read first, the metadata then.
"""

from typing import Self

from fastapi import FastAPI
from pydantic import BaseModel

from tierlog.catalog import Catalog
from tierlog.model.errors import CorruptError
from tierlog.model.ids import stream_name
from tierlog.model.manifest import NO_LEDGER, copy_of, levels_older, older_than_manifest
from tierlog.offload.manifests import KnownManifest, ManifestStore


class ManifestAnswer(BaseModel):
    """The newest manifest of a stream; generation 0: there is none yet.

    ``waiting``: ledgers whose copy is complete and not named yet; their local copies stay.
    ``deletions_stopped``: in what the metadata are older than the manifest. Then nothing of the
    stream is deleted.
    """

    stream: str
    incarnation: str
    generation: int
    snapshot_generation: int
    written_ms: int
    ledgers: int
    copied: int
    trimmed_through: int | None
    waiting: list[int]
    deletions_stopped: str | None

    @classmethod
    def of(cls, known: KnownManifest, *, waiting: list[int], older: str | None) -> Self:
        """Return what is said of a manifest."""
        head = known.head
        trimmed = head.trimmed_through if head is not None else NO_LEDGER
        return cls(
            stream=known.stream,
            incarnation=str(known.incarnation),
            generation=known.generation,
            snapshot_generation=known.snapshot_generation,
            written_ms=known.written_ms,
            ledgers=len(known.ledgers),
            copied=sum(one.uuid is not None for one in known.ledgers.values()),
            trimmed_through=trimmed if trimmed != NO_LEDGER else None,
            waiting=waiting,
            deletions_stopped=older,
        )


class ManifestsApi:
    """The handlers, over the catalog and the bucket."""

    def __init__(self, catalog: Catalog, manifests: ManifestStore) -> None:
        self._catalog = catalog
        self._manifests = manifests

    def add_routes(self, app: FastAPI) -> None:
        """Add the API to ``app``."""
        app.add_api_route("/v1/streams/{name}/manifest", self.manifest, methods=["GET"])

    async def manifest(self, name: str) -> ManifestAnswer:
        """Show the newest manifest of a stream, and how the metadata stand to it."""
        stream = await self._catalog.streams.get(stream_name(name))
        known = await self._manifests.newest(stream.name, stream.incarnation)
        snapshot = await self._catalog.streams.snapshot(stream.name)
        contexts = {}
        waiting = []
        for listed in snapshot.ledgers:
            context = await self._catalog.contexts.peek(listed.ledger_id)
            if context is None:
                continue
            contexts[listed.ledger_id] = context
            copy = copy_of(context)
            if copy is not None and not known.names(listed.ledger_id, copy.uuid):
                waiting.append(int(listed.ledger_id))
        older = None
        if known.head is not None:
            older = older_than_manifest(
                known.head, known.ledgers, snapshot.stream, snapshot.ledgers, contexts
            )
        older = older or await self._policies_older()
        return ManifestAnswer.of(known, waiting=waiting, older=older)

    async def _policies_older(self) -> str | None:
        """Say in what the policies above streams are older: nothing of any stream is deleted."""
        cluster = await self._catalog.nodes.cluster()
        if cluster is None:
            return None
        try:
            _, written = await self._manifests.cluster(cluster.cluster_id)
        except CorruptError:
            # The next leader writes another one.
            return None
        return levels_older(written, await self._catalog.policies.levels())
