"""The storage node over a real directory: what the memory disk shows holds there too."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.unit.storage.node_kit import make_run, open_node, read_all, running
from tierlog.adapters.files import DiskFiles
from tierlog.format.run import Run
from tierlog.model.ids import EntryId, LedgerId

pytestmark = pytest.mark.covers("D22", "D37")


async def test_add_restart_read(tmp_path):
    runs = [make_run(ledger, n, size=2000) for n in range(60) for ledger in (1, 2)]
    for life in range(3):
        files = DiskFiles(tmp_path / "a" / "b")
        node = await open_node(files, seed=life)
        async with running(node):
            for answer in [node.add(run, recovery=True) for run in runs]:
                await answer
            for ledger in (1, 2):
                found = await read_all(node, ledger)
                assert found == [run for run in runs if run.header.ledger_id == ledger]
            await node.checkpoint()
        files.close()


WRITER = """
import asyncio, sys
from pathlib import Path
from tests.unit.storage.node_kit import make_run, open_node, running
from tierlog.adapters.files import DiskFiles
from tierlog.format.run import Run
from tierlog.model.ids import EntryId, LedgerId

async def main():
    files = DiskFiles(Path(sys.argv[1]))
    start = int(sys.argv[2])
    node = await open_node(files, seed=start)
    async with running(node):
        for batch in range(start, start + 100_000, 8):
            answers = [node.add(make_run(1, n, size=700)) for n in range(batch, batch + 8)]
            for n, answer in enumerate(answers, batch):
                await answer
                sys.stdout.write(f"ack {n}\\n")
                sys.stdout.flush()
            if batch % 80 == 0:
                await node.checkpoint()

asyncio.run(main())
"""


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path):
    acknowledged = -1
    for life in range(3):
        start = acknowledged + 100
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "data"), str(start)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert writer.stdout is not None
        lines = [b""]
        while not lines[-1].startswith(b"ack"):
            lines.append(writer.stdout.readline())
        time.sleep(0.15 + 0.1 * life)
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.read().split(b"\n")[:-1]  # the last may be cut
        writer.stdout.close()
        writer.wait()
        acknowledged = max(int(line[4:]) for line in lines if line.startswith(b"ack"))
        asyncio.run(_check(tmp_path / "data", start, acknowledged))
    assert acknowledged > 300


async def _check(root, start, acknowledged):
    files = DiskFiles(root)
    node = await open_node(files, seed=9)
    assert node.damages == []
    found: dict[int, Run] = {}
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.run(stop))
        await asyncio.sleep(0)
        # Without a recovery read, which would fence the ledger for the next writer.
        await node.last_add_confirmed(LedgerId(1))
        node.confirm(LedgerId(1), EntryId(10**6))
        async for runs in node.read(LedgerId(1), EntryId(start), bytes_max=10**9):
            found |= {run.first_entry_id: run for run in runs}
        stop.set()
    files.close()
    for entry_id in range(start, acknowledged + 1):
        assert found[entry_id] == make_run(1, entry_id, size=700)
