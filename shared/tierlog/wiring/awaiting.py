"""How a service waits for the servers that are away when it starts."""

import asyncio

from tierlog.runtime.awaiting import AwaitedServers
from tierlog.runtime.settings import HttpListenSettings
from tierlog.wiring.build import system_clock, system_ids
from tierlog.wiring.security import Protection


def waiting_at(
    listen: HttpListenSettings, title: str, protection: Protection, stop: asyncio.Event
) -> AwaitedServers:
    """Return what waits until ``stop``, and says at the service's own port what it waits for."""
    return AwaitedServers(
        title,
        listen,
        stop=stop,
        tls=protection.tls,
        gate=protection.gate,
        clock=system_clock(),
        ids=system_ids(),
    )
