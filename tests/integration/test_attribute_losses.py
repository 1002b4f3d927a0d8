"""A stream whose attributes can't be rebuilt, since a ledger behind the checkpoint is damaged.

As after a restore that had to leave the checkpoint out, and accepted a damaged ledger.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from tests.integration.test_reader_tiers import SMALL, offloaded_and_gone
from tierlog.adapters.s3 import open_s3
from tierlog.adapters.system import SystemClock, SystemIds
from tierlog.client import AttributeUpdate, Verb, WriterState, open_client
from tierlog.format import paths
from tierlog.format.attribute_records import encode_attributes
from tierlog.model.attribute_record import AttributesRecord
from tierlog.model.attributes import EVENT_COUNT
from tierlog.model.errors import CorruptError
from tierlog.model.ids import StreamName
from tierlog.wiring.build import open_catalog

if TYPE_CHECKING:
    from tests.plugins.fix_cli import CommandLine
    from tests.plugins.fix_cluster import ServiceCluster
    from tierlog.catalog import Catalog

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

STREAM = StreamName("damaged")
MENDED = StreamName("mended")
EVENTS = UUID(bytes=bytes(EVENT_COUNT))


async def forget_checkpoints(catalog: Catalog) -> None:
    path = paths.attributes_path(STREAM)
    found = await catalog.store.get(path)
    assert found is not None
    stream = await catalog.streams.get(STREAM)
    empty = AttributesRecord(incarnation=stream.incarnation)
    await catalog.store.set(path, encode_attributes(empty), version=found.version)


async def damage_copy(cluster: ServiceCluster, ledger_id: int) -> None:
    async with open_s3(cluster.settings.s3, clock=SystemClock(), ids=SystemIds()) as objects:
        keys = [one.key async for one in objects.list()]
        (index,) = [one for one in keys if one.endswith(f"-ledger-{ledger_id}-index")]
        found = await objects.get(index)
        assert found is not None
        await objects.put(index, found[1][:-100] + bytes(100), metadata=found[0].metadata)


async def test_a_damaged_index_is_made_anew_of_what_lies_in_both_tiers(
    cluster: ServiceCluster, cli: CommandLine
) -> None:
    keys = [UUID(int=(1 << 100) + number) for number in range(50)]

    async def add(client: Any, some: list[UUID]) -> None:
        updates = [AttributeUpdate(key=key, verb=Verb.ACCUMULATE, value=1) for key in some]
        await client.attributes(MENDED).update(updates)

    async with open_client(cluster.settings) as client, open_catalog(cluster.settings) as catalog:
        await client.create_stream(MENDED, policy=SMALL)
        await add(client, keys)
        await offloaded_and_gone(cluster, client, MENDED)
        await add(client, keys[:9])
        cluster.kill("ingest")
        before = await catalog.attributes.get(MENDED)
        assert before is not None
        assert before.newest.root.count == 50
        async with open_s3(cluster.settings.s3, clock=SystemClock(), ids=SystemIds()) as objects:
            for one in before.objects:
                await objects.delete(one.key)
        await cluster.restart("ingest")
        found = {key: value async for key, value in client.attributes(MENDED).list()}
        assert {key: found[key] for key in keys} == {key: 1 + (key in keys[:9]) for key in keys}
        asked = ("attributes", "rebuild", MENDED, "-o", "json")
        told = (await cli(*asked, state_dir=cluster.state_dir)).check(0)
        assert json.loads(told.stdout) == []
        after = await catalog.attributes.get(MENDED)
        assert after is not None
        assert after.newest.root.start >= before.newest.root.end


async def test_a_stream_goes_on_without_what_no_tier_gives_once_that_is_accepted(
    cluster: ServiceCluster, cli: CommandLine
) -> None:
    state = WriterState(writer_id=UUID(int=2**127))

    async def send(client: Any, first: int, last: int) -> None:
        async with client.writer(STREAM, state=state) as writer:
            assert writer.resumed_event_number == first
            for number in range(first, last):
                await writer.send(b"%d" % number)

    async with open_client(cluster.settings) as client, open_catalog(cluster.settings) as catalog:
        await client.create_stream(STREAM, policy=SMALL)
        await send(client, 0, 10)
        await offloaded_and_gone(cluster, client, STREAM)
        (lost,) = (await catalog.streams.snapshot(STREAM)).ledgers
        await send(client, 10, 15)
        cluster.kill("ingest")
        await forget_checkpoints(catalog)
        await damage_copy(cluster, lost.ledger_id)
        await cluster.restart("ingest")
        with pytest.raises(CorruptError, match="can't be rebuilt"):
            await client.attributes(STREAM).get([EVENTS])

        asked = ("attributes", "rebuild", STREAM, "-o", "json")
        (await cli(*asked, state_dir=cluster.state_dir)).check(2, "--accept-loss")
        accept = (*asked, "--accept-loss")
        done = (await cli(*accept, state_dir=cluster.state_dir)).check(0)
        (row,) = json.loads(done.stdout)
        assert (row["ledger_id"], row["first_entry_id"]) == (lost.ledger_id, 0)
        assert row["last_entry_id"] == lost.last_entry_id
        # Of ten events nothing is counted; the writer's number stands in those behind them.
        await send(client, 15, 16)
        found = await client.attributes(STREAM).get([state.writer_id, EVENTS])
        assert found == {state.writer_id: 16, EVENTS: 6}
        told = (await cli(*asked, state_dir=cluster.state_dir)).check(0)
        assert json.loads(told.stdout) == [row]
        (await cli(*accept, state_dir=cluster.state_dir)).check(2, "nothing is to be given up")
