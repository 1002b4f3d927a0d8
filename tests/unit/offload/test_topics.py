"""The queue's topics as they should be, and how what is there differs."""

import pytest

from tierlog.offload.messages import Topics
from tierlog.offload.topics import Remedy, TopicSpec, TopicState, differences, queue_specs

DAY_MS = 86_400_000
SPEC = TopicSpec(
    name="t", partitions=4, replication_factor=3,
    config={"retention.ms": "1000", "cleanup.policy": "delete"},
)  # fmt: skip


def state(**changed) -> TopicState:
    given = {"partitions": 4, "replication_factor": 3, "config": {**SPEC.config, "x": "y"}}
    return TopicState(**{**given, **changed})


def test_each_topic_is_versioned_and_kept_for_its_time():
    topics = Topics.of("p")
    specs = queue_specs(
        topics, partitions=12, replication_factor=3, retention_s=7 * 86400.0,
        dead_letter_retention_s=30 * 86400.0,
    )  # fmt: skip
    shown = [(one.name, one.partitions, int(one.config["retention.ms"]) // DAY_MS) for one in specs]
    assert shown == [
        ("p.offload.requested.v1", 12, 7),
        ("p.offload.completed.v1", 12, 7),
        ("p.offload.requested.v1.dlq", 1, 30),
    ]
    assert {one.replication_factor for one in specs} == {3}


def test_what_is_as_it_should_be_differs_in_nothing():
    assert list(differences(SPEC, state())) == []


@pytest.mark.parametrize(
    ("found", "what", "remedy"),
    [
        (None, "topic", Remedy.CREATE),
        (state(partitions=3), "partitions", Remedy.ADD_PARTITIONS),
        (state(partitions=5), "partitions", Remedy.BY_HAND),
        (state(replication_factor=1), "replication factor", Remedy.BY_HAND),
        (state(config={"retention.ms": "1000"}), "cleanup.policy", Remedy.SET),
        (state(config={**SPEC.config, "retention.ms": "999"}), "retention.ms", Remedy.SET),
        (state(leaderless=1), "partitions that nobody leads", Remedy.BY_HAND),
    ],
)
def test_each_difference_is_told_with_what_can_be_done(found, what, remedy):
    (told,) = differences(SPEC, found)
    assert (told.what, told.remedy) == (what, remedy)
    assert told.found != told.wanted
