"""Free loopback ports for the embedded servers, the same ones again at the next start.

Owns which port each server of one state directory has. Ports lie below the kernel's ephemeral
range, so that no outgoing connection of another process takes one between two starts.

A port is only *believed* free: another process may take it between the check and the server's
own bind. The supervisor then forgets the ports of that server and asks again.
"""

import json
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tierlog.model.errors import RetryableError

LOOPBACK: Final = "127.0.0.1"
PORT_FIRST: Final = 20_000
PORT_END_MAX: Final = 32_768
RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Ports:
    """The ports of one state directory, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: dict[str, dict[str, int]] = {}
        self._avoided: set[int] = set()
        try:
            self._held = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none yet, or cut by a crash: any free port will do
            self._held = {}

    def take(
        self,
        owner: str,
        purposes: Sequence[str],
        *,
        usable: Callable[[int], bool] = lambda _port: True,
    ) -> Mapping[str, int]:
        """Return a free port for each purpose: those of the last time when they are free."""
        held = self._held.get(owner, {})
        if set(held) != set(purposes) or not all(
            is_free(port) and usable(port) for port in held.values()
        ):
            self._held.pop(owner, None)
            held = dict(zip(purposes, self._search(len(purposes), usable), strict=True))
            self._held[owner] = held
            self._path.write_text(json.dumps(self._held, indent=1), encoding="utf-8")
        return dict(held)

    def forget(self, owner: str) -> None:
        """Take other ports for this owner next time, since these turned out not to be free."""
        self._avoided.update(self._held.pop(owner, {}).values())

    def _search(self, count: int, usable: Callable[[int], bool]) -> list[int]:
        """Walk the range from a place that differs between state directories."""
        span = port_end() - PORT_FIRST
        start = zlib.crc32(str(self._path.resolve()).encode()) % span
        taken = {port for ports in self._held.values() for port in ports.values()} | self._avoided
        found: list[int] = []
        for step in range(span):
            port = PORT_FIRST + (start + step) % span
            if port not in taken and is_free(port) and usable(port):
                found.append(port)
                if len(found) == count:
                    return found
        raise RetryableError(
            f"no {count} free ports on {LOOPBACK} between {PORT_FIRST} and {port_end()}",
            remedy="Stop what listens there (`ss -ltn` lists it) and start again",
        )


def port_end() -> int:
    """First port of the kernel's ephemeral range, or the usual one where that is too low."""
    try:
        low = int(RANGE_FILE.read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return PORT_END_MAX
    return min(low, PORT_END_MAX) if low >= PORT_FIRST + 1000 else PORT_END_MAX


def is_free(port: int) -> bool:
    """Try to listen there. Closed connections in TIME_WAIT do not count: servers ignore them."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
    return True
