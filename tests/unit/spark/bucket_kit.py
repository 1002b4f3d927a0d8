"""A bucket in memory as a read's driver opens it: manifests, and nothing of what they name."""

import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from uuid import UUID

import pytest

from tests.unit.spark.test_planning import listed
from tierlog.adapters.memory.clock import SimClock
from tierlog.adapters.memory.faults import no_faults
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.objects import MemoryObjects
from tierlog.format.manifest import keep
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.manifest import ManifestHead
from tierlog.model.node import Cluster
from tierlog.model.stream import StreamLifecycle
from tierlog.offload.manifests import ManifestStore
from tierlog.ports.objects import ObjectStore
from tierlog.runtime.settings import S3Settings, Settings
from tierlog_spark import bucket
from tierlog_spark.options import ReadOptions, parse_options

CLUSTER = Cluster(cluster_id=UUID(int=7), created_ms=1)
STREAM, INCARNATION = StreamName("s"), UUID(int=5)
HEAD = ManifestHead(stream=STREAM, incarnation=INCARNATION, created_ms=3)


class ManifestBucket:
    """What is opened below is this one, whatever its name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clock, self._ids = SimClock(), SeededIds(random.Random(1))
        self.objects = MemoryObjects(self._clock)

        @contextlib.asynccontextmanager
        async def opened(*_: object, **__: object) -> AsyncIterator[ObjectStore]:
            yield self.objects.connect(no_faults())

        monkeypatch.setattr(bucket, "open_bucket", opened)

    def manifests(self) -> ManifestStore:
        """Return what writes them."""
        return ManifestStore(
            self.objects.connect(no_faults()),
            cluster_id=CLUSTER.cluster_id,
            clock=self._clock,
            ids=self._ids,
        )

    async def write(
        self,
        *numbers: int,
        uncopied: Sequence[int] = (),
        removed: Sequence[int] = (),
        stream: str = STREAM,
        incarnation: UUID = INCARNATION,
        trimmed_through: int = -1,
        partitions: int = 0,
        lifecycle: StreamLifecycle = StreamLifecycle.ACTIVE,
    ) -> None:
        """Write a stream's next manifest: ledgers of ten entries each come to those before."""
        manifests = self.manifests()
        name = StreamName(stream)
        await manifests.write(
            await manifests.newest(name, incarnation),
            replace(
                HEAD,
                stream=name,
                incarnation=incarnation,
                trimmed_through=LedgerId(trimmed_through),
                trimmed_last=EntryId(9) if trimmed_through >= 0 else None,
                partitions=partitions,
                lifecycle=lifecycle,
            ),
            put={one.listed.ledger_id: keep(one) for one in listed(*numbers, uncopied=uncopied)},
            removed=[LedgerId(one) for one in removed],
        )


def options(**given: str) -> ReadOptions:
    """Return the options of a read of that bucket: of its stream, unless the options say it."""
    settings = Settings.model_construct(
        s3=S3Settings(bucket="b"),
        client=Settings.model_fields["client"].default,
    )
    named = {} if {"table", "streams"} & given.keys() else {"stream": STREAM}
    return parse_options({**named, **given}, settings)
