"""What the demo stands on: a whole cluster in a folder of its own, and a look behind the scenes.

Owns starting, killing and restarting the cluster's processes, and reading the metadata and the
bucket beside the services, as an observer. Does not own the job.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tierlog.cli.output import say
from tierlog.model.errors import RetryableError

if TYPE_CHECKING:
    from tierlog.catalog import Catalog
    from tierlog.client import Client
    from tierlog.embedded.cluster import EmbeddedCluster
    from tierlog.ledger.directory import NodeDirectory
    from tierlog.model.ids import LedgerId, NodeId, StreamName
    from tierlog.model.offload import OffloadContext
    from tierlog.model.stream import ListedLedger
    from tierlog.ports.objects import ObjectStore
    from tierlog.runtime.settings import Settings

POLL_S: Final = 0.1

# Everything that takes hours in earnest takes seconds here.
QUICK: Final = {
    "TIERLOG_SCHEDULER__INTERVAL_S": "0.5",
    "TIERLOG_SCHEDULER__REQUEST_AGAIN_S": "3",
    "TIERLOG_SCHEDULER__SWEEP_AGAIN_S": "2",
    # No sweep is the last before the longest request is over: 14 s with 64 MiB.
    "TIERLOG_S3__REQUEST_S_MAX": "10",
    "TIERLOG_S3__BYTES_PER_S_MIN": str(16 * 2**20),
    "TIERLOG_INGEST__STORAGE__GC_INTERVAL_S": "1",
    "TIERLOG_INGEST__STORAGE__GC_QUARANTINE_S": "1",
    "TIERLOG_INGEST__STORAGE__GC_SHARE_MAX": "1",
    "TIERLOG_INGEST__REPLICATION__INTERVAL_S": "0.5",
    "TIERLOG_INGEST__REPLICATION__SCAN_INTERVAL_S": "1",
    "TIERLOG_INGEST__REPLICATION__LOST_NODE_DELAY_S": "2",
    "TIERLOG_INGEST__REPLICATION__GRACE_S": "2",
    "TIERLOG_INGEST__REPLICATION__BACKOFF_S_FIRST": "0.5",
    "TIERLOG_INGEST__REPLICATION__BACKOFF_S_MAX": "2",
}


class Telling:
    """Says what happens, with the seconds since the beginning, on standard error."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._begun_s = time.monotonic()  # noqa: TID251 - what people see is real time

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begun_s  # noqa: TID251

    def __call__(self, text: str) -> None:
        say(f"[{self.elapsed_s:6.1f} s] {text}", quiet=self._quiet)


@dataclass(frozen=True, slots=True)
class Stage:
    """A running cluster, a client of it, and an observer's view."""

    cluster: "EmbeddedCluster"
    client: "Client"
    catalog: "Catalog"
    objects: "ObjectStore"
    nodes: "NodeDirectory[Any]"
    tell: Telling

    async def ledgers(self, stream: "StreamName") -> "list[ListedLedger]":
        """Return the stream's list of ledgers."""
        return list((await self.catalog.streams.snapshot(stream)).ledgers)

    async def contexts(self, stream: "StreamName") -> "list[OffloadContext]":
        """Return the offload contexts of all ledgers of the stream."""
        found = [
            await self.catalog.contexts.get(one.ledger_id) for one in await self.ledgers(stream)
        ]
        return [one for one in found if one is not None]

    def _check_alive(self) -> None:
        """Raise when a process ended that nobody killed."""
        for name, child in self.cluster.services.children.items():
            if not child.running:
                raise RetryableError(
                    f"{name} ended with {child.exit_code}",
                    remedy=f"Run with --keep and look into {self.cluster.services.log(name)}",
                )

    async def ledgers_on_disk(self) -> "set[LedgerId]":
        """Return the ledgers that the storage nodes hold entries of."""
        held: set[LedgerId] = set()
        live = await self.catalog.nodes.live()
        if not live:
            raise RetryableError("no storage node is live", remedy="Look into ingest's log")
        for node_id in live:
            held |= set(await (await self.nodes.client(node_id)).list_ledgers())
        return held

    def bytes_on_disk(self) -> int:
        """Return how much ingest keeps on the local disk, whatever it is."""
        folders = [self.cluster.data_dir(node) for node in self.cluster.nodes]
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files)

    def node_id(self, process: str) -> "NodeId":
        """Return the id of an ingest node, by its process name."""
        from tierlog.model.ids import NodeId

        env = self.cluster.services.specs[process].env
        return NodeId(env.get("TIERLOG_INGEST__NODE_ID", "node-1"))

    async def until(
        self, what: str, condition: Callable[[], Awaitable[bool]], *, timeout_s: float
    ) -> None:
        """Wait until ``condition`` holds, or say that it never did."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await condition():
                    self._check_alive()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise RetryableError(
                f"{what}: not within {timeout_s:.0f} s",
                remedy=f"Run with --keep and look into {self.cluster.servers.log_dir}",
            ) from None


@contextlib.asynccontextmanager
async def open_stage(state_dir: Path, tell: Telling, *, nodes: int = 1) -> AsyncIterator[Stage]:
    """Start everything under ``state_dir``; at the end no process is left."""
    from tierlog.client import open_client
    from tierlog.embedded.cluster import EmbeddedCluster
    from tierlog.wiring.build import open_catalog, open_objects
    from tierlog.wiring.tier1 import open_storage_controls

    cluster = EmbeddedCluster(state_dir, nodes=nodes, settings=QUICK)
    services = "the four services" if nodes == 1 else f"the four services, ingest of {nodes} nodes"
    tell(f"starting S3, ZooKeeper, Kafka, Redis and {services}")
    await cluster.start(lambda what, _done, _total: tell(what))
    try:
        settings = settings_of(cluster, state_dir)
        async with (
            open_client(settings) as client,
            open_catalog(settings) as catalog,
            open_objects(settings) as objects,
            open_storage_controls(catalog) as directory,
        ):
            yield Stage(cluster, client, catalog, objects, directory, tell)
    finally:
        tell("stopping everything")
        children = [*cluster.servers.children.values(), *cluster.services.children.values()]
        await cluster.stop()
        left = [str(child) for child in children if child.running]
        if left:
            raise RetryableError(
                f"processes are left: {', '.join(left)}", remedy="End them by their process ids"
            )


def settings_of(cluster: "EmbeddedCluster", state_dir: Path) -> "Settings":
    """Return the settings of a client, and of an observer, of the cluster."""
    from tierlog.runtime.settings import ClientSettings, S3Settings, Settings, ZooKeeperSettings

    found = cluster.endpoints
    return Settings(
        state_dir=state_dir,
        s3=S3Settings.model_validate(
            {
                "endpoint_url": found.s3_endpoint_url,
                "access_key": found.s3_access_key,
                "secret_key": found.s3_secret_key,
                "bucket": found.s3_bucket,
            }
        ),
        zookeeper=ZooKeeperSettings(hosts=found.zookeeper_hosts),
        client=ClientSettings(
            ingest_address=",".join(cluster.node_addresses("grpc")),
            reader_http_address=cluster.address("reader", "http"),
            scheduler_http_address=cluster.address("scheduler", "http"),
            timeout_s=60.0,
        ),
    )
