"""What ``tierlog ledger recover`` and ``tierlog node decommission --cancel`` say they know.

The commands run over a catalog in memory; nothing else of them is replaced.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.simulation.virtual_loop import run_virtual
from tests.unit.catalog.world import MIB, NODE, ORDERS, World, one_node
from tierlog.catalog import Catalog
from tierlog.cli import ledger
from tierlog.cli.main import app
from tierlog.format import paths, records
from tierlog.model.ids import LedgerId
from tierlog.model.ledger import KEY_STREAM
from tierlog.model.node import Cookie, NodeInfo
from tierlog_ingest.cli import decommission
from tierlog_ingest.cli.node import app as node_app

Prepare = Callable[[World], Awaitable[Catalog]]
LEDGER = 0
INFO = NodeInfo(node_id=NODE, wire_address="h:1", grpc_address="h:2", http_address="h:3")


def over(prepare: Prepare) -> Callable[[Callable[[Catalog], Awaitable[Any]]], Any]:
    """Return what runs a command's work on the metadata that ``prepare`` leaves."""

    def with_catalog(work: Callable[[Catalog], Awaitable[Any]]) -> Any:
        found: list[Any] = []

        async def main() -> None:
            found.append(await work(await prepare(World())))

        run_virtual(main(), until_s=100)
        return found[0]

    return with_catalog


def of_a_stream(*, recovering: bool, closed: bool = False) -> Prepare:
    async def prepare(world: World) -> Catalog:
        process, claimed = await world.owner()
        catalog = process.catalog
        if closed:
            assert await world.closed_ledger(process, claimed) == LEDGER
            return catalog
        ledger_id = await catalog.ledgers.new_id()
        assert ledger_id == LEDGER
        metadata = replace(one_node(), custom={KEY_STREAM: ORDERS.encode()})
        await catalog.ledgers.open(claimed, ledger_id, metadata, block_size=5 * MIB)
        if recovering:
            await catalog.ledgers.begin_recovery(ledger_id)
        return catalog

    return prepare


async def of_its_own(world: World) -> Catalog:
    """A bare ledger that somebody began to recover."""
    catalog = world.process().catalog
    await catalog.nodes.ensure_cluster()
    assert await catalog.bare.create(one_node()) == LEDGER
    await catalog.ledgers.begin_recovery(LedgerId(LEDGER))
    return catalog


@pytest.mark.parametrize(
    ("prepare", "number", "code", "words"),
    [
        (of_a_stream(recovering=True), 777, 3, "there is no ledger 777"),
        (of_a_stream(recovering=True), LEDGER, 2, "its recovery goes on by itself"),
        (of_its_own, LEDGER, 2, "its recovery goes on with: tierlog ledger close"),
        (of_a_stream(recovering=False), LEDGER, 2, "is OPEN: nothing waits for its copies"),
        (of_a_stream(recovering=False, closed=True), LEDGER, 2, "is CLOSED: nothing waits"),
    ],
)
def test_recover_without_accepting_a_loss_says_what_the_ledger_is(
    monkeypatch: pytest.MonkeyPatch, prepare: Prepare, number: int, code: int, words: str
) -> None:
    monkeypatch.setattr(ledger, "with_catalog", over(prepare))
    done = CliRunner().invoke(app, ["ledger", "recover", str(number)])
    told = " ".join(done.output.split())
    assert done.exit_code == code, told
    assert words in told
    assert ("goes on" in told) is ("goes on" in words)


@pytest.mark.parametrize(
    ("live", "state"), [(True, "live"), (False, "away")], ids=["live", "not registered"]
)
def test_a_decommission_that_is_called_off_tells_what_is_known_of_the_node(
    monkeypatch: pytest.MonkeyPatch, live: bool, state: str
) -> None:
    async def prepare(world: World) -> Catalog:
        process = world.process()
        catalog = process.catalog
        cluster = await catalog.nodes.ensure_cluster()
        cookie = Cookie(cluster_id=cluster.cluster_id, node_id=NODE, instance_id=process.ids.uuid())
        await catalog.store.create(paths.cookie_path(NODE), records.encode_cookie(cookie))
        if live:
            await catalog.nodes.announce(INFO)
        await catalog.draining.begin(NODE)
        return catalog

    monkeypatch.setattr(decommission, "with_catalog", over(prepare))
    done = CliRunner().invoke(node_app, ["decommission", NODE, "--cancel", "-o", "json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {"node_id": NODE, "state": state, "registered": live}
    assert ("not registered" in done.stderr) is not live
