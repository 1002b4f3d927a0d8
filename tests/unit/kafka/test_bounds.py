"""Where a partition begins and ends, while it has no leader: no server can be told to be so."""

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from tierlog.adapters.kafka import event_log


class Leaderless:
    """A consumer whose partition gets a leader after so many questions."""

    def __init__(self, code: int, times: int) -> None:
        self.code = code
        self.times = times
        self.asked = 0

    def get_watermark_offsets(self, where, timeout):
        assert (where.topic, where.partition, timeout) == ("t", 3, 1.0)
        self.asked += 1
        if self.asked <= self.times:
            raise KafkaException(KafkaError(self.code))
        return 4, 9


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(event_log, "POLL_S", 0.01)


@pytest.mark.parametrize(
    "code", [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE]
)
def test_a_partition_without_a_leader_is_waited_for(code):
    consumer: Any = Leaderless(code, 2)
    assert event_log._bounds(consumer, "t", 3, 1.0) == (4, 9)
    assert consumer.asked == 3


def test_not_for_ever_and_not_for_other_reasons():
    never: Any = Leaderless(KafkaError.LEADER_NOT_AVAILABLE, 10**9)
    with pytest.raises(KafkaException):
        event_log._bounds(never, "t", 3, 1.0)
    consumer: Any = Leaderless(KafkaError.TOPIC_AUTHORIZATION_FAILED, 1)
    with pytest.raises(KafkaException):
        event_log._bounds(consumer, "t", 3, 1.0)
    assert consumer.asked == 1
