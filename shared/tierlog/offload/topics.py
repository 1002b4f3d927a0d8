"""What the queue's topics should be, and how what is there differs; pure.

Owns the specifications and the comparison. Does not own doing anything about it: the adapter does.

Invariants:
    * Nothing here asks for a topic to lose partitions, replicas or events: such a difference is
      told, and left to people.
    * What a topic is set to beyond the specification is nobody's business here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tierlog.offload.messages import Topics

DEAD_LETTER_PARTITIONS: Final = 1

RETENTION: Final = "retention.ms"
CLEANUP: Final = "cleanup.policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """A topic as it is to be."""

    name: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.partitions > 0, "a topic has partitions"
        assert self.replication_factor > 0, "a partition has a replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicState:
    """A topic as it is. ``leaderless``: partitions that nobody leads now."""

    partitions: int
    replication_factor: int
    config: Mapping[str, str]
    leaderless: int = 0


class Remedy(StrEnum):
    """What can be done about a difference."""

    CREATE = "create"
    ADD_PARTITIONS = "add partitions"
    SET = "set"
    BY_HAND = "by hand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One value of a topic that is not what it should be."""

    what: str
    found: str
    wanted: str
    remedy: Remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicReport:
    """A topic: what it was and is, what was done about it, and what still differs."""

    spec: TopicSpec
    found: TopicState | None
    now: TopicState | None
    done: Sequence[Difference]
    left: Sequence[Difference]


def queue_specs(
    topics: Topics,
    *,
    partitions: int,
    replication_factor: int,
    retention_s: float,
    dead_letter_retention_s: float,
) -> list[TopicSpec]:
    """Return the specifications of a deployment's topics.

    Dead letters have one partition: they are few, and have one order.
    """

    def spec(name: str, count: int, kept_s: float) -> TopicSpec:
        config = {RETENTION: str(round(kept_s * 1000)), CLEANUP: "delete"}
        return TopicSpec(
            name=name, partitions=count, replication_factor=replication_factor, config=config
        )

    return [
        spec(topics.requested, partitions, retention_s),
        spec(topics.completed, partitions, retention_s),
        spec(topics.dead_letter, DEAD_LETTER_PARTITIONS, dead_letter_retention_s),
    ]


def differences(spec: TopicSpec, found: TopicState | None) -> Sequence[Difference]:
    """Return how ``found`` (None: there is no such topic) differs from what it should be."""
    if found is None:
        return [Difference(what="topic", found="none", wanted="there", remedy=Remedy.CREATE)]
    told: list[Difference] = []
    if found.partitions != spec.partitions:
        fewer = found.partitions < spec.partitions
        told.append(
            Difference(
                what="partitions",
                found=str(found.partitions),
                wanted=str(spec.partitions),
                remedy=Remedy.ADD_PARTITIONS if fewer else Remedy.BY_HAND,
            )
        )
    if found.replication_factor != spec.replication_factor:
        told.append(
            Difference(
                what="replication factor",
                found=str(found.replication_factor),
                wanted=str(spec.replication_factor),
                remedy=Remedy.BY_HAND,
            )
        )
    told.extend(
        Difference(what=name, found=found.config.get(name, ""), wanted=value, remedy=Remedy.SET)
        for name, value in spec.config.items()
        if found.config.get(name) != value
    )
    if found.leaderless:
        told.append(
            Difference(
                what="partitions that nobody leads",
                found=str(found.leaderless),
                wanted="0",
                remedy=Remedy.BY_HAND,
            )
        )
    return told
