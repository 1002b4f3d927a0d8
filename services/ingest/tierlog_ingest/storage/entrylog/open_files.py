"""A bounded number of open files; those in use are never closed.

Owns: which files are open, and that one file is opened once. Does not own their names: ``opener``
does.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from tierlog.ports.files import File

Key = TypeVar("Key")


class OpenFiles(Generic[Key]):
    """Lends files, the least recently used of which is closed when there are too many."""

    def __init__(self, opener: Callable[[Key], Awaitable[File]], *, open_max: int) -> None:
        assert open_max > 0
        self._opener = opener
        self._open_max = open_max
        self._open: OrderedDict[Key, File] = OrderedDict()
        self._users: dict[Key, int] = {}
        self._opening: dict[Key, asyncio.Lock] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        return f"<OpenFiles {len(self._open)}/{self._open_max}, used={len(self._users)}>"

    @asynccontextmanager
    async def use(self, key: Key) -> AsyncIterator[File]:
        """Lend a file."""
        self._users[key] = self._users.get(key, 0) + 1
        try:
            yield await self._get(key)
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._opening.pop(key, None)
            await self._close_surplus()

    async def drop(self, key: Key) -> None:
        """Close a file, whoever uses it."""
        file = self._open.pop(key, None)
        if file is not None:
            await file.close()

    async def close(self) -> None:
        """Close all."""
        for key in list(self._open):
            await self.drop(key)

    async def _get(self, key: Key) -> File:
        file = self._open.get(key)
        if file is None:
            async with self._opening.setdefault(key, asyncio.Lock()):
                file = self._open.get(key)
                if file is None:
                    file = self._open[key] = await self._opener(key)
        if key in self._open:
            self._open.move_to_end(key)
        return file

    async def _close_surplus(self) -> None:
        while len(self._open) > self._open_max:
            idle = next((one for one in self._open if one not in self._users), None)
            if idle is None:
                return
            await self.drop(idle)
