"""A whole Tierlog on one machine: the four servers, and the four services on top of them.

Owns the order: servers, then services; stopping goes the other way round.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tierlog.embedded.endpoints import ExternalServers, ServerEndpoints
from tierlog.embedded.ports import LOOPBACK
from tierlog.embedded.process import first_end
from tierlog.embedded.services import (
    SERVICE_PORTS,
    EmbeddedServices,
    ServiceSpec,
    server_environment,
    service_spec,
)
from tierlog.embedded.supervisor import EmbeddedServers
from tierlog.ports.progress import Progress


class EmbeddedCluster:
    """Starts and stops everything under one state directory."""

    def __init__(
        self,
        state_dir: Path,
        *,
        external: ExternalServers | None = None,
        environ: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Take more TIERLOG_… variables for every service as `settings`."""
        self.servers = EmbeddedServers(state_dir, external=external, environ=environ)
        self.services = EmbeddedServices(
            run_dir=self.servers.run_dir, log_dir=self.servers.log_dir, environ=environ
        )
        self._settings = dict(settings or {})

    def __repr__(self) -> str:
        return f"<EmbeddedCluster {self.servers} {self.services}>"

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
    def endpoints(self) -> ServerEndpoints:
        """The addresses of the four servers."""
        return self.servers.endpoints

    def address(self, service: str, purpose: str) -> str:
        """Return host:port of a service that runs; purposes: http, grpc, wire."""
        return f"{LOOPBACK}:{self.services.specs[service].ports[purpose]}"

    async def start(self, progress: Progress | None = None) -> None:
        """Start all; when this raises, nothing is left running."""
        await self.servers.start(progress)
        try:
            await self.services.start([self.spec(kind) for kind in SERVICE_PORTS], progress)
        except BaseException:
            await self.stop()
            raise

    def spec(self, kind: str, *, name: str | None = None) -> ServiceSpec:
        """Describe one more service process of a kind, on ports of its own."""
        label = name or kind
        env = {
            **server_environment(self.servers.endpoints),
            **self._settings,
            "TIERLOG_STATE_DIR": str(self.servers.state_dir),
        }
        if kind == "ingest":
            env["TIERLOG_INGEST__DATA_DIR"] = str(self.servers.state_dir / "data" / label)
        ports = self.servers.take_ports(label, SERVICE_PORTS[kind])
        return service_spec(kind, ports=ports, env=env, name=name)

    async def stop(self) -> None:
        """Stop the services, then the servers."""
        try:
            await self.services.stop()
        finally:
            await self.servers.stop()

    async def wait_failed(self) -> str:
        """Wait until any process ends; return what to tell the user. Not beside restart()."""
        children = {**self.servers.children, **self.services.children}
        name = await first_end(children)
        log = self.servers.log_dir / f"{name}.log"
        return f"{name} ended with {children[name].exit_code}; its log is {log}"
