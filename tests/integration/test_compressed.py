"""What a producer compresses is the same events to whoever reads them, from either tier."""

import aiohttp
import orjson
import pytest

from tests.integration.test_reader_tiers import offloaded_and_gone
from tierlog.client import open_client
from tierlog.format.entry import Codec, decode_entry
from tierlog.model.policy import MIB, Policy
from tierlog.wiring.objects import open_bucket

pytestmark = [pytest.mark.integration]

EVENTS = [b"%08d" % number * 25 for number in range(2000)]
SOON = Policy(block_size=5 * MIB, deletion_lag_ms=500)


async def test_compressed_events_are_the_same_to_whoever_reads_them(cluster, cli):
    state, lines = {"state_dir": cluster.state_dir}, b"\n".join(EVENTS) + b"\n"
    streams = {"zstd": Codec.ZSTD, "lz4": Codec.LZ4, "none": Codec.NONE}

    async def check_reads(client, stream, codec):
        found = [one async for one in client.reader(stream).entries()]
        assert {decode_entry(one.data).header.codec for one in found} == {codec}
        assert [one.payload async for one in client.reader(stream).events()] == EVENTS
        done = await cli("read", stream, "-o", "raw", **state)
        assert done.check(0).stdout == lines
        url = f"http://{cluster.address('reader', 'http')}/v1/streams/{stream}/entries"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            told = [orjson.loads(line) for line in (await answer.read()).splitlines()]
        assert [one["payload"].encode() for one in told] == EVENTS[: len(told)]
        assert told

    async with open_client(cluster.settings) as client:
        for name, codec in streams.items():
            stream = f"packed-{name}"
            await client.create_stream(stream, policy=SOON)
            done = await cli("append", stream, "--compression", name, stdin=lines, **state)
            done.check(0)
            await check_reads(client, stream, codec)
            await offloaded_and_gone(cluster, client, stream)
            await check_reads(client, stream, codec)
            ledger = (await client.stream(stream))["ledgers"][0]["ledger_id"]
            done = await cli("offload", "export", str(ledger), "-o", "json", **state)
            copy = orjson.loads(done.check(0).stdout)
            async with open_bucket(cluster.settings, copy["bucket"]) as objects:
                found = await objects.get(copy["key"])
            assert found is not None
            exported = [orjson.loads(line) for line in found[1].splitlines()]
            assert [one["value"].encode() for one in exported] == EVENTS
        # A setting is for writers that do not say.
        stream = "packed-by-setting"
        by_setting = {"TIERLOG_CLIENT__COMPRESSION": "zstd"}
        (await cli("append", stream, stdin=lines, **by_setting, **state)).check(0)
        await client.seal(stream)
        await check_reads(client, stream, Codec.ZSTD)
