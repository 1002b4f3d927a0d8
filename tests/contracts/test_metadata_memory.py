"""The metadata twin keeps the contract, and its faults do what they say."""

import asyncio
import random

import pytest

from tests.contracts.metadata_suite import MetadataContract
from tests.simulation.virtual_loop import DeadlockError, run_virtual
from tierlog.adapters.memory.faults import FaultRates, Faults, Outcome
from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.ports.metadata import Put, VersionConflictError, Versioned


@pytest.fixture
def root():
    return "/root"


@pytest.fixture
def connect():
    server = MemoryMetadata()

    async def connect():
        return server.connect()

    return connect


@pytest.fixture
def expire():
    async def expire(client):
        client.expire_session()

    return expire


class TestMemoryMetadata(MetadataContract):
    pass


async def test_a_dropped_reply_is_indeterminate_and_reading_back_decides():
    server, faults = MemoryMetadata(), Faults(random.Random(0))
    client = server.connect(faults)
    await client.create("/a", b"one")
    faults.next("metadata.set", Outcome.REPLY_LOST)
    with pytest.raises(IndeterminateError):
        await client.set("/a", b"two", version=0)
    assert await client.get("/a") == Versioned(b"two", 1)
    with pytest.raises(VersionConflictError):
        await client.set("/a", b"two", version=0)
    faults.next("metadata.transact", Outcome.REQUEST_LOST)
    with pytest.raises(IndeterminateError):
        await client.transact([Put("/a", b"three", 1)])
    assert await client.get("/a") == Versioned(b"two", 1)


async def test_a_refused_change_did_not_happen_and_reads_are_retryable():
    server, faults = MemoryMetadata(), Faults(random.Random(0))
    client = server.connect(faults)
    faults.next("metadata.create", Outcome.REFUSED)
    with pytest.raises(RetryableError):
        await client.create("/a", b"one")
    assert await client.get("/a") is None
    for outcome in (Outcome.REFUSED, Outcome.REQUEST_LOST, Outcome.REPLY_LOST):
        faults.next("metadata.get", outcome)
        with pytest.raises(RetryableError):
            await client.get("/a")
    faults.outages.add("metadata")
    with pytest.raises(RetryableError):
        await client.children("/")
    faults.outages.clear()
    assert await client.children("/") == []


def test_an_abandoned_session_runs_out():
    async def main():
        server = MemoryMetadata(session_timeout_s=6)
        dead, other = server.connect(), server.connect()
        await dead.create_ephemeral("/lock", b"")
        _, gone = await other.watch("/lock")
        dead.abandon()
        await gone.wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 6


def test_a_crash_at_every_step_happens_before_or_after_the_change_and_ends_all():
    async def main(step):
        server, faults = MemoryMetadata(), Faults(random.Random(0))
        client = server.connect(faults)
        done: list[str] = []

        async def work():
            await client.create("/a", b"one")
            done.append("create")
            await client.set("/a", b"two", version=0)
            done.append("set")

        task = asyncio.get_running_loop().create_task(work())
        faults.on_crash = task.cancel
        faults.crash_after(step)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert faults.crashed
        return done, server.get("/a")

    assert run_virtual(main(1)) == ([], None)
    assert run_virtual(main(2)) == ([], Versioned(b"one", 0))
    assert run_virtual(main(3)) == (["create"], Versioned(b"one", 0))
    assert run_virtual(main(4)) == (["create"], Versioned(b"two", 1))


def test_a_crashed_process_cleans_nothing_up():
    async def main():
        server, faults = MemoryMetadata(), Faults(random.Random(0))
        client = server.connect(faults)

        async def work():
            try:
                await client.create("/a", b"")
            finally:
                await client.create("/cleaned-up", b"")

        task = asyncio.get_running_loop().create_task(work())
        faults.on_crash = task.cancel
        faults.crash_after(2)
        await asyncio.wait([task])
        assert task.cancelled()
        return server.children("/")

    assert run_virtual(main()) == ["a"]


def test_a_crashed_process_gets_no_answer():
    async def main():
        faults = Faults(random.Random(0))
        client = MemoryMetadata().connect(faults)
        faults.crash_after(1)
        await client.get("/")

    with pytest.raises(DeadlockError):
        run_virtual(main())


def test_rates_are_followed_and_one_seed_draws_the_same():
    async def main(seed):
        rates = FaultRates(refused=0.2, request_lost=0.1, reply_lost=0.1, delay_s_max=1)
        faults = Faults(random.Random(seed), rates_by_prefix={"metadata.set": rates})
        client = MemoryMetadata().connect(faults)
        await client.create("/a", b"")
        trace: list[str] = []
        for _ in range(1000):
            try:
                await client.set("/a", b"", version=-1)
                trace.append("done")
            except RetryableError:
                trace.append("refused")
            except IndeterminateError:
                trace.append("in doubt")
        found = await client.get("/a")
        assert found is not None
        return trace, found.version

    trace, version = run_virtual(main(1))
    assert 150 < trace.count("refused") < 250
    assert 150 < trace.count("in doubt") < 250
    assert trace.count("done") < version < 1000 - trace.count("refused")
    assert run_virtual(main(1)) == (trace, version)
    assert run_virtual(main(2))[0] != trace
