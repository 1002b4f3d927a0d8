"""BookKeeper's rules for one node (seeds/003, "Data management in bookies"), each by its row.

Most rows are shown in more depth beside the module that they concern; here each is seen on a whole
node, by what reaches its disk and in which order.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.crash_states.recorder import (
    Names,
    Recording,
    Sync,
    SyncDirectory,
    Write,
    recorded_ram,
)
from tests.unit.storage.node_kit import (
    SMALL,
    CrashingNode,
    make_run,
    new_disk,
    open_node,
    opened,
    read_all,
    running,
    virtual,
)
from tierlog.format.run import Run
from tierlog.model.ids import LedgerId
from tierlog.runtime.settings import StorageSettings
from tierlog_ingest.storage.compaction.compaction_plan import Rules, Trigger, due
from tierlog_ingest.storage.entrylog.entry_log import log_path
from tierlog_ingest.storage.entrylog.entry_log_format import LOG_HEADER_LEN
from tierlog_ingest.storage.index.index_files import index_path
from tierlog_ingest.storage.index.index_format import PAGE_LEN
from tierlog_ingest.storage.journal.segments import list_segments
from tierlog_ingest.storage.state_file import decode_state

IDLE = SMALL.model_copy(
    update={
        "checkpoint_interval_s": 10**6,
        "gc_interval_s": 10**6,
        "idle_marker_s": 10**6,
        "write_buffer_bytes_max": 2**20,
        "ledger_cache_bytes_max": 2**20,
        "entry_log_bytes_max": 2**20,
        "journal_segment_bytes": 2**20,
        "journal_spares_max": 0,
    }
)
"""Nothing happens that was not asked for."""


def kind_of(path):
    """Return which kind of file it is: journal, logs, index or state."""
    first = path.removeprefix("d/").split("/")[0]
    return "state" if first.startswith("state") else first


class Recorded:
    """A node's disk that notes what is done to it."""

    def __init__(self):
        self.recording = Recording()
        (self.files,) = recorded_ram(self.recording, ["d"])

    def steps(self, since=0):
        """Return (what, kind of file) of each step, those alike in a row as one."""
        paths: dict[int, str] = {}
        steps: list[tuple[str, str]] = []
        for at, one in enumerate(self.recording.operations):
            if isinstance(one, Names):
                paths.update({inode: path for path, inode in one.changes if inode is not None})
                step = ("name", kind_of(one.changes[-1][0]))
            elif isinstance(one, Write):
                step = ("write", kind_of(paths[one.inode]))
            elif isinstance(one, Sync):
                step = ("sync", kind_of(paths[one.inode]))
            elif isinstance(one, SyncDirectory):
                step = ("sync names", kind_of(one.directory))
            else:
                continue
            if at >= since and (not steps or steps[-1] != step):
                steps.append(step)
        return steps

    def here(self):
        return len(self.recording.operations)


def in_order(steps, *wanted):
    """Tell whether the steps came in this order, each first one behind the one before."""
    at = -1
    for one in wanted:
        at = steps.index(one, at + 1)
    return True


async def state_of(files):
    file = await files.open("state")
    return decode_state(await file.read(0, await file.size()), log_directories=1).state


# The files, and the way of an entry


@pytest.mark.covers("D21", "D24", "D27")
@virtual
async def test_three_kinds_of_files_and_ledgers_share_an_entry_log():
    disk = new_disk()
    async with opened(disk, IDLE) as node:
        for first in range(5):
            for ledger_id in (1, 2, 3):
                await node.add(make_run(ledger_id, first))
        await node.checkpoint()
        kinds = {path.split("/")[0] for path in disk.paths()}
        assert kinds == {"journal", "logs", "index", "state"}
        log = disk.read_whole(log_path(1))
        run_len = len(make_run(1, 0).encoded)
        assert len(log) >= LOG_HEADER_LEN + 15 * run_len
        held = [
            Run.decode(log[at : at + run_len]).header.ledger_id
            for at in range(LOG_HEADER_LEN, LOG_HEADER_LEN + 15 * run_len, run_len)
        ]
        assert held == [1] * 5 + [2] * 5 + [3] * 5, "of one ledger, what lies together"
        for ledger_id in (1, 2, 3):
            assert len(disk.read_whole(index_path(ledger_id))) == 2 * PAGE_LEN


@pytest.mark.covers("D22", "D28", "D30")
@virtual
async def test_an_entry_is_found_then_journaled_then_answered():
    """The write buffer is entry log and index in one until a flush: there it is found first."""
    disk = Recorded()
    node = await open_node(disk.files, IDLE)
    run = make_run(1, 0)
    async with running(node):
        since = disk.here()
        answer = node.add(run)
        assert node._store.buffer.find(LedgerId(1), 0) == run, "1 and 2: its readers find it"
        assert disk.here() == since
        while ("sync", "journal") not in disk.steps(since):
            assert not answer.done(), "4: never before 3"
            await asyncio.sleep(0.0001)
        await answer
        assert disk.steps(since) == [("write", "journal"), ("sync", "journal")]
        since = disk.here()
        await node.checkpoint()
        assert in_order(disk.steps(since), ("write", "logs"), ("write", "index"))
        assert ("write", "journal") not in disk.steps(since)


@pytest.mark.covers("D31")
@virtual
async def test_an_entry_log_takes_batches():
    disk = Recorded()
    node = await open_node(disk.files, IDLE)
    async with running(node):
        since = disk.here()
        for first in range(200):
            await node.add(make_run(first % 20, first // 20))
        assert ("write", "logs") not in disk.steps(since)
        await node.checkpoint()
        writes = [one for one in disk.recording.operations if isinstance(one, Write)]
        batch = b"".join(make_run(at // 10, at % 10).encoded for at in range(200))
        assert sum(batch in one.data for one in writes) == 1, "sorted, and in one piece"


@pytest.mark.covers("D23", "D25")
@virtual
async def test_new_files_at_each_start_and_at_the_threshold():
    disk = new_disk()
    settings = IDLE.model_copy(
        update={"journal_segment_bytes": 64 * 1024, "entry_log_bytes_max": 64 * 1024}
    )

    async def there():
        files = disk.mount()
        return len(await list_segments(files)), len(await files.list("logs"))

    async with opened(disk, settings) as node:
        assert await there() == (1, 0), "an entry log is made when there is something for it"
        await node.add(make_run(1, 0))
        await node.checkpoint()
        assert await there() == (1, 1)
        for first in range(1, 101):
            await node.add(make_run(1, first, size=1000))
        assert (await there())[0] >= 3
        await node.checkpoint()
        assert (await there())[1] == 2
    newest = max(await list_segments(disk.mount()))
    async with opened(disk, settings) as node:
        assert min(await list_segments(disk.mount())) > newest
        await node.add(make_run(1, 101))
        await node.checkpoint()
        assert (await there())[1] == 3


@pytest.mark.covers("D29")
@virtual
async def test_index_pages_live_in_one_bounded_pool():
    settings = IDLE.model_copy(update={"ledger_cache_bytes_max": 16 * PAGE_LEN})
    async with opened(new_disk(), settings) as node:
        for ledger_id in range(200):
            await node.add(make_run(ledger_id, 0))
        await node.checkpoint()
        for ledger_id in range(200):
            assert len(await read_all(node, ledger_id)) == 1
            assert node.statistics()["index_pages"] <= 16


# Flushing


@pytest.mark.covers("D32")
@virtual
async def test_index_pages_are_written_when_the_pool_is_full():
    disk = Recorded()
    settings = IDLE.model_copy(
        update={"ledger_cache_bytes_max": 16 * PAGE_LEN, "write_buffer_bytes_max": 16 * 1024}
    )
    node = await open_node(disk.files, settings)
    async with running(node):
        since = disk.here()
        for ledger_id in range(300):
            await node.ready()
            await node.add(make_run(ledger_id, 0))
        steps = disk.steps(since)
        assert ("write", "index") in steps
        assert ("write", "state") not in steps, "without a mark"


@pytest.mark.covers("D28", "D32")
@virtual
async def test_index_pages_are_written_from_time_to_time():
    disk = Recorded()
    node = await open_node(disk.files, IDLE.model_copy(update={"checkpoint_interval_s": 60}))
    async with running(node):
        since = disk.here()
        await node.add(make_run(1, 0))
        await asyncio.sleep(50)
        assert ("write", "index") not in disk.steps(since)
        await asyncio.sleep(20)
        assert ("write", "index") in disk.steps(since)


@pytest.mark.covers("D34", "D35")
@virtual
async def test_the_mark_is_a_journal_file_and_an_offset_in_it():
    disk = Recorded()
    node = await open_node(disk.files, IDLE)
    async with running(node):
        for first in range(3):
            await node.add(make_run(1, first))
        reached = node._journal.durable_position
        marking = asyncio.create_task(node.checkpoint())
        await asyncio.sleep(0)
        while not marking.done():
            await node.add(make_run(2, node.statistics()["journal_groups"]), recovery=True)
        await marking
        assert (await state_of(disk.files)).mark == reached, "as it was when the flush began"
        assert node._journal.durable_position > reached
        await node.checkpoint()
        assert (await state_of(disk.files)).mark == node._journal.durable_position


@pytest.mark.covers("D33", "D35")
@virtual
async def test_a_flush_goes_before_its_mark_and_the_mark_before_the_journal_goes():
    disk = Recorded()
    node = await open_node(disk.files, IDLE.model_copy(update={"journal_segment_bytes": 64 * 1024}))
    async with running(node):
        for first in range(100):
            await node.add(make_run(1, first, size=1000))
        segments = await list_segments(disk.files)
        assert len(segments) > 1
        since = disk.here()
        await node.checkpoint()
        steps = disk.steps(since)
        flushed = ("write", "logs"), ("sync", "logs"), ("write", "index"), ("sync", "index")
        marked = ("write", "state"), ("sync", "state"), ("name", "state"), ("sync names", "state")
        assert in_order(steps, *flushed, *marked[:3], ("name", "journal"))
        assert steps.index(("name", "journal")) > steps.index(("name", "state"))
        assert not {("write", "logs"), ("write", "index")} & set(
            steps[steps.index(("write", "state")) :]
        )
        assert await list_segments(disk.files) == segments[-1:]


@pytest.mark.covers("D36")
@virtual
async def test_a_flush_writes_all_that_is_dirty_and_replaying_what_was_flushed_is_harmless():
    disk = new_disk()
    runs = [make_run(ledger_id, first) for first in range(10) for ledger_id in range(20)]
    node = CrashingNode(disk, 1, IDLE)

    async def work(one):
        for run in runs:
            await one.add(run)
        before = disk.read_whole("state")
        await one.checkpoint()
        found = one.statistics()
        assert (found["buffered_bytes"], found["index_pages_dirty"]) == (0, 0)
        disk.write_whole("state", before)  # as if the mark had not become durable
        node.crashed.set()

    await node.live(work)
    async with opened(disk, IDLE) as again:
        assert again.damages == []
        for ledger_id in range(20):
            wanted = [run for run in runs if run.header.ledger_id == ledger_id]
            assert await read_all(again, ledger_id) == wanted


@pytest.mark.covers("D37")
@virtual
async def test_what_no_mark_covers_comes_back_from_the_journal():
    disk = new_disk()
    runs = [make_run(1, first) for first in range(50)]
    node = CrashingNode(disk, 1, IDLE)

    async def work(one):
        for run in runs[:25]:
            await one.add(run)
        await one.checkpoint()
        for run in runs[25:]:
            await one.add(run)
        assert one.statistics()["buffered_bytes"] > 0
        node.crashed.set()

    await node.live(work)
    async with opened(disk, IDLE) as again:
        assert await read_all(again, 1) == runs


@pytest.mark.covers("D38")
@virtual
async def test_an_orderly_end_flushes_the_entry_log():
    disk = new_disk()
    run = make_run(1, 0, count=5)
    async with opened(disk, IDLE) as node:
        await node.add(run)
        assert await disk.mount().list("logs") == []
    disk.crash()
    assert bytes(run.encoded) in disk.read_whole(log_path(1))


# Compaction


@pytest.mark.covers("D42", "D43", "D44", "D45")
def test_the_defaults_of_compaction():
    settings = StorageSettings()
    assert settings.minor_compaction_threshold == 0.2
    assert settings.major_compaction_threshold == 0.8
    assert settings.minor_compaction_interval_s == 60 * 60
    assert settings.major_compaction_interval_s == 24 * 60 * 60
    rules = Rules.of(settings)
    assert (rules.minor.threshold, rules.minor.interval_s) == (0.2, 3600)
    assert (rules.major.threshold, rules.major.interval_s) == (0.8, 86400)


@pytest.mark.covers("D46")
@pytest.mark.parametrize("value", [0.0, -1.0])
@pytest.mark.parametrize("what", ["threshold", "interval_s"])
def test_a_setting_of_zero_or_less_switches_a_compaction_off(what, value):

    def due_now(rules):
        return due(rules, now_s=10.0**9, done_s=dict.fromkeys(Trigger, 0.0))

    on = Rules.of(StorageSettings())
    assert due_now(on) is Trigger.MAJOR
    no_major = Rules.of(StorageSettings(**{f"major_compaction_{what}": value}))
    assert due_now(no_major) is Trigger.MINOR
    no_minor = Rules.of(StorageSettings(**{f"minor_compaction_{what}": value}))
    assert not no_minor.minor.enabled
    assert due_now(replace(no_minor, major=no_major.major)) is None


@pytest.mark.covers("D26", "D39", "D41", "D47")
@virtual
async def test_compaction_copies_all_that_is_live_before_the_old_log_goes():
    disk = Recorded()
    node = await open_node(disk.files, IDLE.model_copy(update={"entry_log_bytes_max": 32 * 1024}))
    kept = [make_run(1, first, size=500) for first in range(20)]
    async with running(node):
        for first in range(20):
            for ledger_id in range(1, 11):
                await node.add(make_run(ledger_id, first, size=500))
        await node.checkpoint()
        logs = await disk.files.list("logs")
        for ledger_id in range(3, 11):
            await node.free(LedgerId(ledger_id))
        since = disk.here()
        await node.compactor.compact(threshold=0.8)
        steps = disk.steps(since)
        assert in_order(
            steps,
            ("write", "logs"),  # the copies
            ("sync", "logs"),
            ("write", "state"),  # the new log is known
            ("write", "index"),
            ("sync", "index"),
            ("write", "state"),  # the mark behind them, and the old log forgotten
            ("name", "logs"),  # it goes
        )
        left = await disk.files.list("logs")
        assert set(logs) - set(left), "old ones went"
        assert await read_all(node, 1) == kept
        await node.free(LedgerId(1))
        await node.free(LedgerId(2))
        since = disk.here()
        await node.compactor.compact(threshold=0.8)
        assert ("write", "logs") not in disk.steps(since), "nothing to copy"
        assert await disk.files.list("logs") == []
