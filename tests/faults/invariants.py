"""What must hold once everything is at rest, and at every instant, as functions of plain values.

Owns the rules alone (protocols.md section 3, "Must hold"); whoever gathers the values, from the
memory adapters or from real servers, says what it saw and gets back what is wrong with it.

At rest:
    * every ledger is where its fate says, with one attempt that is complete and none abandoned;
    * the bucket holds the objects of that attempt and no others, and no upload is open;
    * of what was trimmed nothing is left: no context, no object, no local copy, no mention;
    * every byte reads back.
At every instant:
    * a ledger that was not trimmed is in tier 1, or has a complete copy whose data are there;
    * what is uploaded is named by the metadata;
    * an index object is there only when the data and the side object are.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tierlog.format.keys import ObjectRole, parse_key
from tierlog.model.ids import LedgerId
from tierlog.model.offload import OffloadContext, OffloadState, Tier2Location


class Fate(Enum):
    """Where a ledger is in the end."""

    COMPLETE = "in both tiers"
    MOVED = "in tier 2 alone"
    TRIMMED = "nowhere"


_STATES = {Fate.COMPLETE: OffloadState.COMPLETE, Fate.MOVED: OffloadState.TIER1_DELETED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What there is: metadata, bucket (without manifests), open uploads, local copies."""

    contexts: Mapping[LedgerId, OffloadContext]
    keys: Collection[str]
    uploads: Sequence[str]
    held: Collection[LedgerId]
    """Ledgers that are in tier 1."""
    deleting: Collection[LedgerId] = ()
    """Ledgers of which the stream says that something is left."""
    read: Mapping[LedgerId, Sequence[bytes]] = field(default_factory=dict)
    """What was read back; a ledger that is not there was not read yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What there should be."""

    fates: Mapping[LedgerId, Fate]
    entries: Mapping[LedgerId, Sequence[bytes]]
    key_prefix: str = ""
    blocks: int = 3


def wrong_at_rest(seen: Seen, wanted: Wanted) -> list[str]:
    """Return what is wrong once nothing is to be done any more."""
    return [
        *wrong_contexts(seen, wanted),
        *_wrong_bucket(seen),
        *_wrong_bytes(seen, wanted),
    ]


def wrong_contexts(seen: Seen, wanted: Wanted) -> Iterator[str]:
    """Iterate over what is wrong with the ledgers alone, whatever lies in the bucket."""
    for ledger_id, fate in wanted.fates.items():
        context = seen.contexts.get(ledger_id)
        if fate is Fate.TRIMMED:
            if context is not None:
                yield f"trimmed ledger {ledger_id} has a context: {context.state.name}"
            if ledger_id in seen.held or ledger_id in seen.deleting:
                yield f"trimmed ledger {ledger_id} is in tier 1, or still to be deleted"
        elif context is None:
            yield f"ledger {ledger_id} has no context"
        else:
            yield from _wrong_context(context, fate, wanted.blocks)
            if (ledger_id in seen.held) != (fate is Fate.COMPLETE):
                yield f"ledger {ledger_id} in tier 1: {ledger_id in seen.held}, is {fate.value}"
    for ledger_id in seen.contexts.keys() - wanted.fates.keys():
        yield f"nobody knows ledger {ledger_id}"


def _wrong_context(context: OffloadContext, fate: Fate, blocks: int) -> Iterator[str]:
    ledger_id = context.ledger_id
    if context.state is not _STATES[fate] or not context.complete:
        yield f"ledger {ledger_id} is {context.state.name}, not {fate.value}"
    if context.abandoned:
        yield f"ledger {ledger_id} has abandoned attempts: {len(context.abandoned)}"
    if context.copy is not None and context.copy.block_count != blocks:
        yield f"ledger {ledger_id} has {context.copy.block_count} blocks"


def _wrong_bucket(seen: Seen) -> Iterator[str]:
    named = {
        key
        for context in seen.contexts.values()
        if context.complete and context.location is not None
        for key in context.location.keys
    }
    if orphans := sorted(set(seen.keys) - named):
        yield f"nobody names {orphans}"
    if missing := sorted(named - set(seen.keys)):
        yield f"not there, though complete: {missing}"
    if seen.uploads:
        yield f"open uploads: {sorted(seen.uploads)}"


def _wrong_bytes(seen: Seen, wanted: Wanted) -> Iterator[str]:
    for ledger_id, entries in seen.read.items():
        if list(entries) != list(wanted.entries[ledger_id]):
            yield f"ledger {ledger_id} reads back {len(entries)} other entries"


def complete_in_bucket(keys: Collection[str], prefix: str = "") -> dict[LedgerId, int]:
    """Return how many attempts of each ledger look complete: those with an index object."""
    counts: dict[LedgerId, int] = {}
    for key in keys:
        parsed = parse_key(prefix, key)
        if parsed is not None and parsed.role is ObjectRole.INDEX:
            counts[parsed.ledger_id] = counts.get(parsed.ledger_id, 0) + 1
    return counts


def lost_now(
    contexts: Mapping[LedgerId, OffloadContext],
    keys: Collection[str],
    held: Collection[LedgerId],
    ledgers: Collection[LedgerId],
) -> list[str]:
    """Return the ledgers that can't be read from anywhere at this instant, unless trimmed."""
    lost = []
    for ledger_id in ledgers:
        context = contexts.get(ledger_id)
        gone = context is None or context.state is OffloadState.TRIMMING
        if ledger_id in held or gone or context is None:
            continue
        # What lacks another object is mended from this one.
        there = context.location is not None and context.location.data_key in keys
        if not (context.complete and there):
            lost.append(f"ledger {ledger_id} ({context.state.name}) is in neither tier")
    return lost


def named_keys(contexts: Mapping[LedgerId, OffloadContext]) -> set[str]:
    """Return the keys of all attempts that contexts name, abandoned ones too."""
    places: list[Tier2Location | None] = []
    for one in contexts.values():
        places += [one.location, *(attempt.location for attempt in one.abandoned)]
        places += [one.repair.location] if one.repair is not None else []
    named = [place for place in places if place is not None]
    return {key for place in named for key in place.keys}


def stored_too_early(key: str, keys: Collection[str], prefix: str = "") -> str | None:
    """Say what is wrong with an object that was stored just now; None: nothing."""
    parsed = parse_key(prefix, key)
    if parsed is None or parsed.role is not ObjectRole.INDEX:
        return None
    data_key = key.removesuffix("-index")
    missing = sorted({data_key, f"{data_key}-side"} - set(keys))
    return f"{key} is there before {missing}" if missing else None
