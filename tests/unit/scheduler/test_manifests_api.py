"""REST of manifests: whether a stream could be restored as of now, and why nothing is deleted."""

import pytest

from tests.unit.offload.world import STREAM, World
from tests.unit.scheduler.manifests_kit import Leader, backup, offloaded, restore
from tests.unit.scheduler.test_api import ask
from tests.unit.scheduler.test_attempts_api import served
from tierlog.format.manifest import cluster_key
from tierlog.model.policy import Policy


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


async def test_it_says_so_of_policies_above_the_stream_too(world):
    await world.stream()
    cluster = await world.catalog().nodes.ensure_cluster()
    kept = backup(world.metadata)
    await world.catalog().policies.set_level(None, Policy(retention_time_ms=5))
    leader = Leader(world)
    await leader.gate.record_cluster()
    await leader.visit()
    path = f"/v1/streams/{STREAM}/manifest"
    async with served(world) as session:
        assert (await ask(session, "GET", path))["deletions_stopped"] is None
        restore(world.metadata, kept)
        shown = await ask(session, "GET", path)
        assert shown["deletions_stopped"].startswith("by the cluster's manifest the policy of")
        world.bucket.damage(cluster_key("", cluster.cluster_id, 1), 30)
        assert (await ask(session, "GET", path))["deletions_stopped"] is None
