"""Room for answers: within the bound, in turns, and who is slow holds up nobody else."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.unit.catalog.world import on_virtual_time
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.runtime.settings import ReaderSettings, Settings
from tierlog_reader.main import serve
from tierlog_reader.memory import parts_of
from tierlog_reader.shares import Shares

ROOT = Path(__file__).resolve().parents[3]
MIB = 1024 * 1024
# What a container may take at the least: the budget, and the process itself.
LIMIT_MIN = 384 * MIB + 100_000_000


async def served(shares, client, sizes, took_s, log):
    """Be a client that gets answers one after the other and takes them at its own pace."""
    for size in sizes:
        async with shares.room(client, size) as room:
            assert shares.used_bytes <= shares.bytes_max
            await asyncio.sleep(took_s / 2)
            shares.shrink(client, room, size // 2)
            await asyncio.sleep(took_s / 2)
        log.append((client, asyncio.get_running_loop().time()))


@pytest.mark.covers("C15")
@pytest.mark.parametrize("seed", range(5))
def test_what_is_promised_never_passes_the_bound_and_everybody_is_served(seed):
    @on_virtual_time
    async def test():
        chance = random.Random(seed)
        shares = Shares(10_000, wait_s_max=10_000)
        log: list[tuple[object, float]] = []
        async with asyncio.TaskGroup() as group:
            for client in range(40):
                sizes = [chance.choice([10, 900, 4000, 20_000]) for _ in range(20)]
                group.create_task(served(shares, client, sizes, chance.random(), log))
        assert len(log) == 800
        assert 5000 < shares.most_used_bytes <= shares.bytes_max
        assert (shares.used_bytes, shares.waiting, len(shares._accounts)) == (0, 0, 0)

    test()


@on_virtual_time
async def test_who_goes_in_the_moment_in_which_room_comes_gives_it_back():
    shares = Shares(1000, wait_s_max=5)
    room = await shares.take("a", 1000)
    waiting = asyncio.create_task(shares.take("b", 1000))
    await asyncio.sleep(0.1)
    shares.give_back("a", room)
    assert (shares.used_bytes, waiting.done()) == (1000, False)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert (shares.used_bytes, len(shares._accounts)) == (0, 0)


@on_virtual_time
async def test_who_stops_waiting_holds_up_nobody_from_then_on():
    loop, shares = asyncio.get_running_loop(), Shares(1000, wait_s_max=5)
    await shares.take("a", 500)
    large, small = [asyncio.create_task(shares.take(*one)) for one in (("b", 900), ("c", 300))]
    await asyncio.sleep(0.1)
    assert shares.waiting == 2, "the large one is waited for"
    gone_s = loop.time()
    large.cancel()
    await small
    assert loop.time() == gone_s


@pytest.mark.parametrize("stuck_clients", [1, 2, 5])
def test_clients_that_take_nothing_hold_up_nobody_else(stuck_clients):
    @on_virtual_time
    async def test():
        shares = Shares(12_000, wait_s_max=5)
        async with asyncio.TaskGroup() as group:
            stuck = [
                group.create_task(_hold(shares, f"stuck {number % stuck_clients}", 1000, 30))
                for number in range(60)
            ]
            await asyncio.sleep(1)
            # Each has its part and no more, whoever came first, and as much is left.
            assert shares.used_bytes <= 12_000 * stuck_clients // (stuck_clients + 1)
            before_s = asyncio.get_running_loop().time()
            log: list[tuple[object, float]] = []
            await served(shares, "a", [1000] * 20, 0.1, log)
            assert asyncio.get_running_loop().time() - before_s < 2.5
            assert len(log) == 20
            refused = [error for one in stuck if (error := await one) is not None]
            assert all(one.reason is Reason.RESOURCE_EXHAUSTED for one in refused)
            assert len(refused) >= 48

    test()


async def _hold(shares, client, size, hold_s):
    """Be a client that takes nothing; return the error if it got no room."""
    try:
        async with shares.room(client, size):
            await asyncio.sleep(hold_s)
    except RetryableError as error:
        return error
    return None


@on_virtual_time
async def test_a_large_answer_is_not_starved_by_small_ones():
    shares = Shares(10_000, wait_s_max=60)
    async with asyncio.TaskGroup() as group:
        small = [
            group.create_task(served(shares, f"s{one}", [1000] * 400, 0.1, [])) for one in range(20)
        ]
        await asyncio.sleep(1)
        begun_s = asyncio.get_running_loop().time()
        async with shares.room("large", 10_000):
            waited_s = asyncio.get_running_loop().time() - begun_s
        for task in small:
            task.cancel()
    assert waited_s < 2


@on_virtual_time
async def test_who_gets_no_room_in_time_is_told_to_come_again_and_leaves_no_trace():
    shares = Shares(1000, wait_s_max=2)
    async with shares.room("a", 1000):
        with pytest.raises(RetryableError) as caught:
            await shares.take("b", 10)
        assert caught.value.reason is Reason.RESOURCE_EXHAUSTED
        assert caught.value.retry_after_s
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(shares.take("b", 10))
            await asyncio.sleep(1)
            waiting.cancel()
        assert (shares.waiting, shares.refusals, list(shares._accounts)) == (0, 1, ["a"])
    assert (shares.used_bytes, len(shares._accounts)) == (0, 0)


def test_the_parts_are_the_budget_and_settings_that_leave_too_little_are_refused():
    parts = parts_of(ReaderSettings())
    assert parts.total == ReaderSettings().memory_bytes_max == 400 * MIB
    assert parts.answers >= 4 * ReaderSettings().response_bytes_max
    with pytest.raises(RefusedError) as caught:
        parts_of(ReaderSettings(memory_bytes_max=260 * MIB))
    named = [int(word) for word in caught.value.remedy.split() if word.isdecimal()]
    assert parts_of(ReaderSettings(memory_bytes_max=named[0])).answers == 32 * MIB


@pytest.mark.parametrize(
    "larger",
    [
        {"ranges_in_flight_max": 9},
        {"response_bytes_max": 9 * MIB},
        {"cache_bytes_max": 260 * MIB},
        {"handles_max": 2048},
    ],
    ids=str,
)
def test_the_defaults_leave_room_for_one_setting_that_is_a_little_larger(larger):
    assert parts_of(ReaderSettings(**larger)).answers >= 32 * MIB


@on_virtual_time
async def test_a_reader_with_too_little_does_not_wait_for_metadata_before_it_says_so():
    named = ReaderSettings(memory_bytes_max=260 * MIB)
    with pytest.raises(RefusedError, match=r"reader\.memory_bytes_max"):
        await serve(Settings(reader=named), asyncio.Event())


def limit_file(tmp_path, text):
    path = tmp_path / "memory.max"
    path.write_text(text)
    return path


def test_a_budget_above_the_containers_limit_is_refused(tmp_path):
    path = limit_file(tmp_path, f"{LIMIT_MIN - 1}\n")
    with pytest.raises(RefusedError) as caught:
        parts_of(ReaderSettings(memory_bytes_max=384 * MIB), [tmp_path / "away", path])
    assert str(path) in caught.value.message
    assert "reader.memory_bytes_max" in caught.value.remedy
    assert f" {LIMIT_MIN} bytes" in caught.value.remedy


@pytest.mark.parametrize("limit", [f"{LIMIT_MIN}\n", "max\n", "9223372036854771712\n", ""])
def test_a_budget_within_the_containers_limit_is_taken(tmp_path, limit):
    named = ReaderSettings(memory_bytes_max=384 * MIB)
    assert parts_of(named, [limit_file(tmp_path, limit)]).total == 384 * MIB


def test_the_charts_reader_may_take_what_its_settings_say(tmp_path):
    yaml = pytest.importorskip("yaml", reason="make deploy-tools")
    values = yaml.safe_load((ROOT / "deploy/helm/tierlog/values.yaml").read_text("utf-8"))
    limit = values["reader"]["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    path = limit_file(tmp_path, str(int(limit.removesuffix("Gi")) * 1024 * MIB))
    assert parts_of(ReaderSettings(), [path]).total <= 0.5 * int(path.read_text())


@on_virtual_time
async def test_who_is_cancelled_while_it_waits_takes_no_room_out_of_the_books_that_came_since():
    shares = Shares(1000, wait_s_max=10)
    own, others, small = [await shares.take(client, 30) for client in ("a", "b", "b")]
    waiting = asyncio.ensure_future(shares.take("a", 980))
    await asyncio.sleep(0)
    assert shares.waiting == 1
    waiting.cancel()
    # Before it takes a step: it is passed over, its client has nothing more, and comes again.
    shares.give_back("b", others)
    shares.give_back("a", own)
    again = await shares.take("a", 30)
    await asyncio.wait({waiting})
    shares.give_back("a", again)
    shares.give_back("b", small)
    assert shares.used_bytes == 0
    assert (await shares.take("a", 1000)).size == 1000
