"""``tierlog scrub`` on real servers: each kind is planted, told, mended; the rest is left alone."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.integration.test_reader_tiers import SMALL, append, offloaded_and_gone, payloads
from tests.plugins.fix_cluster import ServiceCluster
from tierlog.client import open_client
from tierlog.format import keys
from tierlog.format.keys import CLUSTER_ID, ObjectRole, parse_key
from tierlog.model.ids import LedgerId
from tierlog.model.policy import MIB, Policy
from tierlog.wiring.objects import open_bucket

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.plugins.fix_cli import CommandLine
    from tierlog.embedded.supervisor import EmbeddedServers
    from tierlog.ports.objects import ObjectStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SAFETY_S = 6.0
KEPT = Policy(ledger_bytes_max=6 * MIB, block_size=5 * MIB, deletion_lag_ms=-1)
EVENTS = [f"{number:06d}".encode() * 20 for number in range(500)]


class Site:
    """A cluster, its bucket and the command line."""

    def __init__(self, cluster: ServiceCluster, store: ObjectStore, cli: CommandLine) -> None:
        self.cluster = cluster
        self.store = store
        self._cli = cli
        self._planted = 10**6

    async def scrub(self, *options: str, code: int) -> dict[str, Any]:
        """Scrub, and return the report."""
        found: dict[str, Any] = await self.command("scrub", *options, "-q", code=code)
        return found

    async def command(self, *words: str, code: int) -> Any:
        """Run a command, and return what it prints."""
        done = await self._cli(*words, "-o", "json", state_dir=self.cluster.state_dir)
        assert done.code == code, done.stdout.decode() + done.stderr
        return orjson.loads(done.stdout)

    async def objects_of(self, ledger_id: int) -> dict[ObjectRole, str]:
        """Return the keys of a ledger's objects."""
        parsed = [(one.key, parse_key("", one.key)) async for one in self.store.list("")]
        return {at.role: key for key, at in parsed if at is not None and at.ledger_id == ledger_id}

    async def metadata(self, ledger_id: int, **changed: str) -> Mapping[str, str]:
        """Return what is written beside objects here, but for what is changed."""
        info = await self.store.head((await self.objects_of(ledger_id))[ObjectRole.DATA])
        assert info is not None
        return {**info.metadata, **changed}

    async def plant(self, metadata: Mapping[str, str]) -> str:
        """Put objects that nobody names; return the key of the data object."""
        self._planted += 1
        found = keys.object_keys("", uuid.uuid4(), LedgerId(self._planted))
        for key in (found.data, found.index):
            await self.store.put(key, b"planted", metadata=metadata)
        return found.data

    async def there(self, key: str) -> bool:
        return await self.store.head(key) is not None


def kinds(report: Mapping[str, Any]) -> list[str]:
    return sorted(one["kind"] for one in report["findings"])


async def ledger_of(site: Site, stream: str, policy: Policy) -> int:
    """Make a stream with one ledger, offloaded; return its id."""
    async with open_client(site.cluster.settings) as client:
        await client.create_stream(stream, policy=policy)
        await append(client, stream, EVENTS)
        if policy is KEPT:
            await client.seal(stream)
            await client.offload(stream)
            await complete(site, stream)
        else:
            await offloaded_and_gone(site.cluster, client, stream)
        return int((await client.stream(stream))["ledgers"][0]["ledger_id"])


async def complete(site: Site, stream: str) -> None:
    async with open_client(site.cluster.settings) as client:

        async def done() -> bool:
            ledgers: Sequence[Any] = (await client.stream(stream))["ledgers"]
            return all(one["complete"] for one in ledgers)

        await site.cluster.until(done, what=f"{stream} in tier 2")


async def test_each_kind_is_found_and_mended_and_the_rest_left_alone(
    servers: EmbeddedServers, cli: CommandLine, tmp_path: Path
) -> None:
    name = f"scrub-{uuid.uuid4().hex[:12]}"
    cluster = ServiceCluster(
        servers,
        tmp_path / "cluster",
        name=name,
        env={
            # So that the ids of what is planted were given.
            "TIERLOG_CLUSTER__LEDGER_ID_BASE": "2000000",
            "TIERLOG_SCHEDULER__SCRUB_SAFETY_AGE_S": str(SAFETY_S),
            "TIERLOG_SCHEDULER__SCRUB_INTERVAL_S": "0",
        },
    )
    try:
        await cluster.start()
        async with open_bucket(cluster.settings, name) as store:
            await lived(Site(cluster, store, cli))
    finally:
        await cluster.stop()


async def lived(site: Site) -> None:  # noqa: PLR0915 - one story
    kept, gone = await ledger_of(site, "kept", KEPT), await ledger_of(site, "gone", SMALL)
    clean = await site.scrub("--deep", code=0)
    assert (clean["clean"], clean["copies_checked"], clean["ledgers"]) == (True, 2, 2)
    assert clean["bytes_read"] > 2 * sum(map(len, EVENTS))

    own = await site.metadata(gone)
    orphan = await site.plant(own)
    stray = keys.object_keys("", uuid.uuid4(), LedgerId(7_000_000)).data
    await site.store.create_upload(stray, metadata=own, content_type="x/y")
    damaged = (await site.objects_of(gone))[ObjectRole.DATA]
    found = await site.store.get(damaged)
    assert found is not None
    body = bytearray(found[1])
    body[5000] ^= 1
    await site.store.put(damaged, bytes(body), metadata=found[0].metadata)
    copy = await site.objects_of(kept)
    await site.store.delete(copy[ObjectRole.SIDE])

    young = await site.scrub("--repair", code=0)
    assert kinds(young) == ["missing-object"]
    assert young["findings"][0]["repaired"] == "copied anew, from the local copy"
    assert young["counts"]["too-young"] == 2
    assert await site.there(orphan)
    again = await site.objects_of(kept)
    async with open_client(site.cluster.settings) as client:
        assert await payloads(client, "kept") == EVENTS
    assert again != copy

    await asyncio.sleep(SAFETY_S)
    told = await site.scrub("--deep", code=6)
    assert kinds(told) == ["damaged-data", "orphan-objects", "orphan-upload"]
    assert await site.there(orphan)
    mended = await site.scrub("--deep", "--repair", code=6)
    left = [one for one in mended["findings"] if one["repaired"] is None]
    assert [(one["kind"], one["ledger_id"]) for one in left] == [("damaged-data", gone)]
    assert "entries are in no copy" in left[0]["kept"]
    assert f"Bring {damaged} back" in left[0]["remedy"]
    assert not await site.there(orphan)
    assert not await site.store.list_uploads(stray)

    # Brought back from elsewhere, as it says.
    await site.store.put(damaged, found[1], metadata=found[0].metadata)
    foreign = await site.plant({**own, CLUSTER_ID: str(uuid.uuid4())})
    of_nobody = await site.plant({"role": "data"})
    await site.store.create_upload(stray, metadata=own, content_type="x/y")
    await asyncio.sleep(SAFETY_S)
    fresh = await site.plant(own)
    last = await site.scrub("--deep", "--repair", code=0)
    assert (last["counts"]["foreign"], last["counts"]["too-young"]) == (3, 1)
    assert [await site.there(one) for one in (foreign, of_nobody, fresh)] == [True] * 3
    # Whose an upload is can't be told where others are.
    assert len(await site.store.list_uploads(stray)) == 1
    async with open_client(site.cluster.settings) as client:
        assert await payloads(client, "gone") == EVENTS
