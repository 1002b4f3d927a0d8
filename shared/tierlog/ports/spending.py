"""What requests to the object store are for: who spends, on which stream, through which operation.

Owns the purpose that a task carries, and the counts of one process. Does not own prices
(``tierlog.model.prices``), nor who sends requests: adapters call ``count`` for each of them, tries
that are repeated included, since a store charges those too.

Invariants:
    * A task's purpose is that of the innermost ``spending`` around it; tasks that it begins have
      it too. Without any it is OTHER, of no stream.
    * Counts only grow, and at most ``STREAMS_MAX`` streams are told apart; later ones are counted
      together under ``OTHER_STREAMS``, so that memory is bounded. So are codes, which a store may
      invent.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tierlog.model.durations import Durations

STREAMS_MAX: Final = 10_000
NO_STREAM: Final = ""
OTHER_STREAMS: Final = "*"
ANSWERS_MAX: Final = 500
OTHER_CODES: Final = "other"
# Whose limit bytes waited for, and which way they went.
PROCESS: Final = "process"
NAMESPACE: Final = "namespace"
OUT: Final = "out"
IN: Final = "in"


class Cause(StrEnum):
    """Why a request is sent."""

    OFFLOAD = "offload"
    VERIFY = "verify"
    READ = "read"
    SWEEP = "sweep"
    SCRUB = "scrub"
    MANIFEST = "manifest"
    RESTORE = "restore"
    ATTRIBUTES = "attributes"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a task spends for."""

    cause: Cause = Cause.OTHER
    stream: str = NO_STREAM


_NONE: Final = Purpose()
_purpose: ContextVar[Purpose] = ContextVar("purpose", default=_NONE)


def purpose() -> Purpose:
    """Return what this task spends for."""
    return _purpose.get()


@contextlib.contextmanager
def spending(cause: Cause, stream: str | None = None) -> Iterator[None]:
    """Spend for ``cause`` within the context; None: on the stream of the context around it."""
    around = _purpose.get()
    token = _purpose.set(Purpose(cause, around.stream if stream is None else stream))
    try:
        yield
    finally:
        _purpose.reset(token)


def spending_on(stream: str) -> contextlib.AbstractContextManager[None]:
    """Spend on ``stream`` within the context; for what is said within, or was around it."""
    return spending(_purpose.get().cause, stream)


@dataclass(frozen=True, slots=True, order=True)
class Spent:
    """What requests are told apart by."""

    stream: str
    cause: Cause
    operation: str


@dataclass(slots=True)
class Amount:
    """How many requests, and bytes of their bodies to and from the store."""

    requests: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class CostMeter:
    """The counts of one process."""

    def __init__(self, *, streams_max: int = STREAMS_MAX) -> None:
        self._streams_max = streams_max
        self._streams: set[str] = set()
        self._amounts: dict[Spent, Amount] = {}
        self.durations: defaultdict[str, Durations] = defaultdict(Durations)
        """How long tries took, by operation."""
        self.answers: Counter[tuple[str, str]] = Counter()
        """How tries ended, by operation and code."""
        self.throttled_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        """How long bytes waited for a limit, by direction (in, out) and whose limit it was."""

    def __repr__(self) -> str:
        return f"<CostMeter {sum(one.requests for one in self._amounts.values())} requests>"

    @property
    def amounts(self) -> Mapping[Spent, Amount]:
        """All counts since the process began."""
        return self._amounts

    @property
    def totals(self) -> dict[str, int]:
        """What was sent and received in all, by the names that reports have for it."""
        every = self._amounts.values()
        return {
            "requests_sent": sum(one.requests for one in every),
            "bytes_sent": sum(one.bytes_sent for one in every),
            "bytes_received": sum(one.bytes_received for one in every),
        }

    def count(self, operation: str, *, requests: int = 1, sent: int = 0, received: int = 0) -> None:
        """Count what the running task has just sent, or received."""
        now = _purpose.get()
        amount = self._amounts.setdefault(
            Spent(self._told_apart(now.stream), now.cause, operation), Amount()
        )
        amount.requests += requests
        amount.bytes_sent += sent
        amount.bytes_received += received

    def answered(self, operation: str, *, code: str, took_s: float) -> None:
        """Count how a try ended: ``ok``, the store's name of an error, or the error's kind."""
        self.durations[operation].add(took_s)
        if (operation, code) not in self.answers and len(self.answers) >= ANSWERS_MAX:
            code = OTHER_CODES
        self.answers[operation, code] += 1

    def _told_apart(self, stream: str) -> str:
        if stream not in self._streams:
            if len(self._streams) >= self._streams_max:
                return OTHER_STREAMS
            self._streams.add(stream)
        return stream
