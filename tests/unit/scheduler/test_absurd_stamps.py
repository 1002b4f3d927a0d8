"""What owners note of times is never believed where it matters (B26).

A stream whose owner's clock is anywhere, and a leader whose own clock jumps while ledgers wait:
offloading is never held up, and nothing is deleted early or kept for ever.
"""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import BLOCK, STREAM, World, metadata_of
from tests.unit.scheduler.test_scheduler import ENTRIES, HOUR, running
from tierlog.adapters.memory.clock import SIM_EPOCH_MS, SimClock
from tierlog.catalog import Catalog
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.ledger import LedgerState
from tierlog.model.policy import HOUR_MS, MINUTE_MS, Policy
from tierlog.model.stream import Stream
from tierlog_scheduler.clocks import SAMPLE_AGAIN_MS

OFFLOAD_S, LAG_S, RETENTION_S = 1800.0, 1 * HOUR, 5 * HOUR
SLACK_S = 200.0
"""Some passes, each of which takes what is due to its next step; and what a jump costs."""
POLICY = Policy(
    offload_time_ms=30 * MINUTE_MS, deletion_lag_ms=HOUR_MS, retention_time_ms=5 * HOUR_MS
)
YEAR_9999_MS = 253_402_300_799_000
STAMPS = {
    "1970": 0,
    "behind": SIM_EPOCH_MS - 5 * HOUR_MS,
    "ahead": SIM_EPOCH_MS + 5 * HOUR_MS,
    "9999": YEAR_9999_MS,
    "2**62": 2**62,
}


async def sealed(world: World, claimed: Stream, *, opened_ms: int, closed_ms: int) -> LedgerId:
    """Make a closed ledger whose owner's clock said this when it was opened and closed."""

    def owner(wall_ms: int) -> Catalog:
        clock = SimClock(wall_ms=wall_ms - round(world.clock.monotonic_s() * 1000))
        return Catalog.over(world.metadata.connect(), clock=clock, ids=world.ids)

    opened = replace(
        metadata_of(ENTRIES), state=LedgerState.OPEN, last_entry_id=EntryId(-1), length=0
    )
    before = owner(opened_ms)
    ledger_id = await before.ledgers.new_id()
    await before.ledgers.open(claimed, ledger_id, opened, block_size=BLOCK)
    world.ledgers[ledger_id] = list(ENTRIES)
    await owner(closed_ms).ledgers.close(
        claimed, ledger_id, last_entry_id=EntryId(9), length=sum(map(len, ENTRIES))
    )
    listed = (await world.catalog().streams.snapshot(STREAM)).ledgers[-1]
    assert (listed.opened_ms, listed.closed_ms) == (opened_ms, closed_ms)
    return ledger_id


@pytest.mark.covers("A31", "A36")
@pytest.mark.parametrize("jump_h", [5, -5, 24 * 365 * 50])
@pytest.mark.parametrize(
    ("opened", "closed"),
    [*((one, one) for one in STAMPS), ("9999", "1970"), ("1970", "2**62")],
)
def test_no_stamp_and_no_live_jump_deletes_early_or_keeps_for_ever(opened, closed, jump_h):
    async def main():
        world = World()
        claimed = await world.stream(policy=POLICY)
        loop = asyncio.get_running_loop()
        async with running(world):
            await asyncio.sleep(30)
            ledger_id = await sealed(
                world, claimed, opened_ms=STAMPS[opened], closed_ms=STAMPS[closed]
            )
            begun_s = loop.time()
            await world.seal(claimed, ENTRIES, close=False)
            times: dict[str, float] = {}

            async def until(what: str, end_s: float) -> None:
                while loop.time() - begun_s < end_s:
                    if what not in times and await HAPPENED[what](world, ledger_id):
                        times[what] = loop.time() - begun_s
                    await asyncio.sleep(20)

            await until("offloaded", OFFLOAD_S + SLACK_S)
            assert times["offloaded"] < OFFLOAD_S + SLACK_S
            # In the middle of both waits.
            world.clock.jump_wall(jump_h * HOUR)
            await until("local", times["offloaded"] + LAG_S + SLACK_S)
            assert LAG_S - 20 <= times["local"] - times["offloaded"] < LAG_S + SLACK_S
            await until("trimmed", RETENTION_S + SLACK_S + SAMPLE_AGAIN_MS / 1000)
            assert times["trimmed"] >= RETENTION_S

    with capture_logs():
        run_virtual(main(), until_s=20 * HOUR)


async def _offloaded(world: World, ledger_id: LedgerId) -> bool:
    return (await world.context(ledger_id)).complete


async def _local_gone(world: World, ledger_id: LedgerId) -> bool:
    return await world.catalog().ledgers.get(ledger_id) is None


async def _trimmed(world: World, ledger_id: LedgerId) -> bool:
    listed = (await world.catalog().streams.snapshot(STREAM)).ledgers
    return ledger_id not in [one.ledger_id for one in listed]


HAPPENED = {"offloaded": _offloaded, "local": _local_gone, "trimmed": _trimmed}
