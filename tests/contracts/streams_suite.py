"""What the ingest service must do (ports/streams.py), in memory or as a process.

A module that runs the suite subclasses ``StreamsContract`` and gives two fixtures: ``services``,
a function that opens the ports of one and the same cluster; and ``stream``, a name of its own.
"""

import asyncio
from typing import Any
from uuid import UUID

import pytest

from tests.contracts.services import READ_BYTES, WAIT_S, Open, draft_of, refused
from tierlog.format.entry import AttributeUpdate, Verb, encode_entry
from tierlog.format.frame import pack_entries
from tierlog.model.attributes import (
    EVENT_COUNT,
    INDEX_ROOT_LENGTH,
    INDEX_ROOT_OFFSET,
    ROLL_OVER_AGE_MS,
    ROLL_OVER_BYTES,
    ROLL_OVER_ENTRIES,
    SCALE_POLICY_RATE,
    SCALE_POLICY_SEGMENTS_MIN,
    SCALE_POLICY_TYPE,
    AppendCondition,
    AttributeKey,
)
from tierlog.model.core_attributes import CORE_NAMES
from tierlog.model.errors import IndeterminateError, Reason, RefusedError, RetryableError
from tierlog.model.ids import NodeId, StreamName
from tierlog.model.partitions import partition_names
from tierlog.model.policy import Policy
from tierlog.model.position import Edge, Position

SCALE = {SCALE_POLICY_TYPE: 0, SCALE_POLICY_RATE: 0, SCALE_POLICY_SEGMENTS_MIN: 1}


class StreamsContract:
    async def test_a_stream_is_created_once(self, services: Open, stream: StreamName):
        async with services() as on:
            create, policy = on.control.create_stream, Policy(ledger_entries_max=7)
            assert await create(stream, raw=True, policy=policy, exist_ok=False) is True
            assert await create(stream, raw=True, policy=policy, exist_ok=True) is False
            assert await create(stream, raw=True, policy=None, exist_ok=True) is False
            with pytest.raises(RefusedError):
                await create(stream, raw=True, policy=policy, exist_ok=False)

    async def test_one_name_has_one_shape(self, services: Open, stream: StreamName):
        async with services() as on:
            await on.create(stream, raw=True)
            for raw, policy in ((False, None), (True, Policy(ledger_entries_max=7))):
                with pytest.raises(RefusedError):
                    await on.control.create_stream(stream, raw=raw, policy=policy, exist_ok=True)

    async def test_a_name_that_is_none_is_refused(self, services: Open):
        async with services() as on:
            with refused(Reason.INVALID_ARGUMENT):
                await on.control.create_stream(
                    StreamName("not a name"), raw=True, policy=None, exist_ok=True
                )

    async def test_the_owner_stays_who_it_is(self, services: Open, stream: StreamName):
        async with services() as on:
            await on.create(stream)
            owner = await on.control.find_owner(stream)
            assert owner == await on.control.find_owner(stream)
            assert owner.owner_epoch >= 1
            assert owner.cluster_id != UUID(int=0)
            for address in (owner.wire_address, owner.grpc_address, owner.http_address):
                assert address.rpartition(":")[2].isdigit()

    async def test_what_is_not_there_has_no_owner_and_no_seal(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            with refused(Reason.STREAM_NOT_FOUND):
                await on.control.find_owner(stream)
            with refused(Reason.STREAM_NOT_FOUND):
                await on.control.seal(stream)

    async def test_an_append_to_what_is_not_there_is_refused_and_the_channel_lives(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            await on.create(stream)
            async with on.channel(stream) as channel:
                with refused(Reason.STREAM_NOT_FOUND):
                    await channel.append(
                        StreamName(f"{stream}.missing"), draft_of([b"x"]), deadline_s=WAIT_S
                    )
                assert await channel.append(stream, draft_of([b"y"]), deadline_s=WAIT_S)

    async def test_appends_follow_each_other_and_keep_their_bytes(
        self, services: Open, stream: StreamName
    ):
        drafts = [[b"one", b""], [b"three"], [b"four" * 1000, b"five", b"six"]]
        async with services() as on:
            await on.create(stream)
            async with on.channel(stream) as channel, asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(channel.append(stream, draft_of(one), deadline_s=WAIT_S))
                    for one in drafts
                ]
            ranges = [part for task in tasks for part in task.result()]
            ids = [
                entry_id
                for part in ranges
                for entry_id in range(part.first_entry_id, part.last_entry_id + 1)
            ]
            assert ids == list(range(6))
            assert len({part.ledger_id for part in ranges}) == 1
            found = await on.read_all(stream, 6)
            frames, _ = pack_entries([entry for one in drafts for entry in one])
            assert b"".join(one.frames for one in found) == bytes(frames)

    async def test_seal_closes_what_is_open_and_appends_go_on_behind_it(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            await on.create(stream)
            assert await on.control.seal(stream) is None
            (before,) = await on.append(stream, [b"before"])
            assert await on.control.seal(stream) == before.ledger_id
            assert await on.control.seal(stream) is None
            (after,) = await on.append(stream, [b"after"])
            assert after.ledger_id > before.ledger_id
            assert (after.first_entry_id, after.last_entry_id) == (0, 0)

    @pytest.mark.covers("E03", "E09", "E12", "E18", "E20")
    async def test_a_condition_decides_and_attributes_are_as_of_the_last_entry(
        self, services: Open, stream: StreamName
    ):
        writer, counter = AttributeKey(b"w" * 16), AttributeKey(b"x" * 16)

        def entry(number: int) -> bytes:
            add = AttributeUpdate(key=UUID(bytes=counter), verb=Verb.ACCUMULATE, value=-2)
            return encode_entry(
                [b"one", b"two"],
                publish_time_ms=1,
                writer_id=UUID(bytes=writer),
                event_number=number,
                attribute_updates=[add],
            )

        async with services() as on:
            await on.create(stream, raw=False)
            async with on.channel(stream) as channel:

                async def append(number: int, **condition: Any) -> Position:
                    (place,) = await channel.append(
                        stream,
                        draft_of([entry(number)]),
                        deadline_s=WAIT_S,
                        condition=AppendCondition(**condition),
                    )
                    return Position(place.ledger_id, place.last_entry_id)

                first = await append(2, last_event_number=0, after=Edge.EARLIEST)
                with refused(Reason.CONDITIONAL_APPEND_FAILED) as caught:
                    await append(2, last_event_number=0)
                assert caught.value.details["event_number"] == "2"
                with refused(Reason.CONDITIONAL_APPEND_FAILED) as caught:
                    await append(4, last_event_number=2, after=Edge.EARLIEST)
                assert caught.value.details["last_position"] == str(first)
                second = await append(4, last_event_number=2, after=first)
            found = await on.control.get_attributes(stream, [counter, writer, EVENT_COUNT])
            assert dict(found.values) == {writer: 4, counter: -4, EVENT_COUNT: 4}
            assert found.as_of == second
            listed = await on.control.list_attributes(stream, first=writer, limit=1)
            assert dict(listed.values) == {writer: 4}
            listed = await on.control.list_attributes(stream, first=writer)
            assert list(listed.values) == [writer, counter]

    @pytest.mark.covers("E13")
    async def test_policies_and_the_root_of_the_index_are_core_attributes_as_of_now(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            await on.create(stream, raw=False)

            async def read() -> dict[AttributeKey, int]:
                found = await on.control.list_attributes(stream, last=max(CORE_NAMES))
                assert list(found.values) == sorted(CORE_NAMES)
                keys = await on.control.get_attributes(stream, list(CORE_NAMES))
                assert keys == found
                return dict(found.values)

            async def limits() -> list[int]:
                found = await read()
                return [found[one] for one in (ROLL_OVER_BYTES, ROLL_OVER_ENTRIES)]

            before = await read()
            assert {key: before[key] for key in SCALE} == SCALE
            # Nothing was flushed, so there is no index.
            assert (before[INDEX_ROOT_OFFSET], before[INDEX_ROOT_LENGTH]) == (-1, 0)
            policy = (await on.admin.policy(stream))["effective"]
            assert before[ROLL_OVER_AGE_MS] == policy["ledger_age_ms_max"]
            assert await limits() == [policy["ledger_bytes_max"], policy["ledger_entries_max"]]
            await on.admin.set_policy(stream, {"ledger_entries_max": 7})
            assert await limits() == [policy["ledger_bytes_max"], 7]
            # The highest that a policy takes: no limit.
            await on.admin.set_policy(stream, {"ledger_entries_max": 2**63 - 1})
            assert await limits() == [policy["ledger_bytes_max"], 2**63 - 1]
            middle = await on.control.list_attributes(stream, first=ROLL_OVER_BYTES, limit=2)
            assert list(middle.values) == [ROLL_OVER_BYTES, ROLL_OVER_ENTRIES]

    async def test_raw_streams_take_no_condition_and_have_no_attributes(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            await on.create(stream)
            async with on.channel(stream) as channel:
                with refused(Reason.INVALID_ARGUMENT):
                    await channel.append(
                        stream,
                        draft_of([b"x"]),
                        deadline_s=WAIT_S,
                        condition=AppendCondition(after=Edge.EARLIEST),
                    )
            with refused(Reason.INVALID_ARGUMENT):
                await on.control.get_attributes(stream, [EVENT_COUNT])

    async def test_a_channel_that_was_closed_takes_nothing(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            await on.create(stream)
            async with on.channel(stream) as channel:
                await channel.close()
                with pytest.raises(RetryableError):
                    await channel.append(stream, draft_of([b"x"]), deadline_s=WAIT_S)
                await channel.close()

    async def test_close_lets_what_is_in_flight_be_answered(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            await on.create(stream)
            async with on.channel(stream) as channel, asyncio.TaskGroup() as group:
                await channel.append(stream, draft_of([b"w"]), deadline_s=WAIT_S)
                appended = group.create_task(
                    channel.append(stream, draft_of([b"x"]), deadline_s=WAIT_S)
                )
                await asyncio.sleep(0)
                await channel.close()
                assert len(await appended) == 1

    async def test_what_close_does_not_wait_for_ends_as_indeterminate(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            await on.create(stream)
            async with on.channel(stream) as channel, asyncio.TaskGroup() as group:

                async def append() -> None:
                    with pytest.raises(IndeterminateError):
                        await channel.append(stream, draft_of([b"x"]), deadline_s=WAIT_S)

                group.create_task(append())
                await asyncio.sleep(0)
                await channel.close(drain_s_max=0.0)

    async def test_another_nodes_stream_is_not_appended_to_here(
        self, services: Open, stream: StreamName
    ):
        own, other = StreamName(f"{stream}.own"), NodeId(f"other-{stream}")
        async with services() as on:
            await on.create(own)
            await on.create(stream)
            async with on.give_away(stream, other), on.channel(own) as channel:
                assert (await on.control.find_owner(stream)).node_id == other
                with refused(Reason.NOT_OWNER):
                    await channel.append(stream, draft_of([b"x"]), deadline_s=WAIT_S)
            assert (await on.admin.stream(stream))["ledgers"] == []

    async def test_a_partitioned_stream_stands_for_its_partitions(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            create = on.control.create_stream
            shape: dict[str, Any] = {"raw": True, "policy": None, "exist_ok": True}
            assert await create(stream, partitions=2, **shape) is True
            assert await create(stream, partitions=2, **shape) is False
            with pytest.raises(RefusedError):
                await create(stream, partitions=3, **shape)
            first, second = partition_names(stream, 2)
            for name in (first, second):
                assert await create(name, **shape) is False
            (put,) = await on.append(second, [b"x"])
            assert await on.control.seal(first) is None
            assert await on.control.seal(second) == put.ledger_id

    async def test_what_is_asked_of_a_partitioned_stream_names_its_partitions(
        self, services: Open, stream: StreamName
    ):
        async with services() as on:
            shape: dict[str, Any] = {"raw": True, "policy": None, "exist_ok": True}
            await on.control.create_stream(stream, partitions=4, **shape)
            for ask in (
                on.control.create_stream(stream, **shape),
                on.control.find_owner(stream),
                on.control.seal(stream),
                on.reads.bounds(stream),
                on.reads.read(stream, Edge.EARLIEST, bytes_max=READ_BYTES),
            ):
                with refused(Reason.PARTITIONED) as caught:
                    await ask
                assert caught.value.details["partitions"] == "4"
            async with on.channel(partition_names(stream, 4)[0]) as channel:
                with refused(Reason.PARTITIONED):
                    await channel.append(stream, draft_of([b"x"]), deadline_s=WAIT_S)
