"""What the administration must do (ports/admin.py), in memory or as the scheduler's REST.

A module that runs the suite subclasses ``AdminContract`` and gives two fixtures: ``services``, a
function that opens the ports of one and the same cluster; and ``stream``, a name of its own.
"""

import asyncio

from tests.contracts.services import Open, Services, refused
from tierlog.model.errors import Reason
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.partitions import partition_names
from tierlog.model.policy import CLUSTER_DEFAULT
from tierlog.model.position import Position

OFFLOAD_S_MAX = 60.0
DELETE_S_MAX = 60.0


async def offloaded(on: Services, stream: StreamName) -> list[int]:
    """Return the ledgers of the stream that are in tier 2, once none is on its way."""
    async with asyncio.timeout(OFFLOAD_S_MAX):
        while True:
            found = await on.admin.offloads(stream)
            if found and all(one["complete"] for one in found):
                return [one["ledger_id"] for one in found]
            await asyncio.sleep(0.1)


class AdminContract:
    async def test_streams_are_listed_with_their_sums(self, services: Open, stream: StreamName):
        async with services() as on:
            await on.fill(stream, [b"one", b"three"], [b"four"])
            (found,) = [one for one in await on.admin.streams() if one["stream"] == stream]
            owner = await on.control.find_owner(stream)
            expected = {
                "ledgers": 2,
                "entries": 3,
                "bytes": 12,
                "tier1_bytes": 12,
                "tier2_bytes": 0,
                "raw": True,
                "owner": owner.node_id,
                "owner_epoch": owner.owner_epoch,
            }
            assert {name: found[name] for name in expected} == expected

    async def test_a_stream_is_shown_with_its_ledgers(self, services: Open, stream: StreamName):
        async with services() as on:
            (closed,) = await on.fill(stream, [b"one", b"three"])
            (put,) = await on.append(stream, [b"four"])
            found = await on.admin.stream(stream)
            assert (found["stream"], found["raw"], found["lifecycle"]) == (stream, True, "ACTIVE")
            names = ("ledger_id", "state", "entries", "length", "complete", "tier1", "tier2")
            assert [[one[name] for name in names] for one in found["ledgers"]] == [
                [closed, "CLOSED", 2, 8, False, True, False],
                [put.ledger_id, "OPEN", 0, 0, False, True, False],
            ]

    async def test_a_ledger_is_shown_with_its_context(self, services: Open, stream: StreamName):
        async with services() as on:
            (ledger,) = await on.fill(stream, [b"one", b"three"])
            found = await on.admin.ledger(ledger)
            assert (found["ledger_id"], found["stream"]) == (ledger, stream)
            metadata = found["metadata"]
            assert (metadata["state"], metadata["last_entry_id"]) == ("CLOSED", 1)
            assert metadata["length"] == 8
            assert metadata["ensembles"][0]["first_entry_id"] == 0
            assert found["offload"]["state"] == "LOCAL"
            assert found["offload"]["complete"] is False

    async def test_what_is_not_there_is_told(self, services: Open, stream: StreamName):
        async with services() as on:
            for call in (on.admin.stream, on.admin.policy):
                with refused(Reason.STREAM_NOT_FOUND):
                    await call(stream)
            with refused(Reason.STREAM_NOT_FOUND):
                await on.admin.offload(stream, None)
            with refused(Reason.STREAM_NOT_FOUND):
                await on.admin.set_policy(stream, {})
            with refused(Reason.LEDGER_NOT_FOUND):
                await on.admin.ledger(LedgerId(9_000_000_000))

    async def test_offload_takes_what_is_sealed_before_a_position(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            first, second = await on.fill(stream, [b"one"], [b"two", b"three"])
            # In the middle of a ledger, so that only what lies wholly before it is meant.
            asked = await on.admin.offload(stream, Position(second, EntryId(1)))
            assert (asked["stream"], asked["ledgers"]) == (stream, [first])
            assert asked["requested"] == [first]
            assert asked["position"] == f"{second}:0"
            assert await offloaded(on, stream) == [first]
            found = (await on.admin.stream(stream))["ledgers"]
            assert [one["tier2"] for one in found] == [True, False]

    async def test_offload_of_everything_leaves_what_is_open_and_what_is_done(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            first, second = await on.fill(stream, [b"one"], [b"two", b"three"])
            await on.admin.offload(stream, Position(second, EntryId(0)))
            await offloaded(on, stream)
            (put,) = await on.append(stream, [b"open"])
            asked = await on.admin.offload(stream, None)
            assert (asked["ledgers"], asked["requested"]) == ([first, second], [second])
            assert asked["position"] == f"{put.ledger_id}:0"
            async with asyncio.timeout(OFFLOAD_S_MAX):
                while await offloaded(on, stream) != [first, second]:
                    await asyncio.sleep(0.1)

    async def test_nothing_sealed_is_nothing_to_offload(self, services: Open, stream: StreamName):
        async with services() as on:
            await on.create(stream)
            asked = await on.admin.offload(stream, None)
            assert (asked["position"], asked["ledgers"], asked["requested"]) == (None, [], [])

    async def test_a_policy_is_replaced_as_a_whole(self, services: Open, stream: StreamName):
        async with services() as on:
            await on.create(stream)
            before = await on.admin.policy(stream)
            assert set(before["own"].values()) == {None}
            assert before["effective"]["block_size"] == CLUSTER_DEFAULT.block_size
            await on.admin.set_policy(stream, {"ledger_entries_max": 5})
            after = await on.admin.set_policy(stream, {"ledger_bytes_max": 6})
            assert after == await on.admin.policy(stream)
            own, effective = after["own"], after["effective"]
            assert (own["ledger_entries_max"], own["ledger_bytes_max"]) == (None, 6)
            assert effective["ledger_entries_max"] == CLUSTER_DEFAULT.ledger_entries_max
            assert effective["ledger_bytes_max"] == 6

    async def test_thresholds_that_do_not_fit_are_refused_and_change_nothing(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            await on.create(stream)
            for wrong in ({"block_size": 1}, {"offload_time_ms": 9, "retention_time_ms": 9}):
                with refused(Reason.POLICY_INVALID) as caught:
                    await on.admin.set_policy(stream, wrong)
                assert caught.value.details["bound"] == next(iter(wrong))
            with refused(Reason.INVALID_ARGUMENT):
                await on.admin.set_policy(stream, {"unheard_of": 1})
            assert set((await on.admin.policy(stream))["own"].values()) == {None}

    async def test_a_partitioned_stream_is_shown_with_its_partitions(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            await on.control.create_stream(
                stream, raw=True, policy=None, exist_ok=False, partitions=2
            )
            first, second = partition_names(stream, 2)
            await on.append(second, [b"one", b"three"])
            await on.control.seal(second)
            found = await on.admin.stream(stream)
            assert (found["partitions"], found["ledgers"]) == (2, [])
            shown = [(one["stream"], one["entries"]) for one in found["partition_streams"]]
            assert shown == [(first, 0), (second, 2)]
            counts = {one["stream"]: one["partitions"] for one in await on.admin.streams()}
            assert [counts[name] for name in (stream, first, second)] == [2, 0, 0]

    async def test_thresholds_and_offloads_of_a_partitioned_stream_are_those_of_its_partitions(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            await on.control.create_stream(
                stream, raw=True, policy=None, exist_ok=False, partitions=2
            )
            await on.admin.set_policy(stream, {"ledger_entries_max": 7})
            ledgers = []
            for name in (stream, *partition_names(stream, 2)):
                assert (await on.admin.policy(name))["own"]["ledger_entries_max"] == 7
            for name in partition_names(stream, 2):
                await on.append(name, [b"x"])
                ledgers.append(await on.control.seal(name))
            wished = await on.admin.offload(stream, None)
            assert (wished["ledgers"], wished["position"]) == (ledgers, None)
            for name, ledger_id in zip(partition_names(stream, 2), ledgers, strict=True):
                assert await offloaded(on, name) == [ledger_id]
            found = await on.admin.offloads(stream)
            assert {one["ledger_id"] for one in found} == {*ledgers}
            with refused(Reason.PARTITIONED):
                await on.admin.offload(stream, Position(LedgerId(0), EntryId(0)))

    async def test_the_status_says_how_far_the_copies_have_come(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            first, second = await on.fill(stream, [b"one"], [b"two", b"three"])
            (before,) = await on.admin.offload_status(stream)
            assert (before["stream"], before["position"]) == (stream, f"{first}:0")
            assert (before["states"], before["waiting_bytes"]) == ({"LOCAL": 2}, 11)
            assert (before["pause"], before["failing"]) == (None, [])
            assert await on.admin.attempts(stream) == []
            await on.admin.offload(stream, Position(second, EntryId(0)))
            await offloaded(on, stream)
            (after,) = await on.admin.offload_status(stream)
            assert after["position"] == f"{second}:0"
            assert (after["states"], after["wanted"]) == ({"COMPLETE": 1, "LOCAL": 1}, 0)
            (tried,) = await on.admin.attempts(stream)
            assert (tried["ledger_id"], tried["complete"], tried["attempt_count"]) == (
                first,
                True,
                1,
            )
            assert [one["outcome"] for one in tried["attempts"]] == ["COMPLETE"]
            assert await on.admin.leftovers(stream) == []

    async def test_a_pause_refuses_offloads_until_it_is_resumed(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            (ledger,) = await on.fill(stream, [b"one"])
            (paused,) = await on.admin.pause_offload(stream, "the bucket is moved")
            assert paused["pause"]["cause"] == "the bucket is moved"
            (again,) = await on.admin.pause_offload(stream, "another cause")
            assert again["pause"] == paused["pause"], "the first one holds"
            with refused(Reason.INVALID_ARGUMENT) as caught:
                await on.admin.offload(stream, None)
            assert "the bucket is moved" in str(caught.value)
            (resumed,) = await on.admin.resume_offload(stream)
            assert resumed["pause"] is None
            await on.admin.offload(stream, None)
            assert await offloaded(on, stream) == [ledger]

    async def test_a_pause_of_a_partitioned_stream_is_one_of_its_partitions(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            await on.control.create_stream(
                stream, raw=True, policy=None, exist_ok=False, partitions=2
            )
            paused = await on.admin.pause_offload(stream, "")
            assert [one["stream"] for one in paused] == partition_names(stream, 2)
            assert all(one["pause"] for one in paused)
            with refused(Reason.INVALID_ARGUMENT):
                await on.admin.offload(partition_names(stream, 2)[1], None)
            resumed = await on.admin.resume_offload(stream)
            assert [one["pause"] for one in resumed] == [None, None]

    async def test_status_and_attempts_of_what_is_not_there(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            admin = on.admin
            for call in (
                admin.offload_status, admin.attempts, admin.leftovers, admin.resume_offload,
            ):  # fmt: skip
                with refused(Reason.STREAM_NOT_FOUND):
                    await call(stream)
            with refused(Reason.STREAM_NOT_FOUND):
                await admin.pause_offload(stream, "")

    async def test_levels_above_a_stream_hold_where_it_says_nothing(
        self, services: Open, stream: StreamName
    ):
        namespace = f"ns-{stream}".replace(".", "-")[:60]
        name = StreamName(f"{namespace}.one")
        async with services() as on:
            await on.create(name)
            try:
                before = await on.admin.level(namespace)
                assert set(before["own"].values()) == {None}
                after = await on.admin.set_level(namespace, {"offload_time_ms": 70_000_000})
                assert after == await on.admin.level(namespace)
                assert after["own"]["offload_time_ms"] == 70_000_000
                found = await on.admin.policy(name)
                assert found["own"]["offload_time_ms"] is None
                assert found["effective"]["offload_time_ms"] == 70_000_000
                assert found["levels"]["offload_time_ms"] == f"namespace {namespace}"
                assert found["levels"]["block_size"] == "default"
                told = await on.admin.explain(name)
                thresholds = {one["name"]: one for one in told["thresholds"]}
                assert thresholds["offload_time_ms"]["value"] == 70_000_000
                assert thresholds["offload_time_ms"]["level"] == f"namespace {namespace}"
                assert (told["stream"], told["namespace"]) == (name, namespace)
            finally:
                await on.admin.set_level(namespace, {})
            assert (await on.admin.policy(name))["effective"]["offload_time_ms"] is None

    async def test_a_level_that_breaks_a_stream_below_is_refused_and_names_it(
        self, services: Open, stream: StreamName
    ):
        namespace = f"nb-{stream}".replace(".", "-")[:60]
        name = StreamName(f"{namespace}.one")
        async with services() as on:
            await on.create(name)
            await on.admin.set_policy(name, {"offload_size_bytes": 10**12})
            with refused(Reason.POLICY_INVALID) as caught:
                await on.admin.set_level(namespace, {"retention_size_bytes": 10**12})
            assert caught.value.details["below"] == f"stream {name}"
            assert caught.value.details["bound"] == "offload_size_bytes"
            assert set((await on.admin.level(namespace))["own"].values()) == {None}
            with refused(Reason.INVALID_ARGUMENT):
                await on.admin.set_level("no.namespace", {})

    async def test_a_stream_is_deleted_with_all_it_has(self, services: Open, stream: StreamName):
        async with services() as on:
            await on.fill(stream, [b"one"], [b"two"])
            async with asyncio.timeout(DELETE_S_MAX):
                assert (await on.admin.delete_stream(stream))["stream"] == stream
                while stream in [one["stream"] for one in await on.admin.streams()]:
                    await asyncio.sleep(0.2)
            await on.create(stream)
            assert (await on.admin.stream(stream))["ledgers"] == []
