"""A wall clock that can be set while a process runs; loaded where this folder is on Python's path.

``time.time`` and ``time.time_ns`` are wrapped, which all of Tierlog's own code asks; the file that
``TIERLOG_WALL_CLOCK`` names says by how many seconds they are wrong. The monotonic clock goes on,
as it does on a machine whose clock is set. Clocks of C libraries stay right: what signs requests
to S3, and what librdkafka tells brokers, are not what a test of this is about.
"""

import os
import time
from pathlib import Path

FILE = os.environ.get("TIERLOG_WALL_CLOCK")


def install(path: Path) -> None:
    """Wrap both calls."""
    true_ns = time.time_ns

    def shifted_ns() -> int:
        return true_ns() + int(path.read_text()) * 1_000_000_000

    time.time_ns = shifted_ns
    time.time = lambda: shifted_ns() / 1e9


if FILE is not None:
    install(Path(FILE))
