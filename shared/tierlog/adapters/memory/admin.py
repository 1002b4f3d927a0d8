"""The administration's port over the streams in memory: documents with the scheduler's names.

An offload that is asked for is done at once. Times and sizes of objects are left out.
"""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Final

from tierlog.adapters.memory.streams import NODE, MemoryLedger, MemoryStream, MemoryStreams
from tierlog.catalog.ledgers import context_not_found
from tierlog.model.errors import RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.partitions import is_partitioned, partition_names
from tierlog.model.policy import CLUSTER_DEFAULT, Policy
from tierlog.model.position import Position
from tierlog.ports.admin import Document

_LEDGER_LISTS: Final = ("ledgers", "requested")


class MemoryAdministration:
    """``Administration`` over streams in memory."""

    def __init__(self, streams: MemoryStreams) -> None:
        self._streams = streams

    async def streams(self) -> Sequence[Document]:
        return [_summary(self._streams.by_name[name]) for name in sorted(self._streams.by_name)]

    async def stream(self, name: StreamName) -> Document:
        found = self._streams.stream(name)
        return {
            "stream": found.name,
            "raw": found.raw,
            "lifecycle": "ACTIVE",
            "owner": found.owner,
            "owner_epoch": found.owner_epoch,
            "policy": asdict(found.policy.over(CLUSTER_DEFAULT)),
            "ledgers": [_ledger(one) for one in found.ledgers],
            "partitions": found.partitions,
            "partition_streams": [_summary(one) for one in self._partitions_of(found)],
        }

    def _partitions_of(self, stream: MemoryStream) -> list[MemoryStream]:
        if not stream.partitions:
            return []
        names = partition_names(stream.name, stream.partitions)
        return [self._streams.stream(one) for one in names]

    async def ledger(self, ledger_id: LedgerId) -> Document:
        for stream in self._streams.by_name.values():
            for ledger in stream.ledgers:
                if ledger.ledger_id == ledger_id:
                    return {
                        "ledger_id": ledger_id,
                        "stream": stream.name,
                        "metadata": {
                            "state": "CLOSED" if ledger.closed else "OPEN",
                            "last_entry_id": len(ledger.entries) - 1 if ledger.closed else -1,
                            "length": _length(ledger),
                            "ensembles": [{"first_entry_id": 0, "nodes": [NODE]}],
                        },
                        "offload": _offload(stream, ledger),
                    }
        raise context_not_found(ledger_id)

    async def offload(self, name: StreamName, before: Position | None) -> Document:
        stream = self._streams.stream(name)
        if stream.partitions:
            if before is not None:
                raise is_partitioned(name, stream.partitions)
            done = [await self.offload(one.name, None) for one in self._partitions_of(stream)]
            both = {key: [one for part in done for one in part[key]] for key in _LEDGER_LISTS}
            return {"stream": name, "position": None, **both}
        ledgers = stream.ledgers
        selected = [
            one for one in ledgers if one.closed and (before is None or _last(one) < before)
        ]
        requested = [one.ledger_id for one in selected if not one.offloaded]
        for one in selected:
            one.offloaded = True
        rest = ledgers[len(selected) :]
        end = Position(rest[0].ledger_id, EntryId(0)) if rest else None
        if end is None and selected:
            end = selected[-1].end
        return {
            "stream": name,
            "position": str(end) if end is not None else None,
            "ledgers": [one.ledger_id for one in selected],
            "requested": requested,
        }

    async def offloads(self) -> Sequence[Document]:
        return [
            _offload(stream, ledger)
            for stream in self._streams.by_name.values()
            for ledger in stream.ledgers
            if ledger.offloaded
        ]

    async def policy(self, name: StreamName) -> Document:
        own = self._streams.stream(name).policy
        return {"own": asdict(own), "effective": asdict(own.over(CLUSTER_DEFAULT))}

    async def set_policy(self, name: StreamName, policy: Document) -> Document:
        unknown = set(policy) - {one.name for one in fields(Policy)}
        if unknown:
            raise RefusedError(
                f"{sorted(unknown)} are no thresholds", remedy="Name thresholds as policy does"
            )
        wanted = Policy(**policy)
        wanted.over(CLUSTER_DEFAULT)
        stream = self._streams.stream(name)
        for one in (*self._partitions_of(stream), stream):
            one.policy = wanted
        return await self.policy(name)

    async def close(self) -> None:
        pass


def _last(ledger: MemoryLedger) -> Position:
    return Position(ledger.ledger_id, EntryId(len(ledger.entries) - 1))


def _length(ledger: MemoryLedger) -> int:
    """Bytes of a closed ledger; an open one counts when it is closed."""
    return sum(map(len, ledger.entries)) if ledger.closed else 0


def _ledger(ledger: MemoryLedger) -> Document:
    return {
        "ledger_id": ledger.ledger_id,
        "state": "CLOSED" if ledger.closed else "OPEN",
        "entries": len(ledger.entries) if ledger.closed else 0,
        "length": _length(ledger),
        "complete": ledger.offloaded,
        "tier1": True,
        "tier2": ledger.offloaded,
        "last_error": "",
    }


def _summary(stream: MemoryStream) -> Document:
    closed = [one for one in stream.ledgers if one.closed]
    return {
        "stream": stream.name,
        "ledgers": len(stream.ledgers),
        "entries": sum(len(one.entries) for one in closed),
        "bytes": sum(map(_length, closed)),
        "tier1_bytes": sum(map(_length, closed)),
        "tier2_bytes": sum(_length(one) for one in closed if one.offloaded),
        "owner": stream.owner,
        "owner_epoch": stream.owner_epoch,
        "raw": stream.raw,
        "partitions": stream.partitions,
    }


def _offload(stream: MemoryStream, ledger: MemoryLedger) -> Document:
    return {
        "stream": stream.name,
        "ledger_id": ledger.ledger_id,
        "state": "COMPLETE" if ledger.offloaded else "LOCAL",
        "complete": ledger.offloaded,
        "bookkeeper_deleted": False,
        "last_error": "",
    }
