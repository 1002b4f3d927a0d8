"""An S3 server that answers what a test says: for what a healthy server never does."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, Self

ERROR = (
    "<?xml version='1.0'?><Error><Code>{code}</Code><Message>scripted</Message>"
    "<RequestId>REQ-1</RequestId></Error>"
)


class Served(Protocol):
    """A server that a client is given."""

    url: str


@dataclass
class Request:
    """One request as it came."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass
class Answer:
    """What is sent back. ``cut_body``: so many bytes of it, then the connection goes.

    ``stops_at``: so many, and the rest once the server is told to go on. ``unsized``: it comes in
    chunks, and nobody says how long it is.
    """

    status: int = 200
    headers: dict[str, str] | None = None
    body: bytes = b""
    cut_body: int | None = None
    stops_at: int | None = None
    unsized: bool = False


@dataclass
class CutRequest:
    """The connection goes after so many bytes of the request's body."""

    after: int


@dataclass
class Early:
    """The answer comes before the request's body was asked for, and the connection goes."""

    answer: Answer


Step = Answer | CutRequest | Early | Callable[[Request], Answer | Awaitable[Answer]]


def error(status: int, code: str) -> Answer:
    return Answer(status, {"x-amz-request-id": "REQ-1"}, ERROR.format(code=code).encode())


class ScriptedS3:
    """Answers request after request from ``script``; keeps what came in ``requests``."""

    def __init__(self, *script: Step) -> None:
        self.script = deque(script)
        self.requests: list[Request] = []
        self.url = ""
        self.goes_on = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = head[0].split(" ")
        pairs = (line.partition(":") for line in head[1:] if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        request = Request(method, target, headers)
        self.requests.append(request)
        step = self.script.popleft()
        if isinstance(step, Early):
            await self._give(step.answer, writer, method)
            return False
        if "expect" in headers:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = int(headers.get("content-length", "0"))
        if isinstance(step, CutRequest):
            request.body = await reader.readexactly(min(step.after, length))
            return False
        request.body = await reader.readexactly(length)
        given = step if isinstance(step, Answer) else step(request)
        answer = given if isinstance(given, Answer) else await given
        await self._give(answer, writer, method)
        return answer.cut_body is None

    async def _give(self, answer: Answer, writer: asyncio.StreamWriter, method: str) -> None:
        length_line = f"Content-Length: {len(answer.body)}"
        if answer.unsized:
            length_line = "Transfer-Encoding: chunked"
        lines = [f"HTTP/1.1 {answer.status} X", length_line]
        lines += [f"{name}: {value}" for name, value in (answer.headers or {}).items()]
        body = b"" if method == "HEAD" else answer.body
        if answer.unsized and body:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        cut = answer.cut_body
        writer.write("\r\n".join([*lines, "", ""]).encode())
        if answer.stops_at is not None:
            writer.write(body[: answer.stops_at])
            await self.goes_on.wait()
            body = body[answer.stops_at :]
        writer.write(body[:cut])
        await writer.drain()
