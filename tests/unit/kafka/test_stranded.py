"""A member whose partitions are lost joins again, for a while: no server can be told to forget it.

A broker that comes back empty gives its topics to nobody who joined before they were made.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from tierlog.adapters.kafka import source
from tierlog.adapters.kafka.source import JOINS_AGAIN_MAX, KafkaEventSource

PARTITION = TopicPartition("t", 0)
Join = Callable[["Member"], Iterator[None]]


class Member:
    """A consumer; ``joins`` says, poll by poll, what each one in turn is given."""

    joins: list[Join]
    made: list["Member"]

    def __init__(self, config: object, logger: object) -> None:
        del config, logger
        self.polls = 0
        self.closed = False
        self.made.append(self)
        self._life: Iterator[None] = iter(())

    def subscribe(self, topics: object, *, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        assert topics == ["t"]
        self.assign = lambda *places: on_assign(self, list(places))
        self.lose = lambda *places: on_lost(self, list(places))
        number = min(len(self.made), len(self.joins)) - 1
        self._life = self.joins[number](self)
        del on_revoke

    def poll(self, timeout_s: float) -> None:
        assert timeout_s == source.POLL_S
        self.polls += 1
        next(self._life, None)

    def get_watermark_offsets(self, place: TopicPartition, *, cached: bool) -> None:
        assert cached, place

    def close(self) -> None:
        self.closed = True


def loses_all(member: Member) -> Iterator[None]:
    member.assign(PARTITION)
    yield
    member.lose(PARTITION)
    yield


def is_given_nothing(member: Member) -> Iterator[None]:
    member.assign()
    yield


def is_given_it(member: Member) -> Iterator[None]:
    member.assign(PARTITION)
    yield


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Member]:
    members: list[Member] = []
    monkeypatch.setattr(Member, "made", members, raising=False)
    monkeypatch.setattr(source, "Consumer", Member)
    monkeypatch.setattr(source, "RESTART_DELAY_S", 0.0)
    return members


async def members_of(
    monkeypatch: pytest.MonkeyPatch, made: list[Member], *joins: Join, polls: int
) -> list[Member]:
    """Return the members there were once the last of them polled so often."""
    monkeypatch.setattr(Member, "joins", list(joins), raising=False)
    taking = KafkaEventSource("b:1", ["t"], group="g")
    while not made or made[-1].polls < polls:
        await asyncio.sleep(0.001)
    await taking.close()
    return made


POLLS = round(source.STRANDED_S / source.POLL_S)


async def test_a_member_that_lost_its_partitions_and_gets_none_joins_again(monkeypatch, made):
    members = await members_of(
        monkeypatch, made, loses_all, is_given_nothing, is_given_it, polls=10 * POLLS
    )
    # Once it has a partition it stays, however long nothing comes.
    assert len(members) == 3
    assert all(one.closed for one in members)
    # It waited before, both times: the first one from its loss on.
    assert [one.polls for one in members[:2]] == [POLLS + 1, POLLS]


async def test_it_gives_up_joining_where_there_are_partitions_for_others_alone(monkeypatch, made):
    members = await members_of(monkeypatch, made, loses_all, is_given_nothing, polls=10 * POLLS)
    assert len(members) == 1 + JOINS_AGAIN_MAX


@pytest.mark.parametrize("join", [is_given_nothing, is_given_it])
async def test_who_lost_nothing_waits(monkeypatch, made, join):
    assert len(await members_of(monkeypatch, made, join, polls=10 * POLLS)) == 1
