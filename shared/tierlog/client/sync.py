"""The client for programs without an event loop: the same calls, blocking.

    with SyncClient() as client, client.writer("orders") as writer:
        writer.send(b"one")

Owns one event loop in one background thread for the whole process. A call hands its coroutine to
that loop and waits; interrupting the wait cancels the coroutine.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from tierlog.client.batches import Event
from tierlog.client.client import Client, open_client
from tierlog.client.reading import ReadEntry, ReadEvent
from tierlog.client.writer import StreamWriter
from tierlog.model.ids import LedgerId
from tierlog.model.policy import Policy
from tierlog.model.position import Edge, Position
from tierlog.ports.admin import Document
from tierlog.ports.progress import Progress
from tierlog.runtime.settings import Settings

HOP_EVENTS: Final = 4096

Result = TypeVar("Result")
Item = TypeVar("Item")


class _Background:
    """The process's loop; started by the first call, gone with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run ``work`` on the loop and wait for its result."""
        pending = asyncio.run_coroutine_threadsafe(work, self._started())
        try:
            return pending.result()
        except BaseException:
            pending.cancel()
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="tierlog-client", daemon=True
                ).start()
            return self._loop


_BACKGROUND: Final = _Background()


class _Holder:
    """Keeps an async context open in a task of its own, between two blocking calls."""

    def __init__(self, context: AbstractAsyncContextManager[Any]) -> None:
        self._context = context
        self._leave = asyncio.Event()
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._hold())

    async def value(self) -> Any:  # noqa: ANN401 - whatever the context gives
        """Return what the context gave."""
        return await self._ready

    async def leave(self) -> None:
        """Leave the context; raises what leaving raises."""
        self._leave.set()
        await self._task

    async def _hold(self) -> None:
        try:
            async with self._context as value:
                self._ready.set_result(value)
                await self._leave.wait()
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)


class _Blocking:
    """A context that was entered on the background loop."""

    def __init__(self) -> None:
        self._holder: _Holder | None = None

    def _enter(self, context: AbstractAsyncContextManager[Any]) -> Any:  # noqa: ANN401
        async def enter() -> tuple[_Holder, Any]:
            holder = _Holder(context)
            return holder, await holder.value()

        self._holder, value = _BACKGROUND.run(enter())
        return value

    def close(self) -> None:
        """Leave the context."""
        if self._holder is not None:
            holder, self._holder = self._holder, None
            _BACKGROUND.run(holder.leave())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            # What went wrong first is what is told.
            with contextlib.suppress(Exception):
                self.close()


class SyncWriter(_Blocking):
    """``StreamWriter``, blocking."""

    def __init__(self, client: Client, name: str, **options: Any) -> None:  # noqa: ANN401
        super().__init__()
        self._writer: StreamWriter = self._enter(client.writer(name, **options))

    def send(self, event: Event) -> None:
        """See ``StreamWriter.send``."""
        _BACKGROUND.run(self._writer.send(event))

    def send_all(self, events: Iterable[Event]) -> None:
        """Send many, with few hops to the loop; ``events`` is iterated over here."""

        async def send(some: list[Event]) -> None:
            for event in some:
                await self._writer.send(event)

        held: list[Event] = []
        try:
            for event in events:
                held.append(event)
                if len(held) == HOP_EVENTS:
                    _BACKGROUND.run(send(held))
                    held = []
        finally:
            # Also what came before an event that ``events`` refused to give.
            _BACKGROUND.run(send(held))

    @property
    def acked_events(self) -> int:
        """Events that are acknowledged."""
        return self._writer.acked_events

    @property
    def acked_bytes(self) -> int:
        """Bytes of events that are acknowledged."""
        return self._writer.acked_bytes

    def flush(self) -> Position | None:
        """See ``StreamWriter.flush``."""
        return _BACKGROUND.run(self._writer.flush())


class SyncClient(_Blocking):
    """``Client``, blocking."""

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__()
        self._client: Client = self._enter(open_client(settings))

    def create_stream(
        self, name: str, *, raw: bool = False, policy: Policy | None = None, exist_ok: bool = True
    ) -> bool:
        """See ``Client.create_stream``."""
        return _BACKGROUND.run(
            self._client.create_stream(name, raw=raw, policy=policy, exist_ok=exist_ok)
        )

    def writer(
        self,
        name: str,
        *,
        raw: bool = False,
        batch_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> SyncWriter:
        """Return a writer; a context manager that flushes at its end."""
        return SyncWriter(self._client, name, raw=raw, batch_bytes=batch_bytes, progress=progress)

    def entries(
        self,
        name: str,
        *,
        start: Position | Edge = Edge.EARLIEST,
        until: Position | None = None,
        limit: int | None = None,
        follow: bool = False,
    ) -> Iterator[ReadEntry]:
        """Iterate over entries."""
        reader = self._client.reader(name, start=start, until=until, limit=limit, follow=follow)
        return _iterate(reader.entries())

    def events(
        self,
        name: str,
        *,
        start: Position | Edge = Edge.EARLIEST,
        until: Position | None = None,
        limit: int | None = None,
        follow: bool = False,
    ) -> Iterator[ReadEvent]:
        """Iterate over events."""
        reader = self._client.reader(name, start=start, until=until, limit=limit, follow=follow)
        return _iterate(reader.events())

    def bounds(self, name: str) -> tuple[Position | Edge, Position | Edge]:
        """See ``Client.bounds``."""
        return _BACKGROUND.run(self._client.bounds(name))

    def seal(self, name: str) -> LedgerId | None:
        """See ``Client.seal``."""
        return _BACKGROUND.run(self._client.seal(name))

    def streams(self) -> Sequence[Document]:
        """See ``Client.streams``."""
        return _BACKGROUND.run(self._client.streams())

    def stream(self, name: str) -> Document:
        """See ``Client.stream``."""
        return _BACKGROUND.run(self._client.stream(name))

    def ledger(self, ledger_id: int) -> Document:
        """See ``Client.ledger``."""
        return _BACKGROUND.run(self._client.ledger(ledger_id))

    def offload(self, name: str, before: Position | None = None) -> Document:
        """See ``Client.offload``."""
        return _BACKGROUND.run(self._client.offload(name, before))

    def offloads(self) -> Sequence[Document]:
        """See ``Client.offloads``."""
        return _BACKGROUND.run(self._client.offloads())

    def policy(self, name: str) -> Document:
        """See ``Client.policy``."""
        return _BACKGROUND.run(self._client.policy(name))

    def set_policy(self, name: str, policy: Document) -> Document:
        """See ``Client.set_policy``."""
        return _BACKGROUND.run(self._client.set_policy(name, policy))


def _iterate(items: AsyncIterator[Item]) -> Iterator[Item]:
    """Iterate from outside the loop."""

    async def one() -> tuple[Item] | None:
        try:
            return (await anext(items),)
        except StopAsyncIteration:
            return None

    while (taken := _BACKGROUND.run(one())) is not None:
        yield taken[0]
