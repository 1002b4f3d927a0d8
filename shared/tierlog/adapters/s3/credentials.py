"""The keys that a client signs with, renewed when the store says that they are over.

Invariants:
    * Requests that meet old keys at once renew them once.
    * Keys that turn out to be the same are no new ones: callers are told so.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import aioboto3
from botocore.credentials import ReadOnlyCredentials

from tierlog.model.errors import TierlogError
from tierlog.runtime.settings import S3Settings


class Keys(NamedTuple):
    """What a request is signed with."""

    access_key: str
    secret_key: str
    token: str | None


Reload = Callable[[], S3Settings]


class Credentials:
    """Those of one client."""

    def __init__(
        self,
        in_use: Any,  # noqa: ANN401 - the library has no types
        load: Callable[[], Awaitable[Keys | None]],
    ) -> None:
        self._in_use = in_use
        self._load = load
        self._lock = asyncio.Lock()
        self.generation = 0
        """Grows with each renewal: a request that fails knows which ones it had."""

    def __repr__(self) -> str:
        return f"<Credentials, renewed {self.generation} times>"

    async def renew(self, generation: int) -> bool:
        """Take new keys unless that was done since ``generation``; False: there are none."""
        async with self._lock:
            if self.generation != generation:
                return True
            found = await self._load() if self._in_use is not None else None
            if found is None:
                return False
            # Those that renew themselves have no keys to look at, only copies of them.
            frozen = await self._in_use.get_frozen_credentials()
            current = (frozen.access_key, frozen.secret_key, frozen.token)
            if found == current:
                return False
            self._in_use.access_key, self._in_use.secret_key, self._in_use.token = found
            if hasattr(self._in_use, "_frozen_credentials"):
                # What requests of those are signed with until their own time is over.
                self._in_use._frozen_credentials = ReadOnlyCredentials(*found)  # noqa: SLF001
            self.generation += 1
            return True


def open_session(settings: S3Settings) -> aioboto3.Session:
    """Return a session with the keys of the settings, else with what the SDK finds by itself."""
    return aioboto3.Session(
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=(
            settings.secret_key.get_secret_value() if settings.secret_key else None
        ),
        region_name=settings.region,
    )


async def load_keys(settings: S3Settings, reload: Reload | None) -> Keys | None:
    """Look for keys where these came from: the settings, read again, or the SDK's own chain."""
    if settings.access_key is not None:
        try:
            again = reload() if reload is not None else None
        except TierlogError:
            return None  # half written, say; the next request looks again
        if again is None or again.access_key is None or again.secret_key is None:
            return None
        return Keys(again.access_key, again.secret_key.get_secret_value(), None)
    found = await open_session(settings).get_credentials()
    if found is None:
        return None
    frozen = await found.get_frozen_credentials()
    return Keys(frozen.access_key, frozen.secret_key, frozen.token)
