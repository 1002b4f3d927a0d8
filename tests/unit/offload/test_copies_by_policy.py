"""What is kept of a copy, and how much of it is looked at, is what the stream's policy says.

protocols.md section 3, steps 7 and 9: a SHA-256 of the data object by policy; tier 2 is verified
by a sample or in full, by policy, before the local copy goes.
"""

import hashlib

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.scrubs import BOTH, scrub
from tests.unit.offload.test_repair import APPENDS, offloaded
from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.test_scheduler import ENTRIES, scheduler
from tierlog.format.side import SideObject
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.policy import Policy
from tierlog.offload.driver import BlockOffloader
from tierlog.offload.verify import ReadBack, sampled

PAID = StreamName("shop.paid")
GRAIN = 64


@pytest.mark.parametrize("setting", [False, True])
@pytest.mark.parametrize(
    ("cluster", "namespace", "own", "wanted"),
    [
        (None, None, None, None),
        (True, None, None, True),
        (True, False, None, False),
        (False, False, True, True),
        (None, None, False, False),
    ],
)
def test_a_copy_has_a_digest_of_its_data_where_the_policy_says_so(
    cluster, namespace, own, wanted, setting
):
    async def main():
        world = World()
        claimed = await world.stream(PAID)
        ledger_id = await world.seal(claimed, ENTRIES)
        asked = world.request(claimed, ledger_id)
        # Said after it was asked for: what holds when the attempt begins counts.
        catalog = world.catalog()
        await catalog.policies.set_level(None, Policy(data_sha256=cluster))
        await catalog.policies.set_level("shop", Policy(data_sha256=namespace))
        await catalog.streams.set_policy(PAID, Policy(data_sha256=own))
        await world.worker(data_sha256=setting).handle(asked)
        context = await world.context(ledger_id)
        assert context.copy is not None
        assert context.location is not None
        digest = hashlib.sha256(world.bucket.objects[context.location.data_key][1]).digest()
        kept = setting if wanted is None else wanted
        assert context.copy.data_sha256 == (digest if kept else b"")

    run_virtual(main())


class SetWorld(World):
    """A world whose processes have a setting for what is read back."""

    def __init__(self, setting: ReadBack) -> None:
        super().__init__()
        self.setting = setting

    def offloader(self, *given, **settings) -> BlockOffloader:
        return super().offloader(*given, **{"read_back": self.setting, **settings})


async def damage_unsampled(world: World, ledger_id: LedgerId) -> None:
    """Flip a byte in a grain that no sample reads."""
    context = await world.context(ledger_id)
    assert context.location is not None
    assert context.copy is not None
    side = SideObject.decode(world.bucket.objects[context.location.side_key][1])
    count = side.header.grain_count
    picked = sampled(count, context.copy.side_sha256)
    grain = next(one for one in range(count // 2, count) if one not in picked)
    world.bucket.damage(context.location.data_key, grain * GRAIN + 40)


@pytest.mark.parametrize("setting", list(ReadBack))
@pytest.mark.parametrize(
    ("namespace", "own", "wanted"),
    [
        (None, None, None),
        ("full", None, "full"),
        ("full", "sample", "sample"),
        ("sample", "full", "full"),
    ],
)
def test_damage_that_no_sample_sees_keeps_the_local_copy_where_all_is_read_back(
    namespace, own, wanted, setting
):
    async def main():
        world = SetWorld(setting)
        lasting = Policy(offload_time_ms=0, deletion_lag_ms=0, read_back=own)
        claimed = await world.stream(PAID, policy=lasting)
        catalog = world.catalog()
        await catalog.policies.set_level("shop", Policy(read_back=namespace))
        ledger_id = await world.seal(claimed, [bytes(200)] * 40)
        await world.worker().handle(world.request(claimed, ledger_id))
        await damage_unsampled(world, ledger_id)
        leader = scheduler(world)
        await leader.begin()
        for _ in range(3):
            await leader.run_pass()
        found = (wanted or setting.value) == "full"
        assert (await catalog.ledgers.get(ledger_id) is not None) == found
        assert ((await world.context(ledger_id)).doubt is not None) == found

    run_virtual(main())


def test_a_stream_that_asks_for_more_before_the_local_copy_goes_gets_it():
    async def main():
        world = SetWorld(ReadBack.SAMPLE)
        claimed = await world.stream(PAID, policy=Policy(offload_time_ms=0))
        ledger_id = await world.seal(claimed, [bytes(200)] * 40)
        await world.worker().handle(world.request(claimed, ledger_id))
        await damage_unsampled(world, ledger_id)
        leader = scheduler(world)
        await leader.begin()
        await leader.run_pass()
        lasting = Policy(offload_time_ms=0, deletion_lag_ms=0, read_back="full")
        await world.catalog().streams.set_policy(PAID, lasting)
        for _ in range(3):
            await leader.run_pass()
        assert (await world.context(ledger_id)).doubt is not None
        assert await world.catalog().ledgers.get(ledger_id) is not None

    run_virtual(main())


def test_a_repair_writes_and_reads_back_what_the_policy_says(monkeypatch):
    verify, seen = BlockOffloader.verify, []

    async def noted(self, *given, **how):
        seen.append(how["read_back"])
        await verify(self, *given, **how)

    monkeypatch.setattr(BlockOffloader, "verify", noted)

    async def main():
        world, was = await offloaded(APPENDS)
        lasting = Policy(data_sha256=True, read_back="full")
        await world.catalog().streams.set_policy(STREAM, lasting)
        assert was.location is not None
        world.bucket.damage(was.location.side_key, 50)
        report = await scrub(world, BOTH)
        assert [one.repaired for one in report.findings] == [
            "copied anew, from what is good in tier 2"
        ]
        now = await world.context(was.ledger_id)
        assert was.copy is not None
        assert now.copy is not None
        assert now.location is not None
        data = world.bucket.objects[now.location.data_key][1]
        assert was.copy.data_sha256 == b""
        assert now.copy.data_sha256 == hashlib.sha256(data).digest()
        assert seen == [ReadBack.FULL]

    run_virtual(main())
