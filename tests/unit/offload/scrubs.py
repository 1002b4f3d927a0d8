"""Scrubs of a cluster in memory, and what lies in its bucket that should not."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from tests.unit.offload.world import CLUSTER, ListHandle, World, runs_of
from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.format import keys
from tierlog.format.keys import ObjectRole
from tierlog.format.run import Run
from tierlog.ledger.reader import ReadHandle
from tierlog.model.errors import CorruptError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.ledger import LedgerMetadata
from tierlog.model.manifest import ClusterManifest
from tierlog.model.node import Cluster
from tierlog.model.offload import OffloadContext
from tierlog.model.scrub import DeepPlace, ScrubReport, ScrubWish
from tierlog.offload.driver import SOFTWARE
from tierlog.offload.repair import Repairer
from tierlog.offload.scrub import Scrubber
from tierlog.offload.scrub_rules import ScrubLimits
from tierlog.ports.clock import Clock
from tierlog.ports.objects import ObjectStore
from tierlog_scheduler.scrubs import ScrubRunner, ScrubSchedule

SAFETY_S = 3600.0
REPAIR = ScrubWish(repair=True)
DEEP = ScrubWish(deep=True)
BOTH = ScrubWish(repair=True, deep=True)


def metadata(cluster_id: UUID = CLUSTER, stream: str = "logs") -> dict[str, str]:
    """Return what is written beside an object's bytes."""
    return keys.object_metadata(
        ObjectRole.DATA,
        stream=StreamName(stream),
        cluster_id=cluster_id,
        cluster_name="tierlog",
        software=SOFTWARE,
    )


async def pass_ids(world: World, ledger_id: int) -> None:
    """Let ids go on up to that one, as if ledgers had been made: that leaves no mark."""
    catalog = world.catalog()
    was_marked = await catalog.scrubs.is_restored()
    await catalog.nodes.ensure_cluster(ledger_id_base=ledger_id)
    mark = await catalog.scrubs.mark()
    if mark is not None and not was_marked:
        await catalog.scrubs.note_repaired(mark)


async def plant(
    world: World, uuid: int, ledger: int = 900, *, cluster_id: UUID = CLUSTER, stream: str = "logs"
) -> str:
    """Put a data and an index object that nobody names into the bucket."""
    # Its id was given once.
    await pass_ids(world, ledger + 1)
    found = keys.object_keys("", UUID(int=uuid), LedgerId(ledger))
    store = world.bucket.connect()
    for key in (found.data, found.index):
        await store.put(key, b"bytes", metadata=metadata(cluster_id, stream))
    return found.data


async def write_cluster(world: World) -> None:
    """Write the manifest of the cluster that the world's copies are of."""
    cluster = ClusterManifest(cluster=Cluster(cluster_id=CLUSTER, created_ms=1))
    await world.manifests().write_cluster(1, cluster)


async def plant_upload(world: World, key: str) -> str:
    """Open an upload that nobody will complete."""
    return await world.bucket.connect().create_upload(key, metadata=metadata(), content_type="")


class HalfHandle(ListHandle):
    """A local copy of which only the first entries can be read."""

    def read_runs(
        self, first: EntryId, last: EntryId, *, bytes_max: int | None = None, wait_s: float = 0.0
    ) -> AsyncIterator[Sequence[Run]]:
        del bytes_max, wait_s
        return self._half(first, last)

    async def _half(self, first: EntryId, last: EntryId) -> AsyncIterator[Sequence[Run]]:
        kept = len(self.entries) // 2
        for run in runs_of(self.ledger_id, self.entries):
            if run.last_entry_id >= first and run.first_entry_id <= last:
                if run.last_entry_id >= kept:
                    raise CorruptError(f"entry {kept} is damaged on every node")
                yield [run]


def repairer(
    world: World,
    faults: Faults | None = None,
    *,
    damaged_locally: bool = False,
    **settings: Any,
) -> Repairer:
    """Return what repairs the world's copies; ``damaged_locally``: half of tier 1 is lost."""

    def half(ledger_id: LedgerId, found: LedgerMetadata) -> ReadHandle:
        return HalfHandle(ledger_id, world.ledgers[ledger_id], found)

    return Repairer(
        objects=world.bucket.connect(faults or no_faults()),
        catalog=world.catalog(faults),
        offloader=world.offloader(faults, **settings),
        open_ledger=half if damaged_locally else world.open_ledger,
        ids=world.ids,
    )


def scrubber(
    world: World,
    faults: Faults | None = None,
    *,
    safety_age_s: float = SAFETY_S,
    damaged_locally: bool = False,
    objects: ObjectStore | None = None,
    **limits: float,
) -> Scrubber:
    """Return what scrubs the world's bucket."""
    store = objects or world.bucket.connect(faults or no_faults(), meter=world.meter)
    return Scrubber(
        objects=store,
        catalog=world.catalog(faults),
        manifests=world.manifests(faults),
        repairer=repairer(world, faults, damaged_locally=damaged_locally),
        cluster_id=CLUSTER,
        bucket="b",
        endpoint_name="default",
        key_prefix="",
        clock=world.clock,
        limits=ScrubLimits(safety_age_s=safety_age_s, **limits),
    )


async def scrub(
    world: World,
    wish: ScrubWish | None = None,
    *,
    safety_age_s: float = SAFETY_S,
    findings_max: int = 100,
    deep_from: DeepPlace | None = None,
    damaged_locally: bool = False,
    objects: ObjectStore | None = None,
    **limits: float,
) -> ScrubReport:
    """Scrub once."""
    report = ScrubReport(
        scrub_id=world.ids.uuid(),
        wish=wish or ScrubWish(),
        started_ms=world.clock.wall_ms(),
        findings_max=findings_max,
    )
    found = scrubber(
        world,
        None,
        safety_age_s=safety_age_s,
        damaged_locally=damaged_locally,
        objects=objects,
        **limits,
    )
    await found.run(report, deep_from=deep_from)
    return report


def runner(
    world: World,
    schedule: ScrubSchedule | None = None,
    *,
    leading: bool | Callable[[], bool] = True,
    faults: Faults | None = None,
    slow: Mapping[str, float] | None = None,
    clock: Clock | None = None,
) -> ScrubRunner:
    """Return what runs scrubs of the world; ``slow``: limits of a scrub; ``clock``: its own."""
    limits: Any = slow or {}
    return ScrubRunner(
        scrubber(world, faults, **limits),
        world.catalog().scrubs,
        leading=leading if callable(leading) else lambda: leading,
        clock=clock or world.clock,
        ids=world.ids,
        schedule=schedule or ScrubSchedule(),
    )


async def only_doubted(world: World, was: OffloadContext) -> None:
    """A ledger is as it was, but that its copy was found damaged."""
    now = await world.context(was.ledger_id)
    assert now.doubt is not None
    assert replace(now, doubt=was.doubt) == was


def kinds(report: ScrubReport) -> list[str]:
    """Return the kinds of what was found, faults alone."""
    return sorted(one.kind.value for one in report.findings)
