"""A storage node on disks that fail, fill, stall, vanish or lie; and one that is killed.

The process is the real one, on real files and the real metadata store. ``faulty_ingest`` puts the
faults below its files adapter, as no machine that runs tests lets anything be put lower.
"""

# mypy: disable-error-code="union-attr,var-annotated"

import asyncio
import json
import shutil
import socket
import sys
import time

import pytest

from tests.plugins.fix_corner import environment_of
from tests.plugins.fix_faulty import OTHER, STORAGE, STREAM, Writer
from tests.unit.offload.world import entries_of
from tierlog.embedded.ports import LOOPBACK, Ports
from tierlog.embedded.services import EmbeddedServices, service_spec
from tierlog.format import paths
from tierlog.format.frame import pack_entries
from tierlog.format.run import build_run
from tierlog.model.errors import Reason
from tierlog.model.ids import LedgerId, NodeId
from tierlog.model.policy import MIB, Policy
from tierlog.offload.messages import OffloadRequest, Trigger
from tierlog.runtime.settings import ZooKeeperSettings
from tierlog.wiring.offload import open_attempts

pytestmark = pytest.mark.integration

FREE = f"{STORAGE}FREE_BYTES_MIN"
ALWAYS = {
    f"{STORAGE}WRITE_BUFFER_BYTES_MAX": str(256 * 1024),
    f"{STORAGE}JOURNAL_SEGMENT_BYTES": str(MIB),
    f"{STORAGE}CHECKPOINT_JOURNAL_BYTES": str(2 * MIB),
    f"{STORAGE}CHECKPOINT_INTERVAL_S": "0.05",
    f"{STORAGE}ENTRY_LOG_BYTES_MAX": str(512 * 1024),
    f"{STORAGE}GC_INTERVAL_S": "0.1",
    f"{STORAGE}GC_QUARANTINE_S": "0",
    f"{STORAGE}GC_SHARE_MAX": "1",
    f"{STORAGE}MINOR_COMPACTION_INTERVAL_S": "0.1",
    f"{STORAGE}MINOR_COMPACTION_THRESHOLD": "0.9",
    f"{STORAGE}COMPACTION_BYTES_PER_S": str(100 * MIB),
}
"""Marks, seals and compactions all the time."""


@pytest.fixture
def node(faulty):
    return faulty


async def create(node, *names, policy=None):
    async with node.control() as control:
        for name in names:
            await control.create_stream(name, raw=True, policy=policy, exist_ok=False)


async def seal(node, name=STREAM):
    async with node.control() as control:
        return await control.seal(name)


@pytest.mark.covers("D37")
async def test_a_sync_that_fails_ends_the_process_and_is_never_retried(node):
    await node.start()
    await create(node, STREAM)
    writer = Writer(node)
    async with writer.beside():
        await writer.got(400)
        node.faults.set(eio_on_sync="/journal/")
        async with asyncio.timeout(20):
            code = await node.child.wait()
    assert code == 1
    assert node.log("service.crashed")
    failed_at = [at for at, (outcome, _) in enumerate(node.faults.syncs()) if outcome == "EIO"]
    assert len(failed_at) == 1
    failed_path = node.faults.syncs()[failed_at[0]][1]
    later = [path for _, path in node.faults.syncs()[failed_at[0] + 1 :]]
    assert failed_path not in later, "a sync is not retried"
    assert writer.unknown, "some were in flight"
    node.faults.set()
    await node.start()
    # The group whose sync failed is gone from the disk: had it been acknowledged, it would lack.
    writer.check(await node.read_all())


async def znodes(node):
    """Tell whether the node is registered as writable, and as read-only."""
    name = NodeId("node-1")
    return tuple(
        [
            await node.store.get(paths.available_path(name, read_only=one)) is not None
            for one in (False, True)
        ]
    )


async def with_own_space(node):
    """Start over, so that the journal's segment has all its space: a fresh node's first grows."""

    async def has_spare():
        return {4 * MIB} == {one.stat().st_size for one in node.data.glob("journal/*.spare")}

    await node.until(has_spare, what="a spare segment")
    node.services.kill("ingest")
    await node.start()


async def check_told(node, writer, cli):
    """Whoever appends is told that the disk is full, and what to do."""

    async def is_told():
        return any(one.reason is Reason.READ_ONLY for one in writer.refused.values())

    await node.until(is_told, what="appends are refused")
    told = next(one for one in writer.refused.values() if one.reason is Reason.READ_ONLY)
    assert "free" in told.remedy.lower()
    assert "nothing was appended" in told.remedy
    done = await cli(
        *("append", STREAM, "--raw"),
        stdin=b"refused\n",
        state_dir=node.root,
        TIERLOG_CLIENT__INGEST_ADDRESS=f"127.0.0.1:{node.ports['grpc']}",
        TIERLOG_CLIENT__TIMEOUT_S="2",
    )
    done.check(5, "READ_ONLY", "remedy:")
    assert "free" in done.stderr.lower()


async def check_reads_and_fences(node, writer):
    await node.until(node.is_closed, what="the broken ledger is recovered and closed")
    found = await node.read_all()
    assert {place: found.get(place) for place in writer.acknowledged} == writer.acknowledged
    first = (await node.catalog.streams.snapshot(STREAM)).ledgers[0]
    async with node.storage() as storage:
        answer = await storage.fence(first.ledger_id)
        assert answer.last_entry_id >= first.last_entry_id
        # One that it never saw: the fence has to be made durable now.
        await storage.fence(LedgerId(first.ledger_id + 1000))


async def check_offloaded(node, corner):
    """What a full disk closed goes to tier 2 and comes back whole, while the node takes nothing."""
    written, read = await node.read_all(), {}
    assert written
    hosts = ZooKeeperSettings(hosts=node.env["TIERLOG_ZOOKEEPER__HOSTS"])
    settings = corner.model_copy(update={"zookeeper": hosts})
    stream = (await node.catalog.streams.snapshot(STREAM)).stream
    async with open_attempts(settings, "beside a full disk") as (attempts, parts):
        for listed in stream.ledgers:
            ledger_id = listed.ledger_id
            asked = OffloadRequest(
                stream=STREAM,
                incarnation=stream.incarnation,
                ledger_id=ledger_id,
                trigger=Trigger.ADMIN,
                requested_ms=0,
                request_count=1,
            )
            await attempts.offload(asked)
            context = await parts.catalog.contexts.get(ledger_id)
            assert context.complete
            assert context.uuid is not None
            handle = await parts.offloader.read_offloaded(
                ledger_id, context.uuid, context.location, copy=context.copy
            )
            entries = await entries_of(handle)
            read |= {(ledger_id, number): one for number, one in enumerate(entries)}
    assert read == written
    assert (await node.statistics())["read_only"] == 1
    assert await znodes(node) == (False, True)


async def test_a_full_disk_makes_the_node_read_only_and_space_makes_it_writable(node, cli, corner):
    await node.start(**{FREE: str(8 * MIB), f"{STORAGE}FREE_BYTES_RESUME": str(16 * MIB)})
    await with_own_space(node)
    await create(node, STREAM)
    writer = Writer(node)
    assert await znodes(node) == (True, False)
    async with writer.beside():
        await writer.got(300)
        node.faults.set(full=True, free_bytes=MIB)

        async def is_read_only():
            return await znodes(node) == (False, True)

        await node.until(is_read_only, what="the znode says read-only")
        before = len(writer.acknowledged)
        assert (await node.statistics())["read_only"] == 1
        assert node.log("node.read_only")
        await check_told(node, writer, cli)
        await check_reads_and_fences(node, writer)
        # Nor are those held up who have the stream sealed.
        async with asyncio.timeout(10):
            assert await seal(node) is None
        await check_offloaded(node, corner)
        assert len(writer.acknowledged) == before, "nothing is acknowledged meanwhile"
        node.faults.set()
        child = node.child
        await writer.got(200, seconds=8)
        assert await znodes(node) == (True, False)
        assert node.child is child
        assert child.running
    await seal(node)
    found = await node.read_all()
    writer.check(found)
    assert b"refused" not in found.values()
    # And so after a crash.
    node.services.kill("ingest")
    await node.start()
    assert await node.read_all() == found


async def test_slow_syncs_are_counted_and_told(node):
    await node.start()
    await create(node, STREAM)
    writer = Writer(node, width=2)
    async with writer.beside():
        await writer.got(40)
        assert (await node.statistics())["journal_slow_syncs"] == 0
        node.faults.set(sync_delay_s=0.3)
        await writer.got(20)
        storage = await node.statistics()
        assert storage["journal_slow_syncs"] >= 2
        assert storage["journal_sync_s_max"] >= 0.3
        assert (await node.metrics())["tierlog_journal_slow_fsyncs_total"] >= 2
        assert all(one["seconds"] >= 0.3 for one in node.log("journal.slow_sync"))
        assert node.log("journal.slow_sync")
        node.faults.set()
        await writer.got(100)
    assert not writer.refused
    assert not writer.unknown
    await seal(node)
    writer.check(await node.read_all())


def logs_of(directory):
    return {path.name: path.stat().st_size for path in (directory / "logs").glob("*.log")}


async def start_several(node):
    """Start a node of three directories; return those of its logs."""
    dirs = [node.root / "disk-1", node.root / "disk-2"]
    several = {"TIERLOG_INGEST__LEDGER_DIRECTORIES": json.dumps([str(one) for one in dirs])}
    await node.start(**{**ALWAYS, **several, FREE: str(8 * MIB)})
    return dirs


async def test_one_full_disk_of_several_takes_no_new_log_and_the_others_do(node):
    dirs = await start_several(node)
    await create(node, STREAM)
    writer = Writer(node)
    async with writer.beside():
        await writer.got(400)
        node.faults.set(under=str(dirs[0]), full=True, free_bytes=0)
        await writer.got(100)
        before = [logs_of(one) for one in dirs]
        await writer.got(1600)
        after = [logs_of(one) for one in dirs]
        assert (await node.statistics())["space_level"] == 1, "a warning"
        assert await znodes(node) == (True, False)
        assert not node.log("node.read_only")
        node.faults.set()
        await writer.got(100)
    assert len(after[1].keys() - before[1].keys()) >= 2, "new logs"
    assert not after[0].keys() - before[0].keys(), "none on the full disk"
    assert not writer.refused
    assert not writer.unknown
    await seal(node)
    found = await node.read_all()
    writer.check(found)
    node.services.kill("ingest")
    await node.start()
    assert await node.read_all() == found


async def test_directories_that_are_gone_or_anothers_or_in_use_are_refused(node):
    dirs = await start_several(node)
    await create(node, STREAM)
    writer = Writer(node)
    async with writer.beside():
        await writer.got(100)
    stranger = node.root / "stranger"
    stranger.mkdir()
    shutil.copy(dirs[1] / "cookie", stranger / "cookie")
    async with asyncio.TaskGroup() as tasks:
        in_use = tasks.create_task(node.refusal())
        anothers = tasks.create_task(
            node.refusal(
                TIERLOG_INGEST__NODE_ID="node-2",
                TIERLOG_INGEST__DATA_DIR=str(stranger),
                TIERLOG_INGEST__LEDGER_DIRECTORIES="[]",
            )
        )
    code, log = in_use.result()
    assert code == 5, log
    assert "is in use by process" in log
    assert "Stop that process" in log
    code, log = anothers.result()
    assert code == 1, log
    assert "belongs to node node-1" in log
    assert "not to node node-2" in log
    assert "Mount the right disk" in log
    await seal(node)
    found = await node.read_all()
    writer.check(found)
    node.services.kill("ingest")

    away = node.root / "away"
    dirs[1].rename(away)
    code, log = await node.refusal()
    assert code == 1, log
    assert "1 of 3 data directories of node node-1 have no cookie" in log
    assert "Mount the right disk" in log
    shutil.rmtree(dirs[1])
    away.rename(dirs[1])

    await node.start()
    assert await node.read_all() == found


@pytest.mark.parametrize("purpose", ["http", "grpc", "wire"])
async def test_a_port_in_use_is_named_with_what_to_do(node, purpose):
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        ports = dict.fromkeys(("http", "grpc", "wire"), 0) | {purpose: port}
        code, log = await node.refusal(ports=ports)
    assert code == 5, log
    assert f"can't listen on {LOOPBACK}:{port}" in log
    assert "Stop what uses the port, or choose another one in the settings" in log
    assert "Traceback" not in log


async def delete_oldest(node, name=OTHER):
    """Delete closed ledgers from the metadata, so that their entries are garbage."""
    for listed in (await node.catalog.streams.snapshot(name)).ledgers[:-1]:
        path = paths.ledger_path(listed.ledger_id)
        found = await node.store.get(path)
        if listed.closed and found is not None:
            await node.store.delete(path, version=found.version)


@pytest.mark.covers("D37", "D39")
async def test_killed_in_marks_and_compactions_nothing_is_lost_nor_twice(node):
    await node.start(**ALWAYS)
    policy = Policy(ledger_entries_max=200)
    await create(node, STREAM, OTHER, policy=policy)
    everything = Writer(node)
    compacted = 0
    for round_number in range(10):
        writer, beside = Writer(node, width=3), Writer(node, OTHER, width=3)
        async with writer.beside(), beside.beside():
            for _ in range(2):
                await writer.got(100)
                await delete_oldest(node)
            await asyncio.sleep(0.03 * round_number)
            storage = await node.statistics()
            compacted += storage["compaction_copied_runs"]
            node.services.kill("ingest")
        for kept, new in (
            (everything.acknowledged, writer.acknowledged),
            (everything.refused, writer.refused),
        ):
            assert not kept.keys() & new.keys()
            kept.update(new)
        await node.start()
        if round_number in {4, 9}:
            everything.check(await node.read_all())
    assert compacted > 0, "something was compacted"


async def journal_bytes(node):
    return (await node.statistics())["journal_bytes_on_disk"]


async def test_a_start_with_a_long_journal(node, capsys):
    await node.start(
        **{
            f"{STORAGE}JOURNAL_SEGMENT_BYTES": str(32 * MIB),
            f"{STORAGE}CHECKPOINT_INTERVAL_S": "3600",
            f"{STORAGE}CHECKPOINT_JOURNAL_BYTES": str(1024 * MIB),
            "TIERLOG_INGEST__OWNER__APPEND_TIMEOUT_S": "10",
        }
    )
    await create(node, STREAM)
    writer = Writer(node, width=8)
    async with writer.connected() as client, asyncio.TaskGroup() as tasks:
        slots = asyncio.Semaphore(8)
        acknowledged = {}

        async def one(number):
            entries = [b"%08d" % (number * 64 + step) + bytes(16 * 1024) for step in range(64)]
            frames, offsets = pack_entries(entries)
            (part,) = await client.append(STREAM, build_run(frames, offsets), deadline_s=20.0)
            acknowledged[part.first_entry_id] = number * 64
            slots.release()

        longest = 0
        for number in range(400):
            await slots.acquire()
            tasks.create_task(one(number))
            # A mark lets segments go, on the way and behind it: so long it was at most.
            if number % 20 == 0 and (longest := await journal_bytes(node)) > 100 * MIB:
                break
    assert longest > 100 * MIB
    node.services.kill("ingest")
    began_s = time.monotonic()
    async with asyncio.timeout(60):
        await node.start()
    with capsys.disabled():
        print(
            f"\n[faults] ready after {time.monotonic() - began_s:.1f} s with 100 MiB of journal",
            file=sys.stderr,
        )
    assert await node.is_closed() or not node.log("node.opened")[-1]["damages"]
    found = await node.read_all()
    by_entry = {entry_id: int(entry[:8]) for (_, entry_id), entry in found.items()}
    for first, number in acknowledged.items():
        assert [by_entry[first + step] for step in range(64)] == list(range(number, number + 64))


@pytest.fixture
async def reader(node, corner):
    """A reader process beside the node; what the command line needs to ask it."""
    ports = Ports(node.root / "reader-ports.json").take("reader", ["http", "grpc"])
    env = {
        **environment_of(corner),
        "TIERLOG_ZOOKEEPER__HOSTS": node.env["TIERLOG_ZOOKEEPER__HOSTS"],
    }
    running = EmbeddedServices(run_dir=node.root, log_dir=node.root)
    await running.start([service_spec("reader", ports=ports, env=env)])
    yield {
        "state_dir": node.root,
        "TIERLOG_CLIENT__INGEST_ADDRESS": f"127.0.0.1:{node.ports['grpc']}",
        "TIERLOG_CLIENT__READER_HTTP_ADDRESS": f"127.0.0.1:{ports['http']}",
        "TIERLOG_CLIENT__TIMEOUT_S": "3",
    }
    await running.stop()


async def test_a_damaged_run_is_an_error_for_the_reader_and_never_a_wrong_byte(node, reader, cli):
    await node.start()
    lines = [b"%06d " % number + b"y" * 900 for number in range(300)]
    appended = await cli("append", STREAM, "--raw", stdin=b"\n".join(lines), **reader)
    appended.check(0)
    await seal(node)
    (await cli("read", STREAM, **reader)).check(0)
    await node.services.stop()
    (path,) = (node.data / "logs").glob("*.log")
    data = bytearray(path.read_bytes())
    at = data.index(lines[200]) + 500
    data[at] ^= 1
    path.write_bytes(data)
    await node.start()
    done = await cli("read", STREAM, **reader)
    assert done.code in {5, 6}, done.stderr
    done.check(done.code, "remedy:")
    found = done.stdout.splitlines()
    assert found == lines[: len(found)], "what comes before it, as it was"
    assert len(found) <= 200
    # What lies behind it is there still.
    first = (await node.catalog.streams.snapshot(STREAM)).ledgers[0]
    tail = await cli("read", STREAM, "--from", f"{first.ledger_id}:{first.last_entry_id}", **reader)
    assert tail.check(0).stdout.splitlines()[-1] == lines[-1]
