"""A flush cut short anywhere: the last root is good, nothing of it is lost, nothing is half there.

Must hold: after a crash at any step, with any answer lost, whoever comes next reads all of the
checkpoint before or all of the new one, and goes on from it.
"""

import asyncio
import random
from collections.abc import Mapping

import pytest

from tests.contracts.attributes_suite import all_of, at, key_of
from tests.simulation.virtual_loop import run_virtual
from tests.unit.attributes.world import IndexWorld, Process
from tierlog.adapters.memory.faults import FaultRates, Faults, Outcome
from tierlog.model.attributes import EVENT_COUNT, AttributeKey, Checkpoint
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, RetryableError
from tierlog.model.stream import Stream

BEFORE = {key_of(number): number for number in range(60)}
CHANGES = {key_of(number): -number for number in range(30, 90)}
AFTER = BEFORE | CHANGES


def small_world() -> IndexWorld:
    """A world where the second flush closes a chunk, and trees have several levels.

    Flushes are of several objects.
    """
    return IndexWorld(chunk_objects_max=2, page_bytes=256, step_bytes=2048)


async def prepared(world: IndexWorld) -> tuple[Stream, Checkpoint]:
    stream, index = await world.stream(), world.index()
    base = await index.flush(
        stream,
        await index.load(stream),
        changes=BEFORE,
        core={EVENT_COUNT: 1},
        through=at(0, 0),
    )
    return stream, base


async def flush(process: Process, stream: Stream, base: Checkpoint) -> Checkpoint:
    return await process.index.flush(
        stream, base, changes=CHANGES, core={EVENT_COUNT: 2}, through=at(0, 1)
    )


async def check_next_owner(world: IndexWorld, stream: Stream) -> Mapping[AttributeKey, int]:
    """Become the owner, check what is there, and go on from it."""
    claimed = await world.claim(stream)
    process = world.process()
    found = await process.index.load(claimed)
    values = await all_of(process.index, found)
    assert values in (BEFORE, AFTER)
    is_new = values == AFTER
    assert (found.through, found.core) == (at(0, int(is_new)), {EVENT_COUNT: 1 + is_new})
    more = {key_of(7): 77, key_of(500): 500}
    made = await process.index.flush(
        claimed, found, changes=more, core={EVENT_COUNT: 3}, through=at(1, 0)
    )
    assert await all_of(world.index(), made) == {**values, **more}
    return values


def test_a_crash_at_every_step_leaves_the_last_good_root() -> None:
    async def crashed(steps: int) -> tuple[bool, Mapping[AttributeKey, int]]:
        world = small_world()
        stream, base = await prepared(world)
        faults = Faults(random.Random(steps))
        process = world.process(faults)
        # Pages are read anew: so reads are among the steps, too.
        task = asyncio.create_task(flush(process, stream, base))
        faults.on_crash = task.cancel
        faults.crash_after(steps)
        await asyncio.wait([task])
        done = not task.cancelled()
        if done:
            assert await all_of(world.index(), task.result()) == AFTER
        return done, await check_next_owner(world, stream)

    async def main() -> None:
        steps, outcomes = 0, set()
        done = False
        while not done:
            steps += 1
            done, values = await crashed(steps)
            outcomes.add(values == AFTER)
        assert steps > 30, "reads, an object, a list and a transaction are steps"
        assert outcomes == {True, False}

    run_virtual(main(), until_s=10_000)


def test_a_crash_while_an_index_is_made_anew_leaves_the_one_or_the_other() -> None:
    async def crashed(steps: int) -> tuple[bool, bool]:
        world = small_world()
        stream, base = await prepared(world)
        faults = Faults(random.Random(steps))
        index = world.process(faults).index
        task = asyncio.create_task(index.make_anew(stream, base, values=AFTER, good=None))
        faults.on_crash = task.cancel
        faults.crash_after(steps)
        await asyncio.wait([task])
        claimed = await world.claim(stream)
        found = await world.index().load(claimed)
        values = await all_of(world.index(), found)
        assert values in (BEFORE, AFTER)
        assert (found.through, found.core) == (base.through, base.core)
        made = await world.index().flush(
            claimed, found, changes={key_of(7): 77}, core={}, through=at(0, 1)
        )
        assert await all_of(world.index(), made) == {**values, key_of(7): 77}
        return not task.cancelled(), values == AFTER

    async def main() -> None:
        steps, outcomes, done = 0, set(), False
        while not done:
            steps += 1
            done, is_new = await crashed(steps)
            outcomes.add(is_new)
        assert steps > 15
        assert outcomes == {True, False}

    run_virtual(main(), until_s=10_000)


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.REQUEST_LOST, Outcome.REPLY_LOST])
def test_any_lost_answer_is_settled_or_leaves_the_last_good_root(outcome: Outcome) -> None:
    async def lost(number: int, name: str) -> bool:
        """Let the ``number``-th call of that name fail; False when there is none so late."""
        world = small_world()
        stream, base = await prepared(world)
        faults = Faults(random.Random(number))
        process = world.process(faults)
        for _ in range(number):
            faults.next(name, Outcome.ANSWERED)
        faults.next(name, outcome)
        try:
            made = await flush(process, stream, base)
        except (RetryableError, IndeterminateError):
            # The same again, by the same owner.
            base = await process.index.load(stream)
            made = base if base.through == at(0, 1) else await flush(process, stream, base)
        assert await all_of(world.index(), made) == AFTER
        assert await check_next_owner(world, stream) == AFTER
        return not faults._script

    async def main() -> None:
        for name in ("objects.put", "objects.get", "metadata.get", "metadata.transact"):
            number = 0
            while await lost(number, name):
                number += 1
            assert number >= 1, f"a flush calls {name}"

    run_virtual(main(), until_s=100_000)


def test_two_owners_that_race_end_in_one_history() -> None:
    async def raced(seed: int) -> bool:
        world = small_world()
        stream, base = await prepared(world)
        slow = world.process(Faults(random.Random(seed)))
        slow.faults.rates = FaultRates(delay_s_max=0.2)
        task = asyncio.create_task(flush(slow, stream, base))
        await asyncio.sleep(random.Random(seed).uniform(0, 8))
        claimed = await world.claim(stream)
        fast = world.process()
        found = await fast.index.load(claimed)
        made = await fast.index.flush(
            claimed, found, changes={key_of(1): 111}, core={}, through=at(1, 0)
        )
        await asyncio.wait([task])
        error = task.exception()
        values = await all_of(world.index(), made)
        assert values == {**(AFTER if found.through == at(0, 1) else BEFORE), key_of(1): 111}
        assert await world.index().load(claimed) == made
        published = found.through == at(0, 1)
        assert error is None or (isinstance(error, RefusedError) and error.reason is Reason.FENCED)
        assert published or error is not None, "who is told of success has published"
        return published

    async def main() -> None:
        outcomes = {await raced(seed) for seed in range(40)}
        assert outcomes == {True, False}

    run_virtual(main(), until_s=10_000)
