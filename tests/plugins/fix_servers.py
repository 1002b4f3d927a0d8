"""Real S3, ZooKeeper, Kafka and Redis servers, started once for the whole session.

`servers.endpoints` has their addresses; `servers.kill(name)` and `await servers.restart(name)`
(also `empty=True`) break and mend one of "s3", "zookeeper", "kafka", "redis". A test that broke
one brings it back before it ends. Tests keep apart by names of their own (bucket prefixes,
ZooKeeper roots, topic prefixes).
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tierlog.embedded.supervisor import EmbeddedServers

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator


def run_apart(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on a loop that leaves the test's own loop and policy alone."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


@pytest.fixture(scope="session")
def servers(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[EmbeddedServers]:
    embedded = EmbeddedServers(tmp_path_factory.mktemp("servers"))
    capture: Any = pytestconfig.pluginmanager.getplugin("capturemanager")

    def tell(what: str, done: int, total: int | None) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n[servers] {what}", end="", file=sys.stderr, flush=True)

    run_apart(embedded.start(tell))
    yield embedded
    run_apart(embedded.stop())
