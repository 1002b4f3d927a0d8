"""The four servers as supervised child processes under one state directory.

Owns the state directory: its lock, its ports, which child runs in it. Does not own what a server
is (`server` and its kinds) nor the four services (`services`).

    <state>/lock        held by flock while a supervisor lives; names its pid
    <state>/ports.json  the ports of the last start, taken again when they are free
    <state>/run/*.pid   the children, to be ended at the next start after a kill -9
    <state>/logs/       what each child prints
    <state>/data/       what each server keeps

Invariants:
    * One supervisor per state directory.
    * When start() raises or stop() returns, no child is left.
    * A server keeps its ports over restart(), so that its clients find it again.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from tierlog.embedded.endpoints import ExternalServers, ServerEndpoints
from tierlog.embedded.external import check_external
from tierlog.embedded.full_disk import why_ended
from tierlog.embedded.kafka import Kafka
from tierlog.embedded.ports import LOOPBACK, Ports
from tierlog.embedded.process import Child, end_leftovers, log_tail
from tierlog.embedded.redis import Redis
from tierlog.embedded.seaweedfs import ACCESS_KEY, BUCKET, SECRET_KEY, SeaweedFs
from tierlog.embedded.server import NotReadyError, Place, Server
from tierlog.embedded.zookeeper import ZooKeeper
from tierlog.model.errors import RefusedError, RetryableError
from tierlog.ports.progress import Progress

PORT_TRIES: Final = 3
PROBE_S_MAX: Final = 5.0
PROBE_PAUSE_S: Final = 0.05
PORT_TAKEN: Final = "port_taken"  # a port that was free a moment ago
PORT_TAKEN_WORDS: Final = ("address already in use", "bindexception")


@dataclass(slots=True)
class Running:
    """A server that was started, and its present child."""

    server: Server
    place: Place
    child: Child


class EmbeddedServers:
    """Starts, watches and stops those of the four servers that are not external."""

    def __init__(
        self,
        state_dir: Path,
        *,
        external: ExternalServers | None = None,
        environ: Mapping[str, str] | None = None,
        background_niceness: int = 0,
    ) -> None:
        """Take how much S3 gives way to other processes; the other servers don't."""
        self.state_dir = state_dir.absolute()
        self.external = external or ExternalServers()
        self.environ = dict(os.environ if environ is None else environ)
        self._servers: Sequence[Server] = [
            server
            for server, given in (
                (ZooKeeper(), self.external.zookeeper),
                (Kafka(), self.external.kafka),
                (SeaweedFs(), self.external.s3),
                (Redis(), self.external.redis),
            )
            if given is None
        ]
        self._niceness = {SeaweedFs.name: background_niceness}
        self._running: dict[str, Running] = {}
        self._lock: IO[str] | None = None
        self._ports: Ports | None = None

    def __repr__(self) -> str:
        children = [running.child for running in self._running.values()]
        return f"<EmbeddedServers {self.state_dir} {children}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def run_dir(self) -> Path:
        """Folder of the pid files."""
        return self.state_dir / "run"

    @property
    def log_dir(self) -> Path:
        """Folder of the logs, one for each child."""
        return self.state_dir / "logs"

    @property
    def endpoints(self) -> ServerEndpoints:
        """The addresses of all four servers, ours and external ones."""
        external = self.external
        s3 = external.s3
        return ServerEndpoints(
            s3_endpoint_url=s3.endpoint_url if s3 else f"http://{self._address('s3', 's3')}",
            s3_access_key=s3.access_key if s3 else ACCESS_KEY,
            s3_secret_key=s3.secret_key if s3 else SECRET_KEY,
            s3_bucket=s3.bucket if s3 else BUCKET,
            zookeeper_hosts=external.zookeeper or self._address("zookeeper", "client"),
            kafka_bootstrap=external.kafka or self._address("kafka", "broker"),
            redis_url=external.redis or f"redis://{self._address('redis', 'redis')}/0",
        )

    @property
    def children(self) -> Mapping[str, Child]:
        """The present processes, by name."""
        return {name: running.child for name, running in self._running.items()}

    def pid(self, name: str) -> int:
        """Return the process id of a server's present child."""
        return self._running[name].child.pid

    def take_ports(self, owner: str, purposes: Sequence[str]) -> Mapping[str, int]:
        """Free ports for a service that runs beside the servers; the same ones next time."""
        assert self._ports is not None, "start() first"
        return self._ports.take(owner, purposes)

    async def start(self, progress: Progress | None = None) -> None:
        """Start all and return when each does its work; on failure nothing is left running."""
        tell = progress or _say_nothing
        self._prepare_state()
        self._lock = lock_state(self.state_dir / "lock")
        try:
            for name in await end_leftovers(self.run_dir):
                tell(f"ended a {name} that an earlier run left", 0, None)
            await check_external(self.external)
            self._ports = Ports(self.state_dir / "ports.json")
            done = _Counter(len(self._servers), tell)
            async with asyncio.TaskGroup() as group:
                for server in self._servers:
                    group.create_task(self._start(server, done))
        except BaseException as error:
            await self.stop()
            if isinstance(error, BaseExceptionGroup) and isinstance(
                first := error.exceptions[0], RetryableError | RefusedError
            ):
                raise first from error
            raise

    async def stop(self) -> None:
        """Stop all (SIGTERM, then SIGKILL at the deadline) and release the state directory."""
        try:
            async with asyncio.TaskGroup() as group:
                for running in self._running.values():
                    group.create_task(self._stop(running))
        finally:
            self._running.clear()
            if self._lock is not None:
                self._lock.close()  # releases the flock
                self._lock = None

    async def restart(self, name: str, *, empty: bool = False) -> None:
        """Start one server again on the same ports, stopping it first; `empty`: without data."""
        running = self._running[name]
        await self._stop(running)
        if empty:
            shutil.rmtree(running.place.data)
            running.place.data.mkdir()
        await self._launch(running.server, running.place, _say_nothing)

    def kill(self, name: str) -> None:
        """SIGKILL one server; restart() brings it back."""
        self._running[name].child.kill()

    def _address(self, name: str, purpose: str) -> str:
        return f"{LOOPBACK}:{self._running[name].place.ports[purpose]}"

    def _prepare_state(self) -> None:
        try:
            for folder in (self.run_dir, self.log_dir, self.state_dir / "data"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RefusedError(
                f"the state directory {self.state_dir} cannot be written: {error.strerror}",
                remedy="Name another one, or mend its permissions",
            ) from error

    async def _start(self, server: Server, done: "_Counter") -> None:
        """Start one server, with other ports when somebody was quicker on one of them."""
        assert self._ports is not None
        data = self.state_dir / "data" / server.name
        data.mkdir(exist_ok=True)
        log = self.log_dir / f"{server.name}.log"
        for tries_left in reversed(range(PORT_TRIES)):
            ports = self._ports.take(server.name, server.port_purposes, usable=server.port_usable)
            place = Place(data=data, log=log, ports=ports, environ=self.environ)
            try:
                await self._launch(server, place, done.tell)
            except RetryableError as error:
                if PORT_TAKEN not in error.details or tries_left == 0:
                    raise
                self._ports.forget(server.name)
            else:
                done.add(f"{server.name} is ready on port {ports[server.port_purposes[0]]}")
                return

    async def _launch(self, server: Server, place: Place, tell: Progress) -> None:
        launch = replace(
            await server.prepare(place, tell), niceness=self._niceness.get(server.name, 0)
        )
        child = Child.spawn(server.name, launch, run_dir=self.run_dir)
        self._running[server.name] = Running(server, place, child)
        try:
            async with asyncio.timeout(server.start_s_max):
                await until_ready(server, place, child)
        except TimeoutError:
            raise RetryableError(
                f"{server.name} was not ready after {server.start_s_max:.0f} s",
                remedy=f"Look into its log, {place.log}",
            ) from None
        except ChildEndedError:
            tail = log_tail(place.log, since=child.log_from)
            what = f"{server.name} ended with {child.exit_code} while starting: {tail[-400:]}"
            error = why_ended(what, child, log=place.log, folder=place.data)
            if any(word in tail.lower() for word in PORT_TAKEN_WORDS):
                error.details = {**error.details, PORT_TAKEN: server.name}
            raise error from None

    async def _stop(self, running: Running) -> None:
        await running.child.stop(deadline_s=running.server.stop_s_max)
        running.server.clean_up(running.place)


class ChildEndedError(Exception):
    """The child ended before it was ready."""


class _Counter:
    """Counts servers that are ready, for progress."""

    def __init__(self, total: int, tell: Progress) -> None:
        self.tell = tell
        self._total = total
        self._done = 0

    def add(self, what: str) -> None:
        self._done += 1
        self.tell(what, self._done, self._total)


def _say_nothing(what: str, done: int, total: int | None) -> None:
    pass


async def until_ready(server: Server, place: Place, child: Child) -> None:
    """Probe until the server does its work; raise when its process ends first."""
    while True:
        ready = False
        with contextlib.suppress(OSError, EOFError, NotReadyError, TimeoutError):
            async with asyncio.timeout(PROBE_S_MAX):
                await server.check_ready(place)
            ready = True
        if not child.running:  # also when somebody else's server answered on its port
            raise ChildEndedError
        if ready:
            return
        await asyncio.sleep(PROBE_PAUSE_S)


def lock_state(path: Path) -> IO[str]:
    """Take the lock of a state directory, or say who has it."""
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise RetryableError(
            f"the state directory {path.parent} is in use by process {holder}",
            remedy=f"Stop that one (kill {holder}), or name another state directory",
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
