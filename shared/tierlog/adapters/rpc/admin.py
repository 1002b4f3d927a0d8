"""The scheduler's administration over REST."""

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from tierlog.adapters.rpc.rest import RestService
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.position import Position
from tierlog.ports.admin import Document
from tierlog.runtime.calling import PLAIN, Calling

DEAD_LETTERS: Final = "/v1/dead-letters"
SCRUBS: Final = "/v1/scrubs"


class HttpAdministration:
    """``Administration`` over HTTP."""

    def __init__(self, address: str, *, timeout_s: float, calling: Calling = PLAIN) -> None:
        self._service = RestService(address, name="scheduler", timeout_s=timeout_s, calling=calling)

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

    async def offloads(self, stream: StreamName | None = None) -> Sequence[Document]:
        params = {"stream": stream} if stream is not None else None
        found = await self._service.json("GET", "/v1/offloads", params=params)
        return _items(found, "offloads")

    async def offload_status(self, name: StreamName) -> Sequence[Document]:
        return _items(await self._service.json("GET", _path(name, "/offload")), "streams")

    async def pause_offload(self, name: StreamName, cause: str) -> Sequence[Document]:
        path, body = _path(name, "/offload/pause"), {"cause": cause}
        return _items(await self._service.json("POST", path, body=body), "streams")

    async def resume_offload(self, name: StreamName) -> Sequence[Document]:
        return _items(await self._service.json("POST", _path(name, "/offload/resume")), "streams")

    async def attempts(self, name: StreamName) -> Sequence[Document]:
        return _items(await self._service.json("GET", _path(name, "/attempts")), "ledgers")

    async def leftovers(self, name: StreamName) -> Sequence[Document]:
        return _items(await self._service.json("GET", _path(name, "/leftovers")), "leftovers")

    async def policy(self, name: StreamName) -> Document:
        return _document(await self._service.json("GET", _path(name, "/policy")))

    async def set_policy(self, name: StreamName, policy: Document) -> Document:
        path = _path(name, "/policy")
        return _document(await self._service.json("PUT", path, body=dict(policy)))

    async def change_policy(self, name: StreamName, changes: Document) -> Document:
        path = _path(name, "/policy")
        return _document(await self._service.json("PATCH", path, body=dict(changes)))

    async def level(self, namespace: str | None) -> Document:
        return _document(await self._service.json("GET", _level(namespace)))

    async def set_level(self, namespace: str | None, policy: Document) -> Document:
        path = _level(namespace)
        return _document(await self._service.json("PUT", path, body=dict(policy)))

    async def change_level(self, namespace: str | None, changes: Document) -> Document:
        path = _level(namespace)
        return _document(await self._service.json("PATCH", path, body=dict(changes)))

    async def explain(self, name: StreamName) -> Document:
        return _document(await self._service.json("GET", _path(name, "/policy/explain")))

    async def delete_stream(self, name: StreamName) -> Document:
        return _document(await self._service.json("DELETE", _path(name)))

    async def close(self) -> None:
        await self._service.close()


class HttpDeadLetters:
    """``DeadLetterDesk`` over HTTP."""

    def __init__(self, address: str, *, timeout_s: float, calling: Calling = PLAIN) -> None:
        self._service = RestService(address, name="scheduler", timeout_s=timeout_s, calling=calling)

    def __repr__(self) -> str:
        return f"<HttpDeadLetters {self._service!r}>"

    async def find(
        self, *, state: str | None = None, stream: StreamName | None = None
    ) -> Sequence[Document]:
        return _items(await self.listing(state=state, stream=stream), "dead_letters")

    async def listing(
        self, *, state: str | None = None, stream: StreamName | None = None
    ) -> Document:
        given = {"state": state, "stream": stream}
        params = {name: value for name, value in given.items() if value is not None}
        return _document(await self._service.json("GET", DEAD_LETTERS, params=params))

    async def get(self, place: str) -> Document:
        return _document(await self._service.json("GET", _letter(place)))

    async def replay(self, place: str) -> Document:
        return _document(await self._service.json("POST", _letter(place, "/replay")))

    async def replay_waiting(
        self, *, stream: StreamName | None = None, reason: str | None = None
    ) -> Document:
        body = {"stream": stream, "reason": reason}
        return _document(await self._service.json("POST", f"{DEAD_LETTERS}/replay", body=body))

    async def dismiss(self, place: str) -> Document:
        return _document(await self._service.json("POST", _letter(place, "/dismiss")))

    async def close(self) -> None:
        await self._service.close()


class HttpScrubs:
    """``ScrubDesk`` over HTTP."""

    def __init__(self, address: str, *, timeout_s: float, calling: Calling = PLAIN) -> None:
        self._service = RestService(address, name="scheduler", timeout_s=timeout_s, calling=calling)

    def __repr__(self) -> str:
        return f"<HttpScrubs {self._service!r}>"

    async def begin(
        self, *, repair: bool, deep: bool, ledgers: Sequence[LedgerId] | None = None
    ) -> Document:
        # Only said where it is asked for: a scheduler of before knows no such word.
        asked = {} if ledgers is None else {"ledgers": list(ledgers)}
        body = {"repair": repair, "deep": deep, **asked}
        return _document(await self._service.json("POST", SCRUBS, body=body))

    async def find(self) -> Sequence[Document]:
        return _items(await self._service.json("GET", SCRUBS), "scrubs")

    async def get(self, scrub_id: str) -> Document:
        path = f"{SCRUBS}/{quote(scrub_id, safe='')}"
        return _document(await self._service.json("GET", path))

    async def close(self) -> None:
        await self._service.close()


def _path(name: StreamName, rest: str = "") -> str:
    return f"/v1/streams/{quote(name, safe='')}{rest}"


def _letter(place: str, rest: str = "") -> str:
    return f"{DEAD_LETTERS}/{quote(place, safe='')}{rest}"


def _level(namespace: str | None) -> str:
    if namespace is None:
        return "/v1/policies/cluster"
    return f"/v1/policies/namespaces/{quote(namespace, safe='')}"


def _items(found: Any, name: str) -> list[Document]:  # noqa: ANN401 - JSON
    items = found.get(name, []) if isinstance(found, dict) else found
    return [_document(one) for one in items]


def _document(found: Any) -> Document:  # noqa: ANN401 - JSON
    return found if isinstance(found, dict) else {"value": found}
