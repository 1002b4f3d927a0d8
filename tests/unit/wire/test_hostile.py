"""The wire against peers that mean harm: the node stays up, and its memory stays bounded.

reliability.md part D, "length bombs" and "slowloris". Over real sockets, with raw bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.wire.test_connection import CLUSTER, Handler, make_draft, make_run
from tierlog.adapters.tcp import TcpLimits, TcpTransport
from tierlog.format.versions import Format, current
from tierlog.model.errors import IndeterminateError, RetryableError, TierlogError
from tierlog.model.ids import NodeId
from tierlog.proto.v1 import wire_pb2 as pb
from tierlog.wire.auth import OpenAuthenticator
from tierlog.wire.codec import FrameDecoder, FrameLimits, encode_head
from tierlog.wire.connection import Hello, WireClient
from tierlog.wire.messages import ROLE_OWNER, RUNS_MAX
from tierlog.wire.server import ServerLimits, WireServer

LIMITS = ServerLimits(hello_s_max=0.3, credit_bytes=100_000, stall_s_max=0.5)
TCP = TcpLimits(frames=FrameLimits(frame_len_max=300_000), frame_s_max=0.3, linger_s_max=0.2)


@asynccontextmanager
async def attacked(handler=None):
    handler = handler or Handler()
    server = WireServer(
        handler,
        cluster_id=CLUSTER,
        node_id=NodeId("n1"),
        authenticator=OpenAuthenticator(),
        limits=LIMITS,
    )
    transport = TcpTransport(limits=TCP)
    listener = await transport.listen("127.0.0.1:0", server.serve)
    try:
        yield Attack(listener.address), server
        async with asyncio.TaskGroup() as tasks:
            hello = Hello(cluster_id=CLUSTER, role=ROLE_OWNER)
            client = await WireClient.connect(transport, listener.address, hello, tasks=tasks)
            if handler.at_once:
                await asyncio.wait_for(client.add(make_run()), 5)
            await client.close()
        async with asyncio.timeout(5):
            while server.statistics()["connections"]:
                await asyncio.sleep(0.01)
    finally:
        await listener.close()


class Attack:
    """Raw bytes to the server, and what comes back."""

    def __init__(self, address):
        self.host, _, self.port = address.rpartition(":")

    async def send(self, *pieces, pause_s=0.0, eof=True):
        """Send ``pieces``; return the frames of the answer once the server hung up."""
        reader, writer = await asyncio.open_connection(self.host, int(self.port))
        decoder = FrameDecoder()

        async def read():
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    decoder.feed(data)

        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            with contextlib.suppress(OSError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause_s)
                if eof:
                    writer.write_eof()
        writer.close()
        await _closed(writer)
        return [pb.WireFrame.FromString(frame.header) for frame in decoder.frames]


async def _closed(writer):
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def encode(message, body=b""):
    header = message.SerializeToString()
    return encode_head(header_len=len(header), body_len=len(body)) + header + body


def hello(**changes):
    fields = {
        "version": current(Format.WIRE),
        "cluster_id": CLUSTER.bytes,
        "role": "owner",
        **changes,
    }
    return encode(pb.WireFrame(hello=pb.WireHello(**fields)))


def add(request_id=1, body=None, **changes):
    message = pb.WireAddRuns(**{"count": 1, **changes})
    return encode(
        pb.WireFrame(request_id=request_id, add_runs=message),
        bytes(make_run().encoded) if body is None else body,
    )


def adds(request_id, *runs, count=None):
    """Return a message of several runs, or of what is to be taken for them."""
    message = pb.WireAddRuns(count=len(runs) if count is None else count)
    return encode(pb.WireFrame(request_id=request_id, add_runs=message), b"".join(runs))


RUN = bytes(make_run().encoded)
LARGE = bytes(make_run(size=90_000).encoded)


def reasons(answers):
    return [one.error.reason for one in answers if one.HasField("error")]


HOSTILE = {
    "garbage": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
    "huge length": [b"\xff\xff\xff\xff\x00\x00\x00\x04abcd"],
    "over the limit by one": [(300_001).to_bytes(4, "big") + bytes(4)],
    "header longer than its frame": [b"\0\0\0\x08\0\0\0\x05abcd"],
    "huge header": [b"\0\x02\0\0\0\x01\0\x01" + bytes(70_000)],
    "header is no protobuf": [b"\0\0\0\x08\0\0\0\x04\xff\xff\xff\xff"],
    "empty frame": [b"\0\0\0\x04\0\0\0\0"],
    "no hello": [add()],
    "hello of another version": [hello(version=99)],
    "hello of another cluster": [hello(cluster_id=UUID(int=8).bytes)],
    "hello with a short cluster id": [hello(cluster_id=b"x")],
    "hello of no role": [hello(role="")],
    "hello with a credential": [hello(auth_method="token", auth_data=b"?")],
    "hello twice": [hello(), hello()],
    "request id 0": [hello(), add(0)],
    "request id that jumps": [hello(), add(1), add(3)],
    "request id again": [hello(), add(1), add(1)],
    "request id again, of a message's second run": [hello(), adds(1, RUN, RUN), add(2)],
    "request id behind fewer runs than said": [hello(), adds(1, RUN, count=3), add(2)],
    "no runs": [hello(), adds(1, count=0)],
    "no runs, and one": [hello(), adds(1, RUN, count=0)],
    "too many runs": [hello(), adds(1, *[RUN] * (RUNS_MAX + 1))],
    "a huge count": [hello(), adds(1, RUN, count=2**32 - 1)],
    "lac out of bounds": [
        hello(),
        encode(pb.WireFrame(lac=pb.WireLac(ledger_id=1, last_add_confirmed=-7))),
    ],
    "garbage after hello": [hello(), b"\x00\x01\x02\x03garbage-garbage"],
    "over the credit": [hello(), add(1, LARGE), add(2, LARGE)],
    "over the credit in one message": [hello(), adds(1, LARGE, LARGE)],
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_is_not_the_protocol_is_told_and_hung_up_on(name):
    handler = Handler(at_once=name != "over the credit")
    async with attacked(handler) as (attack, _server):
        answers = await attack.send(*HOSTILE[name], eof=False)
    assert answers[-1].HasField("error"), answers
    assert answers[-1].request_id == 0 or name == "hello twice"
    assert answers[-1].error.message
    assert "Traceback" not in answers[-1].error.message


def resized(run, change):
    """Let a run claim other frames than it has."""
    changed = bytearray(run)
    at = slice(12, 16)
    changed[at] = (int.from_bytes(changed[at], "big") + change).to_bytes(4, "big")
    return bytes(changed)


def bit_flipped(run):
    return bytes(run[:-1]) + bytes([run[-1] ^ 1])


# What of a message of three runs is taken, and how many of its answers are CORRUPT.
BAD_MESSAGES = {
    "cut in its last run": ((RUN, RUN, RUN[:-1]), 2),
    "cut in the prefix of its last run": ((RUN, RUN, RUN[:7]), 2),
    "cut behind its second run": ((RUN, RUN), 2),
    "nothing": ((), 0),
    "a fourth run": ((RUN, RUN, RUN, RUN), 0),
    "the beginning of a fourth run": ((RUN, RUN, RUN, RUN[:3]), 0),
    "a damaged first run": ((bit_flipped(RUN), RUN, RUN), 0),
    "a damaged second run": ((RUN, bit_flipped(RUN), RUN), 1),
    "a damaged last run": ((RUN, RUN, bit_flipped(RUN)), 2),
    "a length that ends in the next run": ((RUN, resized(RUN, 50), RUN), 1),
    "a length that ends in itself": ((RUN, resized(RUN, -5), RUN), 1),
    "a length beyond the frame": ((RUN, resized(RUN, 2 * len(RUN)), RUN), 1),
    "a length beyond all memory": ((RUN, RUN[:8] + b"\xff" * 8 + RUN[16:], RUN), 1),
    "frames without a run": ((RUN, RUN[80:], RUN), 1),
    "zeros": ((RUN, bytes(len(RUN)), RUN), 1),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
async def test_of_a_bad_message_nothing_is_taken_that_is_bad_or_behind_it(name):
    pieces, taken = BAD_MESSAGES[name]
    handler = Handler()
    async with attacked(handler) as (attack, server):
        answers = await attack.send(
            hello(), adds(1, *pieces, count=3), add(4), b"\xff" * 8, eof=False, pause_s=0.01
        )
        assert len(handler.seen) == taken + 1, "the run behind the message is taken"
        assert server.statistics()["in_flight_bytes"] == 0
    by_id = {one.request_id: one for one in answers[1:]}
    refused = [number for number in by_id if by_id[number].error.reason == "CORRUPT" and number]
    assert refused == list(range(taken + 1, 4))
    assert by_id[4].HasField("added")


async def test_refused_requests_leave_the_connection_open():
    run = bytearray(make_run().encoded)
    flipped = bytearray(run)
    flipped[-1] ^= 1
    draft = bytes(make_draft().encoded)
    pieces = [
        hello(),
        add(1, b""),
        add(2, b"junk"),
        add(3, bytes(flipped)),
        add(4, bytes(run[:-1])),
        add(5, bytes(run) * 2),
        encode(pb.WireFrame(request_id=6)),
        encode(pb.WireFrame(request_id=7, append=pb.WireAppend(stream="s")), draft),
        encode(pb.WireFrame(request_id=8, error=pb.WireError(reason="X"))),
        encode(pb.WireFrame(request_id=9, welcome=pb.WireWelcome())),
        add(10),
    ]
    async with attacked() as (attack, _server):
        answers = await attack.send(*pieces, b"\xff" * 8, eof=False, pause_s=0.01)
    assert answers[0].HasField("welcome")
    by_id = {one.request_id: one for one in answers[1:]}
    assert [by_id[n].error.reason for n in range(1, 6)] == ["CORRUPT"] * 5
    assert [by_id[n].error.reason for n in range(6, 10)] == ["INVALID_ARGUMENT"] * 4
    assert by_id[10].HasField("added")


async def test_producers_may_not_replicate_nor_send_what_is_no_draft():
    def append(request_id, run, stream="s"):
        message = pb.WireAppend(stream=stream)
        return encode(pb.WireFrame(request_id=request_id, append=message), bytes(run.encoded))

    pieces = [
        hello(role="producer"),
        add(1),
        append(2, make_run(ledger_id=3)),
        append(3, make_draft(), stream="../etc"),
        append(4, make_draft()),
    ]
    async with attacked() as (attack, _server):
        answers = await attack.send(*pieces, b"\xff" * 8, eof=False, pause_s=0.01)
    assert reasons(answers)[:3] == ["INVALID_ARGUMENT"] * 3
    assert answers[4].request_id == 4
    assert answers[4].HasField("appended")


async def test_every_truncation_of_a_conversation():
    whole = hello() + add(1)
    async with attacked() as (attack, server):
        for cut in range(len(whole)):
            answers = await attack.send(whole[:cut])
            assert len(answers) <= 1 + (cut >= len(hello())) + (cut == len(whole))
        assert server.statistics()["in_flight_bytes"] == 0


async def test_slow_peers_meet_a_deadline():
    async with attacked() as (attack, _server):
        async with asyncio.TaskGroup() as tasks:
            silent = tasks.create_task(attack.send(eof=False))
            trickle = [bytes([one]) for one in hello()]
            slow = tasks.create_task(attack.send(*trickle, pause_s=0.05, eof=False))
            stuck = tasks.create_task(attack.send(hello(), add(1)[:20], eof=False))
        for task in (silent, slow):
            assert "HELLO" in task.result()[-1].error.message
        assert "finish a frame" in stuck.result()[-1].error.message


async def test_a_peer_that_never_reads_is_hung_up_on():
    handler = Handler()
    async with attacked(handler) as (attack, server):
        reader, writer = await asyncio.open_connection(attack.host, int(attack.port), limit=1)
        writer.write(hello())
        message = pb.WireAddRuns(count=1)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(60):
                for request_id in range(1, 10**9):
                    frame = pb.WireFrame(request_id=request_id, add_runs=message)
                    writer.write(encode(frame, b"x" * 50))
                    if request_id % 1000 == 0:
                        await writer.drain()
                        channel_bytes = [one._channel._out_bytes for one in server._connections]
                        assert max(channel_bytes, default=0) < 3 * TCP.send_queue_high
        writer.close()
        await _closed(writer)
        del reader


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.builds(lambda body: encode(pb.WireFrame(), body), st.binary(max_size=50)),
            st.builds(add, st.integers(0, 3), st.binary(max_size=150)),
            st.builds(
                lambda n, runs, count: adds(n, *runs, count=count),
                st.integers(0, 3),
                st.lists(st.sampled_from([RUN, RUN[:50], RUN[7:], bit_flipped(RUN)]), max_size=4),
                st.integers(0, 5),
            ),
            st.builds(
                lambda n, at, mask: add(n, _flipped(at, mask)),
                st.integers(0, 3),
                st.integers(0, 10**6),
                st.integers(1, 255),
            ),
            st.just(hello()),
        ),
        max_size=6,
    ),
    st.booleans(),
)
def test_fuzz(pieces, polite):
    async def run():
        handler = Handler()
        async with attacked(handler) as (attack, server):
            answers = await attack.send(*([hello()] if polite else []), *pieces)
            assert len(answers) <= 5 * len(pieces) + 2
            assert server.statistics()["in_flight_bytes"] == 0
        assert len(handler.seen) <= 4 * len(pieces) + 1

    asyncio.run(run())


def _flipped(at, mask):
    data = bytearray(make_run().encoded)
    data[at % len(data)] ^= mask
    return bytes(data)


async def test_a_client_survives_a_hostile_server():
    answers = [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        encode(pb.WireFrame(added=pb.WireAdded())),
        encode(pb.WireFrame()),
        b"",
    ]
    for answer in answers:

        async def serve(reader, writer, answer=answer):
            await reader.read(1)
            writer.write(answer)
            writer.close()
            await _closed(writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(TierlogError) as caught:
            await _connect_alone(address)
        assert caught.value.remedy
        server.close()
        await server.wait_closed()


async def _connect_alone(address):
    hello_value = Hello(cluster_id=CLUSTER, role=ROLE_OWNER)
    try:
        async with asyncio.TaskGroup() as tasks:
            await WireClient.connect(TcpTransport(), address, hello_value, tasks=tasks)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


async def test_wrong_answers_end_the_connection_and_lie_to_nobody():
    welcome = pb.WireWelcome(
        version=current(Format.WIRE),
        cluster_id=CLUSTER.bytes,
        node_id="n1",
        credit_bytes=10**6,
        frame_len_max=10**6,
    )
    wrong = [
        pb.WireFrame(request_id=7, added=pb.WireAdded()),
        pb.WireFrame(request_id=7, error=pb.WireError(reason="FENCED")),
        pb.WireFrame(request_id=1, hello=pb.WireHello()),
        pb.WireFrame(
            request_id=1,
            appended=pb.WireAppended(ranges=[pb.AppendedRange(first_entry_id=4)]),
        ),
        pb.WireFrame(request_id=1, error=pb.WireError(reason="NEWER", message="?")),
    ]
    for answer in wrong:

        async def handler(channel, answer=answer):
            await channel.receive()
            channel.send(pb.WireFrame(welcome=welcome).SerializeToString())
            await channel.receive()
            channel.send(answer.SerializeToString())
            await channel.receive()

        listener = await TcpTransport().listen("127.0.0.1:0", handler)
        async with asyncio.TaskGroup() as tasks:
            hello_value = Hello(cluster_id=CLUSTER, role=ROLE_OWNER)
            client = await WireClient.connect(
                TcpTransport(), listener.address, hello_value, tasks=tasks
            )
            with pytest.raises(IndeterminateError):
                await asyncio.wait_for(client.add(make_run()), 5)
            await client.close()
            with pytest.raises(RetryableError):
                await client.add(make_run())
        await listener.close()
