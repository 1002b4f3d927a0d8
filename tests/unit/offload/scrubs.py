"""Scrubs of a cluster in memory, and what lies in its bucket that should not."""

from uuid import UUID

from tests.unit.offload.world import CLUSTER, World
from tierlog.adapters.memory.faults import Faults, no_faults
from tierlog.format import keys
from tierlog.format.keys import ObjectRole
from tierlog.model.errors import CorruptError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.offload import OffloadContext
from tierlog.model.scrub import DeepPlace, ScrubReport, ScrubWish
from tierlog.offload.driver import SOFTWARE
from tierlog.offload.scrub import Scrubber, ScrubLimits
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


async def plant(
    world: World, uuid: int, ledger: int = 900, *, cluster_id: UUID = CLUSTER, stream: str = "logs"
) -> str:
    """Put a data and an index object that nobody names into the bucket."""
    found = keys.object_keys("", UUID(int=uuid), LedgerId(ledger))
    store = world.bucket.connect()
    for key in (found.data, found.index):
        await store.put(key, b"bytes", metadata=metadata(cluster_id, stream))
    return found.data


async def plant_upload(world: World, key: str) -> str:
    """Open an upload that nobody will complete."""
    return await world.bucket.connect().create_upload(key, metadata=metadata(), content_type="")


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
    catalog = world.catalog(faults)

    async def check_tier1(context: OffloadContext) -> None:
        if await catalog.ledgers.get(context.ledger_id) is None or damaged_locally:
            raise CorruptError("the local copy is not whole")

    return Scrubber(
        objects=objects or world.bucket.connect(faults or no_faults()),
        catalog=catalog,
        manifests=world.manifests(faults),
        offloader=world.offloader(faults),
        check_tier1=check_tier1,
        cluster_id=CLUSTER,
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
    leading: bool = True,
    faults: Faults | None = None,
) -> ScrubRunner:
    """Return what runs scrubs of the world."""
    return ScrubRunner(
        scrubber(world, faults),
        leading=lambda: leading,
        clock=world.clock,
        ids=world.ids,
        schedule=schedule or ScrubSchedule(),
    )


def kinds(report: ScrubReport) -> list[str]:
    """Return the kinds of what was found, faults alone."""
    return sorted(one.kind.value for one in report.findings)
