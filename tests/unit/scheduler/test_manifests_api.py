"""REST of manifests: whether a stream could be restored as of now, and why nothing is deleted."""

import pytest

from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.manifests_kit import Leader, backup, offloaded, restore
from tests.unit.scheduler.test_api import ask
from tests.unit.scheduler.test_attempts_api import served


@pytest.fixture
def world():
    return World()


async def test_it_says_what_is_named_and_what_is_not_yet(world):
    claimed = await world.stream()
    path = f"/v1/streams/{STREAM}/manifest"
    async with served(world) as session:
        nothing = await ask(session, "GET", path)
        assert (nothing["generation"], nothing["ledgers"]) == (0, 0)
        first = await offloaded(world, claimed)
        await Leader(world).visit()
        second = await offloaded(world, claimed)
        shown = await ask(session, "GET", path)
        assert (shown["generation"], shown["ledgers"], shown["copied"]) == (1, 1, 1)
        assert shown["waiting"] == [second]
        assert shown["deletions_stopped"] is None
        assert shown["trimmed_through"] is None
        assert shown["incarnation"] == str(claimed.incarnation)
        assert first not in shown["waiting"]


async def test_it_says_in_what_the_metadata_are_older(world):
    claimed = await world.stream()
    kept = backup(world.metadata)
    ledger_id = await offloaded(world, claimed)
    await Leader(world).visit()
    restore(world.metadata, kept)
    async with served(world) as session:
        shown = await ask(session, "GET", f"/v1/streams/{STREAM}/manifest")
    assert f"ledger {ledger_id} is named" in shown["deletions_stopped"]
