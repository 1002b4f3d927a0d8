"""What people wanted of a stream since the backup that its metadata came back from.

Must hold: a pause, or a wish that ledgers be offloaded, that the manifest knows and the metadata do
not, stops deletions as any other sign of old metadata; so nothing goes that somebody wanted kept.
"""

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.manifests_kit import ENTRIES, Leader, backup, newest, offloaded, restore
from tests.unit.scheduler.test_older_policies import SHORT, leading, listed
from tierlog.model.manifest import said_older
from tierlog.model.policy import Policy
from tierlog.model.stream import OffloadPause
from tierlog_scheduler.manifests import RESTORED


def why(leader: Leader) -> str:
    return leader.gate.stopped(STREAM) or "nothing stops it"


async def pause_in_bucket(world: World) -> OffloadPause | None:
    head = (await newest(world)).head
    assert head is not None
    return head.offload_pause


def test_a_stream_that_was_paused_since_is_left_as_it_is():
    async def main():
        world = World()
        streams = world.catalog().streams
        claimed = await world.stream(policy=SHORT)
        ledgers = [await offloaded(world, claimed) for _ in range(3)]
        # One before does not count.
        await streams.pause_offload(STREAM)
        await streams.resume_offload(STREAM)
        before = backup(world.metadata)
        await streams.pause_offload(STREAM, "a lawsuit")
        await leading(world, Leader(world))
        restore(world.metadata, before)
        leader = Leader(world)
        found = await leading(world, leader)
        await found.run_pass()
        assert await listed(world) == ledgers
        assert why(leader).startswith(f"{RESTORED}: the stream was paused")
        pause = await pause_in_bucket(world)
        assert pause is not None
        assert pause.cause == "a lawsuit"
        # Who pauses it anew, and ends that, knows what they do.
        await streams.pause_offload(STREAM)
        await found.run_pass()
        assert leader.gate.stopped(STREAM) is None
        await streams.resume_offload(STREAM)
        await found.run_pass()
        await found.run_pass()
        assert await listed(world) == ledgers[-1:]

    run_virtual(main())


def test_a_new_pause_is_newer_than_all_that_a_backup_has_forgotten():
    """By what lies in a copy of the bucket the stream would be older for ever."""

    async def main():
        world = World()
        streams = world.catalog().streams
        await world.stream()
        before = backup(world.metadata)
        for _ in range(3):
            await streams.resume_offload(STREAM)
            await streams.pause_offload(STREAM)
        await leading(world, Leader(world))
        copied = (await newest(world)).head
        restore(world.metadata, before)
        world.clock.jump_wall(1)
        await streams.pause_offload(STREAM)
        stream = await streams.resume_offload(STREAM)
        leader = Leader(world)
        await leading(world, leader)
        assert leader.gate.stopped(STREAM) is None
        assert copied is not None
        assert said_older(stream, copied) is None

    run_virtual(main())


def test_a_pause_that_ended_while_nobody_led_is_no_sign_of_a_backup():
    async def main():
        world = World()
        streams = world.catalog().streams
        await world.stream()
        await streams.pause_offload(STREAM)
        await leading(world, Leader(world))
        await streams.resume_offload(STREAM)
        leader = Leader(world)
        await leading(world, leader)
        assert leader.gate.stopped(STREAM) is None
        assert await pause_in_bucket(world) is None

    run_virtual(main())


def test_what_was_to_be_offloaded_first_is_not_trimmed_by_who_has_forgotten_it():
    async def main():
        world = World()
        claimed = await world.stream(policy=Policy(retention_size_bytes=1))
        ledgers = [await world.seal(claimed, ENTRIES) for _ in range(2)]
        before = backup(world.metadata)
        await world.catalog().streams.want_offloaded(STREAM, ledgers[0])
        await leading(world, Leader(world))
        assert await listed(world) == ledgers
        restore(world.metadata, before)
        leader = Leader(world)
        found = await leading(world, leader)
        await found.run_pass()
        assert await listed(world) == ledgers
        assert why(leader).startswith(f"{RESTORED}: the wish that ledgers up to")
        await world.catalog().streams.want_offloaded(STREAM, ledgers[1])
        await found.run_pass()
        assert leader.gate.stopped(STREAM) is None
        assert await listed(world) == ledgers

    run_virtual(main())
