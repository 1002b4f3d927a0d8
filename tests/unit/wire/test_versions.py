"""Nodes and clients of neighbouring versions speak with each other, both ways: rolling upgrades.

A release that brings version N+1 still reads N. What no side reads is refused, and says why.
"""

import asyncio

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.wire.test_connection import ADDRESS, CLUSTER, Handler, make_run
from tierlog.adapters.memory.transport import MemoryNetwork
from tierlog.format.versions import GATE, Format, Versions, readable_of
from tierlog.model.errors import RefusedError
from tierlog.model.ids import NodeId
from tierlog.wire.auth import OpenAuthenticator
from tierlog.wire.connection import Hello, WireClient
from tierlog.wire.messages import ROLE_OWNER
from tierlog.wire.server import WireServer

N = GATE[Format.WIRE].current
OLD = Versions(N, frozenset({N}))
NEW = Versions(N + 1, frozenset({N, N + 1}))
NEXT = Versions(N + 2, frozenset({N + 1, N + 2}))
CAREFUL = Versions(N, frozenset({N, N + 1}))
"""Reads the new one, and does not say it yet."""


class Counting(MemoryNetwork):
    """Counts calls."""

    calls = 0

    def transport(self, name):
        found = super().transport(name)
        connect = found.connect

        async def counted(address):
            self.calls += 1
            return await connect(address)

        found.connect = counted  # type: ignore[method-assign]
        return found


async def spoken(client_speaks, server_speaks):
    """Connect, store a run, and return the version that was spoken and how often was called."""
    network, handler = Counting(latency_s=lambda: 0.001), Handler()
    server = WireServer(
        handler,
        cluster_id=CLUSTER,
        node_id=NodeId("n1"),
        authenticator=OpenAuthenticator(),
        versions=server_speaks,
    )
    listener = await network.transport("node").listen(ADDRESS, server.serve)
    hello = Hello(cluster_id=CLUSTER, role=ROLE_OWNER)
    try:
        async with asyncio.TaskGroup() as tasks:
            client = await WireClient.connect(
                network.transport("client"), ADDRESS, hello, tasks=tasks, versions=client_speaks
            )
            await client.add(make_run(0))
            await client.close()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        await listener.close()
    assert handler.seen == [(0, False)]
    return client.welcome.version, network.calls


@pytest.mark.parametrize(
    ("client", "server", "version", "calls"),
    [
        (OLD, OLD, N, 1),
        (OLD, NEW, N, 1),
        (NEW, OLD, N, 2),
        (NEW, NEW, N + 1, 1),
        (CAREFUL, NEW, N, 1),
        (NEW, CAREFUL, N + 1, 1),
        (NEXT, NEW, N + 1, 2),
        (NEW, NEXT, N + 1, 1),
    ],
)
def test_neighbours_speak_the_newest_version_that_both_read(client, server, version, calls):
    assert run_virtual(spoken(client, server), until_s=60) == (version, calls)


@pytest.mark.parametrize(("client", "server"), [(OLD, NEXT), (NEXT, OLD)])
def test_what_is_two_releases_apart_is_refused_with_both_versions_named(client, server):
    with pytest.raises(RefusedError, match="format version") as caught:
        run_virtual(spoken(client, server), until_s=60)
    assert f"version {client.current}" in str(caught.value)
    assert readable_of(caught.value, Format.WIRE) == server.readable


@pytest.mark.parametrize("told", ["", "x", "-1", "3,x", "1e3", "9" * 5000, "٣"])
def test_a_peer_that_tells_nonsense_of_its_versions_is_called_once(told):
    error = RefusedError("no", remedy="no", details={"format": "WIRE", "readable": told})
    assert OLD.common_with(readable_of(error, Format.WIRE)) in {None, N}
    assert readable_of(error, Format.RUN) == frozenset()


def test_a_version_that_is_written_is_read_by_the_gate():
    for kind, versions in GATE.items():
        assert versions.current in versions.readable, kind
        assert versions.common_with(versions.readable) == max(versions.readable)
