"""A plain GET of a raw ledger is the whole ledger, or an error: what was cut never looks whole."""

import asyncio
import contextlib

import aiohttp
import pytest

from tests.unit.reader.test_pages import MIB, URL, served
from tests.unit.reader.test_pages_counted import grown
from tests.unit.reader.test_tail import closed as closed_now
from tests.unit.reader.world import N1, ReaderWorld, on_virtual_time
from tierlog.adapters.memory.storage_node import MemoryStorageNode
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.model.ids import NO_ENTRY, EntryId
from tierlog.runtime.http import serve_http
from tierlog_reader.documents import OCTETS
from tierlog_reader.http_entries import COPIES, ROOM_TRIES_MAX, EntryPages

ENTRIES = [b"%05d" % number * 3000 for number in range(100)]
WHOLE = b"".join(ENTRIES)
PAGE_BYTES = MIB // COPIES[OCTETS]


async def raw_world(*, closed: bool = True, offloaded: bool = False):
    world = ReaderWorld(block_size=MIB)
    await world.start(raw=True)
    if not closed:
        return world, await world.opened(ENTRIES, run_bytes_max=100_000)
    ledger = await world.sealed(ENTRIES, run_bytes_max=100_000)
    if offloaded:
        await world.offloaded(ledger)
        await world.gone_locally(ledger)
    return world, ledger


@contextlib.asynccontextmanager
async def listening(world, **how):
    """Serve over a socket, and give a session, the address and the shares."""
    async with (
        served(world, **how) as (client, shares),
        serve_http(client.app, host="127.0.0.1", port=0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        yield session, shares


@pytest.mark.parametrize("closed", [True, False])
@on_virtual_time
async def test_a_ledger_of_many_pages_comes_as_one(closed):
    world, ledger = await raw_world(closed=closed, offloaded=closed)
    assert len(WHOLE) > 5 * PAGE_BYTES
    async with served(world) as (client, shares):
        answer = await client.get(f"{URL}/ledgers/{ledger}")
        assert (answer.status_code, answer.content == WHOLE) == (200, True)
        assert answer.headers["Tierlog-Next"] == f"{ledger}:100"
        assert answer.headers["Accept-Ranges"] == "entries"
        assert answer.headers["Content-Length"] == str(len(WHOLE))
        assert shares.used_bytes == 0


@on_virtual_time
async def test_what_is_appended_meanwhile_is_not_waited_for():
    world, ledger = await raw_world(closed=False)
    async with served(world) as (client, _):
        client.piece_s = 0.1
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(client.get(f"{URL}/ledgers/{ledger}"))
            for first in range(100, 300, 20):
                await asyncio.sleep(0.1)
                await world.write(ledger, [b"later" * 3000] * 20, first=first)
        assert answer.result().content == WHOLE


@on_virtual_time
async def test_a_long_ledger_holds_the_room_of_one_page_while_it_is_sent():
    world, ledger = await raw_world()
    async with served(world) as (client, shares):
        client.piece_s = 1.0
        peaks = []
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(client.get(f"{URL}/ledgers/{ledger}"))
            while not answer.done():
                await asyncio.sleep(0.25)
                peaks.append(shares.used_bytes)
        assert answer.result().content == WHOLE
        assert max(peaks) <= 2 * MIB + COPIES[OCTETS] * PAGE_BYTES
        assert shares.used_bytes == 0


@on_virtual_time
async def test_a_client_that_goes_before_the_first_byte_leaves_its_room():
    world, ledger = await raw_world()
    async with served(world, send_s_max=5) as (client, shares):
        client.piece_s = 1000.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                await client.get(f"{URL}/ledgers/{ledger}")
        assert shares.used_bytes == 0


@pytest.mark.parametrize("closed", [True, False])
async def test_over_a_socket_it_is_whole_for_clients_of_either_version(closed):
    world, ledger = await raw_world(closed=closed)
    async with listening(world) as (session, shares):
        for version in (aiohttp.HttpVersion11, aiohttp.HttpVersion10):
            session._version = version
            async with session.get(f"{URL}/ledgers/{ledger}") as answer:
                assert (answer.status, await answer.read() == WHOLE) == (200, True)
        assert shares.used_bytes == 0


@pytest.mark.parametrize("version", [aiohttp.HttpVersion11, aiohttp.HttpVersion10])
@pytest.mark.parametrize("closed", [True, False])
async def test_what_can_not_be_read_to_its_end_is_an_error_to_the_client(closed, version):
    world, ledger = await raw_world(closed=closed)
    del world.node.runs[ledger][next(one for one in world.node.runs[ledger] if one > 75)]
    async with listening(world) as (session, shares):
        session._version = version
        async with session.get(f"{URL}/ledgers/{ledger}") as answer:
            assert answer.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        await asyncio.sleep(0.1)
        assert shares.used_bytes == 0


@on_virtual_time
async def test_all_of_it_counts_as_served():
    world, ledger = await raw_world()
    async with served(world) as (client, _):
        size = len(WHOLE) + FRAME_HEADER_LEN * len(ENTRIES)
        assert await grown(client.get(f"{URL}/ledgers/{ledger}")) == [100, 0, size, 0, 0]


class Forgetting(MemoryStorageNode):
    """A node in whose place, once most was read, one answers that knows less to be confirmed."""

    def read(self, ledger_id, first_entry_id, **named):
        if first_entry_id > 60:
            self.lacs[ledger_id] = min(self.lacs[ledger_id], EntryId(83))
        return super().read(ledger_id, first_entry_id, **named)


async def test_an_open_ledger_of_which_less_is_known_later_is_an_error_to_the_client():
    world, ledger = await raw_world(closed=False)
    forgetting = Forgetting(N1)
    forgetting.runs, forgetting.lacs = world.node.runs, world.node.lacs
    world.node = forgetting
    async with listening(world) as (session, shares):
        async with session.get(f"{URL}/ledgers/{ledger}") as answer:
            assert (answer.status, answer.headers["Tierlog-Next"]) == (200, f"{ledger}:100")
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        await asyncio.sleep(0.1)
        assert shares.used_bytes == 0


class Forgetful(MemoryStorageNode):
    """One that knows of no more than the first few from the first read on."""

    def read(self, ledger_id, first_entry_id, **named):
        self.lacs[ledger_id] = min(self.lacs[ledger_id], EntryId(5))
        return super().read(ledger_id, first_entry_id, **named)


@on_virtual_time
async def test_a_first_page_that_ends_before_the_end_that_was_told_is_an_error():
    world, ledger = await raw_world(closed=False)
    forgetful = Forgetful(N1)
    forgetful.runs, forgetful.lacs = world.node.runs, world.node.lacs
    world.node = forgetful
    async with served(world) as (client, shares):
        answer = await client.get(f"{URL}/ledgers/{ledger}")
        assert (answer.status_code, answer.json()["reason"]) == (503, "UNKNOWN")
        assert f"entries from {ledger}:6 to {ledger}:100" in answer.json()["detail"]
        assert shares.used_bytes == 0


class Learning(MemoryStorageNode):
    """One that knows what is confirmed only from the first read on."""

    def read(self, ledger_id, first_entry_id, **named):
        self.lacs[ledger_id] = EntryId(99)
        return super().read(ledger_id, first_entry_id, **named)


@on_virtual_time
async def test_what_is_confirmed_between_the_look_at_the_end_and_the_first_page_is_whole():
    world, ledger = await raw_world(closed=False)
    learning = Learning(N1)
    learning.runs, learning.lacs = world.node.runs, {ledger: NO_ENTRY}
    world.node = learning
    async with served(world) as (client, shares):
        answer = await client.get(f"{URL}/ledgers/{ledger}")
        assert (answer.status_code, answer.content == WHOLE) == (200, True)
        assert answer.headers["Tierlog-Next"] == f"{ledger}:100"
        assert shares.used_bytes == 0


@pytest.mark.parametrize("closed", [True, False])
@on_virtual_time
async def test_a_ledger_that_is_not_there_is_told_and_one_without_entries_has_nothing_yet(closed):
    world, ledger = await raw_world(closed=closed)
    async with served(world) as (client, _):
        answer = await client.get(f"{URL}/ledgers/{ledger + 1000}")
        assert (answer.status_code, answer.json()["reason"]) == (404, "LEDGER_NOT_FOUND")
        if closed:
            opened = await world.opened()
            await asyncio.sleep(1)
            answer = await client.get(f"{URL}/ledgers/{opened}")
            assert (answer.status_code, answer.headers["Tierlog-Next"]) == (204, f"{ledger}:100")


@on_virtual_time
async def test_a_ledger_that_was_closed_just_now_is_a_closed_one():
    world, ledger = await raw_world(closed=False)
    async with served(world) as (client, _):
        await client.get(f"{URL}/entries", params={"limit": 1})  # the list is known, as of now
        await closed_now(world, ledger, ENTRIES)
        await world.sealed([])
        await world.opened([b"next"])
        answer = await client.get(f"{URL}/ledgers/{ledger}")
        assert answer.content == WHOLE
        assert answer.headers["Content-Length"] == str(len(WHOLE))
        assert answer.headers["Tierlog-Next"] == f"{ledger}:100"


class Closing(MemoryStorageNode):
    """One that knows what is confirmed only from the first read on, when the ledger is closed."""

    def __init__(self, world, behind):
        super().__init__(N1)
        self.runs, self.lacs = world.node.runs, {}
        self._world, self._behind = world, behind

    async def read(self, ledger_id, first_entry_id, **named):
        if ledger_id not in self.lacs:
            self.lacs[ledger_id] = EntryId(99)
            await closed_now(self._world, ledger_id, ENTRIES)
            if self._behind:
                self._world.node = self
                await self._world.opened([b"next"])
        async for runs in super().read(ledger_id, first_entry_id, **named):
            yield runs


@pytest.mark.parametrize("behind", [False, True])
@on_virtual_time
async def test_a_ledger_that_is_confirmed_and_closed_as_its_first_page_is_read_is_whole(behind):
    world, ledger = await raw_world(closed=False)
    world.node = Closing(world, behind)
    world.node.lacs.pop(ledger, None)
    async with served(world) as (client, shares):
        answer = await client.get(f"{URL}/ledgers/{ledger}")
        assert (answer.status_code, answer.content == WHOLE) == (200, True)
        assert answer.headers["Tierlog-Next"] == f"{ledger}:100"
        assert answer.headers["Content-Length"] == str(len(WHOLE))
        assert shares.used_bytes == 0


@on_virtual_time
async def test_a_ledger_that_has_begun_waits_for_room_longer_than_who_can_be_told_to_come_again():
    world, ledger = await raw_world()
    async with served(world) as (client, shares):
        client.piece_s = 1.0
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(client.get(f"{URL}/ledgers/{ledger}"))
            await asyncio.sleep(2)
            async with shares.room("another", shares.bytes_max):
                await asyncio.sleep(20)  # four times what anybody waits for room
        assert answer.result().content == WHOLE
        assert (shares.used_bytes, shares.refusals > 0) == (0, True)


@on_virtual_time
async def test_a_ledger_that_has_begun_waits_for_room_no_longer_than_so_often():
    world, ledger = await raw_world()
    async with served(world) as (client, shares):
        client.piece_s = 1.0
        answering = asyncio.create_task(client.get(f"{URL}/ledgers/{ledger}"))
        await asyncio.sleep(2)
        async with shares.room("another", shares.bytes_max):
            await asyncio.wait([answering], timeout=1000)
            assert answering.done()
        assert WHOLE.startswith(answering.result().content)
        assert len(answering.result().content) < len(WHOLE)
        assert (shares.used_bytes, shares.refusals) == (0, ROOM_TRIES_MAX)


@pytest.mark.parametrize("lac", [NO_ENTRY, EntryId(3)])
@on_virtual_time
async def test_a_ledger_whose_end_nobody_knows_once_its_first_page_was_read_is_an_error(
    lac, monkeypatch
):
    world, ledger = await raw_world(closed=False)
    learning = Learning(N1)
    learning.runs, learning.lacs = world.node.runs, {ledger: NO_ENTRY}
    world.node = learning
    confirmed, looks = EntryPages.confirmed, []

    async def less_confirmed(*asked):
        looks.append(asked)
        if len(looks) > 1:
            learning.lacs[ledger] = lac
        return await confirmed(*asked)

    monkeypatch.setattr(EntryPages, "confirmed", less_confirmed)
    async with served(world) as (client, shares):
        answer = await client.get(f"{URL}/ledgers/{ledger}")
        assert (answer.status_code, answer.json()["reason"]) == (503, "UNKNOWN")
        assert (len(looks), shares.used_bytes) == (2, 0)
