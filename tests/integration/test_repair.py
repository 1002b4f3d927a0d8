"""Damaged copies in a real bucket are repaired from what is left; what is nowhere is named."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.integration.test_reader_tiers import SMALL, append, offloaded_and_gone, payloads
from tests.integration.test_scrub import KEPT, Site, complete, kinds
from tests.plugins.fix_cluster import ServiceCluster
from tierlog.client import Position, open_client
from tierlog.format.keys import ObjectRole
from tierlog.model.ids import EntryId, LedgerId
from tierlog.wiring.objects import open_bucket

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.plugins.fix_cli import CommandLine
    from tierlog.embedded.supervisor import EmbeddedServers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

EVENTS = [f"{number:06d}".encode() * 150 for number in range(1200)]
DATA, INDEX, SIDE = ObjectRole.DATA, ObjectRole.INDEX, ObjectRole.SIDE
# In the middle of the data, far from any block's end.
FLIPPED_AT = 400_000


async def made(site: Site) -> dict[str, int]:
    """Make all streams, each of one ledger in tier 2; return the ledgers' ids."""
    async with open_client(site.cluster.settings) as client:
        for stream, raw, kept, _, _ in CASES:
            await client.create_stream(stream, policy=KEPT if kept else SMALL, raw=raw)
            await append(client, stream, EVENTS, raw=raw)
            await client.seal(stream)
            await client.offload(stream)
        for stream, _, kept, _, _ in CASES:
            if kept:
                await complete(site, stream)
            else:
                await offloaded_and_gone(site.cluster, client, stream)
        return {
            stream: int((await client.stream(stream))["ledgers"][0]["ledger_id"])
            for stream, *_ in CASES
        }


async def spoil(site: Site, ledger_id: int, how: str) -> tuple[str, Mapping[str, str], bytes]:
    """Do something to a ledger's objects; return the one that is not what it was."""
    objects = await site.objects_of(ledger_id)
    role = {"index": INDEX, "side": SIDE}.get(how.partition(" ")[0], DATA)
    found = await site.store.get(objects[role])
    assert found is not None
    info, body = found
    if how.endswith("flipped"):
        changed = bytearray(body)
        changed[min(FLIPPED_AT, len(body) - 5)] ^= 1
        await site.store.put(objects[role], bytes(changed), metadata=info.metadata)
    elif how.endswith("cut"):
        await site.store.put(objects[role], body[: len(body) // 2], metadata=info.metadata)
    else:
        await site.store.delete(objects[role])
    return objects[role], info.metadata, body


# Stream, whether it is raw, whether the local copy stands, what is done, what is said.
CASES = (
    ("index", False, False, "index", "what is good in tier 2"),
    ("index-flipped", True, False, "index flipped", "what is good in tier 2"),
    ("side", False, False, "side", "what is good in tier 2"),
    ("side-raw", True, False, "side", "what is good in tier 2"),
    ("kept-flipped", False, True, "data flipped", "the local copy"),
    ("kept-cut", True, True, "data cut", "the local copy"),
    ("kept-gone", False, True, "data", "the local copy"),
    ("lost-flipped", True, False, "data flipped", ""),
    ("lost-cut", True, False, "data cut", ""),
)


async def test_whatever_is_left_of_a_ledger_makes_a_new_copy_and_the_rest_is_named(
    servers: EmbeddedServers, cli: CommandLine, tmp_path: Path
) -> None:
    name = f"repair-{uuid.uuid4().hex[:12]}"
    env = {"TIERLOG_SCHEDULER__SCRUB_INTERVAL_S": "0"}
    cluster = ServiceCluster(servers, tmp_path / "cluster", name=name, env=env)
    try:
        await cluster.start()
        async with open_bucket(cluster.settings, name) as store:
            await lived(Site(cluster, store, cli))
    finally:
        await cluster.stop()


async def lived(site: Site) -> None:
    ledgers = await made(site)
    was = {stream: await spoil(site, ledgers[stream], how) for stream, _, _, how, _ in CASES}
    told = await site.scrub("--deep", code=6)
    assert {one["stream"] for one in told["findings"]} == set(ledgers)
    mended = await site.scrub("--deep", "--repair", code=6)
    found = {one["stream"]: one for one in mended["findings"]}
    assert set(found) == set(ledgers)
    for stream, _, _, _, source in CASES:
        said = f"copied anew, from {source}" if source else None
        assert found[stream]["repaired"] == said, found[stream]
    async with open_client(site.cluster.settings) as client:
        for stream, _, _, _, source in CASES:
            if source:
                assert await payloads(client, stream) == EVENTS
        for stream in ("lost-flipped", "lost-cut"):
            await the_rest_reads(site, client, stream, ledgers[stream], found[stream])
    await it_is_kept(site, mended)
    for stream in ("lost-flipped", "lost-cut"):
        key, metadata, body = was[stream]
        await site.store.put(key, body, metadata=metadata)
    last = await site.scrub("--deep", "--repair", code=0)
    assert kinds(last) == []
    async with open_client(site.cluster.settings) as client:
        for stream in ledgers:
            assert await payloads(client, stream) == EVENTS
    await swept(site, ledgers)


async def the_rest_reads(site: Site, client: Any, stream: str, ledger_id: int, found: Any) -> None:
    """Entries that are lost are named, are CORRUPT, and those beside them read."""
    ((first, last),) = [(one["first_entry_id"], one["last_entry_id"]) for one in found["lost"]]
    assert found["lost_count"] == last + 1 - first
    assert first > 0
    assert f"{found['lost_count']} entries are in no copy" in found["kept"]
    for number in {0, first - 1, last + 1} & set(range(len(EVENTS))):
        start = Position(LedgerId(ledger_id), EntryId(number))
        assert await payloads(client, stream, start=start, limit=1) == [EVENTS[number]]
    # Asked for once: the client would ask again for as long as it is patient.
    url = f"http://{site.cluster.address('reader', 'http')}/v1/streams/{stream}/runs"
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, params={"from": f"{ledger_id}:{first}"}) as answer,
    ):
        assert (await answer.json())["reason"] == "CORRUPT"


async def it_is_kept(site: Site, mended: Mapping[str, Any]) -> None:
    """Another scheduler shows the report of the one that is gone."""
    await site.cluster.restart("scheduler")
    listed = await site.command("scrub", "list", code=0)
    assert [one["remaining"] for one in listed] == [2, len(CASES)]
    for options in ((), (mended["scrub_id"],)):
        shown = await site.command("scrub", "show", *options, code=6)
        assert shown == mended


async def swept(site: Site, ledgers: Mapping[str, int]) -> None:
    """Nothing is left of the damaged copies, once the manifests name the new ones."""

    async def one_each() -> bool:
        keys = [one.key async for one in site.store.list("")]
        return all(
            sum(key.endswith(f"-ledger-{ledger_id}") for key in keys) == 1
            for ledger_id in ledgers.values()
        )

    await site.cluster.until(one_each, what="damaged copies swept")
