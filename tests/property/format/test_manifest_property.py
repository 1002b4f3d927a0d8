"""What goes into a manifest comes out the same; bytes that were not put there are refused."""

from hypothesis import given
from hypothesis import strategies as st

from tests.property.format.test_records_property import (
    copies,
    listed,
    locations,
    names,
    naturals,
    policies,
    texts,
    uuids,
)
from tierlog.format import manifest as fmt
from tierlog.format.manifest import PartRef, StreamGeneration
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.ids import LEDGER_ID_MAX, EntryId, LedgerId, StreamName
from tierlog.model.manifest import ManifestCopy, ManifestHead, ManifestLedger
from tierlog.model.stream import OffloadPause, StreamLifecycle

ids = st.integers(0, LEDGER_ID_MAX)
digests = st.binary(min_size=32, max_size=32)
ledger_copies = st.builds(
    ManifestCopy, uuid=uuids, location=locations, complete_ms=naturals, copy=copies
)
heads = st.builds(
    ManifestHead,
    stream=names.map(StreamName),
    incarnation=uuids,
    created_ms=naturals,
    lifecycle=st.sampled_from(StreamLifecycle),
    raw=st.booleans(),
    partitions=st.integers(0, 1024),
    owner_epoch=naturals,
    policy=policies(),
    offload_pause=st.none() | st.builds(OffloadPause, since_ms=naturals, cause=texts),
    trimmed_through=st.just(LedgerId(-1)) | ids.map(LedgerId),
    policy_changed_ms=naturals,
    offload_pauses=naturals,
    offload_through=st.none() | ids.map(LedgerId),
    trimmed_last=st.none() | st.integers(-1, LEDGER_ID_MAX).map(EntryId),
    ledger_id_max=st.just(LedgerId(-1)) | ids.map(LedgerId),
)
parts = st.builds(
    PartRef, key=texts, sha256=digests, length=naturals, ledger_count=st.integers(0, 10_000)
)


@st.composite
def ledgers(draw) -> ManifestLedger:
    one = draw(listed(draw(ids)))
    return ManifestLedger(listed=one, copy=draw(st.none() | ledger_copies))


@st.composite
def generations(draw) -> StreamGeneration:
    number = draw(st.integers(1, 2**63 - 1))
    snapshot = draw(st.just(number) | st.integers(1, number))
    kept = [fmt.keep(one) for one in draw(st.lists(ledgers(), max_size=2))]
    return StreamGeneration(
        generation=number,
        cluster_id=draw(uuids),
        written_ms=draw(naturals),
        head=draw(heads),
        snapshot_generation=snapshot,
        previous_sha256=b"" if snapshot == number else draw(digests),
        ledgers={fmt.unkeep(one.packed).listed.ledger_id: one for one in kept},
        removed=tuple(map(LedgerId, draw(st.lists(ids, max_size=4)))),
        parts=tuple(draw(st.lists(parts, max_size=1))),
    )


@given(ledgers())
def test_a_ledger_comes_back_the_same(one: ManifestLedger) -> None:
    kept = fmt.keep(one)
    assert fmt.unkeep(kept.packed) == one
    assert fmt.keep(fmt.unkeep(kept.packed)) == kept


@given(generations())
def test_a_generation_comes_back_the_same(one: StreamGeneration) -> None:
    assert fmt.decode_generation(fmt.encode_generation(one)) == one


@given(generations(), st.data())
def test_a_changed_byte_is_corrupt(one: StreamGeneration, data: st.DataObject) -> None:
    raw = bytearray(fmt.encode_generation(one))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        fmt.decode_generation(bytes(raw))
    except CorruptError:
        return
    raise AssertionError("a changed byte was taken")


@given(st.sampled_from([1, 2, 3]), st.integers(1, 9), st.binary(max_size=200))
def test_sealed_noise_is_refused_or_a_value(kind: int, number: int, body: bytes) -> None:
    raw = fmt.pack(fmt.ManifestKind(kind), number, body)
    for decode in (fmt.decode_generation, fmt.decode_part, fmt.decode_cluster_manifest):
        try:
            decode(raw)
        except (CorruptError, RefusedError):
            continue
