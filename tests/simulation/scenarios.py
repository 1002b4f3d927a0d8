"""What is done in a run, and what goes wrong meanwhile; each scenario is a function of a world.

``offload_many``: ledgers are filled, sealed, offloaded and deleted locally while processes crash
at random steps, sessions expire, clocks jump, servers go away, connections are cut, and the queue
loses, repeats, delays and forgets. After each step what must hold is checked; at the end the
world is healed and must come to rest within a bound of virtual time.

``lose_nodes``: see ``losses``. ``write_once``: see ``once``. ``trim_many``: the same as the first,
with a retention that ends.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tests.simulation.losses import lose_nodes
from tests.simulation.once import write_once
from tests.simulation.services import IngestProcess, Producer
from tests.simulation.steps import Plan, Result, Steps
from tests.simulation.trace import Trace
from tests.simulation.trimming import RETENTION_S
from tests.simulation.virtual_loop import run_virtual
from tests.simulation.world import (
    BLOCK_SIZE,
    LEDGER_BYTES_MAX,
    STREAM,
    World,
    logs_into,
    small_blocks,
)
from tierlog.model.errors import TierlogError
from tierlog.model.offload import OffloadState
from tierlog.model.policy import HOUR_MS, MINUTE_MS, Policy

RUN_S_MAX = 7 * 24 * 3600.0
REST_S_MAX = 16 * 3600.0


def run(seed: int, plan: Plan, trace: Trace) -> Result:
    """Run a scenario for one seed; raises ``ViolationError``."""

    async def main() -> Result:
        loop = asyncio.get_running_loop()
        trace.now_s = loop.time
        world = World(seed, plan.size, trace)
        world.servers.tasks.install(loop)
        try:
            with world.checker.copies.noting():
                return await SCENARIOS[plan.scenario](world, plan)
        finally:
            trace.end()

    with logs_into(trace), small_blocks():
        return run_virtual(main(), until_s=RUN_S_MAX)


async def offload_many(world: World, plan: Plan) -> Result:
    """Bring many ledgers to tier 2."""
    chance = world.servers.rng("scenario")
    await world.start(
        Policy(
            offload_time_ms=MINUTE_MS,
            retention_time_ms=1000 * HOUR_MS,
            deletion_lag_ms=round(plan.size.lag_s * 1000),
            ledger_entries_max=chance.randint(3, 12),
            ledger_age_ms_max=2 * MINUTE_MS,
            block_size=BLOCK_SIZE,
            ledger_bytes_max=LEDGER_BYTES_MAX,
        )
    )
    steps = Steps(world, chance, plan.focus)
    while _listed(world) < plan.ledgers:
        await steps.next()
        world.look()
    await _come_to_rest(world)
    await world.check_all()
    return Result(
        seed=world.seed,
        digest=world.trace.digest,
        ledgers=len(world.checker.ledgers()),
        crashes=steps.crashes,
        checks=world.checker.checks,
        appends=world.checker.model.counts(),
        virtual_s=world.now_s(),
    )


def _listed(world: World) -> int:
    return len(world.checker.ledgers())


async def _come_to_rest(world: World) -> None:
    """End all faults and all appends; wait until everything is offloaded and swept."""
    world.heal()
    for process in world.of(Producer):
        assert isinstance(process, Producer)
        process.enough.set()
    end_s = world.now_s() + REST_S_MAX
    while (left := await _unsettled(world)) and world.now_s() < end_s:
        await asyncio.sleep(60.0)
        world.look()
    if left:
        world.checker.complain("c", f"{REST_S_MAX} s after the last fault there is left: {left}")
    world.look()


async def _unsettled(world: World) -> list[str]:
    """Return what keeps the world from being at rest."""
    nodes = [one for one in world.of(IngestProcess) if isinstance(one, IngestProcess)]
    empty = set().union(*(one.empty_ledgers() for one in nodes))
    left = [
        f"{one.ledger_id} open"
        for one in world.checker.ledgers()
        if not one.closed and one.ledger_id not in empty
    ]
    left += world.appending()
    left += [
        f"{one.ledger_id} {one.state.name} abandoned={len(one.abandoned)}"
        for one in world.checker.contexts()
        if one.stream == STREAM and one.ledger_id not in empty
        if one.state is not OffloadState.TIER1_DELETED or one.abandoned
    ]
    if left:
        return left[:10]
    kept = {one.ledger_id for one in world.checker.contexts() if one.stream != STREAM}
    held: set[int] = set()
    for node in nodes:
        held.update(await node.storage.list_ledgers() if node.storage is not None else ())
    return [f"{ledger_id} on disk" for ledger_id in sorted(held - kept)]


async def trim_many(world: World, plan: Plan) -> Result:
    """Bring many ledgers to tier 2 while retention takes the oldest away."""
    chance = world.servers.rng("scenario")
    policy = Policy(
        offload_time_ms=MINUTE_MS,
        retention_time_ms=round(RETENTION_S * 1000),
        deletion_lag_ms=round(plan.size.lag_s * 1000),
        ledger_entries_max=chance.randint(3, 12),
        ledger_age_ms_max=2 * MINUTE_MS,
        block_size=BLOCK_SIZE,
        ledger_bytes_max=LEDGER_BYTES_MAX,
    )
    await world.start(policy)
    steps = Steps(world, chance, plan.focus)
    while len(world.checker.trims.trimmed) < plan.ledgers:
        await steps.next()
        world.look()
    # What is there now stays, so that there is something to read back.
    await _insist(lambda: world.admin_catalog.streams.set_policy(STREAM, without_retention(policy)))
    await _come_to_rest(world)
    await world.check_all()
    return Result(
        seed=world.seed,
        digest=world.trace.digest,
        ledgers=len(world.checker.trims.trimmed),
        crashes=steps.crashes,
        checks=world.checker.checks,
        appends=world.checker.model.counts(),
        virtual_s=world.now_s(),
    )


def without_retention(policy: Policy) -> Policy:
    """Return a policy that keeps everything."""
    return replace(policy, retention_time_ms=None)


async def _insist(call: Callable[[], Awaitable[object]]) -> None:
    while True:
        try:
            await call()
        except TierlogError:
            await asyncio.sleep(1.0)
        else:
            return


SCENARIOS = {
    "offload_many": offload_many,
    "lose_nodes": lose_nodes,
    "trim_many": trim_many,
    "write_once": write_once,
}
