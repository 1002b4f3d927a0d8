"""The wire: a HELLO shows a token or comes with a certificate; streams are allowed once each."""

from __future__ import annotations

import asyncio
import contextlib
from uuid import UUID, uuid4

import pytest

from tests.security.making import Issuer, gate_of, grant
from tierlog.adapters.memory.transport import MemoryNetwork
from tierlog.format.frame import pack_entries
from tierlog.format.run import build_run
from tierlog.format.versions import Format, current
from tierlog.model.access import Role
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, TierlogError
from tierlog.model.ids import EntryId, LedgerId, NodeId, StreamName
from tierlog.model.position import AppendedRange
from tierlog.proto.v1 import wire_pb2 as pb
from tierlog.runtime.wire_access import GateAuthenticator
from tierlog.wire.connection import Hello, WireClient
from tierlog.wire.messages import (
    AUTH_JWT,
    AUTH_TOKEN,
    ROLE_OWNER,
    ROLE_PRODUCER,
    Credentials,
)
from tierlog.wire.server import WireServer

CLUSTER = uuid4()
ADDRESS = "server:1"


class Handler:
    """Takes everything."""

    def __init__(self):
        self.appended: list[str] = []

    async def ready(self, *, appends):
        pass

    def append(self, stream, draft, *, deadline_s, condition):
        self.appended.append(stream)
        answer = asyncio.get_running_loop().create_future()
        where = AppendedRange(
            ledger_id=LedgerId(1), first_entry_id=EntryId(0), last_entry_id=EntryId(0)
        )
        answer.set_result([where])
        return answer


class Counting(GateAuthenticator):
    """Counts how often a stream is asked about."""

    asked = 0

    def check(self, credentials, *, role, peer, names):
        admission = super().check(credentials, role=role, peer=peer, names=names)
        counting = self

        class Counted:
            def authorise(self, stream):
                counting.asked += 1
                admission.authorise(stream)

        return Counted()


@pytest.fixture
def issuer(tmp_path):
    return Issuer(tmp_path / "jwks.json")


@contextlib.asynccontextmanager
async def serving(gate):
    network, handler, authenticator = MemoryNetwork(), Handler(), Counting(gate)
    server = WireServer(
        handler,  # type: ignore[arg-type]
        cluster_id=CLUSTER,
        node_id=NodeId("n"),
        authenticator=authenticator,
    )
    listener = await network.transport("server").listen(ADDRESS, server.serve)
    try:
        yield network.transport("client"), handler, authenticator
    finally:
        await listener.close()


def hello_of(token=None, *, method=AUTH_JWT, role=ROLE_PRODUCER, cluster=CLUSTER):
    credentials = Credentials(method=method, data=token.encode()) if token else Credentials()
    return Hello(cluster_id=cluster, role=role, credentials=credentials)


async def refusal(transport, hello):
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as tasks:
            await WireClient.connect(transport, ADDRESS, hello, tasks=tasks)
    error = caught.value.exceptions[0]
    assert isinstance(error, TierlogError)
    return error


def draft():
    frames, offsets = pack_entries([b"one"])
    return build_run(frames, offsets)


async def test_hostile_hellos_are_refused_before_anything_else(issuer):
    good = issuer.token("p", roles=("producer",), streams=("*",))
    consumer = issuer.token("c", roles=("consumer",), streams=("*",))
    nowhere = issuer.token("p", roles=("producer",))
    async with serving(gate_of(issuer)) as (transport, handler, _):
        for hello, reason in (
            (hello_of(), Reason.UNAUTHENTICATED),
            (hello_of("a.b.c"), Reason.UNAUTHENTICATED),
            (hello_of("x" * 20_000), Reason.UNAUTHENTICATED),
            (hello_of(good, method=AUTH_TOKEN), Reason.UNAUTHENTICATED),
            (hello_of(good, method="kerberos"), Reason.UNAUTHENTICATED),
            (hello_of(good, role=ROLE_OWNER), Reason.PERMISSION_DENIED),
            (hello_of(consumer), Reason.PERMISSION_DENIED),
            (hello_of(good, role="root"), Reason.INVALID_ARGUMENT),
            (hello_of(good, cluster=uuid4()), Reason.UNAVAILABLE),
            # Who is not known is not told of the cluster, nor which versions are spoken.
            (hello_of("a.b.c", cluster=uuid4()), Reason.UNAUTHENTICATED),
            (hello_of(consumer, cluster=uuid4()), Reason.PERMISSION_DENIED),
        ):
            error = await refusal(transport, hello)
            assert error.reason is reason
            if reason not in {Reason.INVALID_ARGUMENT, Reason.UNAVAILABLE}:
                assert str(CLUSTER) not in f"{error} {error.details}"
        async with asyncio.TaskGroup() as tasks:
            client = await WireClient.connect(transport, ADDRESS, hello_of(nowhere), tasks=tasks)
            with pytest.raises(RefusedError, match="no pattern"):
                await client.append(StreamName("a"), draft(), deadline_s=5)
            await client.close()
        assert handler.appended == []


async def test_frames_before_hello_and_after_a_refusal_do_nothing(issuer):
    producer = issuer.token("p", roles=("producer",), streams=("*",))
    body = draft().encoded
    append = pb.WireFrame(request_id=1, append=pb.WireAppend(stream="a"))
    good = pb.WireHello(
        version=current(Format.WIRE), cluster_id=CLUSTER.bytes, role=ROLE_PRODUCER,
        auth_method=AUTH_JWT, auth_data=producer.encode(),
    )  # fmt: skip
    bad = pb.WireHello()
    bad.CopyFrom(good)
    bad.auth_data = b"a.b.c"
    async with serving(gate_of(issuer)) as (transport, handler, _):
        for first in (append, pb.WireFrame(hello=bad)):
            channel = await transport.connect(ADDRESS)
            channel.send(first.SerializeToString(), [body])
            channel.send(pb.WireFrame(hello=good).SerializeToString())
            channel.send(append.SerializeToString(), [body])
            answers = []
            with contextlib.suppress(TierlogError):
                while (frame := await channel.receive()) is not None:
                    answers.append(pb.WireFrame.FromString(frame.header))
            assert [one.WhichOneof("message") for one in answers] == ["error"]
            channel.close()
        assert handler.appended == []


async def test_a_second_hello_does_not_change_who_it_is(issuer):
    producer = issuer.token("p", roles=("producer",), streams=("a",))
    service = issuer.token("s", roles=("service",), streams=("*",))
    async with serving(gate_of(issuer)) as (transport, handler, _):
        channel = await transport.connect(ADDRESS)
        for token, role in ((producer, ROLE_PRODUCER), (service, ROLE_OWNER)):
            hello = pb.WireHello(
                version=current(Format.WIRE), cluster_id=CLUSTER.bytes, role=role,
                auth_method=AUTH_JWT, auth_data=token.encode(),
            )  # fmt: skip
            channel.send(pb.WireFrame(request_id=1, hello=hello).SerializeToString())
        first = await channel.receive()
        assert first is not None
        assert pb.WireFrame.FromString(first.header).HasField("welcome")
        second = await channel.receive()
        assert second is not None
        assert pb.WireFrame.FromString(second.header).HasField("error")
        channel.close()
        assert handler.appended == []


async def test_a_stream_is_authorised_once_and_not_with_each_append(issuer):
    producer = issuer.token("p", roles=("producer",), streams=("orders*",))
    async with serving(gate_of(issuer)) as (transport, handler, authenticator):
        async with asyncio.TaskGroup() as tasks:
            client = await WireClient.connect(transport, ADDRESS, hello_of(producer), tasks=tasks)
            for _ in range(50):
                await client.append(StreamName("orders.eu"), draft(), deadline_s=5)
            assert authenticator.asked == 1
            for _ in range(2):
                with pytest.raises(RefusedError) as caught:
                    await client.append(StreamName("billing"), draft(), deadline_s=5)
                assert caught.value.reason is Reason.PERMISSION_DENIED
            await client.append(StreamName("orders.us"), draft(), deadline_s=5)
            await client.close()
        assert handler.appended == ["orders.eu"] * 50 + ["orders.us"]
        assert authenticator.asked == 4


@pytest.mark.parametrize("name", ["", "../orders", "orders/..", "orders\0", "a" * 129, "-a"])
async def test_names_are_validated_before_they_are_authorised(issuer, name):
    producer = issuer.token("p", roles=("producer",), streams=("*",))
    async with serving(gate_of(issuer)) as (transport, handler, authenticator):
        async with asyncio.TaskGroup() as tasks:
            client = await WireClient.connect(transport, ADDRESS, hello_of(producer), tasks=tasks)
            with pytest.raises((RefusedError, IndeterminateError)) as caught:
                await client.append(StreamName(name), draft(), deadline_s=5)
            assert caught.value.reason is Reason.INVALID_ARGUMENT
            await client.close()
        assert handler.appended == []
        assert authenticator.asked == 0


async def test_each_connection_shows_what_is_valid_then(issuer):
    shown = [issuer.token("p", roles=("producer",), streams=("*",))]
    hello = Hello(
        cluster_id=UUID(bytes=CLUSTER.bytes),
        role=ROLE_PRODUCER,
        show=lambda: Credentials(method=AUTH_JWT, data=shown[-1].encode()),
    )
    async with serving(gate_of(issuer)) as (transport, _, _):
        async with asyncio.TaskGroup() as tasks:
            client = await WireClient.connect(transport, ADDRESS, hello, tasks=tasks)
            await client.close()
        issuer.add("k2")
        issuer.publish("k2")
        assert (await refusal(transport, hello)).reason is Reason.UNAUTHENTICATED
        shown.append(issuer.token("p", kid="k2", roles=("producer",), streams=("*",)))
        async with asyncio.TaskGroup() as tasks:
            client = await WireClient.connect(transport, ADDRESS, hello, tasks=tasks)
            await client.close()


async def test_a_service_may_own_and_a_grant_of_some_streams_is_not_enough(issuer):
    gate = gate_of(
        issuer,
        {
            "token:all": grant(Role.SERVICE),
            "token:some": grant(Role.SERVICE, streams=("orders*",)),
        },
    )
    async with serving(gate) as (transport, _, _):
        async with asyncio.TaskGroup() as tasks:
            hello = hello_of(issuer.token("all"), role=ROLE_OWNER)
            client = await WireClient.connect(transport, ADDRESS, hello, tasks=tasks)
            await client.close()
        hello = hello_of(issuer.token("some"), role=ROLE_OWNER)
        assert (await refusal(transport, hello)).reason is Reason.PERMISSION_DENIED
