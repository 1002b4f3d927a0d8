"""Exactly once under kills: ``python -m tests.exactly_once.run --runs 100 --seed N``.

A run: eight producers, processes of their own, send events to one stream of three nodes, while
producers, the stream's owner, other nodes and the offloader are killed with SIGKILL, answers get
lost, and ledgers roll over, are offloaded and deleted locally. At the end each event has to be in
the stream once, and each producer's in its order.

A seed fixes what is killed and for how long, not what the machine makes of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar
from uuid import UUID

import aiohttp

from tests.exactly_once.producer import event_of
from tests.plugins.fix_cluster import ServiceCluster
from tierlog.client import open_client
from tierlog.embedded.supervisor import EmbeddedServers
from tierlog.model.attributes import EVENT_COUNT
from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.model.policy import MIB, Policy
from tierlog.runtime.logs import configure_logging
from tierlog.runtime.sections import LogSettings

WRITERS: Final = 8
EVENTS: Final = 1500
NODES: Final = 3
POLICY: Final = Policy(
    ledger_bytes_max=128 * 1024, block_size=5 * MIB, offload_size_bytes=0, deletion_lag_ms=200
)
DONE_S_MAX: Final = 240.0
EVENTS_KEY: Final = UUID(bytes=bytes(EVENT_COUNT))
Answer = TypeVar("Answer")
_EVENT: Final = re.compile(rb"(\w+)/(\d+)/\.*")


@dataclass
class Run:
    """One run over a cluster that others use before and after it."""

    cluster: ServiceCluster
    folder: Path
    stream: str
    rng: random.Random
    events: int = EVENTS
    kills: Counter[str] = field(default_factory=Counter)
    _producers: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    _troubles: list[str] = field(default_factory=list)

    async def go(self) -> tuple[list[str], dict[str, int]]:
        """Return what is wrong, and what happened."""
        async with open_client(self.cluster.settings) as client:
            await client.create_stream(self.stream, policy=POLICY)
        async with asyncio.timeout(DONE_S_MAX), asyncio.TaskGroup() as tasks:
            writing = [
                tasks.create_task(self._keep_producing(f"w{number}")) for number in range(WRITERS)
            ]
            over = asyncio.Event()
            tasks.create_task(self.trouble(over))
            await asyncio.wait(writing)
            over.set()
        return await self._judge()

    async def _keep_producing(self, name: str) -> None:
        """Start a producer again whenever it was killed, until it says that all is there."""
        settings = self.cluster.settings
        env = {
            **os.environ,
            **self.cluster.env,
            **self.producer_env(name),
            "TIERLOG_CLIENT__INGEST_ADDRESS": settings.client.ingest_address or "",
            "TIERLOG_CLIENT__READER_HTTP_ADDRESS": settings.client.reader_http_address or "",
            "TIERLOG_CLIENT__SCHEDULER_HTTP_ADDRESS": settings.client.scheduler_http_address or "",
            "TIERLOG_CLIENT__TIMEOUT_S": "60",
        }
        words = (str(self.folder / f"{name}.json"), self.stream, str(self.events))
        while True:
            one = self._producers[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.exactly_once.producer", *words),
                env=env, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE,
            )  # fmt: skip
            try:
                _, said = await one.communicate()
            finally:
                if one.returncode is None:
                    one.kill()
            if one.returncode == 0:
                del self._producers[name]
                return
            if one.returncode != -signal.SIGKILL:
                self._troubles.append(f"{name} ended with {one.returncode}: {said[-600:].decode()}")
                return

    def producer_env(self, name: str) -> dict[str, str]:
        """Return what the environment of one producer has beside the cluster's."""
        del name
        return {}

    async def trouble(self, over: asyncio.Event) -> None:
        """Kill one process after the other; all of them run again when this returns."""
        while not over.is_set():
            await asyncio.sleep(self.rng.uniform(0.2, 1.2))
            what = self.rng.choices(("producer", "owner", "node", "offloader"), (6, 2, 1, 1))[0]
            if what == "producer":
                running = sorted(
                    name for name, one in self._producers.items() if one.returncode is None
                )
                if not running:
                    continue
                self._producers[self.rng.choice(running)].kill()
            else:
                name = await self._process(what)
                self.cluster.kill(name)
                await asyncio.sleep(self.rng.choice((0.0, 0.3, 2.0)))
                await self.cluster.restart(name)
            self.kills[what] += 1

    async def _process(self, what: str) -> str:
        if what == "offloader":
            return what
        owner = await self._owner()
        if what == "owner" and owner is not None:
            return owner
        return self.rng.choice([one for one in self.cluster.nodes if one != owner])

    async def _owner(self) -> str | None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, KeyError):
            url = f"http://{self.cluster.address('ingest', 'http')}/v1/streams/{self.stream}/owner"
            async with (
                asyncio.timeout(1.0),
                aiohttp.ClientSession() as http,
                http.get(url) as answer,
            ):
                node_id = str((await answer.json())["node_id"])
                return f"ingest-{node_id.rpartition('-')[2]}"
        return None

    async def _judge(self) -> tuple[list[str], dict[str, int]]:
        found: dict[str, list[int]] = {f"w{number}": [] for number in range(WRITERS)}
        troubles = list(self._troubles)
        async with open_client(self.cluster.settings) as client:
            await _until_done(partial(client.seal, self.stream))
            async for event in client.reader(self.stream).events():
                match = _EVENT.fullmatch(event.payload)
                name, number = (match[1].decode(), int(match[2])) if match else ("", 0)
                if name not in found or event.payload != event_of(name, number):
                    troubles.append(f"an event that nobody sent: {event.payload[:80]!r}")
                    continue
                found[name].append(number)
            counts = await client.attributes(self.stream).get([EVENTS_KEY])
            offloads = await _until_done(client.offloads)
        states = Counter(str(one["state"]) for one in offloads if one["stream"] == self.stream)
        for name, numbers in found.items():
            troubles += differences(name, numbers, self.events)
        if counts.get(EVENTS_KEY) != WRITERS * self.events:
            troubles.append(f"the count of events is {counts}")
        return troubles, {**self.kills, **states}


def differences(name: str, numbers: list[int], count: int) -> list[str]:
    """Say what is wrong with the numbers of one producer's events; nothing: all is well."""
    if numbers == list(range(1, count + 1)):
        return []
    times = Counter(numbers)
    lost = [one for one in range(1, count + 1) if one not in times]
    twice = [one for one in times if times[one] > 1]
    return [f"{name}: lost {lost[:9]}, twice {twice[:9]}, in order {numbers == sorted(numbers)}"]


async def _until_done(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Ask again while a service is away."""
    while True:
        with contextlib.suppress(RetryableError, IndeterminateError):
            return await ask()
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def open_cluster(servers: EmbeddedServers, folder: Path) -> AsyncIterator[ServiceCluster]:
    """Run three nodes and the other services."""
    cluster = ServiceCluster(servers, folder, name=f"once-{os.getpid()}", nodes=NODES)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


async def run_once(cluster: ServiceCluster, folder: Path, seed: int, *, events: int) -> list[str]:
    """Do one run and say what it came to; return what is wrong."""
    began_s = time.monotonic()
    folder.mkdir(parents=True)
    run = Run(cluster, folder, f"once-{seed}", random.Random(seed), events=events)
    troubles, counts = await run.go()
    end = "WRONG" if troubles else f"{WRITERS * events} events once each, in order"
    print(f"seed {seed}, {time.monotonic() - began_s:.0f} s, {counts}: {end}", flush=True)
    for trouble in troubles:
        print(f"  {trouble}", flush=True)
    return troubles


async def _all(seeds: range, keep: Path, events: int) -> int:
    failed = 0
    async with (
        EmbeddedServers(keep / "servers") as servers,
        open_cluster(servers, keep / "cluster") as cluster,
    ):
        for seed in seeds:
            failed += bool(await run_once(cluster, keep / f"seed-{seed}", seed, events=events))
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Run it; the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the (first) seed")
    parser.add_argument("--runs", type=int, default=10, help="how many, from the first seed on")
    parser.add_argument("--events", type=int, default=EVENTS, help="of each of the producers")
    parser.add_argument("--keep", type=Path, help="where states and logs are kept")
    chosen = parser.parse_args(arguments)
    assert chosen.runs >= 1
    keep = chosen.keep or Path(tempfile.mkdtemp(prefix="tierlog-once-"))
    keep.mkdir(parents=True, exist_ok=True)
    configure_logging(LogSettings(level="error"), service="once")
    seeds = range(chosen.seed, chosen.seed + chosen.runs)
    failed = asyncio.run(_all(seeds, keep, chosen.events))
    print(f"{len(seeds) - failed} of {len(seeds)} runs: each event once, in order; kept in {keep}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
