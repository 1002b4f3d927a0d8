"""Runs back to back as a body, closed by an end mark that a cut body lacks.

    offset  size  field
         0     4  magic_word    "TLRE"
         4     4  run_count     runs before the mark, big-endian

Invariant: a body without its mark, or with a wrong count, is cut; it is never a short success.
"""

from struct import Struct
from typing import Final

from tierlog.model.errors import Reason, RetryableError

RUNS_TYPE: Final = "application/vnd.tierlog.runs"
END_MAGIC: Final = b"TLRE"
_MARK: Final = Struct(">4sI")
END_MARK_LEN: Final = _MARK.size
assert END_MARK_LEN == 8


def end_mark(run_count: int) -> bytes:
    """Return the mark behind the last of ``run_count`` runs."""
    return _MARK.pack(END_MAGIC, run_count)


def check_end_mark(mark: bytes, run_count: int) -> None:
    """Raise UNKNOWN unless ``mark`` closes a body of exactly ``run_count`` runs."""
    if mark != end_mark(run_count):
        raise RetryableError(
            f"a body of runs was cut after {run_count} of them",
            reason=Reason.UNKNOWN,
            remedy="Read on from there, or from another node",
        )
