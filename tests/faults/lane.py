"""A corner of real servers with real processes behind proxies, and what a test does to them.

A lane has one ingest node, a scheduler and an offloader. The last two reach S3, ZooKeeper and
Kafka through proxies of their own; the node says of itself that it is on another loopback
address, where proxies are too. Appends and everything that looks go straight to the servers.

One stream lives through everything: each life seals a ledger of three blocks, which comes to tier
2 and loses its local copy, while the ledger of the life before is trimmed. In a lane that deletes
each life makes the stream anew, and nothing of it may be left.
"""

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from tests.faults import invariants
from tests.faults.invariants import Fate, Seen, Wanted
from tests.faults.proxy import FaultProxy, Judge
from tests.plugins.fix_corner import environment_of
from tests.unit.offload.world import entries_of
from tierlog.adapters.rpc.ingest import GrpcStreamControl
from tierlog.embedded.endpoints import ExternalS3, ExternalServers
from tierlog.embedded.nodes import quorum_environment
from tierlog.embedded.ports import LOOPBACK
from tierlog.embedded.services import SERVICE_PORTS, EmbeddedServices, ServiceSpec, service_spec
from tierlog.embedded.supervisor import EmbeddedServers
from tierlog.format import paths
from tierlog.format.attribute_objects import parse_attribute_key
from tierlog.format.manifest import is_manifest_key
from tierlog.model.errors import Reason, RefusedError, RetryableError, TierlogError
from tierlog.model.ids import LedgerId, NodeId, StreamName
from tierlog.model.policy import MIB, Policy
from tierlog.runtime.settings import KafkaSettings, S3Settings, Settings, ZooKeeperSettings
from tierlog.wiring.offload import OffloadParts, open_offload_parts

STREAM: Final = StreamName("faults")
STAYING: Final = StreamName("staying")
NODE: Final = NodeId("node-1")
NODE_HOST: Final = "127.0.0.2"
"""Where the node says that it is: a proxy passes everything on to where it listens."""
VICTIMS: Final = ("offloader", "scheduler")
SAFETY_S: Final = 3.0
POLICY: Final = Policy(
    offload_time_ms=0, deletion_lag_ms=1000, retention_size_bytes=1, block_size=5 * MIB
)
KEPT: Final = Policy(
    offload_time_ms=0, deletion_lag_ms=-1, retention_size_bytes=1, block_size=5 * MIB
)
UNTRIMMED: Final = Policy(offload_time_ms=0, deletion_lag_ms=-1, block_size=5 * MIB)
ENTRY_LEN: Final = 300_000
ENTRIES: Final = 36
"""10.8 MB: two whole blocks, and the beginning of a third."""
QUICK: Final = {
    "TIERLOG_SCHEDULER__INTERVAL_S": "1",
    "TIERLOG_SCHEDULER__REQUEST_AGAIN_S": "3",
    "TIERLOG_SCHEDULER__SWEEP_AGAIN_S": "2",
    # No sweep is the last before the longest request is over: 3 s with 5 MiB.
    "TIERLOG_S3__REQUEST_S_MAX": "3",
    "TIERLOG_S3__BYTES_PER_S_MIN": str(16 * MIB),
    "TIERLOG_SCHEDULER__SCRUB_INTERVAL_S": "0",
    "TIERLOG_SCHEDULER__SCRUB_SAFETY_AGE_S": str(SAFETY_S),
    "TIERLOG_INGEST__STORAGE__GC_INTERVAL_S": "0.5",
    "TIERLOG_INGEST__STORAGE__GC_QUARANTINE_S": "0.5",
    "TIERLOG_INGEST__STORAGE__GC_SHARE_MAX": "1",
}


class Lane:
    """Made by ``open_lane``."""

    def __init__(
        self,
        settings: Settings,
        services: EmbeddedServices,
        parts: OffloadParts,
        *,
        specs: Mapping[str, ServiceSpec],
        judges: Mapping[str, Judge],
        node_proxies: list[FaultProxy],
        servers: EmbeddedServers,
        logs: Path,
    ) -> None:
        self.settings = settings
        self.services = services
        self.parts = parts
        self.judges = judges
        self.take_ports = servers.take_ports
        self._specs = specs
        self._node_proxies = node_proxies
        self._servers = servers
        self._logs = logs
        self._logs_read: dict[str, int] = {}
        self._rng = random.Random(settings.s3.key_prefix)
        self._entries: dict[LedgerId, list[bytes]] = {}
        self._fates: dict[LedgerId, Fate] = {}
        self._deleted = False
        self._control = GrpcStreamControl(
            f"{LOOPBACK}:{specs['ingest'].ports['grpc']}", timeout_s=20.0
        )

    @property
    def scheduler_url(self) -> str:
        """Where the scheduler answers."""
        return f"http://{LOOPBACK}:{self._specs['scheduler'].ports['http']}"

    def count_anew(self, *, reader: str = "offloader") -> None:
        """Begin to count the requests of all processes; ``reader``: who reads the node now."""
        for judge in self.judges.values():
            judge.count_anew()
        for proxy in self._node_proxies:
            proxy.judge = self.judges[reader] if proxy.server == "node" else None

    async def create(self, policy: Policy | None) -> None:
        """Make the stream, if it has a policy, and one that is never offloaded.

        A node takes metadata without any ledger for a failure, and frees nothing then.
        """
        await self._control.create_stream(STAYING, raw=True, policy=None, exist_ok=False)
        await self._control.append(STAYING, [b"kept"])
        if policy is not None:
            await self.make(policy)

    async def make(self, policy: Policy) -> None:
        """Make the stream."""
        await self._control.create_stream(STREAM, raw=True, policy=policy, exist_ok=False)
        self._deleted = False

    async def delete(self) -> None:
        """Begin to delete the stream: nothing of it is to be left."""
        await self.parts.catalog.retention.begin_stream_deletion(STREAM)
        self._deleted = True
        self._fates = dict.fromkeys(self._fates, Fate.TRIMMED)

    async def until_uploading(self, ledger_id: LedgerId, *, seconds: float) -> None:
        """Wait until an attempt of a ledger has begun to upload."""

        async def done() -> bool:
            context = await self.parts.catalog.contexts.get(ledger_id)
            uploads = await self.parts.objects.list_uploads(self.settings.s3.key_prefix)
            return bool(uploads) or (context is not None and context.complete)

        await until(done, seconds, lambda: f"ledger {ledger_id} is not uploaded")

    async def seal(self, fate: Fate) -> LedgerId:
        """Append a ledger of three blocks and close it; those before are trimmed for it."""
        entries = [self._rng.randbytes(ENTRY_LEN) for _ in range(ENTRIES)]
        for start in range(0, ENTRIES, 6):
            await self._control.append(STREAM, entries[start : start + 6])
        await self._control.seal(STREAM)
        listed = (await self.parts.catalog.streams.snapshot(STREAM)).ledgers
        ledger_id = listed[-1].ledger_id
        assert ledger_id not in self._entries
        self._entries[ledger_id] = entries
        self._fates = dict.fromkeys(self._fates, Fate.TRIMMED) | {ledger_id: fate}
        return ledger_id

    # Breaking and mending

    def kill(self, victim: str) -> None:
        """SIGKILL."""
        self.services.kill(victim)

    async def restart(self, victim: str) -> None:
        """Start it again, on its own."""
        await self.services.restart(victim)

    def stop(self, name: str) -> None:
        """SIGSTOP."""
        self.services.children[name].signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self.services.children[name].signal(signal.SIGCONT)

    async def wipe(self) -> None:
        """Have Kafka come back without anything, for all lanes that have the same."""
        self._servers.kill("kafka")
        await self._servers.restart("kafka", empty=True)

    @contextlib.asynccontextmanager
    async def peer(self, victim: str, ports: Mapping[str, int]) -> AsyncIterator[None]:
        """Run a second process of a kind, without proxies."""
        name = f"{victim}-2"
        env = {**self._specs[victim].env, **environment_of(self.settings)}
        await self.services.add(service_spec(victim, ports=ports, env=env, name=name))
        try:
            yield
        finally:
            self.services.kill(name)
            await self.services.children[name].wait()
            self.services.forget(name)

    # Looking

    async def seen(self, *, read: bool = False) -> Seen:
        """Return what there is, asked of the servers themselves."""
        catalog, objects = self.parts.catalog, self.parts.objects
        contexts = {}
        for ledger_id in self._fates:
            context = await catalog.contexts.get(ledger_id)
            if context is not None:
                contexts[ledger_id] = context
        prefix = self.settings.s3.key_prefix
        keys = [one.key async for one in objects.list(prefix)]
        node = await self.parts.nodes.client(NODE)
        copies: dict[LedgerId, list[bytes]] = {}
        for ledger_id, context in contexts.items() if read else ():
            assert context.uuid is not None
            handle = await self.parts.offloader.read_offloaded(
                ledger_id, context.uuid, context.location, copy=context.copy
            )
            copies[ledger_id] = await entries_of(handle)
        return Seen(
            contexts=contexts,
            keys=[
                key
                for key in keys
                if not is_manifest_key(prefix, key) and parse_attribute_key(prefix, key) is None
            ],
            uploads=[one.key for one in await objects.list_uploads(prefix)],
            held=set(await node.list_ledgers()) & self._fates.keys(),
            deleting=await self._deleting(),
            read=copies,
        )

    async def _deleting(self) -> Collection[LedgerId]:
        try:
            return (await self.parts.catalog.streams.snapshot(STREAM)).stream.deleting
        except RefusedError as error:
            if self._deleted and error.reason is Reason.STREAM_NOT_FOUND:
                return ()
            raise

    async def _left_of_stream(self) -> list[str]:
        """Return what the metadata still have of a stream that is deleted; see ``seen`` too."""
        places = [
            paths.stream_path(STREAM),
            paths.pages_path(STREAM),
            paths.attributes_path(STREAM),
        ]
        for ledger_id in self._fates:
            places += [paths.ledger_path(ledger_id), paths.context_path(ledger_id)]
            places.append(paths.ledger_lock_path(ledger_id))
        store = self.parts.catalog.store
        return [f"not deleted: {one}" for one in places if await store.get(one) is not None]

    @property
    def wanted(self) -> Wanted:
        """What there should be."""
        prefix = self.settings.s3.key_prefix
        return Wanted(fates=self._fates, entries=self._entries, key_prefix=prefix)

    async def until_complete(self, ledger_id: LedgerId, *, seconds: float) -> float:
        """Wait until a ledger's copy is complete; return how long it took."""
        begun_s = asyncio.get_running_loop().time()

        async def done() -> bool:
            context = await self.parts.catalog.contexts.get(ledger_id)
            return context is not None and context.complete

        await until(done, seconds, lambda: f"ledger {ledger_id} is not complete")
        return asyncio.get_running_loop().time() - begun_s

    async def until_rest(self, *, seconds: float = 60.0) -> None:
        """Wait until everything is as it should be, then read it back; raise what is wrong."""
        wrong: list[str] = []

        async def done() -> bool:
            wrong[:] = invariants.wrong_at_rest(await self.seen(), self.wanted)
            if self._deleted:
                wrong.extend(await self._left_of_stream())
            return not wrong

        await until(done, seconds, lambda: "\n".join(wrong))
        wrong[:] = invariants.wrong_at_rest(await self.seen(read=True), self.wanted)
        wrong += self._unforeseen()
        assert not wrong, wrong

    def _unforeseen(self) -> list[str]:
        """Return what the processes have logged of errors that nobody foresaw, since last asked."""
        found: list[str] = []
        for file in sorted(self._logs.glob("*.log")):
            with file.open("rb") as log:
                log.seek(self._logs_read.get(file.name, 0))
                lines = log.read().decode(errors="replace").splitlines()
                self._logs_read[file.name] = log.tell()
            found += [line[:1000] for line in lines if "unexpected_error" in line]
        return found

    async def close(self) -> None:
        """Give the connection back."""
        await self._control.close()


async def until(
    condition: Callable[[], Awaitable[bool]], seconds: float, why: Callable[[], str]
) -> None:
    """Wait for a condition; say why when it does not come."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(RetryableError):
                    if await condition():
                        return
                await asyncio.sleep(0.15)
    except TimeoutError:
        raise AssertionError(f"after {seconds:g} s: {why()}") from None
    except TierlogError as error:
        raise AssertionError(f"{why()}: {error}") from error


def own_queue(servers: EmbeddedServers, state_dir: Path) -> EmbeddedServers:
    """Return servers, to be started, of which Kafka is a lane's own; the others are the same."""
    where = servers.endpoints
    s3 = ExternalS3(
        endpoint_url=where.s3_endpoint_url,
        access_key=where.s3_access_key,
        secret_key=where.s3_secret_key,
        bucket=where.s3_bucket,
    )
    others = ExternalServers(s3=s3, zookeeper=where.zookeeper_hosts, redis=where.redis_url)
    return EmbeddedServers(state_dir, external=others)


def corner_of(servers: EmbeddedServers, name: str) -> Settings:
    """Return settings with a ZooKeeper root, topics, a group and a key prefix of their own."""
    where = servers.endpoints
    return Settings(
        s3=S3Settings(
            endpoint_url=where.s3_endpoint_url,
            access_key=where.s3_access_key,
            secret_key=SecretStr(where.s3_secret_key),
            bucket=where.s3_bucket,
            key_prefix=name,
        ),
        zookeeper=ZooKeeperSettings(hosts=f"{where.zookeeper_hosts}/{name}"),
        kafka=KafkaSettings(
            bootstrap_servers=where.kafka_bootstrap,
            topic_prefix=name,
            offloader_group=name,
            partitions=2,
        ),
    )


@contextlib.asynccontextmanager
async def open_lane(
    servers: EmbeddedServers, settings: Settings, folder: Path
) -> AsyncIterator[Lane]:
    """Start everything of a lane; ``settings``: a corner of its own of the servers."""
    name = settings.s3.key_prefix
    ports = {kind: servers.take_ports(f"{name}-{kind}", SERVICE_PORTS[kind]) for kind in _KINDS}
    services = EmbeddedServices(run_dir=folder, log_dir=folder)
    common = {**environment_of(settings), **quorum_environment(1, {}), **QUICK}
    async with contextlib.AsyncExitStack() as stack:
        judges = {victim: Judge() for victim in VICTIMS}
        env = {one: common | await _behind(stack, settings, judges[one]) for one in VICTIMS}
        env["ingest"] = {
            **common,
            "TIERLOG_INGEST__DATA_DIR": str(folder / "data"),
            "TIERLOG_INGEST__LISTEN__ADVERTISE_HOST": NODE_HOST,
        }
        node_proxies = [
            await stack.enter_async_context(
                FaultProxy(
                    "node" if purpose == "http" else "bytes",
                    f"{LOOPBACK}:{port}",
                    None,
                    host=NODE_HOST,
                    port=port,
                )
            )
            for purpose, port in ports["ingest"].items()
        ]
        specs = {kind: service_spec(kind, ports=ports[kind], env=env[kind]) for kind in _KINDS}
        stack.push_async_callback(services.stop)
        await services.start(list(specs.values()))
        parts = await stack.enter_async_context(open_offload_parts(settings))
        lane = Lane(
            settings,
            services,
            parts,
            specs=specs,
            judges=judges,
            node_proxies=node_proxies,
            servers=servers,
            logs=folder,
        )
        stack.push_async_callback(lane.close)
        yield lane


_KINDS: Final = ("ingest", "scheduler", "offloader")


async def _behind(
    stack: contextlib.AsyncExitStack, settings: Settings, judge: Judge
) -> dict[str, str]:
    """Start the proxies of one process; return the settings that send it there."""
    hosts, slash, root = settings.zookeeper.hosts.partition("/")
    s3 = urlsplit(settings.s3.endpoint_url or "").netloc
    made = {
        server: await stack.enter_async_context(FaultProxy(server, target, judge))
        for server, target in {
            "s3": s3,
            "zookeeper": hosts,
            "kafka": settings.kafka.bootstrap_servers,
        }.items()
    }
    return {
        "TIERLOG_S3__ENDPOINT_URL": f"http://{made['s3'].address}",
        "TIERLOG_ZOOKEEPER__HOSTS": f"{made['zookeeper'].address}{slash}{root}",
        "TIERLOG_KAFKA__BOOTSTRAP_SERVERS": made["kafka"].address,
    }
