"""A node dies, and another cluster's node takes its addresses: nobody takes one for the other.

Two clusters of real processes, open, over the same servers.
"""

import pytest

from tierlog.client import open_client
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import StreamName
from tierlog.wiring.build import open_catalog

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

STREAM = StreamName("kept")


async def owner_of(cluster):
    """Return the process that owns the stream."""
    async with open_catalog(cluster.settings) as catalog:
        owner = (await catalog.streams.get(STREAM)).owner
    assert owner is not None
    return f"ingest-{owner.node_id.rpartition('-')[2]}"


async def test_appends_go_on_in_their_own_cluster(start_nodes):
    ours, theirs = await start_nodes(3), await start_nodes(1)
    async with open_client(ours.settings) as client, open_client(theirs.settings) as other:
        for number in range(3):
            await client.append(STREAM, [f"{number}".encode()])
        gone = await owner_of(ours)
        ours.kill(gone)
        taken = {
            f"TIERLOG_INGEST__LISTEN__{purpose.upper()}_PORT": ours.address(gone, purpose)
            for purpose in ("grpc", "wire")
        }
        await theirs.restart(
            "ingest", **{name: at.rpartition(":")[2] for name, at in taken.items()}
        )
        for number in range(3, 6):
            await client.append(STREAM, [f"{number}".encode()])
        events = [one.payload async for one in client.reader(STREAM).events()]
        assert events == [f"{number}".encode() for number in range(6)]
        with pytest.raises(RefusedError) as caught:
            await other.stream(STREAM)
        assert caught.value.reason is Reason.STREAM_NOT_FOUND
