"""A rolling upgrade and the way back: ``python -m tests.upgrade.run --from COMMIT``.

Three nodes and the other services run the code of another commit. One process after the other is
stopped with SIGTERM and started with this code, in the order of docs/how-to/upgrade-a-cluster.md,
and then back again in the opposite order. All the while eight producers, half of them of either
release, send events to one stream after the other; ledgers roll over, are offloaded and deleted
locally. After each step the command line of either release reads the first of these streams. Of
each stream each event has to be there once, and each producer's in its order.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.exactly_once.run import WRITERS, Run
from tests.plugins.fix_cluster import ServiceCluster
from tierlog.embedded.supervisor import EmbeddedServers
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.sections import LogSettings

ROOT: Final = Path(__file__).resolve().parent.parent.parent
SERVICES: Final = ("ingest", "offloader", "reader", "scheduler")
ROOMS: Final = ("shared", *(f"services/{one}" for one in SERVICES))
EVENTS: Final = 1000
NODES: Final = 3
# What only reads what others write goes first.
FIRST: Final = ("reader", "offloader", "scheduler")


def path_of(tree: Path) -> str:
    """Return the search path on which a process finds that tree's code before any other."""
    return os.pathsep.join([*(str(tree / room) for room in ROOMS), str(ROOT)])


def unpack(commit: str, folder: Path) -> None:
    """Put the code of a commit into a folder."""
    told = subprocess.run(
        ["git", "archive", commit, *ROOMS], cwd=ROOT, capture_output=True, check=False
    )
    if told.returncode != 0:
        sys.exit(
            f"error: there is no commit {commit} here: {told.stderr.decode().strip()}\n"
            "remedy: name one that this clone has, with FROM=COMMIT; a shallow clone has few"
        )
    with tarfile.open(fileobj=io.BytesIO(told.stdout)) as packed:
        packed.extractall(folder, filter="data")


@dataclass
class Mixed(Run):
    """A run with producers of two releases; its trouble comes from elsewhere."""

    paths: tuple[str, str] = ("", "")

    def producer_env(self, name: str) -> dict[str, str]:
        """Make every other producer one of the other release."""
        return {"PYTHONPATH": self.paths[int(name[1:]) % 2]}

    async def trouble(self, over: asyncio.Event) -> None:
        """Leave that to who replaces the processes."""


class Upgrade:
    """One upgrade of a cluster and the way back: ``steps`` are done, ``troubles`` were met."""

    def __init__(self, cluster: ServiceCluster, keep: Path, paths: tuple[str, str]) -> None:
        self._cluster = cluster
        self._keep = keep
        self._paths = paths
        self.steps: list[str] = []
        self.troubles: list[str] = []

    async def go(self, *, events: int) -> None:
        """Replace each process twice, with producers at work from before the first to the end."""
        await self._produce(0, events)
        replacing = asyncio.create_task(self._replace_all(WRITERS * events))
        wave = 0
        while not replacing.done():
            wave += 1
            await self._produce(wave, events)
        await replacing

    async def _produce(self, wave: int, events: int) -> None:
        folder = self._keep / f"wave-{wave}"
        folder.mkdir(parents=True)
        run = Mixed(
            self._cluster, folder, f"wave-{wave}", random.Random(0), events=events,
            paths=self._paths,
        )  # fmt: skip
        troubles, counts = await run.go()
        print(f"  wave {wave}: {WRITERS * events} events, {counts}", flush=True)
        self.troubles += [f"wave {wave}: {one}" for one in troubles]

    async def _replace_all(self, count: int) -> None:
        order = [*FIRST, *self._cluster.nodes]
        old, new = self._paths
        for release, names in ((new, order), (old, order[::-1])):
            for name in names:
                began_s = time.monotonic()
                await self._cluster.restart(name, PYTHONPATH=release)
                took_s = time.monotonic() - began_s
                self.steps.append(name)
                words = "new" if release == new else "old"
                print(f"  {name} is {words}, after {took_s:.1f} s", flush=True)
                for path in dict.fromkeys(self._paths):
                    await self._read_by(path, count)

    async def _read_by(self, path: str, count: int) -> None:
        """Read the first stream with one release's client."""
        words = ("-m", "tierlog.cli.main", "read", "wave-0", "--from", "earliest", "-o", "jsonl")
        env = {
            **os.environ, **self._cluster.env, "PYTHONPATH": path,
            "TIERLOG_STATE_DIR": str(self._cluster.state_dir),
        }  # fmt: skip
        one = await asyncio.create_subprocess_exec(
            sys.executable, *words, env=env, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
        told, said = await one.communicate()
        found = len(told.splitlines())
        if one.returncode != 0 or found != count:
            self.troubles.append(
                f"after {self.steps}, {path.partition(os.pathsep)[0]} read {found} of {count} "
                f"events and ended with {one.returncode}: {said[-600:].decode()}"
            )


async def upgrade(
    servers: EmbeddedServers, old: Path, keep: Path, *, events: int = EVENTS
) -> tuple[Sequence[str], Sequence[str]]:
    """Upgrade a cluster of ``old`` to this code and back; return the steps and what is wrong."""
    paths = (path_of(old), path_of(ROOT))
    cluster = ServiceCluster(
        servers, keep / "cluster", name=f"upgrade-{os.getpid()}", nodes=NODES,
        env={"PYTHONPATH": paths[0]},
    )  # fmt: skip
    rolled = Upgrade(cluster, keep, paths)
    try:
        await cluster.start()
        await rolled.go(events=events)
    finally:
        await cluster.stop()
    end = "WRONG" if rolled.troubles else "each event once, in order"
    print(f"{len(rolled.steps)} processes replaced: {end}", flush=True)
    for trouble in rolled.troubles:
        print(f"  {trouble}", flush=True)
    return rolled.steps, rolled.troubles


async def _all(commit: str, keep: Path, events: int) -> int:
    old = keep / "old"
    unpack(commit, old)
    async with EmbeddedServers(keep / "servers") as servers:
        _, troubles = await upgrade(servers, old, keep, events=events)
    return 1 if troubles else 0


def main(arguments: list[str] | None = None) -> int:
    """Run it; the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="commit", default="HEAD~20", help="the other release")
    parser.add_argument("--events", type=int, default=EVENTS, help="of each producer of a stream")
    parser.add_argument("--keep", type=Path, help="where states and logs are kept")
    chosen = parser.parse_args(arguments)
    keep = chosen.keep or Path(tempfile.mkdtemp(prefix="tierlog-upgrade-"))
    keep.mkdir(parents=True, exist_ok=True)
    configure_logging(LogSettings(level="error"), service="upgrade")
    failed = asyncio.run(_all(chosen.commit, keep, chosen.events))
    print(f"from {chosen.commit} and back; kept in {keep}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
