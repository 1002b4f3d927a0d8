"""Those who want a stream's open ledger closed, until each has its answer.

Owns their answers, and how long they wait. Does not own the turn nor the closing (``owner``).

Invariants:
    * Each is answered once, in time: with the ledger, or with one error that says what it is that
      the owner waits for.
    * Nothing is closed for whoever went away, or was told so, before the turn.
"""

import asyncio
from collections.abc import Callable

from tierlog.model.errors import RetryableError, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog_ingest.streams.appends import AppendQueue


class Seals:
    """Who waits for the end of a stream's open ledger; true while somebody does."""

    def __init__(self, name: StreamName, queue: AppendQueue, *, wake: Callable[[], None]) -> None:
        self._name = name
        self._queue = queue
        self._wake = wake
        self._asked: list[asyncio.Future[LedgerId | None]] = []

    def __bool__(self) -> bool:
        return bool(self._asked)

    async def ask(self, timeout_s: float) -> LedgerId | None:
        """Wait for the answer; raises after ``timeout_s``."""
        answer: asyncio.Future[LedgerId | None] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._wake()
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise self._late(timeout_s) from None
        finally:
            if answer in self._asked:
                self._asked.remove(answer)

    def tell(self, ledger_id: LedgerId | None) -> None:
        """Answer with the ledger that was closed; None: nothing was open."""
        asked, self._asked = self._asked, []
        for answer in asked:
            if not answer.done():
                answer.set_result(ledger_id)

    def fail(self, error: TierlogError) -> None:
        """Answer with an error."""
        asked, self._asked = self._asked, []
        for answer in asked:
            if not answer.done():
                answer.set_exception(error)

    def _late(self, timeout_s: float) -> RetryableError:
        why = f" ({self._queue.trouble})" if self._queue.trouble else ""
        return RetryableError(
            f"stream {self._name} was not sealed within {timeout_s:g} s{why}",
            remedy="It may be yet; ask again: sealing twice does no harm",
        )
