"""Checks of a whole deployment from this machine: packages, outer servers, services, clocks.

Owns what is asked of services, over HTTP and gRPC, and where all addresses come from: the settings,
else what ``tierlog up`` wrote. Outer servers are looked at by ``tierlog.wiring.checks``.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from tierlog.model.errors import RetryableError
from tierlog.runtime.calling import PLAIN, Calling
from tierlog.runtime.clusters import CLUSTER_ID
from tierlog.wiring.checks import Check, check_servers, failed, guarded, ok, skew, warning

if TYPE_CHECKING:
    import aiohttp

    from tierlog.runtime.settings import Settings

KINDS: Final = ("versions", "servers", "services")
OWN: Final = (
    "tierlog", "tierlog-ingest", "tierlog-offloader", "tierlog-reader", "tierlog-scheduler",
    "tierlog-spark",
)  # fmt: skip
LIBRARIES: Final = (
    "aioboto3", "aiohttp", "confluent-kafka", "fastapi", "grpcio", "kazoo", "numpy", "obstore",
    "opentelemetry-sdk", "protobuf", "pydantic", "pyspark", "redis", "uvicorn",
)  # fmt: skip
PYTHON_MIN: Final = (3, 11)
HTTP_S_MAX: Final = 5.0
_BUILD: Final = re.compile(r"^tierlog_build_info\{(.*)\} ", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')

Addresses = Mapping[str, Mapping[str, str]]


async def check_all(settings: "Settings", kinds: Iterable[str] = KINDS) -> list[Check]:
    """Make the checks of these kinds."""
    from tierlog.wiring.security import calling_of

    wanted, found = set(kinds), []
    if "versions" in wanted:
        found += check_versions(installed(OWN), sys.version_info[:3])
    if "servers" in wanted:
        found += await check_servers(settings)
    if "services" in wanted:
        found += await check_services(service_addresses(settings), calling_of(settings.security))
    return found


def cluster_settings() -> "Settings":
    """Return the settings, with the servers that ``tierlog up`` runs where none are set."""
    from tierlog.cli.objects import load_s3
    from tierlog.client.endpoints import FILE_NAME, read_endpoints_file, with_kafka, with_zookeeper

    settings: Settings = with_kafka(load_s3())
    try:
        settings = with_zookeeper(settings)
    except RetryableError:
        return settings  # nothing was written: the defaults are what is looked at
    written = read_endpoints_file(settings.state_dir / FILE_NAME)
    url = written.servers.get("redis") if written is not None else None
    if settings.redis.url is None and url:
        redis = settings.redis.model_copy(update={"url": url})
        settings = settings.model_copy(update={"redis": redis})
    return settings


def service_addresses(settings: "Settings") -> Addresses:
    """Return the addresses of services by name and purpose, as far as they are known here."""
    from tierlog.client.endpoints import FILE_NAME, read_endpoints_file

    client = settings.client
    given: dict[str, dict[str, str]] = {}
    for number, address in enumerate(filter(None, client.ingest_address.split(","))):
        given[f"ingest {number}" if number else "ingest"] = {"grpc": address.strip()}
    if client.reader_http_address:
        given["reader"] = {"http": client.reader_http_address}
    if client.scheduler_http_address:
        given["scheduler"] = {"http": client.scheduler_http_address}
    written = read_endpoints_file(settings.state_dir / FILE_NAME)
    return {**(written.services if written is not None else {}), **given}


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages, of those that are there."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def check_versions(packages: Mapping[str, str], python: tuple[int, ...]) -> list[Check]:
    """Compare Tierlog's own packages with each other, and Python with what they need."""
    said = ".".join(map(str, python))
    needed = ".".join(map(str, PYTHON_MIN))
    found = [
        ok("python", said)
        if python >= PYTHON_MIN
        else failed("python", said, f"Use Python {needed} or newer")
    ]
    told = ", ".join(f"{name} {number}" for name, number in packages.items())
    if len(set(packages.values())) > 1:
        return [*found, failed("packages", told, "Install all of them in one version")]
    return [*found, ok("packages", told)]


def http_session(calling: Calling) -> "aiohttp.ClientSession":
    """Return a session that calls services as this process does."""
    import aiohttp

    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=HTTP_S_MAX),
        connector=aiohttp.TCPConnector(ssl=calling.ssl_context() or True),
        headers=calling.headers(),
    )


async def check_services(services: Addresses, calling: Calling = PLAIN) -> list[Check]:
    """Ask each service whether it is ready, for its version and for its time."""
    if not services:
        remedy = "Start them with: tierlog up; or set the section client"
        return [warning("services", "none are known", remedy)]
    found: list[Check] = []
    versions: dict[str, str] = {}
    async with http_session(calling) as session:
        for name, addresses in services.items():
            remedy = f"Start {name}, or correct its address; its log says why it ended"
            if "http" in addresses:
                base = f"{calling.scheme}://{addresses['http']}"
                one = _Http(session, name, base, versions, calling)
                found += await guarded(name, remedy, one.look)
            if "grpc" in addresses:
                grpc = _Grpc(name, addresses["grpc"], calling)
                found += await guarded(f"{name} gRPC", remedy, grpc.look)
    if len(set(versions.values())) > 1:
        told = ", ".join(f"{name} {number}" for name, number in versions.items())
        found.append(
            warning(
                "versions of services", told, "Finish the upgrade: docs/how-to/upgrade-a-cluster.md"
            )
        )
    return found


class _Http:
    """A service over HTTP."""

    def __init__(
        self,
        session: "aiohttp.ClientSession",
        name: str,
        base: str,
        versions: dict[str, str],
        calling: Calling,
    ) -> None:
        self._session = session
        self._calling = calling
        self._name = name
        self._base = base
        self._versions = versions

    async def look(self) -> list[Check]:
        from tierlog.wiring.build import system_clock

        began_ms = system_clock().wall_ms()
        status, text, headers = await self._get("/readyz?verbose")
        between_ms = (began_ms + system_clock().wall_ms()) / 2
        found = [
            ok(self._name, "ready")
            if status == 200
            else failed(self._name, text[:200], "Mend what /readyz says false of")
        ]
        if "Date" in headers:
            stamp_ms = parsedate_to_datetime(headers["Date"]).timestamp() * 1000
            found.append(skew(f"clock of {self._name}", between_ms, stamp_ms))
        labels = build_info((await self._get("/metrics"))[1])
        if "version" in labels:
            self._versions[self._name] = labels["version"]
        return found

    async def _get(self, path: str) -> tuple[int, str, Mapping[str, str]]:
        import aiohttp

        try:
            async with self._session.get(self._base + path, allow_redirects=False) as answer:
                self._calling.check(answer.headers.get(CLUSTER_ID), where=self._base)
                return answer.status, await answer.text(), answer.headers
        except aiohttp.ClientError as error:
            raise OSError(f"{self._base}{path}: {str(error) or type(error).__name__}") from error


class _Grpc:
    """A service over gRPC: the standard health service answers for it."""

    def __init__(self, name: str, address: str, calling: Calling) -> None:
        self._name = name
        self._address = address
        self._calling = calling

    async def look(self) -> list[Check]:
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        from tierlog.runtime.rpc import open_channel

        async with open_channel(self._address, self._calling) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HTTP_S_MAX)
            except grpc.aio.AioRpcError as error:
                raise OSError(f"{self._address}: {error.code().name} {error.details()}") from error
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return [ok(f"{self._name} gRPC", name)]
        return [failed(f"{self._name} gRPC", name, "Wait for its end or start; see its log")]


def build_info(metrics: str) -> dict[str, str]:
    """Return what a service's metrics say of its build; nothing where they don't."""
    match = _BUILD.search(metrics)
    return dict(_LABEL.findall(match[1])) if match else {}
