"""How the interpreter of a process with a storage node is set.

Owns: the numbers, and why. They hold for the whole process; ``main`` sets them first of all.
"""

import gc
import sys
from typing import Final

_GC_THRESHOLDS: Final = (50_000, 20, 100)
"""Runs are many small objects in no cycles: by default, looking for cycles among them takes a
third of a replay's time."""
_SWITCH_INTERVAL_S: Final = 0.0005
"""A thread that comes back from the disk waits so long at most for the event loop to let it go
on. A group of the journal comes back three times; at the default of 5 ms that is most of what a
busy node's slowest adds wait for."""


def set_up_interpreter() -> None:
    """Set what a storage node needs."""
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
