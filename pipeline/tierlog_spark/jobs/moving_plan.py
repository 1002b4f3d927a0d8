"""Which copies go from one bucket into another (pure).

Owns the choice, and what is said of each. Does not own a copy's way (``tierlog.offload.moving``).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple
from uuid import UUID

from tierlog.format.manifest import keep, unkeep
from tierlog.model.attribute_record import KeptRoot
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import KeptLedger, ManifestHead, said_older
from tierlog.model.partitions import whole_of
from tierlog.model.stream import StreamLifecycle
from tierlog.offload.manifests import KnownManifest
from tierlog.offload.moving import is_older, not_named

THERE: Final = "there"
BROUGHT: Final = "brought"
MISSING: Final = "missing"
"""Of a dry run: it would be brought."""
OTHER_COPY: Final = "other_copy"
"""Sound in the target, and the source has a copy of it under another UUID."""
NOT_IN_SOURCE: Final = "not_in_source"
"""Sound in the target, and the source has no copy of it."""
FAILED: Final = "failed"
DELETED: Final = "deleted"
"""Of a stream: who has it as its own is deleting it. So says a copy's manifest in the target then;
and no restore brings any of it back."""
OUTCOMES: Final = (BROUGHT, THERE, MISSING, OTHER_COPY, NOT_IN_SOURCE, FAILED)

_BY_SCHEDULER: Final = (
    "Where ZooKeeper lives, let its scheduler write a newer one, and run this again"
)

Incarnation = tuple[StreamName, UUID]


class StreamPair(NamedTuple):
    """A stream in both buckets; in the target there may be none yet."""

    source: KnownManifest
    target: KnownManifest

    @property
    def name(self) -> Incarnation:
        """Which stream, and which of that name."""
        return self.source.stream, self.source.incarnation


class StreamEnd(NamedTuple):
    """A stream of which all has arrived; ``ledgers``: for its manifest, None: it has one."""

    cluster_id: UUID
    head: ManifestHead
    ledgers: tuple[bytes, ...] | None


class Deleted(NamedTuple):
    """A stream that is being deleted, and why nothing of it comes back.

    ``failed``: it was asked for by its name, and none of that name is there then.
    """

    stream: StreamName
    cause: str = ""
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveItem:
    """A ledger as the source's manifest has it, and as the target's, if that names a copy.

    ``unbacked``: why the source can't bring it, ``OTHER_COPY`` or ``NOT_IN_SOURCE``; ``packed``
    is then as the target's manifest has it.
    """

    cluster_id: UUID
    stream: StreamName
    incarnation: UUID
    ledger_id: LedgerId
    packed: bytes
    known: bytes | None
    data_len: int
    unbacked: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What became of a ledger. ``packed``: as the target has it, for its manifest."""

    item: MoveItem
    outcome: str
    packed: bytes | None = None
    error: str = ""


def also_there(
    found: Iterable[Incarnation], there: Iterable[Incarnation], streams: Collection[StreamName]
) -> list[Incarnation]:
    """Return what either bucket has, of ``streams`` and their partitions where some are named."""
    names = set(found)
    wanted = {name for name, _ in names}
    return sorted(
        {
            *names,
            *(
                one
                for one in there
                if not streams or one[0] in wanted or whole_of(one[0]) in streams
            ),
        }
    )


def living(pairs: Iterable[StreamPair]) -> list[StreamPair]:
    """Leave out what the source has not, or is deleting."""
    return [one for one in pairs if _lives(one.source)]


def _lives(known: KnownManifest) -> bool:
    return known.head is not None and known.head.lifecycle is StreamLifecycle.ACTIVE


def still_wanted(pairs: Iterable[StreamPair]) -> list[StreamPair]:
    """Leave out what the target is deleting itself: it was there, and is to go."""
    return [one for one in pairs if one.target.head is None or _lives(one.target)]


def older_sources(pairs: Iterable[StreamPair]) -> dict[Incarnation, str]:
    """Return the living streams of which the target knows what the source does not; say what.

    The source's manifest lost its newest part, or came back from before: a copy of that would take
    names away from what is sound, or have a restore trim by what was said before.
    """
    found = {}
    for pair in pairs:
        source, target = pair.source.head, pair.target.head
        if source is None or target is None:
            continue
        ledgers = not_named(pair.target.ledgers, source, pair.source.ledgers)
        if target.lifecycle is not StreamLifecycle.ACTIVE:
            what = "the target says that this stream is being deleted, and the source does not"
        elif ledgers:
            what = (
                f"the target's manifest names copies of {len(ledgers)} ledgers, the first "
                f"{ledgers[0]}, that the source's does not name, and did not trim"
            )
        elif (older := said_older(source, target)) is not None:
            what = f"by the target's manifest {older}"
        else:
            continue
        found[pair.name] = (
            f"{what}: that one is older, or each went on by itself, and nothing of the stream is "
            f"copied. {_BY_SCHEDULER}; else bring the source's back with: tierlog spark restore; "
            "or copy to an empty bucket, or prefix"
        )
    return found


def older_targets(pairs: Iterable[StreamPair]) -> dict[Incarnation, str]:
    """Return the streams of which the target's manifest lacks what the backup's has.

    Copies come back, and without a name nobody finds them; and by an old policy more is trimmed.
    """
    found = {}
    for pair in pairs:
        source, target = pair.source, pair.target
        if source.head is None or target.head is None or not _lives(target):
            continue
        lacks = not_named(source.ledgers, target.head, target.ledgers)
        if lacks:
            what = (
                f"does not name the copies of {len(lacks)} ledgers, the first {lacks[0]}, that the "
                "backup's names: by it no restore of metadata brings them back"
            )
        elif (older := said_older(target.head, source.head)) is not None:
            what = f"has what was said before: by the backup's {older}. A restore would trim by it"
        else:
            continue
        found[pair.name] = f"the bucket's manifest {what}. {_BY_SCHEDULER}; where it is lost, " + (
            f"{'read' if lacks else 'set again'} what the backup alone has: the bucket's manifest "
            "has a newer owner or policy, was trimmed further, or names others that the backup's "
            "does not"
            if is_older(source.head, source.ledgers, target.head, target.ledgers)
            else "move the stream's *.manifest and *.part away, and run this again: the backup's "
            "comes back then"
        )
    return found


def dying(pairs: Iterable[StreamPair]) -> list[StreamEnd]:
    """Return the streams that live in the target alone, as the source is deleting them.

    Their manifests name what they named, and say that they are being deleted: no restore brings
    such a stream back. Nothing of it is deleted.
    """
    found = []
    for pair in pairs:
        source, target = pair.source.head, pair.target.head
        if source is None or source.lifecycle is StreamLifecycle.ACTIVE or not _lives(pair.target):
            continue
        assert target is not None
        assert pair.target.cluster_id is not None
        ledgers = tuple(kept.packed for kept in pair.target.ledgers.values())
        head = replace(target, lifecycle=StreamLifecycle.DELETING)
        found.append(StreamEnd(pair.target.cluster_id, head, ledgers))
    return found


def not_restored(pairs: Sequence[StreamPair], streams: Collection[StreamName]) -> list[Deleted]:
    """Return the streams of which a restore brings nothing, as one of the buckets deletes them.

    Where the source alone says so, and another one of that name is there then, nobody misses it.
    ``streams``: those that were named.
    """
    there = {
        one.source.stream
        for one in pairs
        if _lives(one.target) or (one.target.head is None and _lives(one.source))
    }
    found: dict[StreamName, Deleted] = {}
    for pair in pairs:
        name, known = pair.source.stream, pair.source if pair.target.head is None else pair.target
        if known.head is None or _lives(known):
            continue
        if known is pair.target:
            cause = (
                "the bucket says that this stream is being deleted; nothing of it comes back; "
                "leave it out, or read it in the backup"
            )
        elif name not in there:
            cause = (
                "the backup says that this stream was being deleted; nothing of it comes back; use "
                "an older backup"
            )
        else:
            continue
        asked = not {name, whole_of(name)}.isdisjoint(streams)
        found[name] = Deleted(name, cause, failed=asked and name not in there)
    return list(found.values())


def strays(pairs: Sequence[StreamPair]) -> list[KnownManifest]:
    """Return the streams that a restore would bring back, and that the source knows nothing of.

    They were deleted there since a copy before, or the source is the wrong one, or has lost their
    manifests: nobody here can tell. Older ones than those that live no restore brings back.
    """
    clusters = {one.source.cluster_id for one in pairs if one.source.generation}
    newest = {
        one.source.stream: one.source.head.created_ms
        for one in sorted(living(pairs), key=_created_ms)
        if one.source.head is not None
    }
    return [
        one.target
        for one in pairs
        if not one.source.generation
        and one.target.cluster_id in clusters
        and _lives(one.target)
        and one.target.head is not None
        and one.target.head.created_ms >= newest.get(one.target.stream, 0)
    ]


def _created_ms(pair: StreamPair) -> int:
    assert pair.source.head is not None
    return pair.source.head.created_ms


def to_move(pairs: Iterable[StreamPair]) -> list[MoveItem]:
    """Return every ledger of which the source has a copy."""
    return [item for pair in pairs for item in _items(pair)]


def to_restore(pairs: Iterable[StreamPair]) -> list[MoveItem]:
    """Return those that the target should still have: not what it trimmed, or copied anew.

    What its manifest does not know has its place, too: a manifest may be older than its objects.
    """
    found = []
    for pair in pairs:
        head = pair.target.head
        for item in _items(pair):
            trimmed = head is not None and item.ledger_id <= head.trimmed_through
            named = pair.target.ledgers.get(item.ledger_id)
            source = pair.source.ledgers[item.ledger_id]
            other = named is not None and named.uuid not in (None, source.uuid)
            if not trimmed and not other:
                found.append(item)
    return found


def unbacked(pairs: Iterable[StreamPair]) -> list[MoveItem]:
    """Return what the target's manifests name and the source can't bring back.

    Whether it is sound only the target itself can say; nobody else is asked for it.
    """
    found = []
    for pair in pairs:
        if not _lives(pair.target):
            continue
        backup = pair.source.ledgers if _lives(pair.source) else {}
        for ledger_id, kept in pair.target.ledgers.items():
            other = backup.get(ledger_id)
            uuid = other.uuid if other is not None else None
            if kept.uuid is None or uuid == kept.uuid:
                continue
            item = _item(pair.target, ledger_id, kept)
            why = OTHER_COPY if uuid else NOT_IN_SOURCE
            found.append(replace(item, known=kept.packed, unbacked=why))
    return found


def own_indexes(pairs: Iterable[StreamPair], ends: Iterable[StreamEnd]) -> list[Incarnation]:
    """Return the streams whose attribute index is in the target as its own manifest alone has it.

    ``ends``: what is brought of the source is compared then, and not once more.
    """
    brought = {(one.head.stream, one.head.incarnation): _index(one.head) for one in ends}
    return [
        pair.name
        for pair in pairs
        if _lives(pair.target)
        and (own := _index(pair.target.head)) is not None
        and own != brought.get(pair.name)
    ]


def _index(head: ManifestHead | None) -> tuple[KeptRoot, list[bytes]] | None:
    """Return what a checkpoint needs, wherever it lies."""
    if head is None or head.attributes is None:
        return None
    named = head.attributes
    chunks = [one.sha256 for one in named.chunks]
    return named.newest, [*chunks, *(one.sha256 for one in named.objects)]


def _items(pair: StreamPair) -> list[MoveItem]:
    found = []
    for ledger_id, kept in pair.source.ledgers.items():
        if kept.uuid is None:
            continue
        known = pair.target.ledgers.get(ledger_id)
        packed = known.packed if known is not None and known.uuid is not None else None
        found.append(replace(_item(pair.source, ledger_id, kept), known=packed))
    return found


def _item(manifest: KnownManifest, ledger_id: LedgerId, kept: KeptLedger) -> MoveItem:
    assert manifest.cluster_id is not None, "there is a generation"
    copy = unkeep(kept.packed).copy
    assert copy is not None
    return MoveItem(
        cluster_id=manifest.cluster_id,
        stream=manifest.stream,
        incarnation=manifest.incarnation,
        ledger_id=ledger_id,
        packed=kept.packed,
        known=None,
        data_len=copy.copy.data_len,
    )


def best(moved: Iterable[Moved]) -> list[Moved]:
    """Return one outcome of each ledger: of a task that ran twice, what it came to."""
    found: dict[tuple[StreamName, UUID, LedgerId], Moved] = {}
    for one in moved:
        key = (one.item.stream, one.item.incarnation, one.item.ledger_id)
        before = found.get(key)
        if before is None or OUTCOMES.index(one.outcome) < OUTCOMES.index(before.outcome):
            found[key] = one
    return [found[key] for key in sorted(found)]


def arrived(pairs: Iterable[StreamPair], moved: Iterable[Moved], *, anew: bool) -> list[StreamEnd]:
    """Return the streams of which nothing is missing; ``anew``: whatever manifest there is.

    Then also those that had arrived once: else one ledger that is lost for good would keep all that
    come behind it without a name.
    """
    packed: dict[Incarnation, dict[LedgerId, bytes]] = {}
    failed: set[Incarnation] = set()
    for one in moved:
        name = (one.item.stream, one.item.incarnation)
        if one.packed is None:
            failed.add(name)
        else:
            packed.setdefault(name, {})[one.item.ledger_id] = one.packed
    found = []
    for pair in pairs:
        head, there = pair.source.head, packed.get(pair.name, {})
        assert head is not None
        assert pair.source.cluster_id is not None
        if pair.name in failed and not (anew and pair.target.generation):
            continue
        ledgers = None
        if anew or not pair.target.generation:
            ledgers = tuple(
                there.get(ledger_id) or _left(pair, ledger_id, kept)
                for ledger_id, kept in pair.source.ledgers.items()
            )
        found.append(StreamEnd(pair.source.cluster_id, _without_lost(pair, there), ledgers))
    return found


def _without_lost(pair: StreamPair, there: Collection[LedgerId]) -> ManifestHead:
    """Return the source's head; its attributes as of before any ledger that has no copy there.

    What is lost with it stands in no attribute that is restored: those of before, and the entries
    behind them, are known all the same.
    """
    head, before = pair.source.head, pair.target.head
    assert head is not None
    named, through = head.attributes, head.attributes_through
    if named is None or through is None or before is None or before.attributes is None:
        return head
    copied = {*there, *(one for one, kept in pair.target.ledgers.items() if kept.uuid is not None)}
    if all(one in copied or one > through.ledger_id for one in pair.source.ledgers):
        return head
    kept = replace(before.attributes, given_up=named.given_up, lost_keys=named.lost_keys)
    return replace(head, attributes=kept)


def _left(pair: StreamPair, ledger_id: LedgerId, kept: KeptLedger) -> bytes:
    """Return a ledger that was not brought: as the target has it, else as one without a copy."""
    if kept.uuid is None:
        return kept.packed
    known = pair.target.ledgers.get(ledger_id)
    if known is not None and known.uuid is not None:
        return known.packed
    return keep(replace(unkeep(kept.packed), copy=None)).packed
