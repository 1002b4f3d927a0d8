"""What is counted is what the store charges, and what was predicted is what is counted."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from fastapi import FastAPI
from prometheus_client import REGISTRY

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import DEEP, scrub
from tests.unit.offload.world import (
    BLOCK,
    CLUSTER,
    SMALL_RANGES,
    STREAM,
    ListHandle,
    World,
    metadata_of,
)
from tests.unit.scheduler.test_scheduler import running
from tierlog.adapters.memory.objects import _OPERATIONS
from tierlog.format.grains import GRAIN_LEN
from tierlog.format.keys import object_keys
from tierlog.model.ids import LedgerId
from tierlog.model.policy import Policy
from tierlog.model.prices import (
    CLASSES,
    DAYS_A_MONTH,
    GB,
    GRAIN_BYTES,
    GRAINS_SAMPLED,
    READ_BACK_BYTES,
    PriceClass,
    Prices,
    Scrubs,
    Workload,
    offload_requests,
    predict,
    single_requests,
    stored_bytes,
    verify_requests,
)
from tierlog.offload import verify
from tierlog.offload.driver import BlockOffloader, Tier2Settings
from tierlog.offload.single_driver import SingleObjectOffloader
from tierlog.offload.verify import ReadBack
from tierlog.ports.spending import (
    ANSWERS_MAX,
    OTHER_STREAMS,
    Amount,
    Cause,
    CostMeter,
    Purpose,
    Spent,
    purpose,
    spending,
)
from tierlog.runtime.costs import costs_of, serve_costs

PARTS_SENT = "tierlog_offload_part_duration_seconds_count"
PRICES = Prices(
    write_per_1000=5.0, read_per_1000=0.4, received_per_gb=2.0, stored_per_gb_month=0.02
)


def by_cause(meter: CostMeter) -> dict[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter()
    for spent, amount in meter.amounts.items():
        found[spent.cause.value, spent.operation] += amount.requests
    return dict(found)


def of_life(requests: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Return what is asked because of a ledger, from its offload to its end."""
    causes = {"offload", "verify", "sweep"}
    return {what: count for what, count in requests.items() if what[0] in causes}


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
def test_what_an_offload_sends_is_what_was_predicted(blocks):
    async def main():
        world, meter = World(), CostMeter()
        offloader = BlockOffloader(
            world.bucket.connect(meter=meter),
            Tier2Settings(bucket="b", cluster_id=CLUSTER, ranges=SMALL_RANGES),
        )
        entries = [bytes(BLOCK - 140)] * blocks  # one a block
        uuid = world.ids.uuid()
        extra = {"ManagedLedgerName": "logs"}
        sent_before = REGISTRY.get_sample_value(PARTS_SENT) or 0
        await offloader.offload(ListHandle(LedgerId(1), entries), uuid, extra)
        assert REGISTRY.get_sample_value(PARTS_SENT) == sent_before + blocks
        assert {spent.stream for spent in meter.amounts} == {"logs"}
        assert by_cause(meter) == offload_requests(blocks * BLOCK, BLOCK)
        counted = sum(by_cause(meter).values())
        await offloader.delete_offloaded(LedgerId(1), uuid)
        swept = {spent.cause for spent in meter.amounts if spent.stream == ""}
        assert swept == {Cause.SWEEP}
        assert sum(by_cause(meter).values()) > counted
        assert not world.bucket.objects
        assert object_keys("", uuid, LedgerId(1)).data

    run_virtual(main())


@pytest.mark.parametrize("read_back", list(ReadBack))
def test_what_the_second_verification_sends_is_what_was_predicted(read_back):
    async def main():
        world, meter, block = World(), CostMeter(), GRAIN_BYTES * 16
        offloader = BlockOffloader(
            world.bucket.connect(meter=meter), Tier2Settings(bucket="b", cluster_id=CLUSTER)
        )
        entries = [bytes(block - 140)] * 12
        handle = ListHandle(LedgerId(1), entries, metadata_of(entries, block_size=block))
        uuid = world.ids.uuid()
        copy = await offloader.offload(handle, uuid, {})
        before = by_cause(meter)
        await offloader.verify(LedgerId(1), uuid, None, copy, read_back=read_back)
        sent = {
            operation: count - before[cause, operation]
            for (cause, operation), count in by_cause(meter).items()
            if cause == "verify"
        }
        assert sent == verify_requests(copy.data_len, block, read_back=read_back.value)

    assert (GRAINS_SAMPLED, READ_BACK_BYTES) == (verify.SAMPLED_GRAINS, verify.READ_BACK_BYTES)
    assert GRAIN_BYTES == GRAIN_LEN
    run_virtual(main())


def test_a_ledgers_life_and_a_deep_scrub_of_it_cost_what_was_predicted():
    async def main():
        world, thresholds = World(), Policy(offload_time_ms=0, deletion_lag_ms=0)
        claimed = await world.stream(policy=thresholds)
        (ledger_id, *_) = [
            await world.seal(claimed, [bytes(BLOCK - 140)] * 40) for _ in range(DAYS_A_MONTH)
        ]
        async with running(world):
            await asyncio.sleep(3600)
        copy = (await world.context(ledger_id)).copy
        assert copy is not None
        await scrub(world, DEEP)
        gone = replace(thresholds, retention_time_ms=10)
        await world.catalog().streams.set_policy(STREAM, gone)
        async with running(world):
            await asyncio.sleep(7200)
        assert not world.bucket.objects
        work = Workload(
            bytes_per_day=copy.data_len, ledger_bytes=copy.data_len, block_bytes=BLOCK,
            range_bytes=1, reads=0, kept_days=DAYS_A_MONTH, scrubs=Scrubs(deep=1),
        )  # fmt: skip
        predicted = {(one.cause, one.operation): one.requests for one in predict(work)}
        # A ledger so short has one grain of 64 KiB, and here eight and more, of 64 bytes.
        predicted["verify", "get_object"] += DAYS_A_MONTH * (GRAINS_SAMPLED - 1)
        counted = by_cause(world.meter)
        for operation in ("get_object", "head_object"):
            assert counted["scrub", operation] == predicted["scrub", operation]
        assert of_life(counted) == of_life(predicted)

    run_virtual(main())


def test_a_deep_scrub_reads_no_more_than_it_has_time_for():
    def scrubbed(kept_days: float) -> float:
        work = Workload(
            bytes_per_day=100 * GB, ledger_bytes=GB, block_bytes=64 << 20, range_bytes=1 << 20,
            reads=0, kept_days=kept_days,
            scrubs=Scrubs.every(
                interval_s=86_400, deep_interval_s=7 * 86_400, bytes_per_s=50e6, deep_s_max=21_600
            ),
        )  # fmt: skip
        return sum(one.received for one in predict(work) if one.cause == "scrub")

    assert scrubbed(1) == pytest.approx(30 / 7 * 100 * GB)
    assert scrubbed(365) == scrubbed(3650) == pytest.approx(30 / 7 * 1080 * GB)
    never = Scrubs.every(interval_s=0, deep_interval_s=0, bytes_per_s=1, deep_s_max=1)
    assert (never.count, never.deep) == (0, 0)


def test_all_that_a_ledger_costs_counts_on_its_stream():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=0))
        ledger_id = await world.seal(claimed, [b"a", b"b"])
        crashed = world.ids.uuid()
        await world.catalog().contexts.begin_attempt(
            ledger_id,
            uuid=crashed,
            location=world.offloader().location(ledger_id, crashed),
            worker="w",
        )
        async with running(world):
            await asyncio.sleep(3600)
        context = await world.context(ledger_id)
        assert context.bookkeeper_deleted
        assert not context.abandoned
        assert {spent.stream for spent in world.meter.amounts} == {STREAM}
        counted = by_cause(world.meter)
        # A worker sweeps before its own attempt, and a leader for the last time.
        assert counted["sweep", "list_multipart_uploads"] == 2
        assert counted["verify", "head_object"] == 2

    run_virtual(main())


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
def test_what_an_offload_to_a_single_object_sends_is_what_is_said_of_it(blocks):
    async def main():
        world, meter = World(), CostMeter()
        offloader = SingleObjectOffloader(
            world.bucket.connect(meter=meter),
            Tier2Settings(bucket="b", cluster_id=CLUSTER, ranges=SMALL_RANGES),
            index_len_min=600,
        )
        entries = [bytes(BLOCK - 140)] * blocks  # one a block
        copy = await offloader.offload(ListHandle(LedgerId(1), entries), world.ids.uuid(), {})
        assert copy.block_count == blocks
        assert by_cause(meter) == single_requests(blocks)

    run_virtual(main())


def test_a_purpose_is_the_innermost_and_tasks_inherit_it():
    seen: dict[str, Purpose] = {}

    async def note(name: str) -> None:
        await asyncio.sleep(1)
        seen[name] = purpose()

    async def main():
        async with asyncio.TaskGroup() as group:
            with spending(Cause.OFFLOAD, "a"):
                group.create_task(note("offload"))
                with spending(Cause.VERIFY):
                    group.create_task(note("verify"))
                seen["back"] = purpose()
            with spending(Cause.READ, "b"):
                group.create_task(note("read"))
            group.create_task(note("none"))

    run_virtual(main())
    assert seen == {
        "offload": Purpose(Cause.OFFLOAD, "a"),
        "back": Purpose(Cause.OFFLOAD, "a"),
        "verify": Purpose(Cause.VERIFY, "a"),
        "read": Purpose(Cause.READ, "b"),
        "none": Purpose(Cause.OTHER, ""),
    }


def test_streams_that_are_told_apart_are_bounded():
    meter = CostMeter(streams_max=3)
    for number in [*range(10), *range(10)]:
        with spending(Cause.READ, f"s{number}"):
            meter.count("get_object", received=5)
    requests = {spent.stream: amount.requests for spent, amount in meter.amounts.items()}
    assert requests == {"s0": 2, "s1": 2, "s2": 2, OTHER_STREAMS: 14}
    assert meter.amounts[Spent("s1", Cause.READ, "get_object")] == Amount(2, 0, 10)


def test_every_operation_has_a_price_class_and_unknown_ones_cost_the_most():
    assert set(_OPERATIONS.values()) <= set(CLASSES)
    assert PRICES.of_requests("upload_part", 2000) == pytest.approx(10)
    assert PRICES.of_requests("get_object", 1000, received=GB) == pytest.approx(2.4)
    assert PRICES.of_requests("delete_object", 10**6) == 0
    assert CLASSES["list_objects_v2"] is PriceClass.WRITE
    assert PRICES.of_requests("something_new", 1000) == 5


def test_larger_ledgers_and_ranges_cost_fewer_requests():
    def month(ledger: int, size: int) -> float:
        work = Workload(
            bytes_per_day=100 * GB, ledger_bytes=ledger, block_bytes=64 << 20, range_bytes=size,
            reads=1.0, kept_days=30,
        )  # fmt: skip
        assert stored_bytes(work) == 3000 * GB
        found = predict(work)
        read = next(one for one in found if one.cause == "read")
        assert read.received == 3000 * GB
        return sum(
            PRICES.of_requests(one.operation, one.requests, received=one.received) for one in found
        )

    assert month(GB, 1 << 20) < month(GB // 10, 1 << 20)
    assert month(GB, 8 << 20) < month(GB, 1 << 20)


async def test_a_service_shows_its_counts_and_its_metrics_leave_streams_out():
    meter = CostMeter()
    for stream in ("a", "b"):
        with spending(Cause.OFFLOAD, stream):
            meter.count("upload_part", sent=10)
    labels = {"cause": "offload", "operation": "upload_part"}
    app = FastAPI()
    async with serve_costs(app, "offloader", meter):
        assert REGISTRY.get_sample_value("tierlog_s3_requests_total", labels) == 2
        assert REGISTRY.get_sample_value("tierlog_s3_sent_bytes_total", labels) == 20
        assert "/v1/costs" in {getattr(route, "path", "") for route in app.routes}
    assert REGISTRY.get_sample_value("tierlog_s3_requests_total", labels) is None
    shown = costs_of("offloader", meter)
    assert [(one.stream, one.requests) for one in shown.costs] == [("a", 1), ("b", 1)]


async def test_metrics_say_how_tries_ended_and_how_long_they_took():
    meter = CostMeter()
    meter.answered("upload_part", code="ok", took_s=0.02)
    meter.answered("upload_part", code="ok", took_s=40)
    meter.answered("upload_part", code="SlowDown", took_s=0.001)
    for number in range(ANSWERS_MAX + 5):
        meter.answered("get_object", code=f"Invented{number}", took_s=0.5)
    name, of = "tierlog_s3_request_duration_seconds", {"operation": "upload_part"}
    async with serve_costs(FastAPI(), "offloader", meter):
        shown = {
            bound: REGISTRY.get_sample_value(f"{name}_bucket", {**of, "le": bound})
            for bound in ("0.001", "0.01", "0.03", "30.0", "+Inf")
        }
        assert shown == {"0.001": 1, "0.01": 1, "0.03": 2, "30.0": 2, "+Inf": 3}
        assert REGISTRY.get_sample_value(f"{name}_sum", of) == pytest.approx(40.021)
        slow = {**of, "code": "SlowDown"}
        assert REGISTRY.get_sample_value("tierlog_s3_answers_total", slow) == 1
        other = {"operation": "get_object", "code": "other"}
        assert REGISTRY.get_sample_value("tierlog_s3_answers_total", other) == 7
    assert len(meter.answers) == ANSWERS_MAX + 1
