"""The services of Tierlog as supervised child processes beside the embedded servers.

Owns starting them with their settings in the environment, waiting for /readyz, stopping them in
order. Does not own what the settings mean (`tierlog.runtime.settings`) nor the services.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from tierlog.embedded.endpoints import ServerEndpoints
from tierlog.embedded.full_disk import why_ended
from tierlog.embedded.ports import LOOPBACK
from tierlog.embedded.process import Child, Launch, log_tail
from tierlog.embedded.server import child_environment
from tierlog.model.errors import RefusedError, RetryableError
from tierlog.ports.progress import Progress

PROBE_S_MAX: Final = 5.0
PROBE_PAUSE_S: Final = 0.1

OPEN: Final[Mapping[str, str]] = {"TIERLOG_SECURITY__MODE": "open"}
"""All of it is on the loopback interface, for whoever is on this machine."""

# Who listens for what; stopped from the last to the first, so that whoever asks goes first.
SERVICE_PORTS: Final[Mapping[str, Sequence[str]]] = {
    "ingest": ("http", "grpc", "wire"),
    "reader": ("http", "grpc"),
    "offloader": ("http",),
    "scheduler": ("http",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One service process: what to run, with which settings, and how it says that it is ready."""

    name: str
    module: str
    env: Mapping[str, str]
    ready_url: str
    start_s_max: float = 60.0
    stop_s_max: float = 40.0
    niceness: int = 0
    ports: Mapping[str, int] = field(default_factory=dict)


def server_environment(endpoints: ServerEndpoints) -> dict[str, str]:
    """Return the settings that name the four servers."""
    return {
        "TIERLOG_S3__ENDPOINT_URL": endpoints.s3_endpoint_url,
        "TIERLOG_S3__ACCESS_KEY": endpoints.s3_access_key,
        "TIERLOG_S3__SECRET_KEY": endpoints.s3_secret_key,
        "TIERLOG_S3__BUCKET": endpoints.s3_bucket,
        "TIERLOG_ZOOKEEPER__HOSTS": endpoints.zookeeper_hosts,
        "TIERLOG_KAFKA__BOOTSTRAP_SERVERS": endpoints.kafka_bootstrap,
        "TIERLOG_REDIS__URL": endpoints.redis_url,
    }


def service_spec(
    kind: str,
    *,
    ports: Mapping[str, int],
    env: Mapping[str, str],
    name: str | None = None,
    niceness: int = 0,
) -> ServiceSpec:
    """Describe one of the four services on given ports; `name` tells a second one apart."""
    section = f"TIERLOG_{kind.upper()}__LISTEN__"
    listen = {f"{section}{purpose.upper()}_PORT": str(port) for purpose, port in ports.items()}
    return ServiceSpec(
        name=name or kind,
        module=f"tierlog_{kind}.main",
        env={**OPEN, **env, f"{section}HOST": LOOPBACK, **listen},
        ready_url=f"http://{LOOPBACK}:{ports['http']}/readyz",
        ports=dict(ports),
        niceness=niceness,
    )


class EmbeddedServices:
    """Starts, watches and stops service processes."""

    def __init__(
        self, *, run_dir: Path, log_dir: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._environ = child_environment(os.environ if environ is None else environ)
        self._specs: dict[str, ServiceSpec] = {}
        self._children: dict[str, Child] = {}

    def __repr__(self) -> str:
        return f"<EmbeddedServices {list(self._children.values())}>"

    @property
    def specs(self) -> Mapping[str, ServiceSpec]:
        """What was started, by name."""
        return dict(self._specs)

    @property
    def children(self) -> Mapping[str, Child]:
        """The present processes, by name."""
        return dict(self._children)

    def pid(self, name: str) -> int:
        """Return the process id of a service's present child."""
        return self._children[name].pid

    def log(self, name: str) -> Path:
        """Return the log file of a service."""
        return self._log_dir / f"{name}.log"

    async def start(self, specs: Sequence[ServiceSpec], progress: Progress | None = None) -> None:
        """Start services side by side and return when all are ready; on failure none is left."""
        done = 0

        async def start_one(spec: ServiceSpec) -> None:
            nonlocal done
            self._specs[spec.name] = spec
            await self._launch(spec)
            done += 1
            if progress is not None:
                progress(f"{spec.name} is ready ({_where(spec)})", done, len(specs))

        try:
            async with asyncio.TaskGroup() as group:
                for spec in specs:
                    group.create_task(start_one(spec))
        except BaseException as error:
            await self.stop()
            if isinstance(error, BaseExceptionGroup) and isinstance(
                first := error.exceptions[0], RetryableError | RefusedError
            ):
                raise first from error
            raise

    async def stop(self) -> None:
        """Stop all, one after the other, the last one first."""
        for name in reversed(self._in_order()):
            child = self._children.pop(name)
            await child.stop(deadline_s=self._specs[name].stop_s_max)

    async def add(self, spec: ServiceSpec, progress: Progress | None = None) -> None:
        """Start one more service, and return when it is ready; on failure it is not left."""
        self._specs[spec.name] = spec
        try:
            await self._launch(spec)
        except BaseException:
            if (child := self._children.pop(spec.name, None)) is not None:
                child.kill()
            raise
        if progress is not None:
            progress(f"{spec.name} is ready ({_where(spec)})", 1, 1)

    def forget(self, name: str) -> None:
        """Take a service that has ended, for good, from the list."""
        assert not self._children[name].running, "kill it first"
        del self._children[name], self._specs[name]

    async def restart(self, name: str, *, env: Mapping[str, str] | None = None) -> None:
        """Start one again on the same ports, stopping it first.

        `env` changes settings until the next restart, which begins with its own again.
        """
        spec = self._specs[name]
        await self._children[name].stop(deadline_s=spec.stop_s_max)
        if env is not None:
            spec = replace(spec, env={**spec.env, **env})
        await self._launch(spec)

    def kill(self, name: str) -> None:
        """SIGKILL one service; restart() brings it back."""
        self._children[name].kill()

    def _in_order(self) -> list[str]:
        order = list(SERVICE_PORTS)
        kinds = {name: spec.module for name, spec in self._specs.items()}

        def rank(name: str) -> int:
            kind = kinds[name].removeprefix("tierlog_").removesuffix(".main")
            return order.index(kind) if kind in order else len(order)

        return sorted(self._children, key=rank)

    async def _launch(self, spec: ServiceSpec) -> None:
        log = self.log(spec.name)
        environ = {**self._environ, **spec.env, "PYTHONUNBUFFERED": "1"}
        argv = [sys.executable, "-P", "-m", spec.module]
        launch = Launch(argv=argv, cwd=Path.cwd(), log=log, env=environ, niceness=spec.niceness)
        child = Child.spawn(spec.name, launch, run_dir=self._run_dir)
        self._children[spec.name] = child
        missing = dict[str, str]()
        try:
            async with asyncio.timeout(spec.start_s_max):
                await _until_ready(spec, child, missing)
        except TimeoutError:
            waits = f", and waits for {', '.join(missing)}" if missing else _last_words(log, child)
            remedies = [f"{one.rstrip('.')}." for one in missing.values() if one]
            raise RetryableError(
                f"{spec.name} was not ready after {spec.start_s_max:.0f} s{waits}",
                remedy=" ".join([*remedies, f"{spec.ready_url} says more, and its log {log}"]),
            ) from None
        if not child.running:
            tail = log_tail(log, since=child.log_from)
            what = f"{spec.name} ended with {child.exit_code} while starting: {tail[-600:]}"
            raise why_ended(what, child, log=log, folder=self._log_dir)


def _last_words(log: Path, child: Child) -> str:
    """Say what it did last: it never told what it waits for."""
    said = log_tail(log, since=child.log_from)[-600:]
    return f", and wrote last: {said}" if said else ", and has written nothing to its log"


def _where(spec: ServiceSpec) -> str:
    return ", ".join(f"{purpose} {port}" for purpose, port in spec.ports.items())


async def _until_ready(spec: ServiceSpec, child: Child, missing: dict[str, str]) -> None:
    """Ask /readyz until it answers 200, or the process has ended.

    In ``missing`` is what it waits for by then, each with what to do.
    """
    timeout = aiohttp.ClientTimeout(total=PROBE_S_MAX)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while child.running:
            try:
                async with session.get(spec.ready_url, params={"verbose": ""}) as answer:
                    if answer.status == 200:
                        return
                    told = orjson.loads(await answer.read())
                missing.clear()
                missing.update(_missing(told))
            except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError):
                pass
            await asyncio.sleep(PROBE_PAUSE_S)


def _missing(told: Mapping[str, Any]) -> dict[str, str]:
    remedies = told.get("remedies") or {}
    checks = told.get("checks") or {}
    return {name: remedies.get(name, "") for name, there in checks.items() if not there}
