"""A proxy before a real S3 server: it knows what a request is, and does to it what a test says.

Each request goes over a connection of its own to the server; its answer ends the client's, too.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

ERROR = (
    "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>made up</Message>"
    "<RequestId>PROXY</RequestId></Error>"
)


class Fault(Enum):
    """What becomes of one request."""

    DROP_REQUEST = "the connection goes before the server has it"
    CUT_REQUEST = "the connection goes in the middle of its body"
    DROP_REPLY = "the server has done it, the connection goes before its answer"
    CUT_REPLY = "the connection goes in the middle of the answer"
    SLOW_DOWN = "503 SlowDown"
    INTERNAL = "500 InternalError"
    EXPIRED = "400 ExpiredToken"
    DENIED = "403 AccessDenied"
    ERROR_IN_200 = "200, and an error in the body"
    HANG = "nothing comes back"


_ANSWERS = {
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.INTERNAL: (500, "InternalError"),
    Fault.EXPIRED: (400, "ExpiredToken"),
    Fault.DENIED: (403, "AccessDenied"),
    Fault.ERROR_IN_200: (200, "InternalError"),
}
_BY_QUERY = {
    ("POST", "uploads"): "create_multipart_upload",
    ("POST", "uploadId"): "complete_multipart_upload",
    ("PUT", "partNumber"): "upload_part",
    ("DELETE", "uploadId"): "abort_multipart_upload",
    ("GET", "uploads"): "list_multipart_uploads",
    ("GET", "list-type"): "list_objects_v2",
}
_PLAIN = {
    "PUT": "put_object",
    "GET": "get_object",
    "HEAD": "head_object",
    "DELETE": "delete_object",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, numbered from 0."""

    number: int
    operation: str
    key: str


Rule = Callable[[Asked], Fault | None]


class S3Proxy:
    """Forwards to ``host:port``; ``rule`` says what goes wrong; ``asked`` is all that came."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.partition(":")
        self._port = int(port)
        self._tasks: set[asyncio.Task[None]] = set()
        self.rule: Rule = lambda _: None
        self.asked: list[Asked] = []
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=2**20)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.wait([*self._tasks, asyncio.create_task(asyncio.sleep(0))])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            await self._one(reader, writer)
        writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()
        self._tasks.discard(task)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        sized = re.search(r"(?i)\r\ncontent-length: *(\d+)", head)
        length = int(sized[1]) if sized else 0
        if re.search(r"(?i)\r\nexpect:", head):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = re.sub(r"(?i)\r\nexpect:[^\r]*", "", head)
        asked = _asked(len(self.asked), head)
        self.asked.append(asked)
        fault = self.rule(asked)
        body = await reader.readexactly(length // 2 if fault is Fault.CUT_REQUEST else length)
        if fault in {Fault.DROP_REQUEST, Fault.CUT_REQUEST}:
            return
        if fault is Fault.HANG:
            await asyncio.sleep(3600)
        if fault in _ANSWERS:
            status, code = _ANSWERS[fault]
            text = ERROR.format(code=code).encode()
            lines = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\nConnection: close"
            lines += "\r\nx-amz-request-id: PROXY"
            writer.write(f"{lines}\r\n\r\n".encode() + (b"" if head[:4] == "HEAD" else text))
            await writer.drain()
            return
        answer = await self._forwarded(head, body)
        if fault is not Fault.DROP_REPLY:
            writer.write(answer[: len(answer) * 3 // 4] if fault is Fault.CUT_REPLY else answer)
            await writer.drain()

    async def _forwarded(self, head: str, body: bytes) -> bytes:
        head = re.sub(r"(?i)\r\nconnection:[^\r]*", "", head)
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(head[:-2].encode("latin-1") + b"Connection: close\r\n\r\n" + body)
            await writer.drain()
            return await reader.read(-1)
        finally:
            writer.transport.abort()


def _asked(number: int, head: str) -> Asked:
    method, target, _ = head.split("\r\n", 1)[0].split(" ", 2)
    split = urlsplit(target)
    query = parse_qs(split.query, keep_blank_values=True)
    named = [name for (verb, key), name in _BY_QUERY.items() if verb == method and key in query]
    key = unquote(split.path).lstrip("/").partition("/")[2]
    operation = named[0] if named else _PLAIN[method]
    if operation == "head_object" and not key:
        operation = "head_bucket"
    return Asked(number, operation, key)
