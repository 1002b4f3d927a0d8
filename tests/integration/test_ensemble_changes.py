"""Storage nodes are killed and stopped under an owner that lives: four real nodes, 3/3/2.

Protocols.md section 1, "A node fails while writing": appends go on in the same ledger, whose last
ensemble has another node then. The longest time without an acknowledgement is printed.
"""

# mypy: disable-error-code="union-attr,var-annotated,no-untyped-def"

import asyncio
import signal
import sys

import pytest

from tests.integration.test_failover import STREAM, Meter, World
from tierlog.adapters.system import SystemClock, SystemIds
from tierlog.catalog import Catalog
from tierlog.client import open_client
from tierlog.wiring.build import open_metadata

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

GAP_S_SURE = 10.0


@pytest.fixture
async def world(start_nodes):
    cluster = await start_nodes(4)
    async with open_client(cluster.settings) as client, open_metadata(cluster.settings) as store:
        catalog = Catalog.over(store, clock=SystemClock(), ids=SystemIds())
        yield World(cluster, client, catalog)


async def open_ledger(world):
    """Return the id and metadata of the ledger that is being written."""
    (ledger_id,) = [
        one.ledger_id for one in (await world.catalog.streams.get(STREAM)).ledgers if not one.closed
    ]
    return ledger_id, await world.catalog.ledgers.get(ledger_id)


async def break_member(world, meter, how, capsys):
    """Break a node of the ensemble that is not the owner; wait until it is replaced."""
    loop = asyncio.get_running_loop()
    await meter.got(200)
    ledger_id, before = await open_ledger(world)
    owner = (await world.catalog.streams.get(STREAM)).owner.node_id
    broken = next(one for one in before.segments[-1].ensemble if one != owner)
    since_s = loop.time()
    how(world.process_of(broken))
    async with asyncio.timeout(30):
        while True:
            await meter.got(20)
            now_id, after = await open_ledger(world)
            assert now_id == ledger_id, "the ledger goes on"
            if broken not in after.segments[-1].ensemble:
                break
    gap_s = meter.gap_s(since_s)
    with capsys.disabled():
        took_s = loop.time() - since_s
        print(
            f"\n[ensemble] {how.__name__}: {gap_s:.2f} s without acknowledgement, ",
            end="",
            file=sys.stderr,
        )
        print(f"replaced after {took_s:.2f} s", file=sys.stderr)
    assert gap_s < GAP_S_SURE
    assert len(after.segments) > len(before.segments)
    return broken


@pytest.mark.covers("A01", "D03", "D14", "D16")
async def test_members_of_an_ensemble_are_killed_and_stopped(world, capsys):
    def kill(process):
        world.cluster.kill(process)

    def stop(process):
        world.signal(process, signal.SIGSTOP)

    meter = Meter(world.client)
    async with meter.beside():
        killed = await break_member(world, meter, kill, capsys)
        await world.cluster.restart(world.process_of(killed))
        stopped = await break_member(world, meter, stop, capsys)
        world.signal(world.process_of(stopped), signal.SIGCONT)
        await meter.got(100)
    await world.check(meter)
