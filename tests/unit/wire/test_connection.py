"""The wire between a client and a server (protocols.md section 1, "Add"; performance.md).

Over the memory network, which cuts and delays; the hostile side is in test_hostile.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import UUID

import numpy as np
import pytest

from tests.simulation.virtual_loop import run_virtual
from tierlog.adapters.memory.transport import MemoryNetwork
from tierlog.format.frame import pack_entries
from tierlog.format.run import build_run
from tierlog.model.errors import (
    IndeterminateError,
    Reason,
    RefusedError,
    RetryableError,
)
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.position import AppendedRange
from tierlog.wire.auth import OpenAuthenticator, TokenAuthenticator
from tierlog.wire.codec import HEADER_LEN_LEN, FrameLimits
from tierlog.wire.connection import ClientLimits, Hello, WireClient
from tierlog.wire.messages import (
    ADDS_HEADER_LEN_MAX,
    AUTH_TOKEN,
    ROLE_OWNER,
    ROLE_PRODUCER,
    RUNS_MAX,
    Credentials,
)
from tierlog.wire.server import DEFAULT_SERVER_LIMITS, ServerLimits, WireServer

CLUSTER = UUID(int=7)
ADDRESS = "node:1"


def make_run(first_entry_id=0, *, ledger_id=1, count=1, size=10):
    frames, offsets = pack_entries([bytes(size)] * count, first_entry_id)
    return build_run(
        frames, offsets, ledger_id=ledger_id, first_entry_id=first_entry_id, owner_epoch=1
    )


def make_draft(size=10):
    frames, offsets = pack_entries([bytes(size)])
    return build_run(frames, np.asarray(offsets))


class Handler:
    """Notes what comes; answers when told, or at once."""

    def __init__(self, *, at_once=True):
        self.at_once = at_once
        self.group = None
        self.seen = []
        self.answers = []
        self.lacs = []
        self.open = asyncio.Event()
        self.open.set()
        self.open_for_appends = asyncio.Event()
        self.open_for_appends.set()
        self.on_run = lambda: None

    async def ready(self, *, appends):
        await self.open.wait()
        if appends:
            await self.open_for_appends.wait()

    def append(self, stream, draft, *, deadline_s, condition):
        self.seen.append((stream, draft, deadline_s))
        return self._answer(
            [
                AppendedRange(
                    ledger_id=LedgerId(5),
                    first_entry_id=EntryId(len(self.seen)),
                    last_entry_id=EntryId(len(self.seen)),
                )
            ]
        )

    def add_run(self, run, *, recovery):
        if run.header.ledger_id == 404:
            raise RefusedError("fenced", reason=Reason.FENCED, remedy="Stop")
        self.on_run()
        self.seen.append((run.first_entry_id, recovery))
        return self._answer(None)

    def lac(self, ledger_id, last_add_confirmed):
        self.lacs.append((ledger_id, last_add_confirmed))

    def _answer(self, result):
        if self.group is not None:
            return self.group
        answer = asyncio.get_running_loop().create_future()
        self.answers.append((answer, result))
        if self.at_once:
            answer.set_result(result)
        return answer

    def finish(self, number):
        answer, result = self.answers[number]
        answer.set_result(result)


@dataclass
class Connect:
    """Makes clients of the one server."""

    network: MemoryNetwork
    server: WireServer
    tasks: asyncio.TaskGroup

    async def __call__(self, role=ROLE_OWNER, *, cluster_id=CLUSTER, credentials=None, limits=None):
        hello = Hello(
            cluster_id=cluster_id,
            role=role,
            client_name="test",
            credentials=credentials or Credentials(),
        )
        return await WireClient.connect(
            self.network.transport("client"),
            ADDRESS,
            hello,
            tasks=self.tasks,
            limits=limits or ClientLimits(),
        )


@asynccontextmanager
async def served(handler, *, limits=DEFAULT_SERVER_LIMITS, authenticator=None, latency_s=0.001):
    network = MemoryNetwork(latency_s=lambda: latency_s)
    server = WireServer(
        handler,
        cluster_id=CLUSTER,
        node_id=NodeId("n1"),
        authenticator=authenticator or OpenAuthenticator(),
        limits=limits,
    )
    listener = await network.transport("node").listen(ADDRESS, server.serve)
    async with asyncio.TaskGroup() as tasks:
        yield Connect(network, server, tasks)
        await listener.close()


def virtual(test):
    def run():
        run_virtual(test(), until_s=3600)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtual
async def test_adds_arrive_in_order_and_are_answered():
    handler = Handler()
    async with served(handler) as connect:
        client = await connect()
        assert client.welcome.node_id == "n1"
        adds = [client.add(make_run(n), recovery=n == 3) for n in range(50)]
        for add in adds:
            await add
        assert handler.seen == [(n, n == 3) for n in range(50)]
        client.confirm(LedgerId(1), EntryId(49))
        await client.close()
        await asyncio.sleep(1)
        assert handler.lacs == [(1, 49)]
        assert client.closed
        with pytest.raises(RetryableError):
            await client.add(make_run())


class Frames:
    """Counts what travels between the two ends of a network."""

    def __init__(self, network):
        self.count = {"client": 0, "node": 0}
        network.loses = self._note

    def _note(self, source, _target):
        self.count[source] += 1
        return False

    def take(self, name):
        count, self.count[name] = self.count[name], 0
        return count


@virtual
async def test_one_message_carries_whatever_waits():
    handler = Handler()
    async with served(handler) as connect:
        client = await connect(limits=ClientLimits(message_bytes_max=2000))
        frames = Frames(connect.network)
        adds = [client.add(make_run(n, ledger_id=n % 3)) for n in range(15)]
        assert frames.take("client") == 0, "more may come before the loop's step is over"
        for add in adds:
            await add
        assert [first for first, _ in handler.seen] == list(range(15))
        assert frames.take("client") == frames.take("node") == 1
        # A message ends where the flag changes, and where the next run would be too much.
        for n in range(6):
            client.add(make_run(20 + n), recovery=2 <= n < 4)
        adds = [client.add(make_run(30 + n, size=700)) for n in range(4)]
        adds.append(client.add(make_run(40, size=5000)))
        adds.append(client.add(make_run(41)))
        for add in adds:
            await add
        assert handler.seen[15:21] == [(20 + n, 2 <= n < 4) for n in range(6)]
        assert [first for first, _ in handler.seen[21:]] == [30, 31, 32, 33, 40, 41]
        # 20 21 | 22 23 | 24 25 30 31 | 32 33 | 40 | 41
        assert frames.take("client") == 6
        await client.close()


@virtual
async def test_so_many_runs_share_a_message_and_no_more():
    handler = Handler()
    async with served(handler) as connect:
        client = await connect()
        frames = Frames(connect.network)
        adds = [client.add(make_run(n)) for n in range(RUNS_MAX + 1)]
        for add in adds:
            await add
        assert frames.take("client") == 2
        assert [first for first, _ in handler.seen] == list(range(RUNS_MAX + 1))
        await client.close()


@virtual
async def test_messages_keep_to_the_frames_of_both_sides():
    runs = [make_run(n, size=400) for n in range(4)]
    length = sum(len(run.encoded) for run in runs)
    exact = length + HEADER_LEN_LEN + ADDS_HEADER_LEN_MAX
    for ours, theirs, messages in (
        (exact, 10**6, 1),
        (exact - 1, 10**6, 2),
        (10**6, exact, 1),
        (10**6, exact - 1, 2),
    ):
        handler = Handler()
        async with served(handler, limits=ServerLimits(frame_len_max=theirs)) as connect:
            connect.network.limits = FrameLimits(frame_len_max=ours, header_len_max=1000)
            client = await connect()
            frames = Frames(connect.network)
            adds = [client.add(run) for run in runs]
            for add in adds:
                await add
            assert frames.take("client") == messages
            with pytest.raises(RefusedError) as caught:
                await client.add(make_run(size=2500))
            assert caught.value.reason is Reason.TOO_LARGE
            assert not client.closed
            await client.close()


@virtual
async def test_a_message_is_no_transaction():
    handler = Handler(at_once=False)
    async with served(handler) as connect:
        client = await connect()
        frames = Frames(connect.network)
        ledgers = [1, 1, 404, 1, 1, 404, 1]
        adds = [client.add(make_run(n, ledger_id=one)) for n, one in enumerate(ledgers)]
        await asyncio.sleep(1)
        assert frames.take("client") == 1
        assert [first for first, _ in handler.seen] == [0, 1, 3, 4, 6]
        assert [add.done() for add in adds] == [one == 404 for one in ledgers]
        frames.take("node")
        for number in range(4):
            handler.finish(number)
        await asyncio.sleep(1)
        assert frames.take("node") == 1, "an answer covers all before it"
        assert [add.done() for add in adds] == [True] * 6 + [False]
        handler.answers[4][0].set_exception(
            RetryableError("full", reason=Reason.READ_ONLY, remedy="Free some space")
        )
        outcomes = [await _outcome_of(add) for add in adds]
        assert [getattr(one, "reason", None) for one in outcomes] == [
            None, None, Reason.FENCED, None, None, Reason.FENCED, Reason.READ_ONLY,
        ]  # fmt: skip
        assert connect.server.statistics()["in_flight_bytes"] == 0
        await client.close()


async def _outcome_of(add):
    try:
        return await add
    except (RefusedError, RetryableError) as error:
        return error


@virtual
async def test_runs_of_one_group_are_answered_and_refused_together():
    handler = Handler(at_once=False)
    group = handler.group = asyncio.get_running_loop().create_future()
    async with served(handler) as connect:
        client = await connect()
        frames = Frames(connect.network)
        adds = [client.add(make_run(n)) for n in range(3)]
        await asyncio.sleep(1)
        adds += [client.add(make_run(n, ledger_id=404 if n == 4 else 1)) for n in range(3, 6)]
        await asyncio.sleep(1)
        assert frames.take("client") == 2
        assert len(group._callbacks) == 2, "a run costs no call of its own"
        assert frames.take("node") == 1
        group.set_exception(RetryableError("full", reason=Reason.READ_ONLY, remedy="Free some"))
        outcomes = [await _outcome_of(add) for add in adds]
        assert [one.reason for one in outcomes] == [
            Reason.FENCED if n == 4 else Reason.READ_ONLY for n in range(6)
        ]
        assert connect.server.statistics()["in_flight_bytes"] == 0
        await client.close()


@virtual
async def test_a_lac_comes_behind_what_was_added_before():
    handler = Handler()
    lacs_at_run = []
    handler.on_run = lambda: lacs_at_run.append(len(handler.lacs))
    async with served(handler) as connect:
        client = await connect()
        client.add(make_run(0))
        client.confirm(LedgerId(1), EntryId(0))
        await client.add(make_run(1))
        assert lacs_at_run == [0, 1]
        last = client.add(make_run(2))
        await client.close()
        await last


@virtual
async def test_answers_are_cumulative_and_keep_to_what_succeeded():
    handler = Handler(at_once=False)
    async with served(handler) as connect:
        client = await connect()
        adds = [client.add(make_run(n)) for n in range(5)]
        await asyncio.sleep(1)
        handler.finish(1)
        handler.finish(2)
        await asyncio.sleep(1)
        assert not any(add.done() for add in adds), "the first is not done yet"
        handler.answers[4][0].set_exception(
            RetryableError("full", reason=Reason.READ_ONLY, remedy="Free some space")
        )
        await asyncio.sleep(1)
        assert [add.done() for add in adds] == [False] * 4 + [True]
        handler.finish(0)
        await asyncio.sleep(1)
        assert [add.done() for add in adds] == [True, True, True, False, True]
        handler.finish(3)
        await adds[3]
        with pytest.raises(RetryableError) as caught:
            await adds[4]
        assert caught.value.reason is Reason.READ_ONLY
        assert caught.value.remedy == "Free some space"
        await client.close()
        assert connect.server.statistics()["in_flight_bytes"] == 0


@virtual
async def test_an_append_returns_where_it_went():
    handler = Handler()
    async with served(handler) as connect:
        client = await connect(ROLE_PRODUCER)
        ranges = await client.append(StreamName("s"), make_draft(), deadline_s=2)
        assert [(one.ledger_id, one.first_entry_id) for one in ranges] == [(5, 1)]
        assert handler.seen[0][0] == "s"
        assert handler.seen[0][2] == 2
        await client.close()


@virtual
async def test_senders_wait_for_credit():
    handler = Handler(at_once=False)
    run = make_run(size=1000)
    async with served(handler, limits=ServerLimits(credit_bytes=3500)) as connect:
        client = await connect()
        adds = [client.add(run) for _ in range(10)]
        await asyncio.sleep(1)
        assert len(handler.seen) == 3
        assert "unsent=7" in repr(client)
        for number in range(10):
            handler.finish(number)
            await asyncio.sleep(1)
            assert len(handler.seen) == min(10, number + 4)
        for add in adds:
            await add
        await client.close()


@virtual
async def test_a_request_larger_than_the_credit_travels_alone():
    handler = Handler(at_once=False)
    async with served(handler, limits=ServerLimits(credit_bytes=100)) as connect:
        client = await connect()
        adds = [client.add(make_run(size=5000)) for _ in range(2)]
        for number in range(2):
            await asyncio.sleep(1)
            assert len(handler.seen) == number + 1
            handler.finish(number)
        for add in adds:
            await add
        await client.close()


@virtual
async def test_a_lost_connection_tells_sent_from_unsent():
    handler = Handler(at_once=False)
    async with served(handler, limits=ServerLimits(credit_bytes=400)) as connect:
        client = await connect()
        adds = [client.add(make_run(size=100)) for _ in range(4)]
        await asyncio.sleep(1)
        connect.network.cut("client")
        with pytest.raises(IndeterminateError, match="is lost"):
            await adds[0]
        with pytest.raises(RetryableError):
            await adds[3]
        assert client.closed
        await client.close()
        assert len(handler.seen) == 1 + sum(
            isinstance(_error(a), IndeterminateError) for a in adds[1:]
        )


def _error(future):
    return future.exception()


@virtual
async def test_deadlines():
    handler = Handler(at_once=False)
    async with served(handler, limits=ServerLimits(credit_bytes=10)) as connect:
        client = await connect(ROLE_PRODUCER)
        async with asyncio.TaskGroup() as tasks:
            sent = tasks.create_task(_outcome(client.append("s", make_draft(), deadline_s=3)))
            await asyncio.sleep(0.5)
            unsent = tasks.create_task(_outcome(client.append("s", make_draft(), deadline_s=1)))
        assert isinstance(sent.result(), IndeterminateError)
        assert isinstance(unsent.result(), RetryableError)
        handler.finish(0)  # late, and nobody minds
        await asyncio.sleep(1)
        assert not client.closed
        await client.close()
        assert len(handler.seen) == 1


async def _outcome(work):
    try:
        return await work
    except (RetryableError, IndeterminateError) as error:
        return error


@virtual
async def test_a_silent_node_is_given_up():
    handler = Handler(at_once=False)
    async with served(handler) as connect:
        client = await connect(limits=ClientLimits(silence_s_max=30))
        await asyncio.sleep(500)
        assert not client.closed, "nothing is owed"
        add = client.add(make_run())
        with pytest.raises(IndeterminateError):
            await add
        await client.close()


@virtual
async def test_closing_waits_for_answers_that_come():
    handler = Handler(at_once=False)
    async with served(handler) as connect:
        client = await connect()
        add = client.add(make_run())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.close())
            await asyncio.sleep(1)
            handler.finish(0)
        await add


@virtual
async def test_refusals_are_told_and_the_connection_lives():
    handler = Handler()
    async with served(handler) as connect:
        client = await connect()
        with pytest.raises(RefusedError) as caught:
            await client.add(make_run(ledger_id=404))
        assert caught.value.reason is Reason.FENCED
        await client.add(make_run(1))
        with pytest.raises(RefusedError, match="not for this connection"):
            await client.append(StreamName("s"), make_draft(), deadline_s=1)
        with pytest.raises(RefusedError) as caught:
            await client.add(make_run(size=9_000_000))
        assert caught.value.reason is Reason.TOO_LARGE
        await client.close()


@virtual
async def test_a_node_that_is_full_is_not_read_from():
    handler = Handler()
    async with served(handler) as connect:
        client = await connect()
        handler.open.clear()
        adds = [client.add(make_run(n)) for n in range(4)]
        await asyncio.sleep(1)
        assert len(handler.seen) <= 1
        handler.open.set()
        for add in adds:
            await add
        handler.on_run = handler.open.clear
        adds = [client.add(make_run(n)) for n in range(4, 8)]
        for count in range(5, 9):
            await asyncio.sleep(1)
            assert len(handler.seen) == count, "not even the rest of a message"
            handler.open.set()
        for add in adds:
            await add
        await client.close()


@virtual
async def test_a_handler_that_fails_leaves_the_outcome_open():
    handler = Handler(at_once=False)
    async with served(handler) as connect:
        client = await connect()
        add = client.add(make_run())
        await asyncio.sleep(1)
        handler.answers[0][0].set_exception(ZeroDivisionError("a bug"))
        with pytest.raises(IndeterminateError) as caught:
            await add
        assert "a bug" not in str(caught.value)
        await client.close()


@virtual
async def test_who_is_let_in():
    token = Credentials(method=AUTH_TOKEN, data=b"secret")
    async with served(Handler(), authenticator=TokenAuthenticator(b"secret")) as connect:
        # Who was meant may be elsewhere by now: it is tried again, and at other addresses.
        with pytest.raises(RetryableError, match="another cluster") as elsewhere:
            await connect(cluster_id=UUID(int=8), credentials=token)
        assert elsewhere.value.reason is Reason.UNAVAILABLE
        assert elsewhere.value.details["cluster_id"] == str(CLUSTER)
        with pytest.raises(RefusedError, match="role"):
            await connect("visitor", credentials=token)
        for wrong in (Credentials(), Credentials(method=AUTH_TOKEN, data=b"guess")):
            with pytest.raises(RefusedError) as caught:
                await connect(credentials=wrong)
            assert caught.value.reason is Reason.UNAUTHENTICATED
        client = await connect(credentials=token)
        await client.close()
    assert "secret" not in repr(token)
    async with served(Handler()) as connect:
        with pytest.raises(RefusedError) as caught:
            await connect(credentials=token)
        assert caught.value.reason is Reason.UNAUTHENTICATED


@virtual
async def test_connections_are_limited():
    async with served(Handler(), limits=ServerLimits(connections_max=2)) as connect:
        clients = [await connect() for _ in range(2)]
        with pytest.raises(RetryableError) as caught:
            await connect()
        assert caught.value.reason is Reason.RESOURCE_EXHAUSTED
        for client in clients:
            await client.close()
        await asyncio.sleep(1)
        await (await connect()).close()


@virtual
async def test_what_waits_unsent_is_limited():
    handler = Handler(at_once=False)
    async with served(handler, limits=ServerLimits(credit_bytes=10)) as connect:
        client = await connect(limits=ClientLimits(unsent_bytes_max=2000, silence_s_max=5))
        adds = [client.add(make_run(size=500)) for _ in range(8)]
        refused = [a for a in adds if a.done()]
        assert refused
        for one in refused:
            assert one.exception().reason is Reason.RESOURCE_EXHAUSTED
        connect.network.cut("client")
        await client.close()
