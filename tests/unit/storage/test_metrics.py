"""What the storage node shows of itself at /metrics."""

import random

from prometheus_client import CollectorRegistry, generate_latest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.node_kit import SMALL, make_run, open_node, running
from tierlog.adapters.memory.faults import NO_FAULTS, FaultRates, Faults
from tierlog.adapters.memory.files import MemoryDisk
from tierlog_ingest.metrics import UNNAMED, NodeCollector, storage_metrics


class Status:
    """An ingest node of which only the storage is there."""

    def __init__(self, node):
        self.node = node

    def statistics(self):
        raw = {"appends_waiting": 1, "appends_sent": 2, "in_flight_bytes": 300}
        streams = [raw, {**raw, "attributes_unflushed": 7}]
        storage = self.node.statistics()
        return {"streams": streams, "recovering": {}, "storage": storage, "gc_alarm": None}


def shown(node):
    registry = CollectorRegistry()
    registry.register(NodeCollector(Status(node)))
    lines = generate_latest(registry).decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (one.rpartition(" ") for one in lines if not one.startswith("#"))
    }


def test_every_number_has_a_name():
    run_virtual(_every_number())


async def _every_number():
    disks = [MemoryDisk(random.Random(at)) for at in range(3)]
    files, *others = [one.mount() for one in disks]
    node = await open_node(files, ledger_dirs=others)
    async with running(node):
        for first in range(200):
            await node.add(make_run(first % 5, first // 5, size=500))
        await node.checkpoint()
        await node._space.look()
        statistics = node.statistics()
        found = shown(node)
    # The journal's count and sum are one metric, as are those with a label.
    families = list(storage_metrics(statistics))
    assert [one.name for one in families if one.documentation == UNNAMED] == []
    samples = [one for family in families for one in family.samples]
    assert len(samples) == len(statistics)
    assert found["tierlog_ingest_streams"] == 2
    assert found["tierlog_ingest_in_flight_bytes"] == 600
    assert found["tierlog_ingest_attributes_unflushed"] == 7
    assert found["tierlog_storage_ledgers"] == 5
    assert found["tierlog_journal_fsync_duration_seconds_count"] >= 200
    assert found["tierlog_journal_written_bytes_total"] > 200 * 500
    assert found["tierlog_journal_disk_bytes"] == statistics["journal_bytes_on_disk"] > 0
    assert found["tierlog_entry_log_bytes"] > 100 * 500
    assert found["tierlog_index_pages"] == 5
    assert found["tierlog_disk_space_level"] == 0
    assert found['tierlog_compaction_rounds_total{kind="minor"}'] == 0
    assert found['tierlog_disk_turns_total{work="append"}'] >= 1
    for at in range(3):
        assert found[f'tierlog_disk_free_bytes{{directory="{at}"}}'] > 0


def test_a_slow_disk_shows():
    run_virtual(_slow_disk())


async def _slow_disk():
    faults = Faults(random.Random(1))
    settings = SMALL.model_copy(update={"slow_sync_s": 0.5, "idle_marker_s": 3600.0})
    node = await open_node(MemoryDisk(random.Random(1)).mount(faults), settings)
    async with running(node):
        await node.add(make_run(1, 0))
        assert shown(node)["tierlog_journal_slow_fsyncs_total"] == 0
        faults.rates = FaultRates(delay_s_max=4.0)
        for first in range(1, 11):
            await node.add(make_run(1, first))
        found = shown(node)
        faults.rates = NO_FAULTS
    assert found["tierlog_journal_slow_fsyncs_total"] > 3
    assert found["tierlog_journal_fsync_duration_seconds_max"] > 1
    assert found["tierlog_journal_fsync_duration_seconds_sum"] > 5


def test_single_streams_are_shown_when_that_is_wanted_and_the_busiest_of_them():
    def stream(number):
        named = {"stream": f"s{number}", "appends_waiting": 1, "ledger_bytes": 10 * number}
        return {**named, "in_flight_bytes": number, "ledger_entries": 2, "appends_sent": 0}

    class Node:
        def statistics(self):
            streams = [stream(number) for number in range(10)]
            return {"streams": streams, "recovering": {}, "storage": {}, "gc_alarm": None}

    def shown_of(**options):
        return {
            (one.name, one.labels.get("stream")): one.value
            for family in NodeCollector(Node(), **options).collect()
            for one in family.samples
            if one.name.startswith("tierlog_stream_")
        }

    assert shown_of() == {}
    found = shown_of(streams_max=3)
    assert {name for _, name in found} == {"s7", "s8", "s9"}
    assert found["tierlog_stream_in_flight_bytes", "s9"] == 9
    assert found["tierlog_stream_open_ledger_bytes", "s8"] == 80
    assert len(found) == 12
