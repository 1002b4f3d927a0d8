"""Ledgers with a key (ADR-0015): only what their owner signed is read, recovered or handed on."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
import contextlib
import struct
from dataclasses import replace

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM, SmallCluster, draft, payloads
from tierlog.format.checksum import crc32c
from tierlog.format.run import RUN_HEADER_LEN, SIGNED_HEADER_LEN, Run
from tierlog.ledger.keys import NO_KEYS, LedgerKeys
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.ledger.writer import LedgerWriter, WriterLimits
from tierlog.model.errors import Reason, RefusedError, TierlogError
from tierlog.model.ledger import DigestType, LedgerState

pytestmark = pytest.mark.covers("D08")

KEYS = LedgerKeys({"k1": b"1" * 32, "k2": b"2" * 32})
LIMITS = WriterLimits(in_flight_bytes_max=1 << 20, append_timeout_s=5.0, run_bytes_max=64 * 1024)
ENTRIES = [(b"a", b"bb"), (b"ccc",), (b"dddd", b"e")]


@contextlib.asynccontextmanager
async def written(cluster, *, quorums=(2, 2, 2), finish=True):
    """Write a signed ledger of three runs; give catalog, claim, id and metadata."""
    catalog = await cluster.start()
    claimed = await catalog.streams.claim(STREAM, cluster.names[0])
    ledger_id, metadata = await cluster.open_ledger(catalog, claimed, quorums=quorums, key_id="k1")
    writer = LedgerWriter(
        ledger_id=ledger_id,
        metadata=metadata,
        owner_epoch=claimed.owner_epoch,
        nodes=dict(cluster.nodes),
        limits=LIMITS,
        on_confirmed=lambda _: None,
        key=KEYS.of(ledger_id, metadata),
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(writer.run())
        for entries in ENTRIES:
            one = draft(*entries)
            writer.append(one.frames, one.offsets)
            await asyncio.sleep(0.1)
        if finish:
            last, length = await writer.finish()
            await catalog.ledgers.close(claimed, ledger_id, last_entry_id=last, length=length)
        running.cancel()
    yield catalog, claimed, ledger_id, await catalog.ledgers.get(ledger_id)


def forged(run, change):
    """Change a run on purpose; its checksum is right again."""
    raw = bytearray(run.encoded)
    changed = change(raw)
    raw = raw if changed is None else changed
    struct.pack_into(">I", raw, 76, crc32c(bytes(raw[:76] + raw[80:])))
    return Run.decode(bytes(raw))


def forging(node, first, change):
    """Have a node give one run forged."""
    genuine = node.read

    async def read(*place, **named):
        async for runs in genuine(*place, **named):
            yield [forged(run, change) if run.first_entry_id == first else run for run in runs]

    node.read = read


def last_byte(raw):
    raw[-1] ^= 1


def code_byte(raw):
    raw[SIGNED_HEADER_LEN - 1] ^= 1


def last_confirmed(raw):
    raw[39] ^= 1


def without_code(raw):
    raw = raw[:RUN_HEADER_LEN] + raw[SIGNED_HEADER_LEN:]
    raw[5:8] = bytes([0, 0, RUN_HEADER_LEN])
    return raw


FORGERIES = [last_byte, code_byte, last_confirmed, without_code]


async def read(cluster, catalog, ledger_id, metadata, *, keys=KEYS):
    handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog), keys=keys)
    last = max(metadata.last_entry_id, 0)
    return [run async for runs in handle.read_runs(0, last) for run in runs]


def test_an_owner_signs_what_it_writes_and_a_reader_with_the_key_reads_it():
    async def main():
        cluster = SmallCluster(2)
        async with written(cluster) as (catalog, _, ledger_id, metadata):
            assert metadata.digest_type is DigestType.HMAC
            assert metadata.custom["tierlog/key-id"] == b"k1"
            assert metadata.state is LedgerState.CLOSED
            runs = await read(cluster, catalog, ledger_id, metadata)
            assert payloads(runs) == [one for entries in ENTRIES for one in entries]
            for node in cluster.nodes.values():
                held = node.runs[ledger_id].values()
                assert len(held) == len(ENTRIES)
                for run in held:
                    run.check_mac(KEYS.named("k1"))

    run_virtual(main())


@pytest.mark.covers("D03")
@pytest.mark.parametrize("change", FORGERIES)
def test_a_forged_run_is_read_from_the_other_replica_and_never_served(change):
    async def main():
        cluster = SmallCluster(2)
        async with written(cluster) as (catalog, _, ledger_id, metadata):
            first, second = (cluster.nodes[name].runs[ledger_id] for name in cluster.names)
            genuine = dict(first)
            first[2] = forged(first[2], change)
            second[3] = forged(second[3], change)
            runs = await read(cluster, catalog, ledger_id, metadata)
            assert runs == [genuine[one] for one in (0, 2, 3)]
            second[2] = first[2]
            with pytest.raises(TierlogError) as caught:
                await read(cluster, catalog, ledger_id, metadata)
            assert caught.value.reason is Reason.UNKNOWN
            assert "sign" in str(caught.value)
            assert "not known to be lost" in str(caught.value)

    run_virtual(main())


def test_runs_before_a_forged_one_are_kept():
    async def main():
        cluster = SmallCluster(1)
        async with written(cluster, quorums=(1, 1, 1)) as (catalog, _, ledger_id, metadata):
            held = cluster.nodes["n1"].runs[ledger_id]
            held[2] = forged(held[2], last_byte)
            handle = Tier1ReadHandle(ledger_id, metadata, cluster.directory(catalog), keys=KEYS)
            found = []

            async def read_on():
                async for runs in handle.read_runs(0, 4):
                    found.extend(runs)

            with pytest.raises(TierlogError, match=":2 could not be read from tier 1"):
                await read_on()
            assert payloads(found) == [b"a", b"bb"]

    run_virtual(main())


@pytest.mark.parametrize("keys", [NO_KEYS, LedgerKeys({"k2": b"2" * 32})])
def test_without_the_key_nothing_is_served_and_no_node_is_asked(keys):
    async def main():
        cluster = SmallCluster(2)
        async with written(cluster, finish=False) as (catalog, claimed, ledger_id, metadata):
            asked = [node.fenced.copy() for node in cluster.nodes.values()]
            with pytest.raises(RefusedError) as caught:
                await read(cluster, catalog, ledger_id, metadata, keys=keys)
            assert caught.value.reason is Reason.PERMISSION_DENIED
            assert "TIERLOG_KEYS__K1" in caught.value.remedy
            with pytest.raises(RefusedError) as caught:
                await cluster.recovery(catalog, keys=keys).recover(claimed, ledger_id)
            assert caught.value.reason is Reason.PERMISSION_DENIED
            assert [node.fenced for node in cluster.nodes.values()] == asked
            assert not any(node.recovery_adds for node in cluster.nodes.values())
            # Who has the key goes on where it was refused.
            closed = await cluster.recovery(catalog, keys=KEYS).recover(claimed, ledger_id)
            assert closed.last_entry_id == 4

    run_virtual(main())


def test_a_wrong_secret_under_the_right_id_believes_nothing():
    async def main():
        cluster = SmallCluster(2)
        async with written(cluster) as (catalog, _, ledger_id, metadata):
            with pytest.raises(TierlogError) as caught:
                await read(
                    cluster, catalog, ledger_id, metadata, keys=LedgerKeys({"k1": b"3" * 32})
                )
            assert caught.value.reason is Reason.UNKNOWN
            assert "not signed with key k1" in str(caught.value)

    run_virtual(main())


def test_a_ledger_of_someone_else_s_that_names_no_key_is_refused():
    async def main():
        cluster = SmallCluster(2)
        async with written(cluster) as (catalog, _, ledger_id, metadata):
            nameless = replace(metadata, custom={})
            with pytest.raises(RefusedError, match="unnamed key"):
                await read(cluster, catalog, ledger_id, nameless)

    run_virtual(main())


@pytest.mark.covers("D18")
@pytest.mark.parametrize("change", FORGERIES)
def test_recovery_copies_signed_runs_whole_and_takes_no_forged_one(change):
    async def main():
        cluster = SmallCluster(3)
        async with written(cluster, quorums=(3, 3, 2), finish=False) as world:
            catalog, claimed, ledger_id, _ = world
            held = [cluster.nodes[name].runs[ledger_id] for name in cluster.names]
            genuine = held[2][3]
            # Nothing behind entry 2 is confirmed; one node lacks it, and one gives it forged.
            del held[0][3]
            forging(cluster.nodes["n2"], 3, change)
            for node in cluster.nodes.values():
                node.lacs[ledger_id] = 2
            closed = await cluster.recovery(catalog, keys=KEYS).recover(claimed, ledger_id)
            assert (closed.last_entry_id, closed.length) == (4, 11)
            assert [run.first_entry_id for run in cluster.nodes["n1"].recovery_adds] == [3]
            assert bytes(held[0][3].encoded) == bytes(genuine.encoded)
            held[0][3].check_mac(KEYS.named("k1"))
            metadata = await catalog.ledgers.get(ledger_id)
            assert payloads(await read(cluster, catalog, ledger_id, metadata)) == [
                one for entries in ENTRIES for one in entries
            ]

    run_virtual(main())


def test_a_forged_run_alone_is_waited_for_and_never_becomes_the_end():
    async def main():
        cluster = SmallCluster(1)
        async with written(cluster, quorums=(1, 1, 1), finish=False) as world:
            catalog, claimed, ledger_id, _ = world
            held = cluster.nodes["n1"].runs[ledger_id]
            genuine = held[3]
            held[3] = forged(genuine, last_byte)
            recovery = cluster.recovery(catalog, keys=KEYS)
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(recovery.recover(claimed, ledger_id))
                await asyncio.sleep(60)
                assert not task.done()
                assert "not signed with key k1" in recovery.waiting[ledger_id]
                held[3] = genuine
            assert task.result().last_entry_id == 4

    run_virtual(main())


def test_keys_are_in_no_text():
    assert "1" * 32 not in f"{KEYS!r} {KEYS.named('k1')!r}"
    with pytest.raises(RefusedError) as caught:
        KEYS.named("k3")
    assert caught.value.reason is Reason.PERMISSION_DENIED
    with pytest.raises(RefusedError, match="31 bytes"):
        LedgerKeys({"short": b"x" * 31})
