"""Core attributes of a stream of real nodes: as of now, and the same at its next owner."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from tierlog.client import AttributeUpdate, Client, Verb, open_client
from tierlog.model.attributes import INDEX_ROOT_OFFSET
from tierlog.model.core_attributes import CORE_NAMES
from tierlog.model.ids import StreamName
from tierlog.model.policy import MIB
from tierlog.wiring.build import open_catalog

if TYPE_CHECKING:
    from tests.plugins.fix_cluster import StartNodes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STREAM = StreamName("core")
OFFSET = UUID(bytes=bytes(INDEX_ROOT_OFFSET))
KEYS = [UUID(int=(1 << 100) + number) for number in range(300)]


async def core_of(client: Client) -> dict[str, int]:
    """Return the core attributes by name, read by key, by range and one after the other."""
    attributes = client.attributes(STREAM)
    keys = {UUID(bytes=key): name for key, name in sorted(CORE_NAMES.items())}
    found = await attributes.get(list(keys))
    first, *_, last = keys
    assert {key: value async for key, value in attributes.list(first, last)} == found
    iterated = [one async for one in attributes.list()]
    assert iterated == [*found.items(), *((key, 1) for key in KEYS)]
    return {keys[key]: value for key, value in found.items()}


@pytest.mark.covers("E13")
async def test_policies_show_in_the_next_read_and_the_next_owner_tells_the_same(
    start_nodes: StartNodes,
) -> None:
    cluster = await start_nodes(3)
    addresses = ",".join(cluster.address(node, "grpc") for node in cluster.nodes)
    one = cluster.settings.client.model_copy(update={"ingest_address": addresses})
    settings = cluster.settings.model_copy(update={"client": one})
    async with open_client(settings) as client, open_catalog(settings) as catalog:
        await client.create_stream(STREAM)
        adds = [AttributeUpdate(key=key, verb=Verb.ACCUMULATE, value=1) for key in KEYS]
        await client.append(STREAM, [b"a", b"b"], updates=adds)
        await client.seal(STREAM)

        async def flushed() -> bool:
            found = await client.attributes(STREAM).get([OFFSET])
            return found[OFFSET] >= 0

        await cluster.until(flushed, what="the attributes are in the index")
        before = await core_of(client)
        assert before["event-count"] == 2
        assert before["creation-time"] == (await catalog.streams.get(STREAM)).created_ms
        assert [before[f"scale-policy-{one}"] for one in ("type", "rate", "segments-min")] == [
            0,
            0,
            1,
        ]

        await client.set_level(None, {"ledger_bytes_max": 7 * MIB})
        assert (await core_of(client))["roll-over-bytes"] == 7 * MIB
        await client.set_policy(STREAM, {"ledger_entries_max": 8, "ledger_age_ms_max": 99_000})
        found = await core_of(client)
        assert [found[f"roll-over-{one}"] for one in ("bytes", "entries", "age-ms")] == [
            7 * MIB,
            8,
            99_000,
        ]

        record = await catalog.attributes.get(STREAM)
        assert record is not None
        root = record.newest.root
        assert found["index-root-offset"] == root.root_offset
        assert found["index-root-length"] == root.root_length > 0

        owner = (await catalog.streams.get(STREAM)).owner
        assert owner is not None
        cluster.kill(f"ingest-{owner.node_id.rpartition('-')[2]}")
        assert await core_of(client) == found
        after = (await catalog.streams.get(STREAM)).owner
        assert after is not None
        assert after.node_id != owner.node_id
