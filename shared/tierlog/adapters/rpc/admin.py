"""The scheduler's administration over REST."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from tierlog.adapters.rpc.rest import RestService
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.position import Position
from tierlog.ports.admin import Document


class HttpAdministration:
    """``Administration`` over HTTP."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self._service = RestService(address, name="scheduler", timeout_s=timeout_s)

    def __repr__(self) -> str:
        return f"<HttpAdministration {self._service!r}>"

    async def streams(self) -> Sequence[Document]:
        return _items(await self._service.json("GET", "/v1/streams"), "streams")

    async def stream(self, name: StreamName) -> Document:
        return _document(await self._service.json("GET", _path(name)))

    async def ledger(self, ledger_id: LedgerId) -> Document:
        return _document(await self._service.json("GET", f"/v1/ledgers/{ledger_id}"))

    async def offload(self, name: StreamName, before: Position | None) -> Document:
        body = {"before": str(before) if before is not None else None}
        return _document(await self._service.json("POST", _path(name, "/offload"), body=body))

    async def offloads(self) -> Sequence[Document]:
        return _items(await self._service.json("GET", "/v1/offloads"), "offloads")

    async def policy(self, name: StreamName) -> Document:
        return _document(await self._service.json("GET", _path(name, "/policy")))

    async def set_policy(self, name: StreamName, policy: Document) -> Document:
        path = _path(name, "/policy")
        return _document(await self._service.json("PUT", path, body=dict(policy)))

    async def close(self) -> None:
        await self._service.close()


def _path(name: StreamName, rest: str = "") -> str:
    return f"/v1/streams/{quote(name, safe='')}{rest}"


def _items(found: Any, name: str) -> list[Document]:  # noqa: ANN401 - JSON
    items = found.get(name, []) if isinstance(found, dict) else found
    return [_document(one) for one in items]


def _document(found: Any) -> Document:  # noqa: ANN401 - JSON
    return found if isinstance(found, dict) else {"value": found}
