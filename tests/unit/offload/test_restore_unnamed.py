"""A restore tells what lies in the bucket and no manifest names."""

from dataclasses import replace

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.offload.test_restore import OTHER, Site, entries
from tests.unit.offload.world import STREAM
from tierlog.format import keys, paths
from tierlog.format.keys import parse_key
from tierlog.format.manifest import parse_manifest_key
from tierlog.model.errors import CorruptError
from tierlog.model.ids import NodeId
from tierlog.offload.restore import Verdict


def adopt(site: Site) -> None:
    """Let all copies say that they are of the site's cluster."""
    assert site.cluster is not None
    objects = site.world.bucket.objects
    for key, (info, body) in list(objects.items()):
        if parse_key("", key) is not None:
            metadata = {**info.metadata, keys.CLUSTER_ID: str(site.cluster.cluster_id)}
            objects[key] = (replace(info, metadata=metadata), body)


async def two_streams() -> Site:
    site = Site()
    await site.copied(await site.start(), entries(1))
    await site.world.catalog().streams.create(OTHER)
    other = await site.world.catalog().streams.claim(OTHER, NodeId("n"))
    for seed in (2, 3):
        await site.copied(other, entries(seed))
    await site.write_manifests()
    return site


def test_a_stream_whose_manifests_are_gone_is_damage() -> None:
    async def main() -> None:
        site = await two_streams()
        objects = site.world.bucket.objects
        for key in [key for key in objects if f"streams/{OTHER}/" in key]:
            del objects[key]
        site.lose_metadata()
        # Of another cluster, as far as they say.
        assert (await site.restorer().plan()).findings == ()
        adopt(site)
        plan = await site.restorer().plan()
        (finding,) = plan.findings
        assert (finding.verdict, finding.stream) == (Verdict.DAMAGED, OTHER)
        assert "2 ledgers lie there, the first 1," in finding.cause
        with pytest.raises(CorruptError, match="no manifest of the stream"):
            plan.check(accept_loss=True, accept_damage=False)
        plan.check(accept_loss=False, accept_damage=True)

    run_virtual(main())


def test_a_stream_made_anew_is_not_accounted_for_by_the_one_before() -> None:
    async def main() -> None:
        site = await two_streams()
        objects, catalog = site.world.bucket.objects, site.world.catalog()
        await catalog.retention.begin_stream_deletion(OTHER)
        await site.write_manifests()
        await catalog.store.delete(paths.stream_path(OTHER), version=-1)
        site.world.clock.advance(5)
        await catalog.streams.create(OTHER)
        late = await site.copied(await catalog.streams.claim(OTHER, NodeId("n")), entries(5))
        before = set(objects)
        await site.write_manifests()
        for key in [one for one in set(objects) - before if f"streams/{OTHER}/" in one]:
            del objects[key]
        adopt(site)
        site.lose_metadata()
        found = {one.verdict: one for one in (await site.restorer().plan()).findings}
        assert set(found) == {Verdict.SKIPPED, Verdict.DAMAGED}
        assert found[Verdict.DAMAGED].stream == OTHER
        assert f"1 ledgers lie there, the first {late}," in found[Verdict.DAMAGED].cause

    run_virtual(main())


def test_copies_behind_the_newest_manifest_are_told_and_leftovers_are_not() -> None:
    async def main() -> None:
        site = await two_streams()
        world = site.world
        claimed = await world.catalog().streams.claim(STREAM, NodeId("n"))
        late = await site.copied(claimed, entries(4))
        # What another attempt of a ledger left that comes back.
        for key in list(world.bucket.objects):
            found = parse_key("", key)
            if found is not None and found.ledger_id == 0:
                left = key.replace(str(found.uuid), str(world.ids.uuid()))
                world.bucket.objects[left] = world.bucket.objects[key]
        adopt(site)
        site.lose_metadata()
        plan = await site.restorer().plan()
        (finding,) = plan.findings
        assert (finding.verdict, finding.stream) == (Verdict.UNNAMED, STREAM)
        assert f"the first {late}," in finding.cause
        plan.check(accept_loss=False, accept_damage=False)
        # A manifest that can't be read is told once.
        for key in [key for key in world.bucket.objects if f"streams/{STREAM}/" in key]:
            assert parse_manifest_key("", key) is not None
            world.bucket.damage(key, 60)
        plan = await site.restorer().plan()
        assert [(one.verdict, one.stream) for one in plan.findings] == [(Verdict.DAMAGED, STREAM)]

    run_virtual(main())
