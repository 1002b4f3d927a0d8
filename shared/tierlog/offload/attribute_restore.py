"""A checkpoint of attributes that comes back with its stream: all of it is read and compared.

Owns the check of the objects. Does not own which checkpoint a manifest names, nor what becomes of
a stream without one (``tierlog.offload.restore``).

Invariant: what is restored is readable: every object that the checkpoint's root may need is there,
and has the digest that the manifest, or the list of its chunk, says.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace

from tierlog.format import attribute_objects as fmt
from tierlog.model.attribute_record import AttributesRecord
from tierlog.model.attributes import IndexChunk, IndexObject
from tierlog.model.errors import CorruptError
from tierlog.model.manifest import ManifestHead, ManifestLedger
from tierlog.model.position import Position
from tierlog.ports.objects import ObjectStore


def attributes_cause(head: ManifestHead, ledgers: Sequence[ManifestLedger]) -> str | None:
    """Say why the attributes of writers can't be known after a restore; None: they can.

    The checkpoint and all entries behind it are what they are rebuilt from.
    """
    if head.raw or head.partitions:
        return None
    through = head.attributes_through
    if through is None:
        if head.trimmed_through < 0:
            return None
        return (
            f"ledgers up to {head.trimmed_through} were trimmed, and the manifest names no "
            "checkpoint of attributes: the state of writers that did not append since is unknown"
        )
    if not _has_trimmed(through, head):
        return (
            f"ledgers up to {head.trimmed_through} were trimmed, and the checkpoint of attributes "
            f"is as of {through}: the state of writers that did not append since is unknown"
        )
    for one in ledgers:
        if one.copy is None and one.listed.ledger_id <= through.ledger_id:
            return f"ledger {one.listed.ledger_id} is lost, and the checkpoint at {through} has it"
    return None


def _has_trimmed(through: Position, head: ManifestHead) -> bool:
    """Tell whether a checkpoint has every entry that was trimmed; unknown is no."""
    if through.ledger_id != head.trimmed_through:
        return through.ledger_id > head.trimmed_through
    return head.trimmed_last is not None and through.entry_id >= head.trimmed_last


async def checked_attributes(
    objects: ObjectStore, folder: str, named: AttributesRecord, slots: asyncio.Semaphore
) -> AttributesRecord:
    """Return a checkpoint whose objects lie in ``folder`` now, all of them read and compared.

    Raises ``CorruptError`` for the first that is missing or is not what was written.
    """
    root = named.newest
    chunks = [replace(one, key=fmt.moved_key(folder, one.key)) for one in named.chunks]
    inline = [replace(one, key=fmt.moved_key(folder, one.key)) for one in named.objects]
    whole: list[IndexChunk] = []
    listed: list[IndexObject] = []
    cut: list[IndexObject] = []
    for chunk in chunks:
        raw = await _read(objects, chunk.key, chunk.sha256, slots)
        some = fmt.decode_list(raw, key=chunk.key)
        listed += some
        if chunk.end <= root.root.end:
            whole.append(chunk)
        else:
            # It goes on behind the checkpoint, where the next owner's objects will lie.
            cut += some
    cut = [one for one in (*cut, *inline) if root.needs(one.start, one.end)]
    needed = sorted(
        {*cut, *(one for one in listed if root.needs(one.start, one.end))},
        key=lambda one: one.start,
    )
    at = root.root.start
    for one in needed:
        if one.start > at:
            break
        raw = await _read(objects, one.key, one.sha256, slots)
        if len(raw) != one.length:
            raise _differs(one.key, f"has {len(raw)} bytes and not {one.length}")
        at = one.end
    if root.root.root_length and at < root.root.end:
        raise CorruptError(
            f"no object of the attribute index holds byte {at}",
            remedy="Bring the objects back, or restore without them: --accept-damage",
            details={"object": folder, "offset": str(at)},
        )
    # Flushes that were under way when everything was lost publish nothing here.
    return replace(named, generation=named.generation + 1, chunks=tuple(whole), objects=tuple(cut))


async def _read(objects: ObjectStore, key: str, sha256: bytes, slots: asyncio.Semaphore) -> bytes:
    async with slots:
        found = await objects.get(key)
    if found is None:
        raise _differs(key, "is not there")
    if hashlib.sha256(found[1]).digest() != sha256:
        raise _differs(key, "has another digest than the manifest says")
    return found[1]


def _differs(key: str, what: str) -> CorruptError:
    return CorruptError(
        f"object {key} of the attribute index {what}",
        remedy="Bring the object back, or restore without it: --accept-damage",
        details={"object": key, "offset": "0"},
    )
