"""Protocols.md section 1, "Node failure while writing", and ADR-0016: ensemble changes."""

# Ids are plain numbers and names here; what is None fails the test anyway.
# mypy: disable-error-code="index,arg-type,union-attr,var-annotated,assignment"

import asyncio
import contextlib

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.ledger.small_cluster import STREAM, SmallCluster, draft, payloads
from tierlog.adapters.memory.faults import Faults, Outcome
from tierlog.catalog.change import ensure_node
from tierlog.format import paths
from tierlog.ledger.directory import NodeDirectory
from tierlog.ledger.ensemble_change import Ensembles
from tierlog.ledger.reader import Tier1ReadHandle
from tierlog.ledger.writer import LedgerWriter, WriterLimits
from tierlog.model.errors import IndeterminateError, Reason, RetryableError

pytestmark = pytest.mark.covers("A01", "D03", "D13", "D14")

LIMITS = WriterLimits(in_flight_bytes_max=1 << 20, append_timeout_s=8.0, run_bytes_max=64 * 1024)


class Client:
    """A client of a node that ends at the first error, as a connection does."""

    def __init__(self, node):
        self.node = node
        self.broken = False

    def add(self, run, *, recovery=False):
        if self.broken or self.node.down:
            self.broken = True
            raise RetryableError("hung up", remedy="Connect again")
        return self.node.add(run, recovery=recovery)

    def __getattr__(self, name):
        return getattr(self.node, name)


class Connector:
    def __init__(self, cluster):
        self.cluster = cluster
        self.stuck = set()

    async def connect(self, info):
        if info.node_id in self.stuck:
            await asyncio.sleep(100)
        if self.cluster.nodes[info.node_id].down:
            raise RetryableError(f"{info.node_id} takes no connection", remedy="Start it")
        return Client(self.cluster.nodes[info.node_id])

    async def close(self, node):
        node.broken = True


class Scene:
    """A ledger that is being written, and all that stands around it."""

    def __init__(self, count, quorums, stripe_entries=2**40, limits=LIMITS):
        self.cluster = SmallCluster(count)
        self.quorums, self.stripe_entries, self.limits = quorums, stripe_entries, limits
        self.confirmed = []
        self.faults = Faults(self.cluster.rng)
        self.connector = Connector(self.cluster)

    @contextlib.asynccontextmanager
    async def writing(self, *, away=()):
        cluster = self.cluster
        start = await cluster.start()
        self.catalog = cluster.catalog(self.faults)
        self.claimed = await start.streams.claim(STREAM, cluster.names[0])
        self.ledger_id, metadata = await cluster.open_ledger(
            start, self.claimed, quorums=self.quorums, stripe_entries=self.stripe_entries
        )
        self.nodes = NodeDirectory(self.catalog.nodes.live, self.connector)
        clients = {
            one: await self.nodes.client(one)
            for one in metadata.segments[0].ensemble
            if one not in away
        }
        self.changer = Ensembles(self.catalog, self.nodes).changer(
            self.ledger_id, clients, self.publish
        )
        self.writer = LedgerWriter(
            ledger_id=self.ledger_id,
            metadata=metadata,
            owner_epoch=self.claimed.owner_epoch,
            nodes=clients,
            limits=self.limits,
            on_confirmed=self.note,
            replace=self.changer.replace,
            on_failed=self.changer.note_failed,
        )
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.writer.run())
            yield self.writer
            task.cancel()

    async def publish(self, before, after):
        return await self.catalog.ledgers.change_ensemble(
            self.claimed, self.ledger_id, before, after
        )

    def note(self, lac):
        """Whatever is confirmed lies on its ack quorum, in the ensembles as published."""
        metadata = self.writer.metadata
        for entry_id in range(self.confirmed[-1] + 1 if self.confirmed else 0, lac + 1):
            assert (
                sum(self.holds(name, entry_id) for name in metadata.write_set(entry_id))
                >= metadata.ack_quorum
            )
        self.confirmed.append(lac)

    def holds(self, name, entry_id):
        runs = self.cluster.nodes[name].runs.get(self.ledger_id, {})
        return any(run.first_entry_id <= entry_id <= run.last_entry_id for run in runs.values())

    def send(self, *entries):
        one = draft(*entries)
        return self.writer.append(one.frames, one.offsets)

    async def published(self):
        metadata = await self.cluster.catalog().ledgers.get(self.ledger_id)
        return [
            (one.first_entry_id, "".join(n[1:] for n in one.ensemble)) for one in metadata.segments
        ]

    async def read(self, last):
        catalog = self.cluster.catalog()
        metadata = await catalog.ledgers.get(self.ledger_id)
        handle = Tier1ReadHandle(self.ledger_id, metadata, self.cluster.directory(catalog))
        return payloads([run async for runs in handle.read_runs(0, last) for run in runs])


def test_a_failed_node_is_replaced_behind_what_is_confirmed():
    async def main():
        scene = Scene(4, (3, 3, 2))
        async with scene.writing() as writer:
            scene.send(b"a")
            await asyncio.sleep(0.1)
            scene.cluster.nodes["n2"].down = True
            scene.send(b"b")
            await asyncio.sleep(0.1)
            assert scene.confirmed == [0, 1]
            assert await scene.published() == [(0, "123"), (1, "143")]
            assert writer.metadata.segments[-1].ensemble == ("n1", "n4", "n3")
            assert await writer.finish() == (1, 2)
            assert writer.lacking == ()
            assert [scene.holds(name, 1) for name in scene.cluster.names] == [
                True,
                False,
                True,
                True,
            ]

    run_virtual(main())


def test_a_segment_without_a_confirmed_entry_is_replaced_and_not_kept():
    async def main():
        scene = Scene(6, (3, 3, 2))
        async with scene.writing():
            scene.cluster.nodes["n2"].down = True
            scene.send(b"a")
            await asyncio.sleep(0.1)
            segments = await scene.published()
            assert len(segments) == 1
            assert "2" not in segments[0][1]
            assert scene.confirmed == [0]

    run_virtual(main())


def test_two_that_fail_at_once_are_replaced_and_the_writer_does_not_break():
    """Only one of three could acknowledge: the ack quorum is lost until others take over."""

    async def main():
        scene = Scene(5, (3, 3, 2))
        async with scene.writing() as writer:
            scene.send(b"a")
            await asyncio.sleep(0.1)
            scene.cluster.nodes["n2"].down = scene.cluster.nodes["n3"].down = True
            scene.send(b"b")
            scene.send(b"c")
            assert await writer.finish() == (2, 3)
            (_, (first, ensemble)) = await scene.published()
            assert (first, set(ensemble)) == (1, set("145"))

    run_virtual(main())


def test_what_a_replaced_node_acknowledged_does_not_count():
    """n3 has the run and said so; then it is replaced, and the run lies on n1 alone."""

    async def main():
        scene = Scene(4, (3, 3, 2))
        nodes = scene.cluster.nodes
        async with scene.writing() as writer:
            nodes["n2"].mute = nodes["n4"].deaf = True
            nodes["n1"].delay_s = 1.0
            scene.send(b"a")
            await asyncio.sleep(0.1)
            nodes["n3"].read_only = True
            scene.send(b"b")
            await asyncio.sleep(0.1)
            assert await scene.published() == [(0, "124")]
            assert scene.holds("n3", 0)
            await asyncio.sleep(1.5)  # n1 has acknowledged both
            assert scene.confirmed == []
            assert writer.last_add_confirmed == -1

    run_virtual(main())


def test_a_late_answer_of_a_replaced_node_does_not_count():
    async def main():
        scene = Scene(4, (3, 3, 2))
        nodes = scene.cluster.nodes
        async with scene.writing() as writer:
            nodes["n2"].mute = nodes["n4"].deaf = True
            nodes["n3"].delay_s = 1.0
            scene.send(b"a")
            nodes["n3"].delay_s, nodes["n3"].read_only = 0.0, True
            nodes["n1"].delay_s = 1.2
            scene.send(b"b")
            # In the order of the calls: the refusal is heard once the first answer is there.
            scene.writer._fail(scene.writer._replicas["n3"], RetryableError("gone", remedy="x"))
            await asyncio.sleep(0.1)
            assert await scene.published() == [(0, "124")]
            await asyncio.sleep(3)
            assert scene.confirmed == []
            assert writer.last_add_confirmed == -1

    run_virtual(main())


def test_nothing_is_confirmed_while_a_change_is_under_way():
    async def main():
        scene = Scene(4, (3, 3, 2))
        go, asked = asyncio.Event(), []
        publish = scene.publish

        async def slowly(before, after):
            asked.append(after.segments[-1].first_entry_id)
            await go.wait()
            return await publish(before, after)

        scene.publish = slowly
        async with scene.writing() as writer:
            scene.send(b"a")
            await asyncio.sleep(0.1)
            scene.cluster.nodes["n3"].down = True
            scene.send(b"b")
            await asyncio.sleep(0.1)
            scene.send(b"c")
            await asyncio.sleep(1)
            # Two of three have all of it, and said so.
            assert scene.confirmed == [0]
            assert asked == [1]
            go.set()
            await asyncio.sleep(0.1)
            assert writer.last_add_confirmed == 2
            assert await scene.published() == [(0, "123"), (1, "124")]
            assert await scene.read(1) == [b"a", b"b"]

    run_virtual(main())


def test_without_a_replacement_it_goes_on_and_asks_again_later():
    async def main():
        scene = Scene(3, (3, 3, 2))
        async with scene.writing() as writer:
            scene.cluster.nodes["n2"].down = True
            for number in range(3):
                scene.send(b"%d" % number)
                await asyncio.sleep(0.1)
            assert scene.confirmed == [0, 1, 2]
            assert await scene.published() == [(0, "123")]
            # Another machine comes.
            scene.cluster.names.append("n4")
            scene.cluster.nodes["n4"] = type(scene.cluster.nodes["n1"])("n4")
            await scene.cluster.catalog().nodes.announce(scene.cluster.info("n4"))
            await asyncio.sleep(2)
            assert await scene.published() == [(0, "123")], "an idle ledger needs nobody"
            scene.send(b"3")
            await asyncio.sleep(0.1)
            assert await scene.published() == [(0, "123"), (3, "143")]
            assert await writer.finish() == (3, 4)
            assert writer.lacking == ("n2",)

    run_virtual(main())


def test_below_the_ack_quorum_with_nobody_to_take_over_the_writer_breaks():
    async def main():
        scene = Scene(3, (3, 3, 2))
        async with scene.writing() as writer:
            scene.send(b"a")
            await asyncio.sleep(0.1)
            scene.cluster.nodes["n2"].down = scene.cluster.nodes["n3"].down = True
            scene.send(b"b")
            await asyncio.sleep(0.1)
            assert writer.failure is not None
            assert scene.confirmed == [0]

    run_virtual(main())


def test_a_node_that_is_back_takes_its_own_place_without_new_metadata():
    async def main():
        scene = Scene(3, (3, 3, 2))
        async with scene.writing() as writer:
            scene.send(b"a")
            await asyncio.sleep(0.1)
            scene.cluster.nodes["n2"].down = True
            scene.send(b"b")
            await asyncio.sleep(0.1)
            scene.cluster.nodes["n2"].down = False
            await asyncio.sleep(2)
            scene.send(b"c")
            await asyncio.sleep(0.1)
            scene.send(b"d")
            assert await writer.finish() == (3, 4)
            assert await scene.published() == [(0, "123")]
            assert [scene.holds("n2", number) for number in range(4)] == [True, False, True, True]
            assert writer.failed == ()
            assert writer.lacking == ("n2",)

    run_virtual(main())


def test_who_comes_back_has_acknowledged_nothing_that_is_open():
    """A wiped disk may stand behind the same name."""

    async def main():
        scene = Scene(3, (3, 3, 2))
        nodes = scene.cluster.nodes
        async with scene.writing() as writer:
            nodes["n1"].delay_s = 4.0
            nodes["n3"].mute = True
            scene.send(b"a")
            await asyncio.sleep(0.1)
            nodes["n2"].down = True
            scene.send(b"b")
            await asyncio.sleep(1.5)
            nodes["n2"].runs.clear()
            nodes["n2"].down, nodes["n2"].deaf = False, True
            scene.send(b"c")
            await asyncio.sleep(0.1)
            assert writer.failed == ()
            await asyncio.sleep(4)
            assert scene.confirmed == []

    run_virtual(main())


def test_a_slow_node_is_replaced_and_an_evenly_slow_ensemble_is_not():
    async def main():
        scene = Scene(4, (3, 3, 3))
        nodes = scene.cluster.nodes
        async with scene.writing() as writer:
            scene.send(b"a")
            await asyncio.sleep(0.1)
            for name in ("n1", "n2", "n3"):
                nodes[name].delay_s = 4.0
            scene.send(b"b")
            await asyncio.sleep(4.1)
            assert writer.last_add_confirmed == 1
            assert await scene.published() == [(0, "123")]
            for name in ("n1", "n2", "n3"):
                nodes[name].delay_s = 0.0
            nodes["n3"].deaf = True
            began = asyncio.get_running_loop().time()
            scene.send(b"c")
            assert await writer.finish() == (2, 3)
            assert asyncio.get_running_loop().time() - began < 3.5
            assert await scene.published() == [(0, "123"), (2, "124")]
            assert writer.lacking == ()

    run_virtual(main())


def test_a_slow_node_that_nobody_can_replace_is_waited_for():
    async def main():
        scene = Scene(2, (2, 2, 2))
        async with scene.writing() as writer:
            scene.cluster.nodes["n2"].delay_s = 6.0
            scene.send(b"a")
            assert await writer.finish() == (0, 1)
            assert writer.failed == ()

    run_virtual(main())


@pytest.mark.covers("D18")
def test_a_change_that_meets_recovery_breaks_the_writer():
    async def main():
        scene = Scene(4, (3, 3, 2))
        async with scene.writing() as writer:
            scene.send(b"a")
            await asyncio.sleep(0.1)
            await scene.cluster.catalog().ledgers.begin_recovery(scene.ledger_id)
            scene.cluster.nodes["n3"].down = True
            scene.send(b"b")
            await asyncio.sleep(0.1)
            assert writer.failure.reason is Reason.FENCED
            assert scene.confirmed in ([0], [0, 1])
            assert await scene.published() == [(0, "123")]

    run_virtual(main())


@pytest.mark.parametrize("outcome", [Outcome.REPLY_LOST, Outcome.REQUEST_LOST])
def test_a_change_whose_answer_is_lost_is_read_back(outcome):
    async def main():
        scene = Scene(4, (3, 3, 2))
        async with scene.writing() as writer:
            scene.send(b"a")
            await asyncio.sleep(0.1)
            scene.faults.next("metadata.transact", outcome)
            scene.cluster.nodes["n3"].down = True
            scene.send(b"b")
            assert await writer.finish() == (1, 2)
            assert await scene.published() == [(0, "123"), (1, "124")]
            assert writer.metadata.segments[-1].ensemble == ("n1", "n2", "n4")

    run_virtual(main())


def test_without_the_metadata_store_the_search_ends_and_the_quorum_goes_on():
    async def main():
        scene = Scene(4, (3, 3, 2))
        async with scene.writing() as writer:
            scene.send(b"a")
            await asyncio.sleep(0.1)
            scene.faults.outages.add("metadata.")
            scene.cluster.nodes["n3"].down = True
            scene.send(b"b")
            await asyncio.sleep(3)
            assert writer.last_add_confirmed == 1
            assert writer.failure is None

    run_virtual(main())


def test_a_change_that_nobody_answers_ends_with_the_deadline():
    """It may be published: nothing may be confirmed any more but by recovery."""

    async def main():
        scene = Scene(4, (3, 3, 2))

        async def publish(before, after):
            raise IndeterminateError("no answer", remedy="Read back")

        scene.publish = publish
        async with scene.writing() as writer:
            scene.send(b"a")
            await asyncio.sleep(0.1)
            scene.cluster.nodes["n3"].down = True
            scene.send(b"b")
            await asyncio.sleep(0.1)
            assert isinstance(writer.failure, IndeterminateError)

    run_virtual(main())


def test_a_candidate_that_says_nothing_does_not_hold_the_change_up():
    async def main():
        scene = Scene(5, (3, 3, 3))
        async with scene.writing() as writer:
            scene.connector.stuck.update({"n4"})
            scene.cluster.nodes["n2"].down = True
            scene.send(b"a")
            assert await writer.finish() == (0, 1)
            assert asyncio.get_running_loop().time() < 1.5
            assert await scene.published() == [(0, "153")]

    run_virtual(main())


@pytest.mark.covers("D15")
def test_stripes_stay_where_they_are():
    async def main():
        scene = Scene(6, (4, 2, 2), stripe_entries=2)
        async with scene.writing() as writer:
            scene.send(*[b"%d" % i for i in range(8)])
            await asyncio.sleep(0.1)
            scene.cluster.nodes["n3"].down = True
            scene.send(*[b"%d" % i for i in range(8, 24)])
            last, _ = await writer.finish()
            segments = await scene.published()
            assert len(segments) == 2
            metadata = writer.metadata
            for entry_id in range(24):
                held = {name for name in scene.cluster.names if scene.holds(name, entry_id)}
                assert held >= set(metadata.write_set(entry_id))
            scene.cluster.nodes["n3"].down = False
            assert await scene.read(last) == [b"%d" % i for i in range(24)]

    run_virtual(main())


def test_a_placeholder_counts_as_failed_until_it_comes():
    async def main():
        scene = Scene(3, (3, 3, 2))
        scene.cluster.nodes["n3"].down = True
        async with scene.writing(away=("n3",)) as writer:
            assert writer.failed == ("n3",)
            scene.send(b"a")
            await asyncio.sleep(0.1)
            assert scene.confirmed == [0]
            scene.cluster.nodes["n3"].down = False
            await asyncio.sleep(2)
            scene.send(b"b")
            assert await writer.finish() == (1, 2)
            assert [scene.holds("n3", number) for number in range(2)] == [False, True]
            assert writer.lacking == ("n3",)

    run_virtual(main())


def test_who_still_owes_at_the_end_is_lacking():
    async def main():
        scene = Scene(3, (3, 3, 2))
        async with scene.writing() as writer:
            scene.cluster.nodes["n3"].delay_s = 0.1
            scene.send(b"a")
            assert await writer.finish() == (0, 1)
            assert writer.lacking == (), "a moment's patience spares a copy"
        scene = Scene(3, (3, 3, 2))
        async with scene.writing() as writer:
            scene.cluster.nodes["n3"].deaf = True
            scene.send(b"a")
            assert await writer.finish() == (0, 1)
            assert writer.lacking == ("n3",)

    run_virtual(main())


def test_ensembles_are_opened_with_those_that_answer_and_others_stand_in():
    async def main():
        cluster = SmallCluster(4)
        catalog = await cluster.start()
        connector = Connector(cluster)
        ensembles = Ensembles(catalog, NodeDirectory(catalog.nodes.live, connector))
        sizes = {"ensemble_size": 3, "write_quorum": 3, "ack_quorum": 2, "seed": b"1"}
        connector.stuck.add("n2")
        ensemble, clients = await ensembles.open(**sizes)
        assert set(ensemble) == set(clients) == {"n1", "n3", "n4"}
        assert asyncio.get_running_loop().time() < 1.5
        # n3 takes no connection, but is alive still; n9 is known, and away.
        cluster.nodes["n3"].down = True
        nodes = NodeDirectory(catalog.nodes.live, connector)
        await ensure_node(catalog.store, paths.COOKIES)
        await catalog.store.create(paths.cookie_path("n9"), b"")
        ensemble, clients = await Ensembles(catalog, nodes).open(**sizes)
        assert set(ensemble) == {"n1", "n4", "n9"}
        assert set(clients) == {"n1", "n4"}
        cluster.nodes["n4"].down = True
        nodes = NodeDirectory(catalog.nodes.live, connector)
        with pytest.raises(RetryableError, match="needs 2 more"):
            await Ensembles(catalog, nodes).open(**sizes)

    run_virtual(main())
