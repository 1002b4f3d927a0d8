"""The administration's port over the streams in memory: documents with the scheduler's names.

An offload that is asked for is done at once. Times and sizes of objects are left out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Final

from tierlog.adapters.memory.streams import NODE, MemoryLedger, MemoryStream, MemoryStreams
from tierlog.catalog.ledgers import context_not_found
from tierlog.catalog.streams import offload_paused
from tierlog.model.errors import RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName, namespace_of
from tierlog.model.partitions import is_partitioned, partition_names
from tierlog.model.policy import Policy, breaks_below, check_namespace
from tierlog.model.position import Position
from tierlog.model.stream import OffloadPause, check_in_stream
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
            "policy": asdict(self._streams.levels.effective(found.name, found.policy)),
            "ledgers": [_ledger(one) for one in found.ledgers],
            "partitions": found.partitions,
            "partition_streams": [_summary(one) for one in self._partitions_of(found)],
        }

    def _partitions_of(self, stream: MemoryStream) -> list[MemoryStream]:
        if not stream.partitions:
            return []
        names = partition_names(stream.name, stream.partitions)
        return [self._streams.by_name[one] for one in names if one in self._streams.by_name]

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
        if stream.pause is not None:
            raise offload_paused(name, stream.pause)
        if stream.partitions:
            if before is not None:
                raise is_partitioned(name, stream.partitions)
            done = [await self.offload(one.name, None) for one in self._partitions_of(stream)]
            both = {key: [one for part in done for one in part[key]] for key in _LEDGER_LISTS}
            return {"stream": name, "position": None, **both}
        ledgers = stream.ledgers
        if before is not None:
            ends = [
                (one.ledger_id, EntryId(len(one.entries) - 1) if one.closed else None)
                for one in ledgers
            ]
            check_in_stream(name, ends, before)
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

    async def offloads(self, stream: StreamName | None = None) -> Sequence[Document]:
        asked = list(self._streams.by_name.values())
        if stream is not None:
            found = self._streams.stream(stream)
            asked = self._partitions_of(found) or [found]
        return [
            _offload(one, ledger) for one in asked for ledger in one.ledgers if ledger.offloaded
        ]

    async def offload_status(self, name: StreamName) -> Sequence[Document]:
        stream = self._streams.stream(name)
        return [_status(one) for one in self._partitions_of(stream) or [stream]]

    async def pause_offload(self, name: StreamName, cause: str) -> Sequence[Document]:
        stream = self._streams.stream(name)
        for one in (stream, *self._partitions_of(stream)):
            one.pause = one.pause or OffloadPause(since_ms=1, cause=cause)
        return await self.offload_status(name)

    async def resume_offload(self, name: StreamName) -> Sequence[Document]:
        stream = self._streams.stream(name)
        for one in (stream, *self._partitions_of(stream)):
            one.pause = None
        return await self.offload_status(name)

    async def attempts(self, name: StreamName) -> Sequence[Document]:
        stream = self._streams.stream(name)
        return [
            {
                "stream": one.name,
                "ledger_id": ledger.ledger_id,
                "complete": True,
                "attempt_count": 1,
                "attempts": [{"outcome": "COMPLETE", "error": ""}],
            }
            for one in self._partitions_of(stream) or [stream]
            for ledger in one.ledgers
            if ledger.offloaded
        ]

    async def leftovers(self, name: StreamName) -> Sequence[Document]:
        self._streams.stream(name)
        return []

    async def policy(self, name: StreamName) -> Document:
        own, levels = self._streams.stream(name).policy, self._streams.levels
        return {
            "own": asdict(own),
            "effective": asdict(levels.effective(name, own)),
            "levels": levels.sources(name, own),
        }

    async def set_policy(self, name: StreamName, policy: Document) -> Document:
        wanted = _policy_of(policy)
        self._streams.levels.check(name, wanted)
        stream = self._streams.stream(name)
        for one in (*self._partitions_of(stream), stream):
            one.policy = wanted
        return await self.policy(name)

    async def change_policy(self, name: StreamName, changes: Document) -> Document:
        return await self.set_policy(name, {**(await self.policy(name))["own"], **changes})

    async def level(self, namespace: str | None) -> Document:
        levels = self._streams.levels
        own = levels.cluster
        if namespace is not None:
            own = levels.namespaces.get(check_namespace(namespace), Policy())
        below = StreamName("x" if namespace is None else f"{namespace}.x")
        effective = levels.effective(below, Policy())
        return {"namespace": namespace, "own": asdict(own), "effective": asdict(effective)}

    async def set_level(self, namespace: str | None, policy: Document) -> Document:
        planned = self._streams.levels.with_level(namespace, _policy_of(policy))
        for name in sorted(self._streams.by_name):
            try:
                planned.check(name, self._streams.by_name[name].policy)
            except RefusedError as error:
                raise breaks_below(f"stream {name}", error) from error
        self._streams.levels = planned
        return await self.level(namespace)

    async def change_level(self, namespace: str | None, changes: Document) -> Document:
        own = (await self.level(namespace))["own"]
        return await self.set_level(namespace, {**own, **changes})

    async def explain(self, name: StreamName) -> Document:
        """Return the thresholds; what will happen, and when, is left out."""
        stream, found = self._streams.stream(name), await self.policy(name)
        return {
            "stream": name,
            "namespace": namespace_of(name),
            "paused": stream.pause is not None,
            "deletions_stopped": None,
            "oldest_byte_age_ms": 0,
            "thresholds": [
                {"name": key, "value": found["effective"][key], "level": level}
                for key, level in found["levels"].items()
            ],
            "ledgers": [],
        }

    async def delete_stream(self, name: StreamName) -> Document:
        """Delete a stream at once."""
        stream = self._streams.stream(name)
        for one in (*self._partitions_of(stream), stream):
            del self._streams.by_name[one.name]
        return {"stream": name, "incarnation": "", "ledgers_left": 0, "paused": False}

    async def close(self) -> None:
        pass


def _policy_of(given: Document) -> Policy:
    unknown = set(given) - {one.name for one in fields(Policy)}
    if unknown:
        raise RefusedError(
            f"{sorted(unknown)} are no thresholds", remedy="Name thresholds as policy does"
        )
    return Policy(**given)


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


def _status(stream: MemoryStream) -> Document:
    closed = [one for one in stream.ledgers if one.closed]
    left = [one for one in stream.ledgers if not one.offloaded]
    end = Position(left[0].ledger_id, EntryId(0)) if left else None
    if end is None and closed:
        end = closed[-1].end
    return {
        "stream": stream.name,
        "position": str(end) if end is not None else None,
        "pause": asdict(stream.pause) if stream.pause is not None else None,
        "wanted": 0,
        "states": dict(Counter("COMPLETE" if one.offloaded else "LOCAL" for one in closed)),
        "waiting_bytes": sum(_length(one) for one in closed if not one.offloaded),
        "failing": [],
        "failing_count": 0,
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
