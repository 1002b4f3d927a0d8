"""What a manifest says, field by field, for ``tierlog object inspect``.

Invariant: bytes that are no whole manifest are ``CorruptError`` or ``RefusedError``, as in reading.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tierlog.format import manifest as fmt
from tierlog.format.manifest import HEADER_LEN, ManifestKind
from tierlog.model.ids import LedgerId
from tierlog.model.manifest import KeptLedger, ManifestLedger


class ManifestField(NamedTuple):
    """Something that stands in a manifest; fields of the body have the body's place."""

    offset: int
    length: int
    name: str
    value: str


def manifest_fields(raw: bytes) -> list[ManifestField]:
    """Return what a manifest says."""
    kind, generation, body = fmt.unpack(raw)
    header = [
        ManifestField(0, 4, "magic", fmt.MAGIC.decode()),
        ManifestField(4, 2, "version", str(int.from_bytes(raw[4:6], "big"))),
        ManifestField(6, 2, "kind", kind.name.lower()),
        ManifestField(8, 8, "generation", str(generation)),
        ManifestField(16, 4, "body_len", str(len(body))),
        ManifestField(20, 32, "sha256", raw[20:HEADER_LEN].hex()),
    ]
    said = (ManifestField(HEADER_LEN, len(body), *one) for one in _body(raw, kind))
    return [*header, *said]


def _body(raw: bytes, kind: ManifestKind) -> Iterator[tuple[str, str]]:
    if kind is ManifestKind.STREAM:
        yield from _generation(raw)
    elif kind is ManifestKind.PART:
        yield from _ledgers(fmt.decode_part(raw))
    else:
        found = fmt.decode_cluster_manifest(raw)
        yield "cluster_id", str(found.cluster.cluster_id)
        yield "ledger_id_base", str(found.cluster.ledger_id_base)
        yield "policy.cluster", str(found.levels.cluster)
        for name, policy in sorted(found.levels.namespaces.items()):
            yield f"policy.{name}", str(policy)


def _generation(raw: bytes) -> Iterator[tuple[str, str]]:
    one = fmt.decode_generation(raw)
    yield "cluster_id", str(one.cluster_id)
    yield "written_ms", str(one.written_ms)
    yield "snapshot_generation", str(one.snapshot_generation)
    yield "previous_sha256", one.previous_sha256.hex()
    for name in one.head.__slots__:
        yield f"head.{name}", str(getattr(one.head, name))
    for part in one.parts:
        yield "part", f"{part.key} ({part.ledger_count} ledgers, {part.length} bytes)"
    if one.removed:
        yield "removed", " ".join(map(str, one.removed))
    yield from _ledgers(one.ledgers)


def _ledgers(kept: Mapping[LedgerId, KeptLedger]) -> Iterator[tuple[str, str]]:
    for ledger_id, one in kept.items():
        yield f"ledger.{ledger_id}", _said(fmt.unkeep(one.packed))


def _said(ledger: ManifestLedger) -> str:
    what = f"{ledger.listed.entry_count} entries, {ledger.listed.length} bytes"
    copy = ledger.copy
    if copy is None:
        return f"{what}, no copy"
    return f"{what}, {copy.location.data_key}, index {copy.copy.index_sha256.hex()[:16]}…"
