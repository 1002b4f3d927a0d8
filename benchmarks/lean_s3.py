"""An S3 server that costs next to nothing to read from: HOST PORT FOLDER. It prints its port.

A store that is elsewhere takes none of the machine's processors. This one answers ranged GETs of
objects that lie in FOLDER, under their keys, out of the kernel's page cache (``sendfile``), and
passes everything else on to the real server at HOST and PORT. Nothing is checked. It ends when its
standard input does.
"""

import contextlib
import os
import re
import socket
import socketserver
import sys
import threading
from collections.abc import AsyncIterator
from email.utils import formatdate
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from delay_proxy import in_its_own_process

HEAD_BYTES_MAX: Final = 64 * 1024
RECEIVE_BYTES: Final = 256 * 1024
_RANGE: Final = re.compile(rb"\r\nrange: *bytes=(\d+)-(\d+)\r\n", re.IGNORECASE)
_CONNECTION: Final = re.compile(rb"\r\nconnection:[^\r]*", re.IGNORECASE)


class Handler(socketserver.BaseRequestHandler):
    """One connection; whoever asks for anything but a range of a file has it to itself."""

    server: "LeanS3"
    request: socket.socket

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):
            while head := self._head():
                asked = _RANGE.search(head)
                method, target = head.split(b" ", 2)[:2]
                key = unquote(urlsplit(target.decode()).path).partition("/")[2].partition("/")[2]
                path = self.server.folder / key
                if method != b"GET" or asked is None or not path.is_file():
                    self._pass_on(head)
                    return
                self._give(path, int(asked[1]), int(asked[2]))

    def _head(self) -> bytes:
        head = b""
        while b"\r\n\r\n" not in head and len(head) < HEAD_BYTES_MAX:
            if not (more := self.request.recv(RECEIVE_BYTES)):
                return b""
            head += more
        return head

    def _give(self, path: Path, first: int, last: int) -> None:
        with path.open("rb") as file:
            known = os.fstat(file.fileno())
            count = min(last + 1, known.st_size) - first
            made = formatdate(known.st_mtime, usegmt=True).encode()
            self.request.sendall(
                b'HTTP/1.1 206 Partial Content\r\nETag: "lean"\r\nLast-Modified: %s\r\n'
                b"Content-Range: bytes %d-%d/%d\r\nContent-Length: %d\r\n\r\n"
                % (made, first, first + count - 1, known.st_size, count)
            )
            while count:
                sent = os.sendfile(self.request.fileno(), file.fileno(), first, count)
                first, count = first + sent, count - sent

    def _pass_on(self, head: bytes) -> None:
        with socket.create_connection(self.server.target) as other:
            head = _CONNECTION.sub(b"", head)
            other.sendall(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            carrying = threading.Thread(target=_carry, args=(self.request, other), daemon=True)
            carrying.start()
            _carry(other, self.request)


def _carry(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(RECEIVE_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


class LeanS3(socketserver.ThreadingTCPServer):
    """Listens on a free port of the loopback."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, target: tuple[str, int], folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.folder = target, folder


@contextlib.asynccontextmanager
async def lean_s3(url: str, folder: Path) -> AsyncIterator[str]:
    """Run one before the server at ``url``, in a process of its own; give its own URL."""
    host, _, port = urlsplit(url).netloc.partition(":")
    async with in_its_own_process(__file__, host, port, str(folder)) as address:
        yield f"http://{address}"


def main() -> None:
    """Serve until standard input ends, so that nothing is left when the parent goes."""
    host, port, folder = sys.argv[1:]
    server = LeanS3((host, int(port)), Path(folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
