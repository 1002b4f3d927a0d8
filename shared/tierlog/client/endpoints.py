"""Where a client finds the services: the settings, else what ``tierlog up`` wrote.

``<state_dir>/endpoints.json`` holds ``host:port`` of each service and purpose, for as long as
the services run:

    {"version": 1, "pid": …, "services": {"ingest": {"grpc": "127.0.0.1:…", …}, …}, "servers": {…}}

``ingest`` is the first ingest node. Where there are several, each has an entry of its own too:
``ingest-1``, ``ingest-2`` and so on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationError

from tierlog.format.versions import GATE, Format, current
from tierlog.model.errors import RefusedError, RetryableError
from tierlog.runtime.settings import ClientSettings, Settings

FILE_NAME: Final = "endpoints.json"


class EndpointsFile(BaseModel):
    """What ``tierlog up`` writes."""

    version: int = current(Format.ENDPOINTS_FILE)
    pid: int
    state_dir: str
    services: dict[str, dict[str, str]]
    servers: dict[str, str] = {}

    def ingest_addresses(self, purpose: str) -> list[str]:
        """Return the addresses of all ingest nodes for a purpose, the first node's first."""
        found = [self.services["ingest"][purpose]]
        for name, addresses in self.services.items():
            if name.startswith("ingest-") and addresses[purpose] not in found:
                found.append(addresses[purpose])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The three addresses that a client needs, ``host:port`` each; of ingest one or more."""

    ingest_grpc: str
    reader_http: str
    scheduler_http: str


def find_endpoints(settings: ClientSettings, state_dir: Path) -> Endpoints:
    """Return the addresses, or say where they were looked for."""
    given = Endpoints(
        ingest_grpc=settings.ingest_address,
        reader_http=settings.reader_http_address,
        scheduler_http=settings.scheduler_http_address,
    )
    if given.ingest_grpc and given.reader_http and given.scheduler_http:
        return given
    written = read_endpoints_file(state_dir / FILE_NAME)
    if written is None:
        if given.ingest_grpc or given.reader_http or given.scheduler_http:
            return given
        raise RetryableError(
            f"no services are known: {state_dir / FILE_NAME} does not exist",
            remedy="Start them with: tierlog up; or set TIERLOG_CLIENT__INGEST_ADDRESS, "
            "…READER_HTTP_ADDRESS and …SCHEDULER_HTTP_ADDRESS",
        )
    services = written.services
    return Endpoints(
        ingest_grpc=given.ingest_grpc or ",".join(written.ingest_addresses("grpc")),
        reader_http=given.reader_http or services["reader"]["http"],
        scheduler_http=given.scheduler_http or services["scheduler"]["http"],
    )


def with_zookeeper(settings: Settings) -> Settings:
    """Return the settings with the address that ``tierlog up`` wrote, where none is given."""
    if "hosts" in settings.zookeeper.model_fields_set:
        return settings
    path = settings.state_dir / FILE_NAME
    written = read_endpoints_file(path)
    if written is None:
        raise RetryableError(
            f"no cluster is known: {path} does not exist",
            remedy="Start one with: tierlog up; or set TIERLOG_ZOOKEEPER__HOSTS",
        )
    hosts = written.servers.get("zookeeper")
    if not hosts:
        return settings
    zookeeper = settings.zookeeper.model_copy(update={"hosts": hosts})
    return settings.model_copy(update={"zookeeper": zookeeper})


def with_kafka(settings: Settings) -> Settings:
    """Return the settings with the broker that ``tierlog up`` wrote, where none is given."""
    if "bootstrap_servers" in settings.kafka.model_fields_set:
        return settings
    written = read_endpoints_file(settings.state_dir / FILE_NAME)
    bootstrap = written.servers.get("kafka") if written is not None else None
    if not bootstrap:
        return settings
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": bootstrap})
    return settings.model_copy(update={"kafka": kafka})


def read_endpoints_file(path: Path) -> EndpointsFile | None:
    """Return what the file says; None when there is none."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RefusedError(
            f"{path} can't be read: {error.strerror}", remedy="Check its permissions"
        ) from error
    try:
        found = EndpointsFile.model_validate_json(text)
    except ValidationError as error:
        raise RefusedError(
            f"{path} is not what tierlog up writes", remedy="Remove it and start tierlog up again"
        ) from error
    is_known = found.version in GATE[Format.ENDPOINTS_FILE].readable
    if not is_known or not {"ingest", "reader", "scheduler"} <= set(found.services):
        raise RefusedError(
            f"{path} is of another version", remedy="Start tierlog up of this version again"
        )
    return found
