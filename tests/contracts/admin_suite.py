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


async def offloaded(on: Services, stream: StreamName) -> list[int]:
    """Return the ledgers of the stream that are in tier 2, once none is on its way."""
    async with asyncio.timeout(OFFLOAD_S_MAX):
        while True:
            found = [one for one in await on.admin.offloads() if one["stream"] == stream]
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
            with refused(Reason.PARTITIONED):
                await on.admin.offload(stream, Position(LedgerId(0), EntryId(0)))
