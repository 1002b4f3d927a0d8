"""A whole Tierlog on one machine: the four servers, and the four services on top of them.

Owns the order: servers, then services; stopping goes the other way round. The ingest service may
be several nodes (``nodes``): ``services.kill("ingest-2")`` and ``services.restart`` break and mend
one of them, ``lose_node`` takes one and its disk away for good, ``add_node`` starts another.
"""

import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tierlog.embedded.endpoints import ExternalServers, ServerEndpoints
from tierlog.embedded.full_disk import why_ended
from tierlog.embedded.nodes import (
    KIND,
    NodePlace,
    give_number,
    last_number,
    numbers_in,
    places_of,
    quorum_environment,
)
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
from tierlog.model.errors import RetryableError
from tierlog.model.quorums import ACKNOWLEDGING
from tierlog.ports.progress import Progress


class EmbeddedCluster:
    """Starts and stops everything under one state directory."""

    def __init__(
        self,
        state_dir: Path,
        *,
        nodes: int | None = 1,
        external: ExternalServers | None = None,
        environ: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
        background_niceness: int = 0,
    ) -> None:
        """Take more TIERLOG_… variables for every service as `settings`.

        `nodes` None: as many ingest nodes as the state directory has. `background_niceness`: so
        much S3 and all services but ingest give way to appends.
        """
        self.servers = EmbeddedServers(
            state_dir,
            external=external,
            environ=environ,
            background_niceness=background_niceness,
        )
        self._background_niceness = background_niceness
        self.services = EmbeddedServices(
            run_dir=self.servers.run_dir, log_dir=self.servers.log_dir, environ=environ
        )
        known, last = numbers_in(self._data), last_number(self.servers.state_dir)
        self.places = places_of(nodes, known, last=last)
        """The ingest nodes, in the order of their numbers."""
        self._settings = dict(settings or {})
        given = {**(os.environ if environ is None else environ), **self._settings}
        self._quorums = quorum_environment(len(self.places), given)

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

    @property
    def _data(self) -> Path:
        return self.servers.state_dir / "data"

    @property
    def nodes(self) -> list[str]:
        """The process names of the ingest nodes: `ingest`, or `ingest-1`, `ingest-2` and so on."""
        return [place.process for place in self.places]

    def address(self, service: str, purpose: str) -> str:
        """Return host:port of a service that runs; purposes: http, grpc, wire.

        `ingest` is the first node, whatever its process is called.
        """
        name = self.nodes[0] if service == KIND else service
        return f"{LOOPBACK}:{self.services.specs[name].ports[purpose]}"

    def node_addresses(self, purpose: str) -> list[str]:
        """Return host:port of every ingest node."""
        return [self.address(name, purpose) for name in self.nodes]

    def data_dir(self, node: str) -> Path:
        """Return the folder of an ingest node, by its process name."""
        return self._data / self._place(node).folder

    def _place(self, node: str) -> NodePlace:
        return next(place for place in self.places if place.process == node)

    async def start(self, progress: Progress | None = None) -> None:
        """Start all; when this raises, nothing is left running."""
        await self.servers.start(progress)
        for place in self.places:
            give_number(self.servers.state_dir, place)
        try:
            await self.services.start(self.specs(), progress)
        except BaseException:
            await self.stop()
            raise

    def specs(self, kinds: Collection[str] = tuple(SERVICE_PORTS)) -> list[ServiceSpec]:
        """Describe the services of these kinds: all ingest nodes, and one of each other kind."""
        nodes = [self.node_spec(place) for place in self.places if KIND in kinds]
        return [*nodes, *(self.spec(kind) for kind in kinds if kind != KIND)]

    def spec(self, kind: str, *, name: str | None = None) -> ServiceSpec:
        """Describe one more service process of a kind, on ports of its own; ingest: the first."""
        if kind == KIND:
            assert name is None, "ingest nodes have names of their own"
            return self.node_spec(self.places[0])
        return self._spec(kind, name or kind, {})

    def node_spec(self, place: NodePlace) -> ServiceSpec:
        """Describe an ingest node."""
        env = {"TIERLOG_INGEST__DATA_DIR": str(self._data / place.folder), **place.env}
        return self._spec(KIND, place.process, env)

    def _spec(self, kind: str, name: str, own: Mapping[str, str]) -> ServiceSpec:
        env = {
            **server_environment(self.servers.endpoints),
            **self._quorums,
            **self._settings,
            "TIERLOG_STATE_DIR": str(self.servers.state_dir),
            **own,
        }
        ports = self.servers.take_ports(name, SERVICE_PORTS[kind])
        niceness = 0 if kind == KIND else self._background_niceness
        return service_spec(kind, ports=ports, env=env, name=name, niceness=niceness)

    async def add_node(self, progress: Progress | None = None) -> str:
        """Start one more ingest node, with a number that no other had; return its process name."""
        place = NodePlace(number=last_number(self.servers.state_dir) + 1)
        give_number(self.servers.state_dir, place)
        spec = self.node_spec(place)
        await self.services.add(spec, progress)
        self.places.append(place)
        return place.process

    def lose_node(self, node: str) -> None:
        """SIGKILL an ingest node and remove its disk: it never comes back."""
        place, folder = self._place(node), self.data_dir(node)
        self.services.kill(node)
        self.services.forget(node)
        self.places.remove(place)
        shutil.rmtree(folder)

    async def stop(self) -> None:
        """Stop the services, then the servers."""
        try:
            await self.services.stop()
        finally:
            await self.servers.stop()

    async def wait_failed(self, progress: Progress | None = None) -> RetryableError:
        """Wait until a process ends that the others can't do without; return why, and the remedy.

        Of three ingest nodes and more, as many may end as leave an ack quorum. Not beside
        restart().
        """
        gone: set[str] = set()
        while True:
            children = {**self.servers.children, **self.services.children}
            name = await first_end({one: children[one] for one in children if one not in gone})
            error = why_ended(
                f"{name} ended with {children[name].exit_code}",
                children[name],
                log=self.servers.log_dir / f"{name}.log",
                folder=self.servers.state_dir,
            )
            gone.add(name)
            left = [one for one in self.nodes if one not in gone]
            if name not in self.nodes or len(left) < ACKNOWLEDGING:
                return error
            if progress is not None:
                progress(f"{error}; {', '.join(left)} go on without it", len(left), None)
