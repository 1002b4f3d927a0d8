"""A ledger whose only node is lost for good: its recovery waits until an admin gives it up.

"Only an audited `tierlog ledger recover --accept-loss` ends such a wait, recording the lost range,
which readers get as CORRUPT." (protocols.md section 1)
"""

# mypy: disable-error-code="no-untyped-call,no-untyped-def,union-attr"

import json

import pytest

from tierlog.client import open_client
from tierlog.model.errors import CorruptError
from tierlog.model.ids import EntryId, StreamName
from tierlog.model.ledger import LedgerState
from tierlog.model.position import Position
from tierlog.wiring.build import open_catalog

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

STREAM = StreamName("precious")
ONE_COPY = {
    "TIERLOG_INGEST__OWNER__ENSEMBLE_SIZE": "1",
    "TIERLOG_INGEST__OWNER__WRITE_QUORUM": "1",
    "TIERLOG_INGEST__OWNER__ACK_QUORUM": "1",
}


async def append(client, *payloads):
    async with client.writer(STREAM) as writer:
        for payload in payloads:
            await writer.send(payload)
        await writer.flush()


async def test_a_loss_is_waited_for_until_it_is_accepted(start_nodes, cli):
    cluster = await start_nodes(2, **ONE_COPY)
    async with open_client(cluster.settings) as client, open_catalog(cluster.settings) as catalog:
        await append(client, b"one", b"two")
        snapshot = await catalog.streams.snapshot(STREAM)
        (lost,) = snapshot.ledgers
        owner = snapshot.stream.owner.node_id
        cluster.kill(f"ingest-{owner.rpartition('-')[2]}")

        async def waits():
            metadata = await catalog.ledgers.get(lost.ledger_id)
            return metadata.state is LedgerState.IN_RECOVERY

        await cluster.until(waits, what="another node recovers the ledger")
        number, where = str(lost.ledger_id), cluster.state_dir
        (await cli("ledger", "recover", number, state_dir=where)).check(2, "--accept-loss")
        assert await waits()
        done = await cli(
            *("ledger", "recover", number, "--accept-loss", "-o", "json"), state_dir=where
        )
        told = json.loads(done.check(0).stdout)
        assert (told["state"], told["lost"], told["entries"]) == ("CLOSED", ["0-0"], 1)
        await append(client, b"three")
        with pytest.raises(CorruptError):
            async for _ in client.reader(STREAM).events():
                pass
        behind = Position((await catalog.streams.snapshot(STREAM)).ledgers[1].ledger_id, EntryId(0))
        found = [one.payload async for one in client.reader(STREAM, start=behind).events()]
        assert found == [b"three"]
