"""A publisher whose queue may be away when its process starts, and is waited for.

Owns when the queue's topics are asked for again, and what is said meanwhile. Does not own how
topics are made, nor publishing: both are the adapter's.

Invariants:
    * Nothing is published before the topics are there. Who publishes waits for them, but no longer
      than ``patience_s``, and is then told why they are not.
    * Waits between tries grow up to a cap and are drawn by chance, so that processes that wait
      together do not all come back at once.
    * What no later try can mend (``RefusedError``) is raised at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog
from prometheus_client import Gauge

from tierlog.model.errors import RetryableError, TierlogError
from tierlog.ports.clock import Clock
from tierlog.ports.events import EventPublisher, TopicMark
from tierlog.ports.ids import Ids
from tierlog.ports.retrying import until_there

log = structlog.get_logger()

REACHED: Final = Gauge(
    "tierlog_queue_reached", "1: Kafka's topics were there since this process started"
)


class AwaitedPublisher:
    """Publishes by ``inner`` once ``ensure`` has returned."""

    def __init__(
        self,
        inner: EventPublisher,
        ensure: Callable[[], Awaitable[object]],
        *,
        clock: Clock,
        ids: Ids,
        patience_s: float,
    ) -> None:
        self._inner = inner
        self._ensure = ensure
        self._clock = clock
        self._ids = ids
        self._patience_s = patience_s
        self._there = asyncio.Event()
        REACHED.set(0)
        self._missing = RetryableError(
            "Kafka was not reached yet",
            remedy="Check that Kafka runs and is reachable, or set kafka.bootstrap_servers",
        )

    def __repr__(self) -> str:
        return f"<AwaitedPublisher there={self._there.is_set()} {self._inner!r}>"

    async def ensure(self) -> None:
        """Make what is missing of the topics, or raise why that can't be."""
        try:
            await self._ensure()
        except RetryableError as error:
            self._missing = error
            raise
        self._there.set()
        REACHED.set(1)

    async def come(self) -> None:
        """Return once the topics are there, however long that takes."""

        def tell(error: TierlogError, wait_s: float) -> None:
            log.warning("queue.awaited", cause=str(error), again_s=round(wait_s, 1))

        if not self._there.is_set():
            await until_there(self.ensure, clock=self._clock, ids=self._ids, tell=tell)

    async def answers(self) -> bool:
        """Return True if the topics were there, or raise why not: for a service's readiness."""
        if not self._there.is_set():
            raise self._why()
        return True

    async def publish(
        self, topic: str, *, key: bytes, value: bytes, headers: Mapping[str, bytes]
    ) -> None:
        if not self._there.is_set():
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._there.wait()
            except TimeoutError:
                raise self._why() from None
        await self._inner.publish(topic, key=key, value=value, headers=headers)

    async def mark(self, topic: str) -> TopicMark:
        if not self._there.is_set():
            raise self._why()
        return await self._inner.mark(topic)

    async def close(self) -> None:
        await self._inner.close()

    def _why(self) -> RetryableError:
        """Return the present error anew: one that is raised twice keeps both traces."""
        found = self._missing
        return RetryableError(found.message, reason=found.reason, remedy=found.remedy)
