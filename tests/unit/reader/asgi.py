"""An HTTP client of an application in this process: no socket, so that time may be virtual."""

import asyncio
import json
from urllib.parse import urlencode


class Answer:
    """What came back."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        self.status_code = status
        self.headers = {name.decode().title(): value.decode() for name, value in headers}
        self.content = content

    @property
    def text(self) -> str:
        return self.content.decode()

    def json(self):
        return json.loads(self.content)


class AsgiClient:
    """Sends requests to an application; ``piece_s``: how long it takes to take a piece."""

    def __init__(self, app, *, piece_s: float = 0.0, host: str = "client") -> None:
        self.app = app
        self.piece_s = piece_s
        self._host = host

    async def get(self, path, *, params=None, headers=None) -> Answer:
        named = {"host": "reader", **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": urlencode(params or {}).encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
            "client": (self._host, 1),
            "server": ("reader", 80),
            "state": {},
        }
        started, pieces = [], []
        asked = False

        async def receive():
            nonlocal asked
            if asked:
                await asyncio.Event().wait()
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            if message["type"] == "http.response.start":
                started.append(message)
                return
            await asyncio.sleep(self.piece_s)
            pieces.append(message.get("body", b""))

        await self.app(scope, receive, send)
        return Answer(started[0]["status"], started[0]["headers"], b"".join(pieces))
