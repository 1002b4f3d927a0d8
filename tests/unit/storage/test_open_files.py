"""Open files are bounded, opened once, and never closed under somebody who uses them."""

from __future__ import annotations

import asyncio
import random

import pytest

from tierlog.adapters.memory.files import MemoryDisk
from tierlog_ingest.storage.entrylog.open_files import OpenFiles


class Folder:
    def __init__(self):
        disk = MemoryDisk(random.Random(1))
        self.files = disk.mount()
        self.opened: list[str] = []
        self.failing = False

    async def open(self, name: str):
        self.opened.append(name)
        await asyncio.sleep(0.01)
        if self.failing:
            raise FileNotFoundError(name)
        return await self.files.open(name, create=True)


async def test_the_least_recently_used_is_closed():
    folder = Folder()
    files = OpenFiles(folder.open, open_max=2)
    for name in "abacab":
        async with files.use(name) as file:
            assert await file.size() == 0
    assert folder.opened == ["a", "b", "c", "b"]
    assert len(files) == 2
    await files.drop("a")
    await files.drop("never opened")
    assert len(files) == 1
    await files.close()
    assert len(files) == 0


async def test_a_file_is_opened_once_for_many():
    folder = Folder()
    files = OpenFiles(folder.open, open_max=1)

    async def use(name):
        async with files.use(name) as file:
            await asyncio.sleep(0.01)
            assert await file.size() == 0

    async with asyncio.TaskGroup() as tasks:
        for name in "aaabbbccc":
            tasks.create_task(use(name))
    assert sorted(folder.opened) == ["a", "b", "c"]
    assert repr(files) == "<OpenFiles 1/1, used=0>"
    assert not files._opening


async def test_what_can_not_be_opened_is_tried_again():
    folder = Folder()
    folder.failing = True
    files = OpenFiles(folder.open, open_max=1)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            async with files.use("a"):
                pass
    folder.failing = False
    async with files.use("a") as file:
        assert await file.size() == 0
    assert folder.opened == ["a"] * 3
    assert not files._opening
