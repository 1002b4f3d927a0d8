"""Both ways with Apache Pulsar (``make test-interop SEED=7``): who writes, the other one reads.

Not among ``make test``: its name is no test's, for it fetches Pulsar. On a real S3 server, over
ledgers around the edges of the block format (``cases``), with Pulsar's own offloader and reader:

* what Tierlog writes, Pulsar's reader reads, and ``check`` walks byte for byte: the reader never
  looks at block headers, padding, part ids or the index's length;
* what Pulsar writes, Tierlog reads, with Spark too, inspects and verifies, though it has no side
  object;
* both write the same data object, bit for bit;
* each deletes what the other wrote. Pulsar knows nothing of side objects, and leaves them.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
import pytest

from tests.integration.spark_kit import options_of, rows_read
from tests.interop.cases import GAPS, PART_MIN, Case, cases
from tests.interop.program import Bucket, Pulsar, build
from tests.plugins.fix_cli import CommandLine
from tests.unit.offload.scrubs import DEEP, kinds, scrub
from tests.unit.offload.world import CLUSTER, ListHandle, World, entries_of, metadata_of
from tierlog.embedded.supervisor import EmbeddedServers
from tierlog.format.block import BLOCK_HEADER_LEN, entry_len_max
from tierlog.format.frame import FRAME_HEADER_LEN
from tierlog.format.index import COUNT_OFFSET, INDEX_LEN_OFFSET, MAPPING_LEN, ObjectIndex
from tierlog.format.keys import ObjectKeys, object_keys
from tierlog.format.versions import Format, current
from tierlog.model.errors import CorruptError
from tierlog.model.ids import LedgerId
from tierlog.model.ledger import DigestType, LedgerState
from tierlog.model.offload import Tier2Copy
from tierlog.model.policy import MIB
from tierlog.model.scrub import FindingKind
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.verify import ReadBack
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.settings import Settings
from tierlog.wiring.build import open_objects

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SEED = int(os.environ.get("INTEROP_SEED", "1"))
CASES = cases(SEED)
BUCKET = "interop"
BATCH = 100
RUN_BYTES = 256 * 1024
COMPARED_AT_ONCE = 4 * MIB
each_case = pytest.mark.parametrize("number", range(len(CASES)), ids=[one.name for one in CASES])
"""Told apart by number, so that ledger ids are used once."""


@pytest.fixture(scope="module")
def pulsar(servers: EmbeddedServers) -> Iterator[Pulsar]:
    where = servers.endpoints
    bucket = Bucket(
        endpoint_url=where.s3_endpoint_url,
        name=BUCKET,
        access_key=where.s3_access_key,
        secret_key=where.s3_secret_key,
    )
    with Pulsar(build(print), bucket) as running:
        yield running


@pytest.fixture
def settings(corner: Settings) -> Settings:
    s3 = corner.s3.model_copy(update={"bucket": BUCKET, "key_prefix": ""})
    return corner.model_copy(update={"s3": s3})


@pytest.fixture
async def objects(settings: Settings) -> AsyncIterator[ObjectStore]:
    async with open_objects(settings) as opened:
        yield opened


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """A case with its bytes, under a ledger id of its own."""

    case: Case
    ledger_id: LedgerId
    uuid: UUID
    payload: bytes
    entries: list[bytes]
    singly: list[int]

    @property
    def keys(self) -> ObjectKeys:
        return object_keys("", self.uuid, self.ledger_id)

    @property
    def asked(self) -> dict[str, object]:
        """What every request to Pulsar's program names."""
        return {
            "ledger_id": self.ledger_id,
            "uuid": self.uuid,
            "block_size": self.case.block_size,
        }

    @property
    def handle(self) -> ListHandle:
        metadata = metadata_of(self.entries, block_size=self.case.block_size)
        return ListHandle(self.ledger_id, self.entries, metadata, run_bytes_max=RUN_BYTES)

    def digest(self, entry_ids: Sequence[int] | None = None) -> str:
        """The digest of all entries, or of these, as Pulsar's program makes it."""
        digest = hashlib.sha256()
        for entry_id in range(len(self.entries)) if entry_ids is None else entry_ids:
            digest.update(entry_id.to_bytes(8, "big"))
            digest.update(self.entries[entry_id])
        return digest.hexdigest()


def ledger_of(case: Case, number: int) -> Ledger:
    rng = random.Random(f"{SEED} {number}")
    payload, entries = case.payload(rng)
    return Ledger(
        case=case,
        ledger_id=LedgerId(1 + number),
        uuid=UUID(int=rng.getrandbits(128)),
        payload=payload,
        entries=entries,
        singly=case.singly(rng),
    )


def offloader_of(objects: ObjectStore, read_back: ReadBack = ReadBack.FULL) -> BlockOffloader:
    # No short ranges and nothing kept: Tierlog's reader as a service has it.
    settings = Tier2Settings(bucket=BUCKET, cluster_id=CLUSTER, read_back=read_back)
    return BlockOffloader(objects, settings)


async def keys_of(objects: ObjectStore, ledger: Ledger) -> list[str]:
    return [info.key async for info in objects.list(f"{ledger.uuid}-ledger-{ledger.ledger_id}")]


async def write_with_pulsar(pulsar: Pulsar, ledger: Ledger, folder: Path) -> dict[str, Any]:
    file = folder / f"{ledger.ledger_id}"
    file.write_bytes(ledger.payload)
    written = await pulsar("write", **ledger.asked, file=file, sizes=ledger.case.pairs)
    file.unlink()
    return written


async def check_with_pulsar(pulsar: Pulsar, ledger: Ledger) -> None:
    """Walk the raw bytes, then read them with Pulsar's reader: all, and single entries."""
    checked = await pulsar("check", **ledger.asked)
    assert checked["ok"], checked
    assert checked["entries"] == len(ledger.entries)
    assert checked["payload_bytes"] == len(ledger.payload)
    read = await pulsar("read", **ledger.asked, batch=BATCH, singly=ledger.singly)
    assert read["ok"], read
    assert read["entries"] == len(ledger.entries)
    assert read["sha256"] == ledger.digest()
    assert read["singly_sha256"] == ledger.digest(ledger.singly)
    assert read["metadata"]["last_entry_id"] == len(ledger.entries) - 1
    assert read["metadata"]["length"] == len(ledger.payload)
    assert read["metadata"]["state"] == "CLOSED"


async def inspect(cli: CommandLine, settings: Settings, key: str, folder: Path) -> dict[str, Any]:
    assert settings.s3.secret_key is not None
    done = await cli(
        "object", "inspect", f"s3://{BUCKET}/{key}", "-o", "json",
        state_dir=folder,
        TIERLOG_S3__ENDPOINT_URL=settings.s3.endpoint_url or "",
        TIERLOG_S3__ACCESS_KEY=settings.s3.access_key or "",
        TIERLOG_S3__SECRET_KEY=settings.s3.secret_key.get_secret_value(),
    )  # fmt: skip
    found: dict[str, Any] = orjson.loads(done.check(0).stdout)
    assert found["sound"], found["problems"]
    return found


async def copy_of(objects: ObjectStore, ledger: Ledger) -> Tier2Copy:
    """What a context would say of objects that have no side object."""
    got = await objects.get(ledger.keys.index)
    assert got is not None
    index = ObjectIndex.decode(got[1])
    return Tier2Copy(
        format_version=current(Format.DATA_OBJECT),
        data_len=index.data_len,
        index_len=len(got[1]),
        index_sha256=hashlib.sha256(got[1]).digest(),
        entry_count=len(ledger.entries),
        block_count=len(index.entries),
    )


async def digest_of_object(objects: ObjectStore, key: str) -> str:
    info, digest = await objects.head(key), hashlib.sha256()
    assert info is not None
    for start in range(0, info.size, COMPARED_AT_ONCE):
        digest.update(await objects.get_range(key, start, COMPARED_AT_ONCE) or b"")
    return digest.hexdigest()


@each_case
@pytest.mark.covers("A13", "A20", "A39", "A43", "A44", "A45", "A46", "A49", "A58", "A66")
async def test_pulsar_reads_what_tierlog_writes_and_deletes_all_it_knows_of(
    pulsar, objects, cli, settings, tmp_path, number
):
    ledger = ledger_of(CASES[number], 1000 * SEED + number)
    offloader = offloader_of(objects)
    copy = await offloader.offload(ledger.handle, ledger.uuid, {})
    await offloader.verify(ledger.ledger_id, ledger.uuid, None, copy)
    await check_with_pulsar(pulsar, ledger)
    for key in (ledger.keys.data, ledger.keys.index, ledger.keys.side):
        await inspect(cli, settings, key, tmp_path)
    assert (await pulsar("delete", **ledger.asked))["ok"]
    # Pulsar has never heard of side objects.
    assert await keys_of(objects, ledger) == [ledger.keys.side]
    await offloader.delete_offloaded(ledger.ledger_id, ledger.uuid)
    assert await keys_of(objects, ledger) == []


@each_case
@pytest.mark.covers(
    "A12", "A13", "A19", "A20", "A39", "A42", "A43", "A44", "A45", "A46", "A47", "A48", "A49",
    "A54", "A55", "A56", "A58", "A65", "A66", "A71", "A78",
)  # fmt: skip
async def test_tierlog_reads_what_pulsar_writes_writes_the_same_bytes_and_deletes_it(
    pulsar, objects, cli, settings, tmp_path, number
):
    ledger = ledger_of(CASES[number], 1000 * SEED + 500 + number)
    written = await write_with_pulsar(pulsar, ledger, tmp_path)
    assert written["ok"], written
    assert await keys_of(objects, ledger) == [ledger.keys.data, ledger.keys.index]
    await check_with_pulsar(pulsar, ledger)
    offloader = offloader_of(objects)
    opened = await offloader.read_offloaded(ledger.ledger_id, ledger.uuid)
    metadata = opened.ledger_metadata
    assert (metadata.state, metadata.digest_type) == (LedgerState.CLOSED, DigestType.CRC32C)
    assert (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum) == (3, 2, 2)
    assert metadata.length == len(ledger.payload)
    told = {name: value.decode() for name, value in metadata.custom.items()}
    assert told == written["metadata"]["custom"]
    assert await entries_of(opened) == ledger.entries
    alone = await offloader_of(objects).read_offloaded(ledger.ledger_id, ledger.uuid)
    for entry_id in ledger.singly:
        assert await entries_of(alone, entry_id, entry_id) == [ledger.entries[entry_id]]
    # A task of its own for each block.
    given = options_of(settings.s3, keys=ledger.keys.data, partitionBytes="1")
    rows = await rows_read(given, columns="ledger_id,entry_id,payload")
    assert [tuple(row.values()) for row in rows] == [
        (ledger.ledger_id, entry_id, entry) for entry_id, entry in enumerate(ledger.entries)
    ]
    data = await inspect(cli, settings, ledger.keys.data, tmp_path)
    assert data["entries"] == len(ledger.entries)
    await inspect(cli, settings, ledger.keys.index, tmp_path)
    await offloader.verify(ledger.ledger_id, ledger.uuid, None, await copy_of(objects, ledger))
    # A data object does not depend on its ledger's id.
    own = replace(ledger, ledger_id=LedgerId(ledger.ledger_id + 10**9))
    await offloader.offload(own.handle, own.uuid, {})
    expected = await digest_of_object(objects, ledger.keys.data)
    assert await digest_of_object(objects, own.keys.data) == expected
    for written_by in (ledger, own):
        await offloader.delete_offloaded(written_by.ledger_id, written_by.uuid)
        assert await keys_of(objects, written_by) == []


DAMAGES = {
    # What, in which object, at which byte of it (from its end when negative).
    "magic": ("data", 0),
    "header_len": ("data", 11),
    "block_len": ("data", 19),
    "first_entry_id": ("data", 27),
    "zeros-first": ("data", 28),
    "zeros-last": ("data", BLOCK_HEADER_LEN - 1),
    "entry-len": ("data", BLOCK_HEADER_LEN + 3),
    "entry-id": ("data", BLOCK_HEADER_LEN + 11),
    "padding-first": ("data", 5 * MIB - 7),
    "padding-last": ("data", 5 * MIB - 1),
    "second-block-len": ("data", 5 * MIB + 19),
    "second-first_entry_id": ("data", 5 * MIB + 27),
    "index-magic": ("index", 0),
    "index_len": ("index", INDEX_LEN_OFFSET + 3),
    "data_object_length": ("index", 15),
    "data_header_length": ("index", 23),
    "index_entry_count": ("index", COUNT_OFFSET + 3),
    "mapping-entry": ("index", -MAPPING_LEN + 7),
    "mapping-part": ("index", -MAPPING_LEN + 11),
    "mapping-offset": ("index", -1),
}


async def test_whatever_field_is_another_the_check_and_tierlog_refuse_it(pulsar, objects):
    """The check would be worth nothing if it accepted everything."""
    # Seven bytes are left in the first block.
    case = Case(name="damaged", block_size=5 * MIB, sizes=(5 * MIB - BLOCK_HEADER_LEN - 19, 100))
    ledger = ledger_of(case, 10**11 + SEED)
    offloader = offloader_of(objects)
    copy = await offloader.offload(ledger.handle, ledger.uuid, {})
    await offloader.verify(ledger.ledger_id, ledger.uuid, None, copy)
    await check_with_pulsar(pulsar, ledger)
    sound = {key: await objects.get(key) for key in (ledger.keys.data, ledger.keys.index)}
    for name, (which, at) in DAMAGES.items():
        key = ledger.keys.data if which == "data" else ledger.keys.index
        got = sound[key]
        assert got is not None
        info, raw = got
        body = bytearray(raw)
        body[at] ^= 1
        await objects.put(key, bytes(body), metadata=info.metadata)
        checked = await pulsar("check", **ledger.asked)
        assert not checked["ok"], f"{name}: {checked}"
        with pytest.raises(CorruptError):
            await offloader.verify(ledger.ledger_id, ledger.uuid, None, copy)
        await objects.put(key, raw, metadata=info.metadata)
    await check_with_pulsar(pulsar, replace(ledger, singly=[0, 1]))
    await offloader.delete_offloaded(ledger.ledger_id, ledger.uuid)


async def test_a_deep_scrub_takes_a_copy_of_pulsars_for_whole_until_it_is_damaged(
    pulsar, objects, tmp_path
):
    """The metadata are in memory; the bucket and what lies in it are real."""
    case = Case(name="scrubbed", block_size=PART_MIN, sizes=(1000,) * 6000)
    ledger, world = ledger_of(case, 0), World(block_size=PART_MIN)
    ledger_id = await world.seal(await world.stream(), ledger.entries)
    ledger = replace(ledger, ledger_id=ledger_id)
    assert (await write_with_pulsar(pulsar, ledger, tmp_path))["ok"]
    contexts, offloader = world.catalog().contexts, offloader_of(objects)
    location = world.offloader().location(ledger_id, ledger.uuid)
    await contexts.begin_attempt(ledger_id, uuid=ledger.uuid, location=location, worker="pulsar")
    copy = await copy_of(objects, ledger)
    await contexts.complete_attempt(ledger_id, uuid=ledger.uuid, copy=copy)
    report = await scrub(world, DEEP, objects=objects, bytes_per_s=1e12)
    assert (kinds(report), report.copies_checked) == ([], 1)
    got = await objects.get(ledger.keys.data)
    assert got is not None
    info, raw = got
    # The second block's first_entry_id.
    damaged = raw[: PART_MIN + 27] + b"\x7f" + raw[PART_MIN + 28 :]
    await objects.put(ledger.keys.data, damaged, metadata=info.metadata)
    report = await scrub(world, DEEP, objects=objects, bytes_per_s=1e12)
    assert [(one.kind, one.uuid) for one in report.findings] == [
        (FindingKind.DAMAGED_DATA, ledger.uuid)
    ]
    await offloader.delete_offloaded(ledger_id, ledger.uuid)


def ends_of_blocks(case: Case) -> Iterator[int]:
    """Pack naively; at each block's end: what is left, and what is left with the next frame."""
    at = BLOCK_HEADER_LEN
    for size in case.sizes:
        if at + FRAME_HEADER_LEN + size > case.block_size:
            yield case.block_size - at
            yield case.block_size - at - FRAME_HEADER_LEN - size
            at = BLOCK_HEADER_LEN
        at += FRAME_HEADER_LEN + size


def test_a_seed_meets_every_edge_and_draws_what_can_be_offloaded():
    assert len({one.name for one in CASES}) == len(CASES)
    met = {gap for one in CASES for gap in ends_of_blocks(one)}
    assert set(GAPS) <= met
    for one in CASES:
        assert 0 <= max(one.sizes) <= entry_len_max(one.block_size)
        assert one.block_size >= PART_MIN or not list(ends_of_blocks(one))
        assert sum(count for count, _ in one.pairs) == len(one.sizes)
