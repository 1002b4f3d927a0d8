"""Real leaders, workers and manifests together, under faults, judged as the bucket changes.

The rules are those of ``tests.simulation.manifests``: one chain that never goes back, no local copy
given up before the newest generation names the other one, no object of a trimmed ledger deleted
before a generation says so; and metadata from a backup delete nothing at all.
"""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.simulation.manifests import ManifestRules, is_manifest
from tests.simulation.servers import WatchedBucket
from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, TOPICS, World
from tests.unit.scheduler.manifests_kit import backup, offloaded, restore
from tests.unit.scheduler.test_scheduler import ENTRIES, HOUR, faults, scheduler
from tierlog.adapters.memory.faults import FaultRates, Faults
from tierlog.format.keys import parse_key
from tierlog.model.errors import RefusedError
from tierlog.model.manifest import copy_of
from tierlog.model.offload import GONE_FROM_TIER1, OffloadState
from tierlog.model.policy import Policy
from tierlog.model.stream import StreamLifecycle
from tierlog.runtime.worker import WorkerLimits, run_worker
from tierlog_scheduler.manifests import RESTORED, BucketManifests


class Judged:
    """A world whose bucket is watched."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed=seed)
        self.complaints: list[str] = []
        self.rules = ManifestRules(lambda rule, text: self.complaints.append(f"{rule}: {text}"))
        self.bucket = WatchedBucket(self.world.clock)
        self.bucket.watcher = self  # type: ignore[assignment]
        self.world.bucket = self.bucket

    def upload_begun(self, key: str) -> None:
        """See ``Watcher``."""

    def object_stored(self, key: str, before: bytes | None, body: bytes) -> None:
        """See ``Watcher``."""
        if is_manifest(key):
            self.rules.stored(key, before, body)

    def object_deleted(self, key: str) -> None:
        """See ``Watcher``."""
        if is_manifest(key):
            self.rules.deleted(key)
            return
        parsed = parse_key("", key)
        assert parsed is not None
        for chain in self.rules._chains.values():
            kept = chain.ledgers.get(parsed.ledger_id)
            if kept is not None and kept.uuid == parsed.uuid:
                self.complaints.append(f"{key} was deleted, which the newest manifest names")

    @asynccontextmanager
    async def running(self, given: Faults | None = None, *, leaders: int = 2, workers: int = 2):
        """Run leaders and workers; judge what they did to local copies."""
        world, stop = self.world, asyncio.Event()
        gates = []
        async with asyncio.TaskGroup() as group:
            for _ in range(leaders):
                gate = BucketManifests(world.manifests(given), world.catalog(given))
                gates.append(gate)
                leader = scheduler(world, given, manifests=gate)
                group.create_task(leader.run(stop))
            for number in range(workers):
                source = world.queue.source([TOPICS.requested], group="offloader", faults=given)
                group.create_task(
                    run_worker(
                        source,
                        world.worker(given, name=f"w{number}").handle,
                        stop=stop,
                        limits=WorkerLimits(in_flight_max=2, drain_s_max=5),
                    )
                )
            watching = group.create_task(self._watch_local(stop))
            try:
                yield gates
            finally:
                stop.set()
                watching.cancel()
        assert not self.complaints, self.complaints[:3]

    async def _watch_local(self, stop: asyncio.Event) -> None:
        """A local copy that is given up is named by a manifest."""
        catalog, seen = self.world.catalog(), set()
        while not stop.is_set():
            for ledger_id in list(self.world.ledgers):
                context = await catalog.contexts.get(ledger_id)
                gone = context is not None and context.state in GONE_FROM_TIER1
                if gone and context is not None and ledger_id not in seen:
                    seen.add(ledger_id)
                    self.rules.given_up(context)
            await asyncio.sleep(20)

    async def at_rest(self) -> None:
        """The newest manifest says what the metadata say."""
        catalog = self.world.catalog()
        snapshot = await catalog.streams.snapshot(STREAM)
        contexts = [await self.world.context(one.ledger_id) for one in snapshot.ledgers]
        self.rules.at_rest(snapshot.ledgers, contexts)
        for context in contexts:
            copy = copy_of(context)
            assert copy is None or copy.location.data_key in self.bucket.objects
        assert not self.complaints, self.complaints[:3]

    def attempts(self) -> set[str]:
        return {key for key in self.bucket.objects if not is_manifest(key)}


@pytest.mark.parametrize("seed", range(4))
def test_two_leaders_two_workers_and_faults_everywhere(seed: int) -> None:
    async def main() -> None:
        judged = Judged(seed)
        world = judged.world
        world.queue.rates = type(world.queue.rates)(repeated=0.2, lost=0.2, delay_s_max=30)
        claimed = await world.stream(
            policy=Policy(
                offload_time_ms=0, deletion_lag_ms=60_000, retention_time_ms=3 * 3_600_000
            )
        )
        given = faults(seed, refused=0.03, request_lost=0.03, reply_lost=0.03, delay_s_max=0.2)
        async with judged.running(given):
            for _ in range(8):
                await world.seal(claimed, ENTRIES)
                await asyncio.sleep(600)
            await asyncio.sleep(1.5 * HOUR)
            given.rates = FaultRates()
            last = await world.seal(claimed, ENTRIES)
            await asyncio.sleep(2.9 * HOUR)
        snapshot = await world.catalog().streams.snapshot(STREAM)
        assert [one.ledger_id for one in snapshot.ledgers] == [last]
        assert snapshot.stream.deleting == ()
        await judged.at_rest()
        context = await world.context(last)
        assert context.location is not None
        assert judged.attempts()
        assert judged.attempts() <= set(context.location.keys)

    run_virtual(main(), until_s=100 * HOUR)


def test_a_local_copy_goes_in_the_very_pass_that_finds_its_lag_over() -> None:
    async def main() -> None:
        judged = Judged()
        world = judged.world
        claimed = await world.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=0))
        ledger_id = await offloaded(world, claimed)
        gate = BucketManifests(world.manifests(), world.catalog())
        leader = scheduler(world, manifests=gate)
        await leader.begin()
        await leader.run_pass()
        assert (await world.context(ledger_id)).state.name == "TIER1_DELETED"
        assert not judged.complaints

    run_virtual(main())


@pytest.mark.parametrize("out", ["objects.", "objects.put", "objects.list"])
def test_while_no_manifest_can_be_written_or_found_nothing_is_deleted(out: str) -> None:
    async def main() -> None:
        judged = Judged()
        world = judged.world
        claimed = await world.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=1000))
        ledger_id = await offloaded(world, claimed)
        given = faults()
        given.outages = {out}
        async with judged.running(given, leaders=1):
            await asyncio.sleep(HOUR)
            assert (await world.context(ledger_id)).state.name == "COMPLETE"
            given.outages = set()
            await asyncio.sleep(120)
            assert (await world.context(ledger_id)).state.name == "TIER1_DELETED"

    run_virtual(main())


def test_metadata_from_a_backup_delete_nothing_whatever_their_thresholds_say() -> None:
    async def main() -> None:
        judged = Judged()
        world = judged.world
        policy = Policy(offload_time_ms=0, deletion_lag_ms=60_000, retention_time_ms=2 * 3_600_000)
        claimed = await world.stream(policy=policy)
        for _ in range(3):
            await world.seal(claimed, ENTRIES)
        kept: dict[str, Any] = backup(world.metadata)
        async with judged.running(leaders=1):
            await asyncio.sleep(600)
            await world.seal(claimed, ENTRIES)
            await asyncio.sleep(600)
        before = dict(judged.bucket.objects)
        restore(world.metadata, kept)
        async with judged.running(leaders=2) as gates:
            await asyncio.sleep(5 * HOUR)
            assert (gates[0].stopped(STREAM) or gates[1].stopped(STREAM) or "").startswith(RESTORED)
        # Nothing that was there is gone; new attempts of old metadata may be beside it.
        assert before.items() <= judged.bucket.objects.items()
        manifests = {key for key in judged.bucket.objects if is_manifest(key)}
        assert manifests == {key for key in before if is_manifest(key)}
        catalog = world.catalog()
        snapshot = await catalog.streams.snapshot(STREAM)
        assert len(snapshot.ledgers) == 3
        assert snapshot.stream.deleting == ()
        for listed in snapshot.ledgers:
            assert await catalog.ledgers.get(listed.ledger_id) is not None

    run_virtual(main())


def test_a_deleted_stream_leaves_a_manifest_that_says_so() -> None:
    async def main() -> None:
        judged = Judged()
        world = judged.world
        claimed = await world.stream(policy=Policy(offload_time_ms=0))
        for _ in range(2):
            await world.seal(claimed, ENTRIES)
        async with judged.running():
            await asyncio.sleep(60)
            await world.catalog().retention.begin_stream_deletion(STREAM)
            await asyncio.sleep(1800)
        with pytest.raises(RefusedError):
            await world.catalog().streams.snapshot(STREAM)
        assert not judged.attempts()
        known = await world.manifests().newest(STREAM, claimed.incarnation)
        assert known.head is not None
        assert known.head.lifecycle is StreamLifecycle.DELETING
        assert not known.ledgers

    run_virtual(main())


def test_an_empty_stream_is_not_removed_before_a_manifest_says_that_it_goes() -> None:
    async def main() -> None:
        judged = Judged()
        world = judged.world
        claimed = await world.stream()
        given = faults()
        async with judged.running(given, leaders=1):
            await asyncio.sleep(60)
            given.outages = {"objects.put"}
            await world.catalog().retention.begin_stream_deletion(STREAM)
            await asyncio.sleep(600)
            await world.catalog().streams.snapshot(STREAM)
            given.outages = set()
            await asyncio.sleep(60)
        with pytest.raises(RefusedError):
            await world.catalog().streams.snapshot(STREAM)
        known = await world.manifests().newest(STREAM, claimed.incarnation)
        assert known.head is not None
        assert known.head.lifecycle is StreamLifecycle.DELETING

    run_virtual(main())


def test_a_local_deletion_that_a_backup_has_begun_is_not_ended() -> None:
    async def main() -> None:
        judged = Judged()
        world = judged.world
        claimed = await world.stream(policy=Policy(offload_time_ms=0, deletion_lag_ms=0))
        ledger_id = await offloaded(world, claimed)
        async with judged.running(leaders=1):
            await asyncio.sleep(60)
        catalog = world.catalog()
        deleted = await world.context(ledger_id)
        # As if it were so, of an attempt that the bucket's own manifest does not name.
        begun = replace(
            deleted, state=OffloadState.TIER1_DELETING, bookkeeper_deleted=False, uuid=UUID(int=8)
        )
        await catalog.contexts.change(ledger_id, lambda _: begun, applied=lambda one: one == begun)
        gate = BucketManifests(world.manifests(), world.catalog())
        leader = scheduler(world, manifests=gate)
        await leader.begin()
        for _ in range(5):
            await leader.run_pass()
        assert (gate.stopped(STREAM) or "").startswith(RESTORED)
        assert (await world.context(ledger_id)).state is OffloadState.TIER1_DELETING

    run_virtual(main())
