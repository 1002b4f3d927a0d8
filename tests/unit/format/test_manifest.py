"""Manifests, byte for byte; whatever is not one is refused, and no key of one is an attempt's."""

import hashlib
from dataclasses import replace
from struct import pack as struct_pack
from uuid import UUID

import pytest

from tierlog.format import manifest as fmt
from tierlog.format.inspect import ObjectKind, inspect_object
from tierlog.format.keys import object_keys, parse_key
from tierlog.format.manifest import ManifestKind, PartRef, StreamGeneration
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.manifest import ClusterManifest, ManifestHead, ManifestLedger
from tierlog.model.node import Cluster
from tierlog.model.policy import Policy, PolicyLevels
from tierlog.model.stream import ListedLedger

STREAM = StreamName("orders")
INCARNATION = UUID(bytes=b"\x22" * 16)
CLUSTER = UUID(bytes=b"\x11" * 16)
HEAD = ManifestHead(stream=STREAM, incarnation=INCARNATION, created_ms=7)


def ledger(ledger_id: int) -> ManifestLedger:
    listed = ListedLedger(
        ledger_id=LedgerId(ledger_id),
        opened_ms=1,
        block_size=3,
        owner_epoch=4,
        closed=True,
        last_entry_id=EntryId(1),
        length=7,
        closed_ms=2,
    )
    return ManifestLedger(listed=listed)


def generation(**given) -> StreamGeneration:
    values = {
        "generation": 1,
        "cluster_id": CLUSTER,
        "written_ms": 5,
        "head": HEAD,
        "snapshot_generation": 1,
        "ledgers": {},
        **given,
    }
    return StreamGeneration(**values)


def test_a_part_byte_for_byte() -> None:
    # Written down from the byte table and the numbers of manifest.proto.
    body = bytes.fromhex(
        "0a10" + "11" * 16  # cluster_id
        + "1210" + "22" * 16  # incarnation
        + "1a12"  # ledgers[0], 18 bytes
        + "0a10" + "0805" + "1001" + "1801" + "2007" + "2801" + "3002" + "3803" + "4004"
    )  # fmt: skip
    head = bytes.fromhex("544c4d4600010002000000000000000900000038")
    expected = head + hashlib.sha256(head + body).digest() + body
    raw = fmt.encode_part(
        9, cluster_id=CLUSTER, incarnation=INCARNATION, ledgers=[fmt.keep(ledger(5))]
    )
    assert raw.hex() == expected.hex()
    assert fmt.decode_part(expected) == {5: fmt.keep(ledger(5))}


def test_where_manifests_lie() -> None:
    key = fmt.manifest_key("pre/fix", STREAM, INCARNATION, 12)
    assert key == (
        "pre/fix/streams/orders/22222222-2222-2222-2222-222222222222/00000000000000000012.manifest"
    )
    assert fmt.parse_manifest_key("pre/fix", key) == (STREAM, INCARNATION, 12, False)
    part = fmt.part_key("", STREAM, INCARNATION, 12, writer=CLUSTER, number=3)
    assert part == (
        "streams/orders/22222222-2222-2222-2222-222222222222/00000000000000000012"
        "-11111111-1111-1111-1111-111111111111-00003.part"
    )
    assert fmt.parse_manifest_key("", part) == (STREAM, INCARNATION, 12, True)
    own = fmt.cluster_key("p", CLUSTER, 1)
    assert own == "p/cluster/11111111-1111-1111-1111-111111111111/00000000000000000001.manifest"
    assert fmt.parse_cluster_key("p", own) == (CLUSTER, 1)
    assert fmt.parse_cluster_key("q", own) is None
    # Generations sort as their keys do.
    assert fmt.manifest_key("", STREAM, INCARNATION, 9) < fmt.manifest_key(
        "", STREAM, INCARNATION, 10
    )


@pytest.mark.parametrize("prefix", ["", "streams", "a/b"])
def test_manifests_are_never_taken_for_attempts_nor_the_other_way_round(prefix: str) -> None:
    manifests = [
        fmt.manifest_key(prefix, STREAM, INCARNATION, 1),
        fmt.part_key(prefix, STREAM, INCARNATION, 1, writer=CLUSTER, number=0),
        fmt.cluster_key(prefix, CLUSTER, 1),
    ]
    assert [parse_key(prefix, key) for key in manifests] == [None] * 3
    assert [parse_key("", key) for key in manifests] == [None] * 3
    attempt = object_keys(prefix, CLUSTER, LedgerId(3))
    for key in (attempt.data, attempt.index, attempt.side):
        assert fmt.parse_manifest_key(prefix, key) is None
        assert fmt.parse_cluster_key(prefix, key) is None


@pytest.mark.parametrize(
    "key",
    [
        "streams/orders/x/00000000000000000001.manifest",
        "streams/-bad/22222222-2222-2222-2222-222222222222/00000000000000000001.manifest",
        "streams/orders/22222222-2222-2222-2222-222222222222/1.manifest",
        "streams/orders/------------------------------------/00000000000000000001.manifest",
        "streams/orders/22222222-2222-2222-2222-222222222222/00000000000000000001.manifest2",
    ],
)
def test_other_keys_are_none_of_ours(key: str) -> None:
    assert fmt.parse_manifest_key("", key) is None


def test_every_flipped_byte_is_found() -> None:
    raw = fmt.encode_generation(generation(ledgers={5: fmt.keep(ledger(5))}))
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        with pytest.raises(CorruptError):
            fmt.decode_generation(bytes(damaged))
    for length in range(len(raw)):
        with pytest.raises(CorruptError):
            fmt.decode_generation(raw[:length])
    with pytest.raises(CorruptError):
        fmt.decode_generation(raw + b"\0")


def sealed(version: int, kind: int, number: int, body: bytes, *, body_len: int | None = None):
    """Return an object whose digest fits, whatever it says."""
    length = len(body) if body_len is None else body_len
    head = struct_pack(">4sHHQI", b"TLMF", version, kind, number, length)
    return head + hashlib.sha256(head + body).digest() + body


@pytest.mark.parametrize(
    "raw",
    [
        sealed(1, 9, 1, b""),
        sealed(1, 1, 0, b""),
        sealed(1, 1, 2**63, b""),
        sealed(1, 1, 1, b"abc", body_len=2),
        sealed(1, 1, 1, b"\xff"),
        sealed(1, 1, 1, b""),
        sealed(1, 2, 1, bytes.fromhex("1a03ffffff")),
        # A ledger whose id is -1.
        sealed(1, 2, 1, bytes.fromhex("1a0d0a0b08ffffffffffffffffff01")),
        sealed(1, 3, 1, b"\x0a\x01a"),
    ],
)
def test_what_is_sealed_and_makes_no_sense_is_corrupt(raw: bytes) -> None:
    for decode in (fmt.decode_generation, fmt.decode_part, fmt.decode_cluster_manifest):
        with pytest.raises(CorruptError):
            decode(raw)


def test_a_version_of_the_future_is_refused() -> None:
    with pytest.raises(RefusedError, match="format version 2"):
        fmt.unpack(sealed(2, 1, 1, b""))


def test_a_generation_that_is_no_snapshot_names_the_one_before_it() -> None:
    change = generation(generation=3, snapshot_generation=1, previous_sha256=b"\x01" * 32)
    assert fmt.decode_generation(fmt.encode_generation(change)) == change
    assert not change.is_snapshot
    for wrong in (
        replace(change, previous_sha256=b""),
        replace(change, snapshot_generation=4),
        replace(change, snapshot_generation=3),
    ):
        with pytest.raises(CorruptError):
            fmt.decode_generation(fmt.encode_generation(wrong))


def test_a_snapshot_in_parts() -> None:
    part = PartRef(key="k", sha256=b"\x03" * 32, length=9, ledger_count=2)
    snapshot = generation(parts=(part,), removed=())
    assert fmt.decode_generation(fmt.encode_generation(snapshot)) == snapshot
    assert snapshot.is_snapshot


def test_a_cluster_s_manifest() -> None:
    manifest = ClusterManifest(
        cluster=Cluster(cluster_id=CLUSTER, created_ms=5, ledger_id_base=77),
        levels=PolicyLevels(
            cluster=Policy(offload_time_ms=9), namespaces={"ns": Policy(deletion_lag_ms=-1)}
        ),
    )
    raw = fmt.encode_cluster_manifest(manifest, generation=4, now_ms=6)
    assert fmt.unpack(raw)[:2] == (ManifestKind.CLUSTER, 4)
    assert fmt.decode_cluster_manifest(raw) == manifest
    with pytest.raises(CorruptError, match="CLUSTER where a STREAM"):
        fmt.decode_generation(raw)


def test_inspect_shows_manifests_and_what_is_wrong_with_them() -> None:
    raw = fmt.encode_generation(generation(ledgers={5: fmt.keep(ledger(5))}))

    def read(offset: int, length: int) -> bytes:
        return raw[offset : offset + length]

    report = inspect_object(read, len(raw))
    assert (report.kind, report.sound) == (ObjectKind.MANIFEST, True)
    shown = {one.name: one.value for one in report.fields}
    assert shown["generation"] == "1"
    assert shown["head.stream"] == "orders"
    assert shown["ledger.5"] == "2 entries, 7 bytes, no copy"
    for other in (
        fmt.encode_part(1, cluster_id=CLUSTER, incarnation=INCARNATION, ledgers=[]),
        fmt.encode_cluster_manifest(
            ClusterManifest(cluster=Cluster(cluster_id=CLUSTER, created_ms=5)),
            generation=1,
            now_ms=6,
        ),
    ):
        raw = other
        assert inspect_object(read, len(raw)).sound
    raw = raw[:-1]
    report = inspect_object(read, len(raw))
    assert (report.kind, report.sound) == (ObjectKind.MANIFEST, False)
    assert "digest" in report.problems[0].message
