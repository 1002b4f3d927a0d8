"""The demo's job: append, offload, two crashes, and everything read back and compared.

Owns the order of the steps and every check. Each check that fails ends the demo with exit 6.

What is shown:
    * an offloader that is killed in the middle of an upload leaves nothing behind in the end,
    * ingest that is killed in the middle of appending loses nothing that was acknowledged, and
      what was not acknowledged is neither lost nor doubled,
    * ledgers that left the local disk read back the same, byte for byte.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from uuid import UUID

from tierlog.cli.demo.records import Source
from tierlog.cli.demo.round_trip import STEP_BYTES, STREAM, RoundTrip, differs, read_back
from tierlog.cli.demo.stage import POLL_S, Stage
from tierlog.format.attribute_objects import parse_attribute_key
from tierlog.format.manifest import is_manifest_key
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.model.policy import MIB, Policy
from tierlog.model.position import Edge

if TYPE_CHECKING:
    from tierlog.client import PartitionedWriter, StreamWriter

POLICY: Final = Policy(
    ledger_bytes_max=7 * MIB,
    block_size=5 * MIB,
    offload_size_bytes=12 * MIB,
    retention_size_bytes=1024 * MIB,
    deletion_lag_ms=1000,
)
LEDGERS_IN_TIER2_MIN: Final = 5
# So long waits the offloader that is to be killed after each part of its upload.
PART_DELAY_S: Final = 4.0
KILL_S_MAX: Final = 60.0


@dataclass(slots=True)
class Outcome(RoundTrip):
    """What the job found, for the report."""

    killed_attempt: UUID | None = None
    killed_ledger: int | None = None
    disk_bytes: int = 0
    left_behind: list[str] = field(default_factory=list)
    unacknowledged_at_kill: int = 0


class Job:
    """One run of the main job on a stage."""

    def __init__(self, stage: Stage, source: Source, *, bytes_min: int) -> None:
        self._stage = stage
        self._source = source
        self._bytes_min = bytes_min
        self.outcome = Outcome(source=source.name)

    async def run(self) -> Outcome:
        """Do all of it; raises ``CorruptError`` when anything differs."""
        stage = self._stage
        await stage.client.create_stream(STREAM, policy=POLICY)
        stage.tell(f"{len(self._source.records)} records from {self._source.name}")
        await self._slow_offloader()
        await self._append()
        await self._kill_offloader()
        await self._until_offloaded()
        await self._check_bucket()
        await read_back(stage, self.outcome)
        await self._survey()
        return self.outcome

    async def _slow_offloader(self) -> None:
        """Restart the offloader so that an upload takes long enough to be interrupted."""
        env = {"TIERLOG_OFFLOADER__PART_DELAY_S": str(PART_DELAY_S)}
        await self._stage.cluster.services.restart("offloader", env=env)

    # Appending, and the two crashes

    async def _append(self) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        async with asyncio.TaskGroup() as group, self._stage.client.writer(STREAM) as writer:
            ingest = group.create_task(self._kill_ingest(writer))
            told = 0
            for event in self.outcome.events(self._source, self._bytes_min):
                await writer.send(event)
                if writer.acked_bytes // STEP_BYTES > told:
                    told = writer.acked_bytes // STEP_BYTES
                    self._stage.tell(f"{writer.acked_bytes / 1e6:.0f} MB appended")
            await writer.flush()
            await ingest
        self.outcome.append_s = loop.time() - begun_s
        self.outcome.resolved_count = writer.resolved_count
        self.outcome.acknowledged = writer.acked_events
        if writer.acked_events != self.outcome.appended.count:
            raise differs("not every event was acknowledged")
        self._stage.tell(
            f"all {writer.acked_events} events ({writer.acked_bytes / 1e6:.1f} MB) acknowledged; "
            f"lost answers settled: {writer.resolved_count}"
        )

    async def _kill_ingest(self, writer: "StreamWriter | PartitionedWriter") -> None:
        """Kill ingest once half of the events are acknowledged and more are in flight."""
        stage, half = self._stage, self._bytes_min // 2
        while writer.acked_bytes < half or not writer.in_flight_events:
            if writer.acked_bytes >= self._bytes_min:
                raise differs("all was appended before ingest could be killed in the middle")
            await asyncio.sleep(0.001)
        self.outcome.unacknowledged_at_kill = writer.in_flight_events
        name = stage.cluster.nodes[0]
        stage.tell(
            f"kill -9 {name}: {writer.acked_events} events acknowledged, "
            f"{writer.in_flight_events} in flight"
        )
        stage.cluster.services.kill(name)
        await asyncio.sleep(1.0)
        stage.tell(f"restarting {name}; it recovers the open ledger, the writer reads back")
        await stage.cluster.services.restart(name)
        stage.tell(f"{name} is ready again")

    async def _kill_offloader(self) -> None:
        """Kill the offloader while an upload is open that the metadata names."""
        stage = self._stage
        try:
            async with asyncio.timeout(KILL_S_MAX):
                while not await self._killed_in_upload():
                    # The upload ended just then: another one is caught.
                    await self._slow_offloader()
        except TimeoutError:
            raise differs("no upload was open for long enough to be interrupted") from None
        stage.tell(
            f"kill -9 offloader: ledger {self.outcome.killed_ledger} is OFFLOADING as attempt "
            f"{self.outcome.killed_attempt}, its upload is open"
        )
        await asyncio.sleep(1.0)
        env = {"TIERLOG_OFFLOADER__PART_DELAY_S": "0"}
        await stage.cluster.services.restart("offloader", env=env)
        stage.tell("the offloader is ready again")

    async def _killed_in_upload(self) -> bool:
        """Kill the offloader once an upload is open; tell whether it still was, afterwards."""
        stage = self._stage
        async for context in self._uploading():
            assert context.location is not None
            if not await stage.objects.list_uploads(context.location.data_key):
                continue
            stage.cluster.services.kill("offloader")
            still = await stage.objects.list_uploads(context.location.data_key)
            now = await stage.catalog.contexts.get(context.ledger_id)
            self.outcome.killed_attempt = context.uuid
            self.outcome.killed_ledger = context.ledger_id
            return bool(
                still
                and now is not None
                and now.state is OffloadState.OFFLOADING
                and now.uuid == context.uuid
            )
        return False

    async def _uploading(self) -> AsyncIterator[OffloadContext]:
        while True:
            for context in await self._stage.contexts(STREAM):
                if context.state is OffloadState.OFFLOADING:
                    yield context
            await asyncio.sleep(POLL_S)

    # What must hold afterwards

    async def _until_offloaded(self) -> None:
        stage = self._stage
        stage.tell("waiting until ledgers are complete in S3 and gone from the local disk")
        told = -1

        async def enough() -> bool:
            nonlocal told
            contexts = await stage.contexts(STREAM)
            gone = sum(one.state is OffloadState.TIER1_DELETED for one in contexts)
            if gone != told:
                told = gone
                stage.tell(f"{gone} ledgers are in S3 alone")
            busy = {OffloadState.OFFLOADING, OffloadState.COMPLETE, OffloadState.TIER1_DELETING}
            return gone >= LEDGERS_IN_TIER2_MIN and all(one.state not in busy for one in contexts)

        await stage.until("five ledgers in S3 alone", enough, timeout_s=100)
        await self._until_off_disk()
        stage.tell("waiting until nothing of the killed attempt is left")

        async def swept() -> bool:
            return not any(one.abandoned for one in await stage.contexts(STREAM))

        await stage.until("the killed attempt struck off", swept, timeout_s=60)

    async def _until_off_disk(self) -> None:
        """Wait until the storage node has freed the ledgers that are in S3 alone."""
        stage = self._stage
        gone = {
            one.ledger_id
            for one in await stage.contexts(STREAM)
            if one.state is OffloadState.TIER1_DELETED
        }

        async def freed() -> bool:
            return not gone & await stage.ledgers_on_disk()

        await stage.until("the local disk freed", freed, timeout_s=60)
        stage.tell("the storage node holds nothing of them")

    async def _check_bucket(self) -> None:
        """Check that the bucket holds exactly what the metadata names, and no open upload."""
        stage = self._stage
        named: set[str] = set()
        for context in await stage.contexts(STREAM):
            if context.complete:
                assert context.location is not None
                named |= set(context.location.keys)
        listed = {info.key async for info in stage.objects.list()}
        found = {
            key
            for key in listed
            if not is_manifest_key("", key) and parse_attribute_key("", key) is None
        }
        uploads = await stage.objects.list_uploads()
        killed = str(self.outcome.killed_attempt)
        keys = [*found, *(one.key for one in uploads)]
        self.outcome.left_behind = [key for key in keys if killed in key]
        if self.outcome.left_behind or uploads or found != named:
            raise differs(
                f"the bucket has {len(found - named)} objects too many, {len(named - found)} too "
                f"few, {len(uploads)} open uploads; of the killed attempt: "
                f"{len(self.outcome.left_behind)}"
            )
        stage.tell(
            f"the bucket holds exactly the {len(named)} objects that the metadata names, "
            f"no open upload, and {len(listed - found)} manifests and checkpoints of attributes"
        )

    async def _survey(self) -> None:
        """Note where each ledger lies, for the report."""
        self.outcome.disk_bytes = self._stage.bytes_on_disk()
        listed = await self._stage.ledgers(STREAM)
        contexts = {one.ledger_id: one for one in await self._stage.contexts(STREAM)}
        last = (await self._stage.client.bounds(STREAM))[1]
        for ledger in listed:
            context = contexts[ledger.ledger_id]
            entries, size = ledger.entry_count, ledger.length
            if not ledger.closed and not isinstance(last, Edge):
                entries = last.entry_id if last.ledger_id == ledger.ledger_id else 0
            self.outcome.ledgers.append(
                {
                    "ledger_id": int(ledger.ledger_id),
                    "state": "closed" if ledger.closed else "open",
                    "entries": int(entries),
                    "bytes": size if ledger.closed else None,
                    "where": _where(context),
                    "attempts": context.attempt_count,
                    "blocks": context.copy.block_count if context.copy is not None else None,
                    "uuid": str(context.uuid) if context.uuid is not None else None,
                }
            )
        in_tier2 = sum(one["where"] == "S3" for one in self.outcome.ledgers)
        if in_tier2 < LEDGERS_IN_TIER2_MIN:
            raise differs(f"only {in_tier2} ledgers are in S3 alone")


def _where(context: OffloadContext) -> str:
    if context.state is OffloadState.TIER1_DELETED:
        return "S3"
    return "both" if context.complete else "local"
