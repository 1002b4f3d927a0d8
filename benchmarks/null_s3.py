"""An S3 server that keeps no bodies: what is left when the store costs nothing.

It answers what an upload asks (create, parts, complete, put, head, small ranged gets), keeps
small objects and the first bytes of each part, and the rest is dropped in the kernel, uncopied.
Nothing is checked. One thread a connection, so that receiving is all that it does.
"""

import base64
import hashlib
import re
import socket
import socketserver
import sys
import threading
import time
from email.utils import formatdate
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

KEPT_BYTES = 4 * 1024 * 1024
RECEIVE_BYTES = 1024 * 1024
LOOK_EVERY_S = 0.0003
HEAD_BYTES_MAX = 64 * 1024


class Stored:
    """What is remembered of an object: heads of its pieces, and how long each is."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.metadata = {
            name: value for name, value in headers.items() if name.startswith("x-amz-meta-")
        }
        self.pieces: dict[int, tuple[bytes, int]] = {}

    @property
    def size(self) -> int:
        return sum(length for _, length in self.pieces.values())

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(b"null").hexdigest()}-{len(self.pieces)}"'

    def read(self, start: int, stop: int) -> bytes:
        """Return a range; zeros where nothing was kept."""
        found, at = bytearray(stop - start), 0
        for _, (head, length) in sorted(self.pieces.items()):
            low, high = max(start, at), min(stop, at + len(head))
            if low < high:
                found[low - start : high - start] = head[low - at : high - at]
            at += length
        return bytes(found)


class Handler(socketserver.BaseRequestHandler):
    """One connection."""

    objects: ClassVar[dict[str, Stored]] = {}
    request: socket.socket

    def setup(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pending = bytearray()
        self._buffer = bytearray(RECEIVE_BYTES)

    def handle(self) -> None:
        while (head := self._head()) is not None:
            line, *fields = head.decode("latin-1").split("\r\n")
            method, target, _ = line.split(" ", 2)
            headers = {
                name.lower(): value.strip()
                for name, _, value in (one.partition(":") for one in fields)
            }
            length = int(headers.get("content-length", "0"))
            if headers.get("expect", "").lower() == "100-continue":
                self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = self._body(length)
            self._answer(method, target, headers, body, length)

    def _head(self) -> bytes | None:
        while (end := self._pending.find(b"\r\n\r\n")) < 0:
            received = self.request.recv(HEAD_BYTES_MAX)
            if not received:
                return None
            self._pending += received
        head = bytes(self._pending[:end])
        del self._pending[: end + 4]
        return head

    def _body(self, length: int) -> bytes:
        """Receive a body and drop all but its first bytes."""
        kept = self._pending[:length]
        del self._pending[:length]
        received = len(kept)
        while received < length:
            whole = len(kept) >= KEPT_BYTES
            # Of TCP it means: take it off the socket and copy nothing.
            flags = socket.MSG_DONTWAIT | (socket.MSG_TRUNC if whole else 0)
            asked = min(RECEIVE_BYTES, length - received)
            try:
                got = self.request.recv_into(self._buffer, asked, flags)
            except BlockingIOError:
                # Who sleeps in a receive is woken by the sender, on the loopback at its cost.
                time.sleep(LOOK_EVERY_S)
                continue
            if not got:
                raise ConnectionError("cut body")
            if not whole:
                kept += memoryview(self._buffer)[:got]
            received += got
        return bytes(kept[:KEPT_BYTES])

    def _answer(
        self, method: str, target: str, headers: dict[str, str], body: bytes, length: int
    ) -> None:
        split = urlsplit(target)
        key, query = unquote(split.path), parse_qs(split.query, keep_blank_values=True)
        stored = self.objects.get(key)
        if method == "POST" and "uploads" in query:
            self.objects[key] = Stored(headers)
            self._xml("InitiateMultipartUploadResult", "<UploadId>null</UploadId>")
        elif method == "POST":
            self._xml("CompleteMultipartUploadResult", "<ETag>null</ETag>")
        elif method == "PUT" and key.count("/") > 1:
            number = int(query.get("partNumber", ["1"])[0])
            if stored is None or "partNumber" not in query:
                stored = self.objects[key] = Stored(headers)
            stored.pieces[number] = (body, length)
            checksum = headers.get("x-amz-checksum-crc32c", base64.b64encode(bytes(4)).decode())
            etag = hashlib.md5(b"null").hexdigest()
            self._send("200 OK", b"", {"ETag": f'"{etag}"', "x-amz-checksum-crc32c": checksum})
        elif method in {"HEAD", "GET"} and stored is not None:
            self._give(method, stored, headers.get("range", ""))
        elif method == "HEAD" and key.count("/") > 1:
            self._send("404 Not Found", b"", {})
        elif method == "GET" and "uploads" in query:
            self._xml("ListMultipartUploadsResult", "<IsTruncated>false</IsTruncated>")
        elif method == "GET" and "list-type" in query:
            self._xml("ListBucketResult", "<IsTruncated>false</IsTruncated>")
        else:
            self._send("200 OK", b"", {})

    def _give(self, method: str, stored: Stored, asked: str) -> None:
        about = {"ETag": stored.etag, "Last-Modified": formatdate(usegmt=True), **stored.metadata}
        found = re.match(r"bytes=(\d+)-(\d+)", asked)
        start, stop = (int(found[1]), int(found[2]) + 1) if found else (0, stored.size)
        stop = min(stop, stored.size)
        if method == "HEAD":
            self._send("200 OK", None, {"Content-Length": str(stored.size), **about})
            return
        about["Content-Range"] = f"bytes {start}-{stop - 1}/{stored.size}"
        status = "206 Partial Content" if found else "200 OK"
        self._send(status, stored.read(start, stop), about)

    def _xml(self, name: str, inner: str) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inner}</{name}>'.encode()
        self._send("200 OK", body, {"Content-Type": "application/xml"})

    def _send(self, status: str, body: bytes | None, headers: dict[str, str]) -> None:
        length = {} if body is None else {"Content-Length": str(len(body))}
        lines = [f"{name}: {value}" for name, value in {**headers, **length}.items()]
        head = "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode("latin-1")
        self.request.sendall(head + (body or b""))


class NullS3(socketserver.ThreadingTCPServer):
    """Listens on a free port of the loopback."""

    daemon_threads = True
    allow_reuse_address = True


def main() -> None:
    """Serve until standard input ends, so that nothing is left when the parent goes."""
    server = NullS3(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
