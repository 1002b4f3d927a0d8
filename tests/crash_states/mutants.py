"""Defects put into the code, each of a kind that loses or changes what was acknowledged.

``hunt`` tells which plan catches one; ``test_crash_states`` demands it within the share of CI.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.crash_states.explore import CrashStateError, Plan, explore
from tests.crash_states.recorder import RecordingFile, RecordingFiles
from tierlog.format import checksum

LATE_S = 0.005


def _answer_before_the_sync() -> contextlib.AbstractContextManager[Any]:
    """Call a group of the journal durable when it was written; the sync ends a little later."""
    honest = RecordingFile.write_and_sync

    async def write_and_sync(self: RecordingFile, offset: int, buffers: Any) -> None:
        if "/journal/" not in self.path:
            await honest(self, offset, buffers)
            return
        await self.write(offset, buffers)
        asyncio.get_running_loop().call_later(LATE_S, self.note_sync)

    return patch.object(RecordingFile, "write_and_sync", write_and_sync)


def _no_sync_of_folders() -> contextlib.AbstractContextManager[Any]:
    """Leave it to chance which names survive."""

    async def sync_directory(_self: RecordingFiles, _directory: str) -> None:
        """Do nothing."""

    return patch.object(RecordingFiles, "sync_directory", sync_directory)


@contextlib.contextmanager
def _no_checksum() -> Iterator[None]:
    """Write zeros for each CRC, and find them right."""
    users = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("tierlog") and getattr(module, "crc32c", None) is checksum.crc32c
    ]
    with contextlib.ExitStack() as patches:
        for module in users:
            patches.enter_context(patch.object(module, "crc32c", lambda _data, _start=0: 0))
        yield


MUTANTS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[Any]], str]] = {
    "answer before the sync": (_answer_before_the_sync, "is lost"),
    "no sync of folders": (_no_sync_of_folders, "is lost"),
    "no checksum": (_no_checksum, "is not what was sent"),
}
"""Each with what it must be caught at, whatever else goes wrong before."""


def hunt(name: str, plans: Sequence[Plan]) -> str | None:
    """Return what is found when the defect is in, or None."""
    mutant, damage = MUTANTS[name]
    with mutant():
        for plan in plans:
            try:
                explore(replace(plan, only=damage))
            except CrashStateError as error:
                return str(error)
    return None
