"""The journal over a real directory: what the memory disk shows holds there too."""

from __future__ import annotations

import random

import pytest

from tests.unit.storage.journal.journal_kit import SMALL, add_all, found, restarted, running
from tierlog.adapters.files import DiskFiles

pytestmark = pytest.mark.covers("D23", "D37")


async def test_lives_with_recycled_segments(tmp_path):
    stored: list[bytes] = []
    mark, folder = None, tmp_path / "node" / "journal"
    for life in range(4):
        files = DiskFiles(tmp_path / "node")
        seen, replay, journal = await restarted(files, mark=mark, seed=life)
        assert seen == stored
        assert not replay.damages
        async with running(journal):
            first = journal.segment_id
            for n in range(40):
                payloads = [random.Random(f"{life}/{n}/{m}").randbytes(1500) for m in range(3)]
                stored += payloads
                await add_all(journal, payloads)
                if n == 25:
                    assert journal.segment_id > first + 2
                    mark, stored = journal.durable_position, []
                    await journal.release_before(mark.segment_id)
                    oldest = min(folder.glob("*.journal"))
                    assert oldest.name.startswith(f"{mark.segment_id:016x}")
        assert files._open_count == 0
        assert (await found(files, mark))[0] == stored
        assert files._open_count == 0
        names = [one.name for one in folder.iterdir()]
        assert sum(one.endswith(".spare") for one in names) <= SMALL.journal_spares_max
        files.close()
