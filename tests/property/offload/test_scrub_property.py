"""The judgement of whole buckets: what is named, young or another's is never called an orphan.

Buckets, contexts and manifests are drawn at random from few attempts, so that they meet.
"""

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.format.keys import CLUSTER_ID, ObjectRole, object_keys, parse_key
from tierlog.model.ids import EntryId, LedgerId, StreamName
from tierlog.model.manifest import KeptLedger
from tierlog.model.offload import (
    AbandonedAttempt,
    OffloadContext,
    OffloadState,
    Tier2Copy,
    Tier2Location,
)
from tierlog.model.scrub import FindingKind
from tierlog.offload.manifests import KnownManifest
from tierlog.offload.scrub_rules import Survey, classify
from tierlog.ports.objects import ObjectInfo, OpenUpload

OWN, OTHER = UUID(int=1), UUID(int=2)
NOW_MS, SAFETY_MS = 1_000_000, 1000
LEN = {
    ObjectRole.DATA: 10,
    ObjectRole.INDEX: 3,
    ObjectRole.SIDE: 2,
    ObjectRole.SINGLE: 13,
    ObjectRole.EXPORT: 7,
}
COPY = Tier2Copy(
    format_version=1,
    data_len=LEN[ObjectRole.DATA],
    index_len=LEN[ObjectRole.INDEX],
    index_sha256=b"",
    entry_count=1,
    block_count=1,
    side_len=LEN[ObjectRole.SIDE],
)
TWO_OBJECTS = (ObjectRole.DATA, ObjectRole.INDEX, ObjectRole.SIDE)
SINGLE_COPY = replace(COPY, data_len=LEN[ObjectRole.SINGLE], side_len=0)
PREFIXES = st.sampled_from(["", "a/b"])
uuids = st.integers(1, 4).map(lambda one: UUID(int=one << 64))
attempts = st.tuples(uuids, st.integers(0, 3))
ages = st.sampled_from([0, SAFETY_MS - 1, SAFETY_MS, SAFETY_MS + 1])


def key_of(prefix: str, uuid: UUID, ledger: int, role: ObjectRole = ObjectRole.DATA) -> str:
    return str(getattr(object_keys(prefix, uuid, LedgerId(ledger)), role.value))


@st.composite
def buckets(draw):
    """Return a prefix, objects in the order of keys, uploads, contexts and manifests."""
    prefix = draw(PREFIXES)
    seen = draw(
        st.dictionaries(
            st.tuples(attempts, st.sampled_from(ObjectRole)),
            st.tuples(
                ages, st.sampled_from([0, 0, 0, 1]), st.sampled_from([OWN, OWN, OWN, OTHER, None])
            ),
            max_size=20,
        )
    )
    objects = [
        ObjectInfo(
            key=key_of(prefix, uuid, ledger, role),
            size=LEN[role] + wrong,
            etag="",
            metadata={CLUSTER_ID: str(cluster)} if cluster else {},
            modified_ms=NOW_MS - age,
        )
        for ((uuid, ledger), role), (age, wrong, cluster) in seen.items()
    ]
    uploads = [
        OpenUpload(key=key_of(prefix, *one), upload_id=str(number), initiated_ms=NOW_MS - age)
        for number, (one, age) in enumerate(draw(st.lists(st.tuples(attempts, ages), max_size=5)))
    ]
    manifests = [
        KnownManifest(
            stream=StreamName("s"),
            incarnation=OWN,
            ledgers={LedgerId(ledger): KeptLedger(uuid, EntryId(0), b"")},
        )
        for uuid, ledger in draw(st.lists(attempts, max_size=3))
    ]
    contexts = [
        context(prefix, ledger, uuid, state, given_up, single=single)
        for ledger, (uuid, state, given_up, single) in draw(
            st.dictionaries(
                st.integers(0, 3),
                st.tuples(
                    uuids,
                    st.sampled_from([OffloadState.OFFLOADING, OffloadState.COMPLETE]),
                    st.booleans(),
                    st.booleans(),
                ),
                max_size=6,
            )
        ).items()
    ]
    return prefix, sorted(objects, key=lambda one: one.key), uploads, contexts, manifests


def context(
    prefix: str,
    ledger: int,
    uuid: UUID,
    state: OffloadState,
    given_up: bool,
    *,
    single: bool = False,
) -> OffloadContext:
    key = key_of(prefix, uuid, ledger, ObjectRole.SINGLE) if single else ""
    place = Tier2Location(
        driver="d", endpoint_name="e", bucket="b", data_key=key, index_key=key, side_key=""
    )
    before = AbandonedAttempt(uuid=UUID(int=3 << 64), location=place, abandoned_ms=1)
    done = state is OffloadState.COMPLETE
    return OffloadContext(
        stream=StreamName("s"),
        incarnation=OWN,
        ledger_id=LedgerId(ledger),
        state=state,
        uuid=uuid,
        location=place,
        complete=done,
        copy=(SINGLE_COPY if single else COPY) if done else None,
        abandoned=(before,) if given_up and uuid != before.uuid else (),
    )


@given(buckets())
def test_nothing_that_is_named_young_or_foreign_is_called_an_orphan(drawn):
    prefix, objects, uploads, contexts, manifests = drawn
    found = classify(
        objects,
        uploads,
        contexts,
        manifests,
        cluster_id=OWN,
        key_prefix=prefix,
        now_ms=NOW_MS,
        safety_ms=SAFETY_MS,
    )
    named = {(one.ledger_id, one.uuid) for one in contexts}
    named |= {(one.ledger_id, gone.uuid) for one in contexts for gone in one.abandoned}
    by_manifest = {(at, kept.uuid) for one in manifests for at, kept in one.ledgers.items()}
    by_attempt: dict[tuple[LedgerId, UUID], list[ObjectInfo]] = {}
    for info in objects:
        parsed = parse_key(prefix, info.key)
        assert parsed is not None
        by_attempt.setdefault((parsed.ledger_id, parsed.uuid), []).append(info)
    expected = set(by_attempt) - named - by_manifest
    judged = {
        (one.ledger_id, one.uuid)
        for one in found
        if not one.key and one.kind is not FindingKind.ORPHAN_UPLOAD and not one.stream
    }
    assert expected <= judged
    for one in found:
        if one.kind is FindingKind.ORPHAN_OBJECTS:
            assert one.ledger_id is not None
            assert one.uuid is not None
            assert (one.ledger_id, one.uuid) in expected
            some = by_attempt[one.ledger_id, one.uuid]
            assert all(NOW_MS - info.modified_ms >= SAFETY_MS for info in some)
            assert all(info.metadata == {CLUSTER_ID: str(OWN)} for info in some)
        if one.kind is FindingKind.ORPHAN_UPLOAD:
            works = {(at.ledger_id, at.uuid) for at in contexts if not at.complete}
            assert (one.ledger_id, one.uuid) not in works


@pytest.mark.parametrize("by", ["nobody", "newest", "abandoned", "manifest"])
def test_each_of_those_that_name_an_attempt_keeps_it(by: str):
    uuid = UUID(int=3 << 64)
    info = ObjectInfo(
        key=key_of("", uuid, 1), size=1, etag="", metadata={CLUSTER_ID: str(OWN)}, modified_ms=0
    )
    named = LedgerId(1) if by == "manifest" else LedgerId(2)
    known = KnownManifest(
        stream=StreamName("s"),
        incarnation=OWN,
        ledgers={named: KeptLedger(uuid, EntryId(0), b"")},
    )
    newest = uuid if by == "newest" else UUID(int=4 << 64)
    found = classify(
        [info],
        [],
        [context("", 1, newest, OffloadState.OFFLOADING, by == "abandoned")],
        [known],
        cluster_id=OWN,
        now_ms=NOW_MS,
        safety_ms=SAFETY_MS,
    )
    assert [one.kind for one in found] == ([FindingKind.ORPHAN_OBJECTS] if by == "nobody" else [])


@given(buckets())
def test_a_complete_copy_is_called_whole_only_if_it_is(drawn):
    prefix, objects, uploads, contexts, manifests = drawn
    found = classify(
        objects,
        uploads,
        contexts,
        manifests,
        cluster_id=OWN,
        key_prefix=prefix,
        now_ms=NOW_MS,
        safety_ms=SAFETY_MS,
    )
    sizes = {info.key: info.size for info in objects}
    copies = (FindingKind.MISSING_OBJECT, FindingKind.WRONG_OBJECT, FindingKind.POINTS_NOWHERE)
    told = {one.ledger_id: one.kind for one in found if one.kind in copies}
    for one in contexts:
        if not one.complete:
            assert one.ledger_id not in told
            continue
        assert one.location is not None
        wanted = {ObjectRole.SINGLE} if one.location.is_single else set(TWO_OBJECTS)
        there = {role: sizes.get(key_of(prefix, one.uuid, one.ledger_id, role)) for role in wanted}
        assert (one.ledger_id in told) == (there != {role: LEN[role] for role in wanted})
        if not any(size is not None for size in there.values()):
            assert told[one.ledger_id] is FindingKind.POINTS_NOWHERE


@given(buckets())
def test_a_survey_says_of_each_attempt_what_was_listed(drawn):
    prefix, objects, *_ = drawn
    survey = Survey(prefix)
    expected: dict[tuple[UUID, LedgerId], dict[ObjectRole, int]] = {}
    for info in objects:
        assert survey.see_object(info)
        parsed = parse_key(prefix, info.key)
        assert parsed is not None
        expected.setdefault(parsed[:2], {})[parsed.role] = info.size
    assert len(survey) == len(expected)
    for (uuid, ledger_id), sizes in expected.items():
        assert survey.sizes_of(uuid, ledger_id) == sizes
    assert {(one.uuid, one.ledger_id) for one in survey.unnamed()} == set(expected)
    for uuid, ledger_id in expected:
        survey.name(uuid, ledger_id)
    assert not list(survey.unnamed())
