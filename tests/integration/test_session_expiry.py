"""Sessions that end while their holders work, as ZooKeeper's own tests end them (C2).

Another client takes the session over and closes it: whoever had it is told, late, and by then what
it held is somebody else's.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from kazoo.client import KazooClient

from tests.integration.test_offload_on_servers import Place, some_entries
from tests.integration.test_offload_queue import begun
from tierlog.format import paths
from tierlog.model.policy import MIB, Policy
from tierlog.runtime.settings import Settings
from tierlog.wiring.offload import OffloadParts, open_offload_parts
from tierlog_scheduler.scheduler import OFFICE, SchedulerLimits

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

LIMITS = SchedulerLimits(interval_s=0.5, request_again_s=2, sweep_again_s=1)


async def expire(parts: OffloadParts, hosts: str) -> None:
    """End the session of a process."""
    store = parts.catalog.store
    lost, session = store.session_lost, store._client.client_id  # type: ignore[attr-defined]

    def take_over_and_close() -> None:
        other = KazooClient(hosts, client_id=session)
        other.start()
        other.stop()
        other.close()

    await asyncio.to_thread(take_over_and_close)
    async with asyncio.timeout(20):
        await lost.wait()


async def until(what: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(40):
        while not await what():
            await asyncio.sleep(0.1)


async def test_who_loses_its_session_in_mid_upload_loses_its_office_and_completes_at_most_once(
    corner: Settings, servers
):
    hosts = servers.endpoints.zookeeper_hosts
    slow = corner.offloader.model_copy(update={"part_delay_s": 2.0})
    settings = corner.model_copy(update={"offloader": slow})
    async with open_offload_parts(settings) as mine, open_offload_parts(settings) as others:
        first = Place(settings, mine, {})
        second = Place(settings, others, first.ledgers)
        claimed = await first.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=-1))

        async def candidates(count: int) -> bool:
            standing = await others.catalog.store.children(f"{paths.ROOT}/election/{OFFICE}")
            return len(standing or []) == count

        async with first.working(scheduler=LIMITS) as leader:
            assert leader is not None
            await until(lambda: _is(leader.leading))
            ledger_id = await first.seal(claimed, some_entries(1, total=12 * MIB))
            begun_by = await begun(first, ledger_id)
            lock = await others.catalog.store.get(paths.ledger_lock_path(ledger_id))
            assert lock is not None
            async with second.working(scheduler=LIMITS) as successor:
                assert successor is not None
                await until(lambda: candidates(2))
                await expire(mine, hosts)
                assert await others.catalog.store.get(paths.ledger_lock_path(ledger_id)) != lock
                await until(lambda: _is(successor.leading and not leader.leading))
                context = await first.until_complete(ledger_id)
                assert context.attempt_count <= 2
                assert (context.uuid == begun_by.uuid) == (context.attempt_count == 1)
                # The office goes on, and the one that lost it stands again, behind the other.
                later = await second.seal(claimed, some_entries(2, total=MIB))
                await second.until_complete(later)
                await until(lambda: candidates(2))
                assert (leader.leading, successor.leading) == (False, True)

                async def struck_off() -> bool:
                    now = await others.catalog.contexts.get(ledger_id)
                    return now is not None and not now.abandoned

                await until(struck_off)
            # It was next in line.
            await until(lambda: _is(leader.leading))
        for one in (ledger_id, later):
            await second.check(one)
            assert await others.catalog.store.get(paths.ledger_lock_path(one)) is None
        await second.check_bucket()


async def _is(what: bool) -> bool:
    return what
