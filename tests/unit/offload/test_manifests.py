"""Generations in a bucket: one writer wins, what is read is whole, and little is written twice."""

import random
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.format.test_manifest import ledger
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import FaultRates, Faults, no_faults
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.format import manifest as fmt
from tierlog.format.manifest import cluster_key, parse_manifest_key
from tierlog.model.errors import CorruptError, TierlogError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import ClusterManifest, KeptLedger, ManifestHead
from tierlog.model.node import Cluster
from tierlog.offload.manifests import (
    CLUSTER_KEPT,
    KnownManifest,
    ManifestLimits,
    ManifestStore,
)
from tierlog.ports.objects import ObjectExistsError

STREAM = StreamName("orders")
INCARNATION = UUID(int=2)
CLUSTER = UUID(int=77)
HEAD = ManifestHead(stream=STREAM, incarnation=INCARNATION, created_ms=7)
QUICK = ManifestLimits(changes_min=4, changes_max=8)


class Bucket:
    """A bucket, and stores over it."""

    def __init__(self) -> None:
        self.clock = SimClock()
        self.ids = SeededIds(random.Random(1))
        self.objects = MemoryObjects(self.clock)

    def store(
        self, faults: Faults | None = None, *, limits: ManifestLimits = QUICK, prefix: str = ""
    ) -> ManifestStore:
        return ManifestStore(
            self.objects.connect(faults or no_faults()),
            cluster_id=CLUSTER,
            clock=self.clock,
            ids=self.ids,
            key_prefix=prefix,
            limits=limits,
        )

    def generations(self) -> list[int]:
        keys = [parse_manifest_key("", key) for key in sorted(self.objects.objects)]
        return [key.generation for key in keys if key is not None and not key.is_part]


def put(*numbers: int) -> dict[LedgerId, KeptLedger]:
    return {LedgerId(number): fmt.keep(ledger(number)) for number in numbers}


async def grown(store: ManifestStore, known: KnownManifest, upto: int) -> KnownManifest:
    """Write generations until there are so many, one ledger each."""
    while known.generation < upto:
        known = await store.write(known, HEAD, put=put(known.generation))
    return known


def same(one: KnownManifest, other: KnownManifest) -> bool:
    return (one.generation, one.sha256, one.head, dict(one.ledgers)) == (
        other.generation,
        other.sha256,
        other.head,
        dict(other.ledgers),
    )


def test_what_was_written_is_read_by_whoever_comes() -> None:
    async def main() -> None:
        bucket = Bucket()
        store = bucket.store()
        known = await store.newest(STREAM, INCARNATION)
        assert (known.generation, known.head, dict(known.ledgers)) == (0, None, {})
        for _ in range(30):
            known = await store.write(
                known,
                HEAD,
                put=put(known.generation, 1000),
                removed=[LedgerId(known.generation - 3)],
            )
            found = await bucket.store().newest(STREAM, INCARNATION)
            assert same(found, known)
            assert found.cluster_id == CLUSTER
            # A writer that goes on from what it read decides as the one that wrote it.
            assert found.snapshot_generation == known.snapshot_generation
            assert found.snapshot_len == known.snapshot_len
            assert found.changes_len == known.changes_len
        assert list(known.ledgers) == [27, 28, 29, 1000]
        assert await store.streams() == {(STREAM, INCARNATION): 30}

    run_virtual(main())


def test_a_change_writes_the_change_alone_and_snapshots_come_from_time_to_time() -> None:
    async def main() -> None:
        bucket = Bucket()
        store = bucket.store(limits=ManifestLimits(changes_min=4, changes_max=50))
        known = await store.newest(STREAM, INCARNATION)
        known = await store.write(known, HEAD, put=put(*range(200)))
        lengths = {}
        for _ in range(40):
            known = await store.write(known, HEAD, put=put(1000 + known.generation))
            newest = max(bucket.objects.objects)
            lengths[known.generation] = len(bucket.objects.objects[newest][1])
        whole = len(fmt.keep(ledger(1)).packed) * 200
        small = [length for length in lengths.values() if length < whole / 10]
        large = [length for length in lengths.values() if length >= whole / 10]
        assert large
        assert len(small) >= 38
        # Each but the last one comes once the changes are as long as the one before.
        assert sum(large) - max(large) <= sum(small)

    run_virtual(main())


def test_snapshots_before_the_last_but_one_are_pruned() -> None:
    async def main() -> None:
        bucket = Bucket()
        store = bucket.store()
        known = await store.newest(STREAM, INCARNATION)
        counts, snapshots = set(), [1]
        for upto in range(1, 100):
            known = await grown(store, known, upto)
            generations = bucket.generations()
            assert generations == list(range(generations[0], upto + 1))
            counts.add(len(generations))
            if known.snapshot_generation != snapshots[-1]:
                snapshots.append(known.snapshot_generation)
            # Whoever reads from the snapshot before the newest is not disturbed.
            assert generations[0] <= snapshots[max(0, len(snapshots) - 2)]
            assert same(await bucket.store().newest(STREAM, INCARNATION), known)
        assert max(counts) <= 2 * (QUICK.changes_max + 1)

    run_virtual(main())


def test_of_two_leaders_one_writes_and_the_other_starts_over() -> None:
    async def main() -> None:
        bucket = Bucket()
        store, other = bucket.store(), bucket.store()
        known = await grown(store, await store.newest(STREAM, INCARNATION), 3)
        await store.write(known, HEAD, put=put(50))
        before = dict(bucket.objects.objects)
        with pytest.raises(ObjectExistsError):
            await other.write(known, HEAD, put=put(60))
        assert bucket.objects.objects == before
        newest = await other.newest(STREAM, INCARNATION)
        assert (newest.generation, LedgerId(50) in newest.ledgers) == (4, True)

    run_virtual(main())


def test_a_leader_that_slept_until_its_number_was_pruned_is_refused_too() -> None:
    async def main() -> None:
        bucket = Bucket()
        store = bucket.store()
        known = await grown(store, await store.newest(STREAM, INCARNATION), 1)
        newest = await grown(store, known, 40)
        assert 2 not in bucket.generations()
        with pytest.raises(ObjectExistsError, match="pruned before"):
            await bucket.store().write(known, HEAD, put=put(999))
        found = await bucket.store().newest(STREAM, INCARNATION)
        assert same(found, newest)
        # What it wrote goes with the next pruning.
        await grown(store, newest, 60)
        assert 2 not in bucket.generations()

    run_virtual(main())


@pytest.mark.parametrize("seed", range(8))
def test_two_leaders_under_faults_make_one_chain(seed: int) -> None:
    async def main() -> None:
        bucket = Bucket()
        rng = random.Random(seed)
        told: dict[int, set[int]] = {}
        number = 100
        stores = []
        for _ in range(2):
            rates = FaultRates(refused=0.05, request_lost=0.05, reply_lost=0.1)
            stores.append(bucket.store(Faults(random.Random(rng.random()), rates=rates)))
        views: list[KnownManifest | None] = [None, None]
        for _ in range(150):
            turn = rng.randrange(2)
            try:
                known = views[turn] or await stores[turn].newest(STREAM, INCARNATION)
                number += 1
                views[turn] = None
                known = await stores[turn].write(known, HEAD, put=put(number))
                told[number] = {known.generation}
                views[turn] = known
            except CorruptError:
                raise
            except TierlogError:
                continue
        newest = await bucket.store().newest(STREAM, INCARNATION)
        # Whatever was told to be written is there, each in a generation of its own.
        assert told.keys() <= newest.ledgers.keys()
        assert len({min(one) for one in told.values()}) == len(told)

    run_virtual(main())


def test_a_long_list_lies_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmt, "PART_LEDGERS", 10)

    async def main() -> None:
        bucket = Bucket()
        store = bucket.store()
        known = await store.newest(STREAM, INCARNATION)
        known = await store.write(known, HEAD, put=put(*range(95)))
        parts = [key for key in bucket.objects.objects if key.endswith(".part")]
        assert len(parts) == 10
        found = await bucket.store().newest(STREAM, INCARNATION)
        assert list(found.ledgers) == list(range(95))
        # So many new ledgers at once are a snapshot again.
        known = await store.write(known, HEAD, put=put(*range(100, 111)))
        assert known.snapshot_generation == 2
        known = await store.write(known, HEAD, put=put(200))
        assert same(await bucket.store().newest(STREAM, INCARNATION), known)
        bucket.objects.damage(parts[0], 60)
        known = await grown(store, known, 40)
        assert not set(parts) & set(bucket.objects.objects)
        newest = max(key for key in bucket.objects.objects if key.endswith(".part"))
        bucket.objects.damage(newest, 60)
        with pytest.raises(CorruptError, match="digest"):
            await bucket.store().newest(STREAM, INCARNATION)

    run_virtual(main())


def test_a_damaged_or_missing_link_is_corrupt_and_never_an_empty_manifest() -> None:
    async def main() -> None:
        bucket = Bucket()
        store = bucket.store()
        known = await grown(store, await store.newest(STREAM, INCARNATION), 4)
        whole = dict(bucket.objects.objects)
        for key in sorted(whole):
            for at in (0, 25, len(whole[key][1]) - 1):
                bucket.objects.damage(key, at)
                with pytest.raises(CorruptError):
                    await bucket.store().newest(STREAM, INCARNATION)
                bucket.objects.damage(key, at)
        for number in (1, 2, 3):
            key = fmt.manifest_key("", STREAM, INCARNATION, number)
            taken = bucket.objects.objects.pop(key)
            with pytest.raises(CorruptError, match="is not there"):
                await bucket.store().newest(STREAM, INCARNATION)
            bucket.objects.objects[key] = taken
        # Whole, but another one than its key says; and one that was not written behind the other.
        one, two = (fmt.manifest_key("", STREAM, INCARNATION, number) for number in (1, 2))
        bucket.objects.objects[two] = whole[one]
        with pytest.raises(CorruptError, match="than its key says"):
            await bucket.store().newest(STREAM, INCARNATION)
        bucket.objects.objects[two] = whole[two]
        assert same(await bucket.store().newest(STREAM, INCARNATION), known)
        other = Bucket()
        strange = await other.store().write(
            KnownManifest(stream=STREAM, incarnation=INCARNATION), HEAD, put=put(9)
        )
        await other.store().write(strange, HEAD, put=put(10))
        bucket.objects.objects[two] = other.objects.objects[two]
        with pytest.raises(CorruptError, match="was not written behind"):
            await bucket.store().newest(STREAM, INCARNATION)

    run_virtual(main())


def test_an_object_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmt, "MANIFEST_LEN_MAX", 60)

    async def main() -> None:
        bucket = Bucket()
        key = fmt.manifest_key("", STREAM, INCARNATION, 1)
        bucket.objects.put(key, bytes(61), {}, if_none_match=False)
        with pytest.raises(CorruptError, match="61 bytes"):
            await bucket.store().newest(STREAM, INCARNATION)

    run_virtual(main())


def test_the_cluster_s_own_manifest() -> None:
    async def main() -> None:
        bucket = Bucket()
        store = bucket.store(prefix="p")
        assert await store.cluster(CLUSTER) == (0, None)
        first = ClusterManifest(cluster=Cluster(cluster_id=CLUSTER, created_ms=1))
        await store.write_cluster(1, first)
        second = ClusterManifest(
            cluster=Cluster(cluster_id=CLUSTER, created_ms=1, ledger_id_base=5)
        )
        await store.write_cluster(2, second)
        with pytest.raises(ObjectExistsError):
            await store.write_cluster(2, first)
        assert await store.cluster(CLUSTER) == (2, second)
        assert await store.clusters() == {CLUSTER: 2}
        assert await bucket.store().clusters() == {}

    run_virtual(main())


def test_of_the_cluster_s_own_manifest_the_newest_generations_are_kept() -> None:
    async def main() -> None:
        bucket = Bucket()
        store, objects = bucket.store(), bucket.objects.objects
        other = ClusterManifest(cluster=Cluster(cluster_id=UUID(int=5), created_ms=1))
        await store.write_cluster(1, other)
        for number in range(1, 31):
            cluster = Cluster(cluster_id=CLUSTER, created_ms=1, ledger_id_base=number)
            await store.write_cluster(number, ClusterManifest(cluster=cluster))
        own = [cluster_key("", CLUSTER, number) for number in range(31 - CLUSTER_KEPT, 31)]
        assert sorted(objects) == sorted([*own, cluster_key("", UUID(int=5), 1)])
        # A leader that slept until its number was free again.
        late = ClusterManifest(cluster=Cluster(cluster_id=CLUSTER, created_ms=1))
        with pytest.raises(ObjectExistsError, match="pruned before"):
            await store.write_cluster(3, late)
        generation, newest = await store.cluster(CLUSTER)
        assert newest is not None
        assert (generation, newest.cluster.ledger_id_base) == (30, 30)

    run_virtual(main())
