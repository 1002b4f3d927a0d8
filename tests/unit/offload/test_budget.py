"""All uploads of a process together keep to their bytes and parts, and each comes to its turn."""

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import BLOCK, ListHandle, World, entries_of, metadata_of
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.policy import BLOCK_SIZE_DEFAULT
from tierlog.offload.blocks import BESIDE_BYTES, BlockFiller, DataObjectLayout
from tierlog.offload.budget import (
    LEDGER_PARTS,
    MEMORY_BYTES_MAX,
    UploadBudget,
    UploadShare,
    bytes_for_blocks,
)
from tierlog.offload.driver import Tier2Settings
from tierlog.offload.single_driver import SingleObjectOffloader
from tierlog.runtime.settings import OffloaderSettings
from tierlog.wiring.offload import read_per_s

BIGGEST = BLOCK - 140
ROOM = BLOCK + BESIDE_BYTES + 8  # one block with one entry, about as it is counted


@dataclass
class Upload:
    """What a made-up upload does: blocks of these lengths, each held for so long."""

    begins_s: float
    lengths: list[int]
    held_s: float
    cancelled_s: float | None = None
    again_s: float | None = None
    """Its first try of each part fails, and it waits that long for the second."""


uploads = st.builds(
    Upload,
    begins_s=st.integers(0, 5).map(float),
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=6),
    held_s=st.integers(1, 30).map(lambda tenths: tenths / 10),
    cancelled_s=st.none() | st.integers(1, 60).map(lambda tenths: tenths / 10),
    again_s=st.none() | st.integers(0, 20).map(lambda tenths: tenths / 10),
)


class Meeting:
    """Uploads that share a budget, and what they see of it."""

    def __init__(self, parts_max: int) -> None:
        self.budget = UploadBudget(bytes_max=100, parts_max=parts_max)
        self.parts_max = parts_max
        self.flying = 0

    async def run(self, plan: Upload) -> None:
        """Do what the plan says, or a part of it."""
        await asyncio.sleep(plan.begins_s)
        try:
            async with asyncio.timeout(plan.cancelled_s):
                await self._upload(plan)
        except TimeoutError:
            assert plan.cancelled_s is not None

    async def _upload(self, plan: Upload) -> None:
        with self.budget.share() as share:
            async with asyncio.TaskGroup() as group:
                for length in plan.lengths:
                    await share.take(length)
                    held = self.budget.held_bytes
                    assert held <= 100 or held == length
                    group.create_task(self._hold(share, length, plan))

    async def _hold(self, share: UploadShare, length: int, plan: Upload) -> None:
        async with share.sending() as leave:
            await self._fly(plan.held_s)
            if plan.again_s is not None:
                async with leave.lent():
                    await asyncio.sleep(plan.again_s)
                await self._fly(plan.held_s)
        share.give_back(length)

    async def _fly(self, held_s: float) -> None:
        self.flying += 1
        assert self.flying <= self.parts_max
        try:
            await asyncio.sleep(held_s)
        finally:
            self.flying -= 1


@settings(max_examples=150, deadline=None)
@given(st.lists(uploads, min_size=1, max_size=8), st.integers(1, 4))
def test_whatever_uploads_do_the_budget_holds_and_all_end(plans, parts_max):
    async def main():
        meeting = Meeting(parts_max)
        async with asyncio.timeout(1000), asyncio.TaskGroup() as group:
            for plan in plans:
                group.create_task(meeting.run(plan))
        assert meeting.budget.held_bytes == 0
        assert meeting.budget.held_bytes_peak <= 120
        # All of it is to be had again.
        with meeting.budget.share() as share:
            async with asyncio.timeout(1), contextlib.AsyncExitStack() as stack:
                for _ in range(parts_max):
                    await stack.enter_async_context(share.sending())
                await share.take(100)

    run_virtual(main())


class Senders:
    """Uploads that hold blocks, and how many parts each has on its way."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.flying: Counter[str] = Counter()
        self._group = group
        self._over: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def send(self, name: str, share: UploadShare, parts: int) -> None:
        """Send so many parts; none is there before ``end``."""
        for _ in range(parts):
            self._group.create_task(self._send(name, share))

    async def _send(self, name: str, share: UploadShare) -> None:
        async with share.sending():
            self.flying[name] += 1
            await self._over[name].wait()
        self.flying[name] -= 1

    def end(self, name: str) -> None:
        """Let all its parts be there."""
        self._over[name].set()


def test_the_last_leave_to_send_is_not_for_who_has_all_others():
    async def main():
        budget = UploadBudget(bytes_max=100, parts_max=4)
        with budget.share() as first, budget.share() as second:
            async with asyncio.TaskGroup() as group:
                senders = Senders(group)
                await first.take(1)
                await second.take(1)
                senders.send("first", first, 9)
                await asyncio.sleep(1)
                assert senders.flying["first"] == 3
                # It is the other one's for as long as that has a block, sent or not.
                second.give_back(1)
                await asyncio.sleep(1)
                assert senders.flying["first"] == 4
                senders.end("first")
        assert not budget.held_bytes

    run_virtual(main())


def test_who_has_no_part_on_its_way_sends_before_who_has_some():
    async def main():
        budget = UploadBudget(bytes_max=100, parts_max=4)
        with budget.share() as first, budget.share() as second, budget.share() as third:
            async with asyncio.TaskGroup() as group:
                senders = Senders(group)
                await first.take(1)
                senders.send("first", first, 4)  # while it is alone
                await asyncio.sleep(1)
                for name, share in (("second", second), ("third", third)):
                    await share.take(1)
                    senders.send(name, share, 3)
                senders.send("again", first, 2)
                senders.end("first")
                await asyncio.sleep(1)
                # One each first, the oldest before the others; then what is left is the oldest's.
                assert senders.flying == {"first": 0, "again": 2, "second": 1, "third": 1}
                for name in ("second", "third", "again"):
                    senders.end(name)

    run_virtual(main())


def test_a_leave_that_is_lent_is_waited_for_again():
    async def main():
        budget, order = UploadBudget(bytes_max=100, parts_max=1), list[str]()
        with budget.share() as one, budget.share() as other:
            async with asyncio.TaskGroup() as group:

                async def beside() -> None:
                    async with other.sending():
                        order.append("other begins")
                        await asyncio.sleep(10)
                        order.append("other ends")

                async with one.sending() as leave:
                    group.create_task(beside())
                    await asyncio.sleep(1)
                    async with leave.lent():
                        order.append("lent")
                        await asyncio.sleep(1)
                    order.append("back")
        assert order == ["lent", "other begins", "other ends", "back"]

    run_virtual(main())


def test_a_leave_that_was_given_to_someone_who_is_cancelled_just_then_is_not_lost():
    async def main():
        budget = UploadBudget(parts_max=1)
        with budget.share() as one, budget.share() as other:

            async def send() -> None:
                async with other.sending():
                    raise AssertionError("it was cancelled before")

            async with one.sending():
                waiting = asyncio.create_task(send())
                await asyncio.sleep(1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            async with asyncio.timeout(1), one.sending():
                pass

    run_virtual(main())


def test_the_oldest_upload_comes_first_and_leaves_room_for_the_next():
    async def main():
        budget = UploadBudget(bytes_max=3, parts_max=9)
        order: list[str] = []

        async def upload(name: str, blocks: int) -> None:
            with budget.share() as share:
                async with asyncio.TaskGroup() as group:
                    for _ in range(blocks):
                        await share.take(1)
                        order.append(name)
                        group.create_task(sent(share))

        async def sent(share) -> None:
            await asyncio.sleep(10)
            share.give_back(1)

        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(upload(name, 4))
        # The first has all while it is alone, then leaves room; who is first is done first.
        assert "".join(order) == "aaabacbbcbcc"
        assert LEDGER_PARTS == 2

    run_virtual(main())


def test_a_block_larger_than_all_goes_alone():
    async def main():
        budget = UploadBudget(bytes_max=10)
        with budget.share() as one, budget.share() as other:
            await one.take(4)
            async with asyncio.TaskGroup() as group:
                large = group.create_task(other.take(50))
                await asyncio.sleep(1)
                small = group.create_task(other.take(1))
                await asyncio.sleep(1)
                # What needs less waits too: nobody is passed.
                assert not large.done()
                assert not small.done()
                one.give_back(4)
                await asyncio.sleep(1)
                assert large.done()
                assert not small.done()
                other.give_back(50)
            assert budget.held_bytes == 1
            assert budget.held_bytes_peak == 50
        assert budget.held_bytes == 0

    run_virtual(main())


class SlowStore:
    """Takes so long for each part, and knows how many there are at once."""

    def __init__(self, offloader, takes_s: float) -> None:
        self._upload_part = offloader._objects.upload_part
        self._takes_s = takes_s
        self.flying = self.flying_peak = 0

    async def __call__(self, key, upload_id, number, body, *, crc32c):
        self.flying += 1
        self.flying_peak = max(self.flying_peak, self.flying)
        await asyncio.sleep(self._takes_s)
        self.flying -= 1
        return await self._upload_part(key, upload_id, number, body, crc32c=crc32c)


@pytest.mark.covers("A80")
def test_blocks_of_all_ledgers_together_are_bounded(monkeypatch):
    async def main():
        world = World()
        budget = UploadBudget(bytes_max=3 * ROOM, parts_max=2)
        offloader = world.offloader(budget=budget)
        slow = SlowStore(offloader, 5.0)
        monkeypatch.setattr(offloader._objects, "upload_part", slow)
        entries = [bytes([number]) * BIGGEST for number in range(6)]  # one a block
        begun: list[int] = []

        class Noting(ListHandle):
            async def read_runs(self, first, last, *, bytes_max=None, wait_s=0.0):
                begun.append(self.ledger_id)
                async for runs in ListHandle.read_runs(self, first, last):
                    yield runs

        handles = [Noting(LedgerId(n), entries, run_bytes_max=1) for n in range(8)]
        async with asyncio.TaskGroup() as group:
            for handle in handles:
                group.create_task(offloader.offload(handle, world.ids.uuid(), {}))
            await asyncio.sleep(4)
            # Two parts on their way, one block read ahead; the others have not begun to read.
            assert begun == [0]
            assert slow.flying == 2
            assert 3 * (ROOM - 8) < budget.held_bytes <= 3 * ROOM
        assert slow.flying_peak == 2
        assert budget.held_bytes == 0
        assert budget.held_bytes_peak <= 3 * ROOM
        # Sending never waits for reading: 48 parts, two at a time.
        assert asyncio.get_running_loop().time() == pytest.approx(24 * 5)
        assert len([key for key in world.bucket.objects if key.endswith("-index")]) == 8

    run_virtual(main())


def test_so_are_the_parts_of_single_objects_their_indexes_with_them(monkeypatch):
    async def main():
        world = World()
        budget = UploadBudget(bytes_max=3 * ROOM, parts_max=1)
        offloader = SingleObjectOffloader(
            world.bucket.connect(),
            Tier2Settings(bucket="b", cluster_id=world.ids.uuid()),
            budget=budget,
            index_len_min=600,
        )
        slow = SlowStore(offloader, 5.0)
        monkeypatch.setattr(offloader._objects, "upload_part", slow)
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                handle = ListHandle(LedgerId(number), [bytes(BIGGEST)] * 2)
                group.create_task(offloader.offload(handle, world.ids.uuid(), {}))
        assert slow.flying_peak == 1
        assert budget.held_bytes == 0
        assert len(world.bucket.objects) == 3

    run_virtual(main())


def test_reading_goes_on_while_the_last_part_is_on_its_way(monkeypatch):
    async def main():
        world = World()
        offloader = world.offloader(budget=UploadBudget(bytes_max=2 * ROOM))
        monkeypatch.setattr(offloader._objects, "upload_part", SlowStore(offloader, 5.0))

        class SlowHandle(ListHandle):
            async def read_runs(self, first, last, *, bytes_max=None, wait_s=0.0):
                async for runs in ListHandle.read_runs(self, first, last):
                    await asyncio.sleep(4)
                    yield runs

        handle = SlowHandle(LedgerId(1), [bytes(BIGGEST)] * 6, run_bytes_max=1, runs_a_list=1)
        await offloader.offload(handle, world.ids.uuid(), {})
        # One after the other it would be 6 x 9; reading alone is more than half of that.
        assert 6 * 4 + 5 <= asyncio.get_running_loop().time() <= 35

    run_virtual(main())


@pytest.mark.parametrize("seed", range(5))
def test_an_upload_that_fails_or_is_cancelled_gives_all_back(seed, monkeypatch):
    async def main():
        world, rng = World(), random.Random(seed)
        budget = UploadBudget(bytes_max=2 * ROOM, parts_max=2)
        offloader = world.offloader(budget=budget)
        slow = SlowStore(offloader, 1.0)
        monkeypatch.setattr(offloader._objects, "upload_part", slow)
        entries = [bytes(BIGGEST)] * 9

        async def attempt(number: int) -> None:
            try:
                async with asyncio.timeout(rng.uniform(0.1, 20)):
                    handle = ListHandle(LedgerId(number), entries)
                    await offloader.offload(handle, world.ids.uuid(), {})
            except TimeoutError:
                pass

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(attempt(number))
        assert budget.held_bytes == 0
        handle = ListHandle(LedgerId(77), entries)
        uuid = world.ids.uuid()
        copy = await offloader.offload(handle, uuid, {})
        tier2 = await offloader.read_offloaded(LedgerId(77), uuid, copy=copy)
        assert await entries_of(tier2) == entries
        assert await tier2.last_add_confirmed() == EntryId(8)

    run_virtual(main())


def test_room_that_was_given_to_someone_who_is_cancelled_just_then_is_not_lost():
    async def main():
        budget = UploadBudget(bytes_max=10)
        with budget.share() as one, budget.share() as other:
            await one.take(10)
            waiting = asyncio.create_task(other.take(10))
            await asyncio.sleep(1)
            one.give_back(10)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert budget.held_bytes == 0
            await one.take(10)

    run_virtual(main())


def test_the_least_memory_that_may_be_set_is_a_block_at_a_time():
    async def main():
        budget = UploadBudget(bytes_max=bytes_for_blocks(1))
        with budget.share() as share:
            await share.take(ROOM)

    run_virtual(main())


@pytest.mark.parametrize("entry_size", [100, 1000, 10_000, 1_000_000])
def test_the_default_memory_holds_a_block_that_is_read_beside_one_that_is_sent(entry_size):
    memory_bytes_max = OffloaderSettings().memory_bytes_max
    assert memory_bytes_max == MEMORY_BYTES_MAX
    count = 10 * BLOCK_SIZE_DEFAULT // entry_size
    metadata = replace(
        metadata_of([b""]), last_entry_id=EntryId(count - 1), length=count * entry_size
    )
    filler = BlockFiller(
        ListHandle(LedgerId(1), [], metadata), DataObjectLayout(), block_size=BLOCK_SIZE_DEFAULT
    )
    assert BLOCK_SIZE_DEFAULT <= filler.next_memory <= bytes_for_blocks(memory_bytes_max) // 2


@pytest.mark.parametrize(
    ("sent_per_s", "read"), [(0.0, 0.0), (1.0, 16e6), (8e6, 16e6), (50e6, 100e6)]
)
def test_ledgers_are_read_at_a_pace_where_they_are_sent_at_one(sent_per_s, read):
    assert read_per_s(sent_per_s) == read
