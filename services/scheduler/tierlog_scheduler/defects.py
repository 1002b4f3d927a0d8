"""Errors that nobody foresaw, in work that goes on for ever: told, counted, and no one's end.

    a defect, or a stream that provokes it   tierlog_scheduler_unexpected_errors_total (by work)

Owns how they are told. Invariants:
    * Whoever catches everything tells it here, with its trace; nothing is hidden.
    * What was being done counts as not done, and is tried again in its turn; what was not decided
      is not done.
"""

from typing import Final, Literal, get_args

import structlog
from prometheus_client import Counter

log = structlog.get_logger()

Work = Literal["act", "decide", "pass", "read stream", "scrub", "scrub schedule", "staging"]

DEFECTS: Final = Counter(
    "tierlog_scheduler_unexpected_errors_total",
    "Errors that nobody foresaw; the log has their traces",
    ["work"],
)


# From the start: of what appears with its first increase nobody sees an increase.
for _work in get_args(Work):
    DEFECTS.labels(_work)


def note_defect(work: Work, error: Exception, **where: str) -> str:
    """Count and log an unexpected error; return its class and message for a status."""
    said = describe(error)
    DEFECTS.labels(work).inc()
    log.error("unexpected_error", work=work, cause=said, exc_info=error, **where)
    return said


def describe(error: BaseException) -> str:
    """Return class and message, of a group those of the first one in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
