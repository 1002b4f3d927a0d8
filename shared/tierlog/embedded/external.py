"""Checks that the servers that somebody else runs can be reached at all, before anything starts."""

import asyncio
from typing import Final
from urllib.parse import urlsplit

from tierlog.embedded.endpoints import ExternalServers
from tierlog.model.errors import RefusedError, RetryableError

CONNECT_S_MAX: Final = 5.0


async def check_external(external: ExternalServers) -> None:
    """Connect to one address of each external server, or say which cannot be reached."""
    wanted = {
        "s3": [external.s3.endpoint_url] if external.s3 else [],
        "zookeeper": (external.zookeeper or "").partition("/")[0].split(","),
        "kafka": (external.kafka or "").split(","),
        "redis": [external.redis or ""],
    }
    async with asyncio.TaskGroup() as group:
        for name, given in wanted.items():
            addresses = [_host_port(name, address.strip()) for address in given if address]
            if addresses:
                group.create_task(_reach(name, addresses))


def _host_port(name: str, address: str) -> tuple[str, int]:
    parts = urlsplit(address if "//" in address else f"//{address}")
    try:
        port = parts.port or {"https": 443, "http": 80, "redis": 6379}.get(parts.scheme)
    except ValueError:
        port = None
    if not parts.hostname or port is None:
        raise RefusedError(
            f"the address of the external {name}, {address!r}, has no host and port",
            remedy="Write it as host:port, or as a URL for s3 and redis",
        )
    return parts.hostname, port


async def _reach(name: str, addresses: list[tuple[str, int]]) -> None:
    problem = ""
    for host, port in addresses:
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError) as error:
            problem = f"{host}:{port} ({error!r})"
        else:
            writer.close()
            return
    raise RetryableError(
        f"the external {name} cannot be reached at {problem}",
        remedy="Start it, mend its address in the settings, or leave it out to have one started",
    )
