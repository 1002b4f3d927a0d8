"""Rule i of the checker: what the bucket says of the stream.

    i  a generation, once written, never changes; it never goes back behind the one before it;
       the newest is never deleted; a local copy is given up only when the newest one names the
       other copy with its digests; at rest the newest one says what the metadata say

Reads the objects by themselves, as whoever restores from them would.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from uuid import UUID

from tierlog.format.manifest import (
    StreamGeneration,
    decode_generation,
    is_manifest_key,
    keep,
    parse_manifest_key,
    unkeep,
)
from tierlog.model.errors import CorruptError
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import KeptLedger, ManifestHead, ManifestLedger, copy_of
from tierlog.model.offload import OffloadContext
from tierlog.model.stream import ListedLedger

Complain = Callable[[str, str], None]


def is_manifest(key: str) -> bool:
    """Tell whether an object is a manifest, of a stream or of the cluster."""
    return is_manifest_key("", key)


class ManifestRules:
    """The manifests of all streams, as they come into the bucket."""

    def __init__(self, complain: Complain) -> None:
        self._complain = complain
        self._chains: dict[tuple[StreamName, UUID], _Chain] = {}

    def __repr__(self) -> str:
        return f"<ManifestRules {list(self._chains.values())}>"

    def stored(self, key: str, before: bytes | None, body: bytes) -> None:
        """A manifest came into the bucket."""
        if before is not None:
            self._complain("i", f"{key} changed")
        parsed = parse_manifest_key("", key)
        if parsed is not None and not parsed.is_part:
            self._chain(parsed.stream, parsed.incarnation).stored(key, body)

    def deleted(self, key: str) -> None:
        """A manifest left the bucket."""
        parsed = parse_manifest_key("", key)
        if parsed is None:
            self._complain("i", f"{key} was deleted")
        else:
            self._chain(parsed.stream, parsed.incarnation).deleted(key, parsed.generation)

    def given_up(self, context: OffloadContext) -> None:
        """The local copy of a ledger is given up."""
        self._chain(context.stream, context.incarnation).given_up(context)

    def head_of(self, stream: StreamName, incarnation: UUID) -> ManifestHead | None:
        """Return the head of the newest generation of a stream."""
        newest = self._chain(stream, incarnation).newest
        return newest.head if newest is not None else None

    def at_rest(self, ledgers: Iterable[ListedLedger], contexts: Iterable[OffloadContext]) -> None:
        """The newest generation says what the metadata say of a stream."""
        by_id = {one.ledger_id: one for one in contexts}
        listed = [one for one in ledgers if one.ledger_id in by_id]
        if listed:
            first = by_id[listed[0].ledger_id]
            self._chain(first.stream, first.incarnation).at_rest(listed, by_id)

    def _chain(self, stream: StreamName, incarnation: UUID) -> "_Chain":
        return self._chains.setdefault((stream, incarnation), _Chain(self._complain))


class _Chain:
    """The manifests of one stream."""

    def __init__(self, complain: Complain) -> None:
        self._complain = complain
        self.newest: StreamGeneration | None = None
        self.ledgers: dict[LedgerId, KeptLedger] = {}
        """As of the newest generation."""
        self._raw = b""
        self.written = 0
        self.pruned = 0

    def __repr__(self) -> str:
        return f"<_Chain written={self.written} pruned={self.pruned}>"

    def stored(self, key: str, body: bytes) -> None:
        try:
            one = decode_generation(body, key=key)
        except CorruptError as error:
            self._complain("i", f"{key} was stored, and {error.message}")
            return
        number = self.newest.generation if self.newest is not None else 0
        if one.generation <= number:
            # A sleeper's, of a number that was pruned: its writer is refused, nobody reads it.
            self._expect(f"{key} came after generation {number}", holds=self.pruned > 0)
            return
        self._expect(f"{key} came behind {number}", holds=one.generation == number + 1)
        self._check_step(one, key)
        kept = {} if one.is_snapshot else dict(self.ledgers)
        for ledger_id in one.removed:
            kept.pop(ledger_id, None)
        self.newest, self.ledgers, self._raw = one, kept | dict(one.ledgers), body
        self.written += 1

    def _check_step(self, one: StreamGeneration, key: str) -> None:
        newest = self.newest
        if newest is None:
            self._expect(f"{key} is no snapshot", holds=one.is_snapshot)
            return
        digest = hashlib.sha256(self._raw).digest()
        link = one.is_snapshot or one.previous_sha256 == digest
        self._expect(f"{key} names another generation before it", holds=link)
        epochs = one.head.owner_epoch >= newest.head.owner_epoch
        self._expect(f"{key} has an owner epoch that went back", holds=epochs)
        trimmed = one.head.trimmed_through >= newest.head.trimmed_through
        self._expect(f"{key} takes back what was trimmed", holds=trimmed)
        if one.is_snapshot:
            lost = [
                ledger_id
                for ledger_id, kept in self.ledgers.items()
                if kept.uuid is not None
                and ledger_id > one.head.trimmed_through
                and ledger_id not in one.ledgers
            ]
            self._expect(f"{key} forgets {lost}", holds=not lost)

    def deleted(self, key: str, generation: int) -> None:
        newest = self.newest
        kept = newest is None or generation < newest.snapshot_generation
        self._expect(f"{key} was deleted", holds=kept)
        self.pruned += 1

    def given_up(self, context: OffloadContext) -> None:
        copy, kept = copy_of(context), self.ledgers.get(context.ledger_id)
        named = kept is not None and copy is not None and unkeep(kept.packed).copy == copy
        text = f"ledger {context.ledger_id} is given up locally, and no manifest names its copy"
        self._expect(text, holds=named)

    def at_rest(
        self, ledgers: Iterable[ListedLedger], by_id: Mapping[LedgerId, OffloadContext]
    ) -> None:
        wanted = {}
        for listed in ledgers:
            context = by_id.get(listed.ledger_id)
            copy = copy_of(context) if context is not None else None
            if listed.closed and copy is not None:
                wanted[listed.ledger_id] = keep(ManifestLedger(listed=listed, copy=copy))
        have = {number: one for number, one in self.ledgers.items() if one.uuid is not None}
        text = f"the newest manifest names {sorted(have)}, the metadata {sorted(wanted)}"
        self._expect(text, holds=have == wanted)

    def _expect(self, text: str, *, holds: bool) -> None:
        if not holds:
            self._complain("i", text)
