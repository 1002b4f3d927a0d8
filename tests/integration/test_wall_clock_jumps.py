"""Wall clocks that jump by five hours under real processes: nothing goes early, nothing stalls.

What has passed is the smaller of the progress of two clocks (ADR-0021).
"""

from functools import partial
from pathlib import Path

import pytest

from tests.integration.test_reader_tiers import append, numbered, payloads
from tierlog.client import open_client
from tierlog.model.policy import MIB, Policy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SHIFTED = Path(__file__).parents[1] / "plugins" / "shifted"
HOUR_S = 3600
LONG = Policy(block_size=5 * MIB, offload_time_ms=0, deletion_lag_ms=30 * 60_000)
SHORT = Policy(block_size=5 * MIB, offload_time_ms=2000, deletion_lag_ms=2000)


async def copies(client, stream):
    """Return of each ledger whether it is in tier 1 and in tier 2."""
    ledgers = (await client.stream(stream))["ledgers"]
    return [(bool(one["tier1"]), bool(one["complete"])) for one in ledgers]


async def test_jumps_of_five_hours_delete_nothing_early_and_stop_nothing(start_nodes, tmp_path):
    clock = tmp_path / "wall-clock"
    clock.write_text("0")
    cluster = await start_nodes(1, PYTHONPATH=str(SHIFTED), TIERLOG_WALL_CLOCK=str(clock))

    async with open_client(cluster.settings) as client:

        async def is_so(stream, wanted):
            return await copies(client, stream) == wanted

        async def sealed(stream, policy):
            await client.create_stream(stream, policy=policy)
            await append(client, stream, numbered(0, 10))
            await client.seal(stream)

        await sealed("waits", LONG)
        both = partial(is_so, "waits", [(True, True)])
        await cluster.until(both, what="the copy of what waits")
        for jumped, offset_h in enumerate((5, 0, -5)):
            # Its copy is not due yet, or its lag not past.
            await sealed(f"goes-{jumped}", SHORT)
            clock.with_suffix(".new").write_text(f"{offset_h * HOUR_S}")
            clock.with_suffix(".new").replace(clock)
            gone = partial(is_so, f"goes-{jumped}", [(False, True)])
            await cluster.until(gone, what=f"tier 1 let go of what waited at {offset_h} h")
            assert await both(), f"deleted early at {offset_h} h"
        assert await payloads(client, "waits") == numbered(0, 10)
        closed_ms = [
            (await client.stream(f"goes-{jumped}"))["ledgers"][0]["closed_ms"] for jumped in (0, 1)
        ]
        assert closed_ms[1] - closed_ms[0] > 5 * HOUR_S * 1000, "the processes go by that clock"
        # Nor does it wait for ever.
        await client.change_policy("waits", {"deletion_lag_ms": 2000})
        await cluster.until(partial(is_so, "waits", [(False, True)]), what="its lag has passed")
