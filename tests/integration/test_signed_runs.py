"""Ledgers with a key over real processes: append, kill, offload, read back from both tiers."""

import base64

import aiohttp
import pytest

from tests.integration.test_reader_tiers import (
    SMALL,
    append,
    numbered,
    offloaded_and_gone,
    payloads,
)
from tierlog.client import open_client
from tierlog.embedded.ports import LOOPBACK
from tierlog.embedded.services import service_spec
from tierlog.format.authentication import LedgerKey
from tierlog.format.run import take_runs
from tierlog.model.errors import Reason, RefusedError
from tierlog.model.ids import LedgerId
from tierlog.model.ledger import DigestType
from tierlog.wiring.build import open_catalog

pytestmark = [pytest.mark.integration, pytest.mark.covers("D08")]

SECRET = bytes(range(32))
KEY = LedgerKey("k1", SECRET)


async def test_a_signed_stream_from_append_to_both_tiers(signed_cluster):
    cluster = signed_cluster
    events = numbered(0, 15_000)
    async with open_client(cluster.settings) as client:
        await client.create_stream("signed", policy=SMALL)
        await append(client, "signed", events[:4000])
        # The open ledger is recovered: read by its code, copied and closed.
        cluster.kill("ingest")
        await cluster.restart("ingest")
        await append(client, "signed", events[4000:])
        assert await payloads(client, "signed") == events
        await client.seal("signed")
        ledgers = (await client.stream("signed"))["ledgers"]
        async with open_catalog(cluster.settings) as catalog, aiohttp.ClientSession() as session:
            here = [one for one in ledgers if one["tier1"]]
            assert here
            for one in here[-1:]:
                ledger_id = LedgerId(one["ledger_id"])
                metadata = await catalog.ledgers.get(ledger_id)
                assert metadata is not None
                assert metadata.digest_type is DigestType.HMAC
                assert metadata.custom["tierlog/key-id"] == b"k1"
                assert SECRET not in b"".join(metadata.custom.values())
                await check_signed_on_disk(session, cluster, ledger_id, metadata.last_entry_id)
        await offloaded_and_gone(cluster, client, "signed")
        tiers = {event.tier async for event in client.reader("signed").events()}
        assert tiers == {"tier2"}
        assert await payloads(client, "signed") == events
    text = "".join(cluster.services.log(name).read_text() for name in cluster.services.children)
    assert base64.b64encode(SECRET).decode() not in text
    assert SECRET.hex() not in text


async def check_signed_on_disk(session, cluster, ledger_id, last_entry_id):
    """Look at what the storage node holds, which does not know the key."""
    url = f"http://{cluster.address('ingest', 'http')}/v1/ledgers/{ledger_id}/runs"
    params = {"first": "0", "last": str(last_entry_id)}
    async with session.get(url, params=params) as answer:
        assert answer.status == 200
        body = await answer.read()
    runs = take_runs(body).runs
    assert runs
    for run in runs:
        run.check_mac(KEY)


async def test_a_reader_without_the_key_refuses_and_names_the_setting(signed_cluster):
    cluster = signed_cluster
    async with open_client(cluster.settings) as client:
        await append(client, "refused", [b"one"])
    env = {name: value for name, value in cluster.env.items() if "KEY_ID" not in name}
    del env["TIERLOG_KEYS__K1"]
    ports = cluster.servers.take_ports("signed-keyless", ("http", "grpc"))
    await cluster.services.start([service_spec("reader", ports=ports, env=env, name="keyless")])
    address = f"{LOOPBACK}:{ports['http']}"
    keyless = cluster.settings.client.model_copy(update={"reader_http_address": address})
    async with open_client(cluster.settings.model_copy(update={"client": keyless})) as client:
        with pytest.raises(RefusedError) as caught:
            await payloads(client, "refused")
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert "TIERLOG_KEYS__K1" in str(caught.value)
