"""What the supervisor asks of each kind of server.

Owns the base class and the small network probes that ready checks share. The probes speak a few
bytes of each protocol themselves: the client libraries belong to the adapters.
"""

import asyncio
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tierlog.embedded.ports import LOOPBACK
from tierlog.embedded.process import Launch
from tierlog.ports.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one server lives: its folders and its ports by purpose."""

    data: Path
    log: Path
    ports: Mapping[str, int]
    environ: Mapping[str, str]

    def scratch(self) -> Path:
        """Return an empty folder for temporary files, which a kill -9 leaves behind."""
        folder = self.data / "tmp"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


class NotReadyError(Exception):
    """The server answers, but not yet as one that is ready."""


class Server(ABC):
    """One kind of server. Holds no state of a run: that is in the place and the child."""

    name: ClassVar[str]
    port_purposes: ClassVar[Sequence[str]]
    start_s_max: ClassVar[float] = 60.0
    stop_s_max: ClassVar[float] = 10.0

    def port_usable(self, port: int) -> bool:
        """Refuse a port that is free but no good for this server."""
        return port > 0

    @abstractmethod
    async def prepare(self, place: Place, progress: Progress) -> Launch:
        """Write its configuration, and say how to run it."""

    @abstractmethod
    async def check_ready(self, place: Place) -> None:
        """Return when it does its work; raise OSError or NotReadyError when not yet."""

    def clean_up(self, place: Place) -> None:  # noqa: B027 - most leave nothing
        """Remove what the ended server left outside its place."""


async def ask(port: int, request: bytes, *, answer_bytes_max: int = 65536) -> bytes:
    """Send bytes to a loopback port and return the first that come back."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    try:
        writer.write(request)
        await writer.drain()
        return await reader.read(answer_bytes_max)
    finally:
        writer.close()


def child_environment(environ: Mapping[str, str], **extra: str) -> dict[str, str]:
    """Copy the environment; Java's own option variables would change what we start."""
    unwanted = {"JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "CLASSPATH"}
    kept = {name: value for name, value in environ.items() if name not in unwanted}
    return {**kept, **extra}


assert os.name == "posix", "the embedded servers run on Linux"
