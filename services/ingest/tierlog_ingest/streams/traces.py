"""What a stream's owner adds to the traces of its ledgers: sampled appends, and the ledger's own.

Invariant: an append's answer waits for nothing here, and a ledger is closed with or without a span.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple, Protocol

from tierlog.format.envelope import Traceparent
from tierlog.format.run import Run
from tierlog.model.ids import LedgerId
from tierlog.model.stream import Stream
from tierlog.ports.clock import Clock
from tierlog.ports.tracing import CALLER, LedgerLife, Tracer, within
from tierlog_ingest.streams.appends import Answer


class Claimant(Protocol):
    """A stream's owner."""

    @property
    def claimed(self) -> Stream | None:
        """The stream as of its claim."""
        ...


class _Began(NamedTuple):
    at_s: float
    caller: Traceparent | None
    entries: int
    length: int


class AppendTraces:
    """Gives one in so many appends a span."""

    def __init__(self, tracer: Tracer, clock: Clock) -> None:
        self._tracer = tracer
        self._clock = clock
        self._count = 0

    def watch(self, answer: Answer, owner: Claimant, draft: Run) -> Answer:
        """Note an append; returns its answer."""
        every = self._tracer.append_every
        if every:
            self._count += 1
            if self._count % every == 0:
                entries, length = draft.header.count, draft.payload_len
                began = _Began(self._clock.monotonic_s(), CALLER.get(), entries, length)
                answer.add_done_callback(partial(self._answered, owner, began))
        return answer

    def _answered(self, owner: Claimant, began: _Began, answer: Answer) -> None:
        """Make the span now: by its ledger it is known in which trace it is."""
        claimed = owner.claimed
        if answer.cancelled() or answer.exception() is not None or claimed is None:
            return
        with self._tracer.span(
            "append",
            parent=LedgerLife(claimed.incarnation, answer.result()[0].ledger_id),
            link=began.caller,
            age_s=self._clock.monotonic_s() - began.at_s,
            stream=claimed.name,
            entries=began.entries,
            bytes=began.length,
        ):
            pass


@contextlib.contextmanager
def closing(
    tracer: Tracer, stream: Stream, ledger_id: LedgerId, *, opened_s: float, length: int
) -> Iterator[None]:
    """Give a ledger's life its first span, from its opening to the end of this context."""
    life = LedgerLife(stream.incarnation, ledger_id)
    age_s = asyncio.get_running_loop().time() - opened_s
    with (
        tracer.span(
            "ledger",
            parent=life,
            first=True,
            age_s=age_s,
            stream=stream.name,
            ledger_id=ledger_id,
            bytes=length,
        ),
        within("ledger.close"),
    ):
        yield
