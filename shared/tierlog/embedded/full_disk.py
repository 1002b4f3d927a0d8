"""Why a process ended, where its disk is full: what free space and its last words say.

Owns the judgement and its remedy. Invariants:
    * Without a sign of a full disk nothing is said of it.
    * Who was ended by a signal is not said to have met a full disk because little is free.
"""

import shutil
from pathlib import Path
from typing import Final

from tierlog.embedded.process import Child, log_tail
from tierlog.model.errors import Reason, RetryableError

LOW_BYTES: Final = 256 * 1024 * 1024
"""What a storage node leaves free: a disk with less was full for whoever ended on it."""
LAST_WORDS_BYTES: Final = 16 * 1024
REFUSALS: Final = ("no space left on device", "disk quota exceeded", "the disk is full")

_MIB: Final = 1024 * 1024


def full_disk(
    what: str, folder: Path, *, free_bytes: int, exit_code: int | None, last_words: str
) -> RetryableError | None:
    """Return the error of a process that ended on a full disk; None: the disk is not to blame."""
    refused = any(word in last_words.lower() for word in REFUSALS)
    is_low = free_bytes < LOW_BYTES and (exit_code or 0) > 0
    if not (refused or is_low):
        return None
    said = ", and its log says that it met a full disk" if refused else ""
    return RetryableError(
        f"{what}: the disk is full; {free_bytes // _MIB} MiB are free at {folder}{said}",
        reason=Reason.READ_ONLY,
        remedy="Free some space and start again; or move that folder to a larger disk, and name it"
        " with --state-dir or TIERLOG_STATE_DIR",
    )


def why_ended(what: str, child: Child, *, log: Path, folder: Path) -> RetryableError:
    """Return the error of a child that ended: its full disk, or where its log is."""
    found = full_disk(
        what,
        folder,
        free_bytes=shutil.disk_usage(folder).free,
        exit_code=child.exit_code,
        last_words=log_tail(log, since=child.log_from, bytes_max=LAST_WORDS_BYTES),
    )
    return found or RetryableError(what, remedy=f"Look into its log, {log}, and start again")
