"""Checks of the outer systems, from where a process of Tierlog stands: each with its remedy.

Owns what is asked of ZooKeeper, Kafka, S3 and Redis, and what is a failure. Invariants:
    * Nothing of Tierlog's is changed. Of a bucket's objects only a probe is written, under a name
      of its own, and it goes again; topics are looked at.
    * Each check ends within ``ANSWER_S_MAX``; a check that isn't ok names its remedy.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tierlog.catalog import Catalog
from tierlog.model.errors import TierlogError
from tierlog.offload.cleaning import LET_LIST
from tierlog.ports.clock import Clock
from tierlog.ports.ids import Ids
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import apply_queue_topics, open_metadata, system_clock, system_ids
from tierlog.wiring.objects import open_bucket

ANSWER_S_MAX: Final = 15.0
SKEW_WARN_S: Final = 5.0
SKEW_FAIL_S: Final = 60.0
"""S3 refuses requests from 15 minutes on; orphans are judged by the store's clock."""
SLOW_S: Final = 0.5
PROBES: Final = "tierlog-doctor/"
PERMISSIONS: Final = "docs/reference/s3-permissions.md says what each process needs"


class Result(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: what, how it ended, what was seen, what to do."""

    check: str
    result: Result
    value: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.result is Result.OK or self.remedy, "who fails says what to do"

    def row(self) -> dict[str, str]:
        """Return it as commands print it."""
        return {
            "check": self.check,
            "result": self.result.value,
            "value": self.value,
            "remedy": self.remedy,
        }


def ok(check: str, value: str) -> Check:
    """Return a check that found nothing wrong."""
    return Check(check=check, result=Result.OK, value=value)


def warning(check: str, value: str, remedy: str) -> Check:
    """Return a check that found something to think about."""
    return Check(check=check, result=Result.WARNING, value=value, remedy=remedy)


def failed(check: str, value: str, remedy: str) -> Check:
    """Return a check that found something that does not work."""
    return Check(check=check, result=Result.FAILED, value=value, remedy=remedy)


async def guarded(
    check: str, remedy: str, work: Callable[[], Awaitable[list[Check]]]
) -> list[Check]:
    """Run a check; an error of its own, or no answer in time, is its failure."""
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            return await work()
    except TimeoutError:
        return [failed(check, f"no answer in {ANSWER_S_MAX:.0f} s", remedy)]
    except TierlogError as error:
        return [failed(check, error.message, error.remedy or remedy)]
    except OSError as error:
        return [failed(check, str(error) or type(error).__name__, remedy)]
    except ModuleNotFoundError as error:
        return [failed(check, f"the package {error.name} is not there", "Install tierlog[all]")]


async def check_servers(settings: Settings) -> list[Check]:
    """Look at all four, one after the other."""
    clock, ids = system_clock(), system_ids()

    async def metadata() -> list[Check]:
        async with open_metadata(settings) as store:
            catalog = Catalog.over(store, clock=clock, ids=ids)
            return await check_metadata(catalog, clock)

    async def bucket() -> list[Check]:
        async with open_bucket(settings, settings.s3.bucket) as objects:
            return await check_bucket(
                objects, clock, ids, key_prefix=settings.s3.key_prefix, bucket=settings.s3.bucket
            )

    zookeeper = f"Start ZooKeeper, or correct zookeeper.hosts ({settings.zookeeper.hosts})"
    kafka = f"Start Kafka, or correct kafka.bootstrap_servers ({settings.kafka.bootstrap_servers})"
    return [
        *await guarded("metadata", zookeeper, metadata),
        *await guarded("queue", kafka, lambda: check_queue(settings)),
        *await guarded("bucket", f"Correct the section s3; {PERMISSIONS}", bucket),
        *await guarded("cache", "Start Redis, or correct redis.url", lambda: check_cache(settings)),
    ]


async def check_metadata(catalog: Catalog, clock: Clock) -> list[Check]:
    """Ask ZooKeeper for the cluster and its nodes, and take the time."""
    began_s = clock.monotonic_s()
    cluster = await catalog.nodes.cluster()
    took_s = clock.monotonic_s() - began_s
    if cluster is None:
        remedy = "Start an ingest node, or correct the root behind zookeeper.hosts"
        return [warning("metadata", "ZooKeeper answers, and there is no cluster in it", remedy)]
    said = f"cluster {cluster.cluster_id}, answered in {took_s * 1000:.0f} ms"
    live = await catalog.nodes.live()
    nodes = f"{len(live)} live: {', '.join(sorted(live)[:10])}"
    return [
        ok("metadata", said)
        if took_s < SLOW_S
        else warning("metadata", said, "Give ZooKeeper a disk of its own, near the services"),
        ok("nodes", nodes)
        if live
        else failed("nodes", "none is live", "Start an ingest node; its log says why it ended"),
    ]


async def check_queue(settings: Settings) -> list[Check]:
    """Compare the topics with what the settings want; nothing is changed."""
    found = []
    for report in await apply_queue_topics(settings, dry_run=True):
        told = "; ".join(f"{one.what}: {one.found}, wanted {one.wanted}" for one in report.left)
        name = f"topic {report.spec.name}"
        if report.now is None:
            remedy = "Start a scheduler, or run: tierlog topics apply"
            found.append(warning(name, "is not there", remedy))
        elif report.now.leaderless:
            found.append(failed(name, told, "Bring the brokers back that have its partitions"))
        elif told:
            found.append(warning(name, told, "See: tierlog topics show; tierlog topics apply"))
        else:
            found.append(ok(name, f"{report.now.partitions} partitions"))
    return found


async def check_bucket(
    objects: ObjectStore, clock: Clock, ids: Ids, *, key_prefix: str, bucket: str
) -> list[Check]:
    """Do with a probe what services do with objects, and compare the store's clock with ours."""
    probe = _Probe(objects, f"{key_prefix}{PROBES}{ids.uuid()}")

    async def run(name: str, step: Callable[[], Awaitable[str]]) -> list[Check]:
        check = f"bucket {bucket}: {name}"
        return await guarded(check, PERMISSIONS, lambda: _done(check, step))

    # Some servers make a bucket when something is put into it.
    found = await run("look", probe.look)
    began_ms = clock.wall_ms()
    if found[0].result is Result.OK:
        found += await run("write", probe.write)
    if found[-1].result is not Result.OK:
        return found
    ended_ms = clock.wall_ms()
    for name, step in (
        ("read", probe.read),
        ("list", probe.list),
        ("upload", probe.upload),
        ("delete", probe.delete),
    ):
        found += await run(name, step)
    if probe.modified_ms is not None:
        found.append(skew("clock of the store", (began_ms + ended_ms) / 2, probe.modified_ms))
    return found


class _Probe:
    """An object, and what services do with one."""

    BODY: Final = b"a probe of tierlog doctor"

    def __init__(self, objects: ObjectStore, key: str) -> None:
        self._objects = objects
        self._key = key
        self.modified_ms: int | None = None

    async def look(self) -> str:
        if await self._objects.head(self._key) is not None:
            raise OSError("an object is there that was never written")
        return "it is there"

    async def write(self) -> str:
        await self._objects.put(self._key, self.BODY, metadata={"role": "probe"})
        return "an object was written"

    async def read(self) -> str:
        info = await self._objects.head(self._key)
        part = await self._objects.get_range(self._key, 2, 5)
        if info is None or part != self.BODY[2:7]:
            raise OSError("what was written is not what is read")
        self.modified_ms = info.modified_ms
        return "it was read back"

    async def list(self) -> str:
        async for info in self._objects.list(self._key):
            if info.key == self._key:
                return "it was listed"
        raise OSError("what was written is not listed")

    async def upload(self) -> str:
        upload_id = await self._objects.create_upload(
            self._key, metadata={}, content_type="text/plain"
        )
        try:
            listed = await self._objects.list_uploads(self._key)
        finally:
            await self._objects.abort_upload(self._key, upload_id)
        if upload_id not in {one.upload_id for one in listed}:
            raise OSError(f"an open upload is not listed. {LET_LIST}")
        return "an upload was begun, listed and aborted"

    async def delete(self) -> str:
        await self._objects.delete(self._key)
        return "it was deleted"


async def _done(check: str, step: Callable[[], Awaitable[str]]) -> list[Check]:
    return [ok(check, await step())]


def skew(check: str, own_ms: float, other_ms: float, *, resolution_s: float = 1.0) -> Check:
    """Judge how far another clock is from ours; what it says is cut to whole seconds."""
    apart_s = (other_ms - own_ms) / 1000
    beyond_s = max(0.0, abs(apart_s) - resolution_s)
    value = f"{apart_s:+.1f} s from this machine's"
    remedy = "Run NTP (chrony) on both machines"
    if beyond_s >= SKEW_FAIL_S:
        return failed(check, value, remedy)
    if beyond_s >= SKEW_WARN_S:
        return warning(check, value, remedy)
    return ok(check, value)


async def check_cache(settings: Settings) -> list[Check]:
    """Put a value into Redis and take it out again."""
    from tierlog.wiring.reader import open_cache

    if settings.redis.url is None:
        return [ok("cache", "no Redis is set; readers do without")]
    key, value = f"doctor-{system_ids().uuid()}", b"probe"
    async with open_cache(settings) as cache:
        await cache.put(key, value, ttl_s=10)
        found = await cache.get(key)
        await cache.drop(key)
    if found != value:
        remedy = "Start Redis, or correct redis.url; readers do without it, and are slower"
        return [warning("cache", "Redis does not give back what it was given", remedy)]
    return [ok("cache", "Redis gave back what it was given")]
