"""What must hold at every instant, checked at each change of metadata and bucket, and at rest.

Rules (protocols.md section 3, "Must hold", and section 1), by the letter in a violation:
    a  each acknowledged entry is readable from tier 1 or from a complete copy, byte for byte
    b  at most one attempt of a ledger is ever complete, and a complete one never changes
    c  at rest the bucket holds exactly what the metadata names, and no upload is open;
       nothing is uploaded under a name that the metadata does not hold
    d  acknowledged entries are never lost, doubled or changed; ids are dense; what was refused
       is not there; what is ambiguous is there once at most
    e  tier 1 is deleted only after a complete copy and the lag, by the smaller clock
    f  two owners never both get acknowledgements: nothing is acknowledged behind a ledger's end,
       nor in a ledger that the stream does not list
    g  what is acknowledged, or in a closed ledger, an ack quorum of the nodes that the metadata
       names has made durable
    h  ensembles name a node for an entry that was shown only once the node has it; of a closed
       ledger nothing else changes; the last ensemble of an unclosed one, its writer changes alone
    i  manifests: see ``tests.simulation.manifests``
    j  retention: see ``tests.simulation.trimming``
    k  conditional appends: see ``tests.simulation.once_writers``

A rule that fails is noted with the time and does not disturb the run; whoever drives it looks at
``violations`` after each step.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from tests.golden.oracle import naive_read
from tests.simulation.copies import Copies
from tests.simulation.manifests import ManifestRules, is_manifest
from tests.simulation.model import Model, Position
from tests.simulation.servers import Changes, WatchedBucket, WatchedMetadata
from tests.simulation.trace import CURRENT, Trace
from tests.simulation.trimming import TrimRules
from tierlog.format import ledger_metadata, paths, records
from tierlog.model.errors import CorruptError
from tierlog.model.ids import EntryId, StreamName
from tierlog.model.ledger import LedgerMetadata, LedgerState
from tierlog.model.manifest import ManifestHead
from tierlog.model.offload import (
    GONE_FROM_TIER1,
    TRANSITIONS,
    OffloadContext,
    OffloadState,
    Tier2Location,
)
from tierlog.model.stream import ListedLedger, Stream
from tierlog.ports.metadata import Versioned


class Checker:
    """Watches the servers. Reads them as an administrator does: at once and without faults."""

    def __init__(
        self,
        metadata: WatchedMetadata,
        bucket: WatchedBucket,
        trace: Trace,
        *,
        stream: StreamName,
        lag_s: float,
    ) -> None:
        self.violations: list[str] = []
        self.model = Model(stream, self.complain)
        self.bare = Model("bare", self.complain)
        """The entries of all bare ledgers."""
        self.copies = Copies(self.complain)
        self.told: asyncio.Future[int] | None = None
        """Gets the ledger of the next acknowledgement that someone is told of."""
        self.deleted: set[int] = set()
        """Bare ledgers that someone set out to delete."""
        self.stream = stream
        self.completed_s: dict[int, float] = {}
        """When each ledger became complete, in true time."""
        self.checks = 0
        self._metadata = metadata
        self._bucket = bucket
        self._trace = trace
        self._lag_s = lag_s
        self._contexts: dict[int, OffloadContext] = {}
        self._made_by: dict[int, str] = {}
        """Who made each ledger, and so writes it."""
        self._listed: tuple[int, list[ListedLedger]] = (-1, [])
        self._ever_named: set[str] = set()
        """Every key that the metadata ever held; a slow worker may come after its strike-off."""
        self.manifests = ManifestRules(self.complain)
        self.trims = TrimRules(self.complain, trace.now_s)
        self._good_copies: set[tuple[str, str]] = set()
        """Keys and etags of data objects whose content was looked at already."""

    def __repr__(self) -> str:
        return f"<Checker {len(self.completed_s)} complete, {len(self.violations)} violations>"

    def complain(self, rule: str, text: str) -> None:
        """Note a violation."""
        self._trace.note("violation", rule=rule, text=text)
        self.violations.append(f"rule {rule}, {self._trace.now_s():.3f} s: {text}")

    def _expect(self, rule: str, text: str, *, holds: bool) -> None:
        self.checks += 1
        if not holds:
            self.complain(rule, text)

    # The metadata, as it is now

    def context(self, ledger_id: int) -> OffloadContext | None:
        """Return a ledger's context."""
        return self._contexts.get(ledger_id)

    def contexts(self) -> Iterator[OffloadContext]:
        """Iterate over all contexts."""
        yield from self._contexts.values()

    def ledger(self, ledger_id: int) -> LedgerMetadata | None:
        """Return a ledger's own metadata."""
        return _ledger(self._metadata.get(paths.ledger_path(ledger_id)))

    def ledgers(self) -> list[ListedLedger]:
        """Return the stream's whole list."""
        found = self._metadata.get(paths.stream_path(self.stream))
        if found is None:
            return []
        if found.version == self._listed[0]:
            return self._listed[1]
        stream = records.decode_stream(found.data)
        listed: list[ListedLedger] = []
        for page in stream.pages:
            held = self._metadata.get(paths.page_path(self.stream, page.page_number))
            assert held is not None, "a page is made with its reference"
            listed += records.decode_page(held.data)
        self._listed = found.version, [*listed, *stream.ledgers]
        return self._listed[1]

    @property
    def ledgers_made(self) -> int:
        """How many there ever were, of streams and bare ones."""
        return len(self._made_by)

    def all_ledgers(self) -> dict[int, LedgerMetadata]:
        """Return every ledger that has metadata, bare ones too."""
        found = {ledger_id: self.ledger(ledger_id) for ledger_id in sorted(self._made_by)}
        return {ledger_id: one for ledger_id, one in found.items() if one is not None}

    def writer_of(self, ledger_id: int) -> str:
        """Return the process that made a ledger, and writes it."""
        return self._made_by[ledger_id]

    def model_of(self, metadata: LedgerMetadata) -> Model:
        """Return who knows a ledger's entries."""
        return self.bare if metadata.is_bare else self.model

    # Changes of metadata

    def metadata_changed(self, before: Changes) -> None:
        """See ``Watcher``."""
        contexts = [path for path in before if _is_context(path)]
        for path in contexts:
            self._keep_context(paths.context_ledger_id_of(path), self._metadata.get(path))
        for path, was in before.items():
            now = self._metadata.get(path)
            if path in contexts:
                self._context_changed(_context(was), _context(now))
            elif _is_ledger(path):
                self._ledger_changed(paths.ledger_id_of(path), _ledger(was), _ledger(now))
            elif path == paths.stream_path(self.stream):
                self._stream_changed(_stream(was), _stream(now))

    def _keep_context(self, ledger_id: int, node: Versioned | None) -> None:
        context = _context(node)
        if context is None:
            self._contexts.pop(ledger_id, None)
            return
        self._contexts[ledger_id] = context
        if context.location is not None:
            self._ever_named.update(_keys(context.location))

    def _context_changed(self, was: OffloadContext | None, now: OffloadContext | None) -> None:
        if was is None:
            return
        ledger_id = was.ledger_id
        if now is None:
            gone = ledger_id not in self.model.acked_ends and not was.complete
            if was.is_trimmed:
                self.trims.deleted("the context", ledger_id, self._head_of(was))
                gone = True
            self._expect("a", f"the context of ledger {ledger_id} was removed", holds=gone)
            return
        legal = now.state in TRANSITIONS[was.state]
        self._expect("b", f"ledger {ledger_id}: {was.state} to {now.state}", holds=legal)
        if now.state is OffloadState.TRIMMING and was.state is not now.state:
            self.trims.began(was)
        elif was.complete:
            kept = was.uuid, was.copy, was.location, was.timestamp_ms
            same = now.complete and kept == (now.uuid, now.copy, now.location, now.timestamp_ms)
            self._expect("b", f"complete ledger {ledger_id} became {now}", holds=same)
        if now.complete and not was.complete:
            self._completed(was, now)
        struck = {one.uuid: one.location for one in was.abandoned}
        for attempt in now.abandoned:
            struck.pop(attempt.uuid, None)
        for uuid, location in struck.items():
            left = self._leftovers(location)
            self._expect("c", f"attempt {uuid} was struck off, but left {left}", holds=not left)
        if now.state in GONE_FROM_TIER1 and was.state not in GONE_FROM_TIER1:
            self._tier1_given_up(was, now)

    def _completed(self, was: OffloadContext, now: OffloadContext) -> None:
        ledger_id = now.ledger_id
        again = ledger_id in self.completed_s
        self._expect("b", f"ledger {ledger_id} became complete twice", holds=not again)
        begun = was.uuid == now.uuid and was.state is OffloadState.OFFLOADING
        self._expect("b", f"{now.uuid} of ledger {ledger_id} was not begun", holds=begun)
        abandoned = any(one.uuid == now.uuid for one in now.abandoned)
        self._expect("b", f"abandoned {now.uuid} became complete", holds=not abandoned)
        self.completed_s[ledger_id] = self._trace.now_s()
        self.check_copy(now)

    def _tier1_given_up(self, was: OffloadContext, now: OffloadContext) -> None:
        ledger_id = was.ledger_id
        self._expect("e", f"incomplete ledger {ledger_id} is deleted locally", holds=was.complete)
        true_s = self._trace.now_s() - self.completed_s.get(ledger_id, float("inf"))
        text = f"ledger {ledger_id} is deleted locally {true_s:.1f} s after success"
        self._expect("e", text, holds=true_s >= self._lag_s - 0.001)
        if was.complete:
            self.check_copy(now)
            self.manifests.given_up(now)

    def _ledger_changed(
        self, ledger_id: int, was: LedgerMetadata | None, now: LedgerMetadata | None
    ) -> None:
        if was is None:
            self._made_by[ledger_id] = CURRENT.get()
            return
        model = self.model_of(was)
        acked = model.acked_ends.get(ledger_id, -1)
        if now is None and was.is_bare:
            text = f"bare ledger {ledger_id} was deleted, and nobody asked for it"
            self._expect("a", text, holds=ledger_id in self.deleted)
        elif now is None:
            context = self.context(ledger_id)
            emptied = context is None and acked < 0
            moved = context is not None and context.complete and context.state in GONE_FROM_TIER1
            trimmed = context is not None and context.state is OffloadState.TRIMMING
            if trimmed and context is not None:
                self.trims.deleted("the local copy", ledger_id, self._head_of(context))
            text = f"ledger {ledger_id} was deleted from tier 1, its context: {context}"
            self._expect("a", text, holds=emptied or moved or trimmed)
            if context is not None and context.complete:
                self.check_copy(context)
        elif was.state is LedgerState.CLOSED:
            same = replace(was, segments=now.segments) == now
            self._expect("d", f"closed ledger {ledger_id} changed to {now}", holds=same)
            self._ensembles_changed(ledger_id, was, now, was.last_entry_id)
        else:
            shown = model.shown_ends.get(ledger_id, -1)
            if now.state is LedgerState.CLOSED:
                text = f"ledger {ledger_id} was closed at {now.last_entry_id}, shown: {shown}"
                self._expect("d", text, holds=now.last_entry_id >= shown)
                self._check_quorums(ledger_id, now, range(now.last_entry_id + 1))
            else:
                self._ensembles_changed(ledger_id, was, now, shown)

    def _ensembles_changed(
        self, ledger_id: int, was: LedgerMetadata, now: LedgerMetadata, last: int
    ) -> None:
        """Check a change of ensembles; entries up to ``last`` were shown to someone."""
        if was.segments == now.segments:
            return
        if was.state is not LedgerState.CLOSED and was.segments[-1] != now.segments[-1]:
            who, writer = CURRENT.get(), self._made_by[ledger_id]
            text = f"{who} changed the last ensemble of ledger {ledger_id}, which {writer} writes"
            kept = was.segments[-1] in now.segments
            writes = who == writer and now.state is LedgerState.OPEN
            self._expect("h", text, holds=kept or writes)
        for entry_id in range(last + 1):
            before, after = (one.write_set(EntryId(entry_id)) for one in (was, now))
            for node_id in sorted(set(after).difference(before)):
                text = f"{node_id} is to have {(ledger_id, entry_id)}, and never got it"
                # Who crashed before its answer may say, once it is back, that it has it.
                has = node_id in self.copies.may_hold((ledger_id, entry_id))
                self._expect("h", text, holds=has)

    def _stream_changed(self, was: Stream | None, now: Stream | None) -> None:
        if was is None:
            return
        if now is None:
            self.complain("a", "the stream was deleted")
            return
        grown = now.owner_epoch >= was.owner_epoch
        self._expect("f", f"epoch {was.owner_epoch} became {now.owner_epoch}", holds=grown)
        listed = {one.ledger_id: one for one in self.ledgers()}
        self.trims.list_changed(was, now, self.context)
        for one in was.ledgers:
            kept = listed.get(one.ledger_id)
            if one.ledger_id in now.deleting:
                continue
            if kept is None:
                empty = one.ledger_id not in self.model.acked_ends and not one.closed
                self._expect("a", f"ledger {one.ledger_id} left the list", holds=empty)
            elif one.closed:
                text = f"closed ledger {one.ledger_id} changed in the list"
                self._expect("d", text, holds=kept == one)

    # What producers are told

    def acknowledged(self, tokens: list[int], positions: list[Position]) -> None:
        """Note an acknowledgement that a producer got."""
        self.model.acknowledged(tokens, positions)
        self._check_acknowledged(positions)
        for ledger_id, _ in positions:
            listed = any(one.ledger_id == ledger_id for one in self.ledgers())
            self._expect("f", f"ledger {ledger_id} is acknowledged, but not listed", holds=listed)

    def acknowledged_bare(self, tokens: list[int], positions: list[Position]) -> None:
        """Note an acknowledgement that the writer of a bare ledger got."""
        self.bare.acknowledged(tokens, positions)
        self._check_acknowledged(positions)

    def _check_acknowledged(self, positions: list[Position]) -> None:
        if self.told is not None and not self.told.done() and positions:
            self.told.set_result(positions[0][0])
        for ledger_id, entry_id in positions:
            metadata = self.ledger(ledger_id)
            if metadata is not None:
                self._check_quorums(ledger_id, metadata, [entry_id])
            closed = metadata is not None and metadata.state is LedgerState.CLOSED
            if closed and metadata is not None:
                text = f"{(ledger_id, entry_id)} lies behind its end {metadata.last_entry_id}"
                self._expect("f", text, holds=entry_id <= metadata.last_entry_id)

    def _check_quorums(
        self, ledger_id: int, metadata: LedgerMetadata, entry_ids: Iterable[int]
    ) -> None:
        for entry_id in entry_ids:
            named = metadata.write_set(EntryId(entry_id))
            have = sorted(self.copies.holders((ledger_id, entry_id)).intersection(named))
            text = f"{(ledger_id, entry_id)} stands; of {named} only {have} ever got it"
            self._expect("g", text, holds=len(have) >= metadata.ack_quorum)

    # The bucket

    def _named(self) -> dict[str, OffloadContext]:
        """Return every key that the metadata holds, complete or not."""
        named: dict[str, OffloadContext] = {}
        for context in self.contexts():
            places = [one.location for one in context.abandoned]
            if context.location is not None:
                places.append(context.location)
            for place in places:
                named |= dict.fromkeys(_keys(place), context)
        return named

    def upload_begun(self, key: str) -> None:
        """See ``Watcher``."""
        named = key in self._ever_named
        self._expect("c", f"an upload of {key} began, which the metadata lacks", holds=named)

    def object_stored(self, key: str, before: bytes | None, body: bytes) -> None:
        """See ``Watcher``."""
        if is_manifest(key):
            self.manifests.stored(key, before, body)
            return
        context = self._named().get(key)
        text = f"object {key} was stored, which the metadata lacks"
        self._expect("c", text, holds=key in self._ever_named)
        if context is not None and _serves(context, key):
            self._expect("b", f"object {key} of a complete copy changed", holds=before == body)

    def object_deleted(self, key: str) -> None:
        """See ``Watcher``."""
        if is_manifest(key):
            self.manifests.deleted(key)
            return
        context = self._named().get(key)
        serving = context is not None and _serves(context, key)
        self._expect("a", f"object {key} of a complete copy was deleted", holds=not serving)
        found = self._metadata.get(paths.stream_path(self.stream))
        incarnation = records.decode_stream(found.data).incarnation if found is not None else None
        if incarnation is not None:
            head = self.manifests.head_of(self.stream, incarnation)
            self.trims.object_deleted(key, head)

    def _head_of(self, context: OffloadContext) -> ManifestHead | None:
        return self.manifests.head_of(context.stream, context.incarnation)

    def _leftovers(self, location: Tier2Location) -> list[str]:
        keys = _keys(location)
        uploads = [one.key for one in self._bucket.uploads.values() if one.key in keys]
        return [key for key in keys if key in self._bucket.objects] + uploads

    def check_copy(self, context: OffloadContext) -> bool:
        """Check that a complete copy is there, whole, and has the ledger's entries."""
        location, ledger_id = context.location, context.ledger_id
        assert location is not None
        data = self._bucket.objects.get(location.data_key)
        whole = data is not None and set(location.keys) <= set(self._bucket.objects)
        self._expect("a", f"the complete copy of ledger {ledger_id} is not there", holds=whole)
        if data is None or not whole:
            return False
        info, body = data
        if (info.key, info.etag) in self._good_copies:
            return True
        try:
            blocks = naive_read(body)
        except AssertionError:
            self.complain("a", f"object {info.key} is not what the format says")
            return False
        entries = [entry for block in blocks for entry in block.entries]
        ids = [entry_id for entry_id, _ in entries]
        listed = next((one for one in self.ledgers() if one.ledger_id == ledger_id), None)
        count = listed.entry_count if listed is not None else -1
        text = f"the copy of ledger {ledger_id} has entries {ids}, not 0 to {count - 1}"
        self._expect("d", text, holds=ids == list(range(count)))
        for entry_id, entry in entries:
            self.model.seen((ledger_id, entry_id), entry, f"the copy of ledger {ledger_id}")
        self._good_copies.add((info.key, info.etag))
        return True

    # At rest

    def check_bucket_at_rest(self) -> None:
        """Rule c: exactly what the metadata names."""
        wanted: set[str] = set()
        for context in self.contexts():
            self._expect(
                "c",
                f"{context.abandoned} are left of {context.ledger_id}",
                holds=not context.abandoned,
            )
            if context.complete and context.location is not None:
                wanted |= set(context.location.keys)
        self.manifests.at_rest(self.ledgers(), self.contexts())
        self.trims.at_rest(list(self.contexts()), list(self._bucket.objects))
        have = {key for key in self._bucket.objects if not is_manifest(key)}
        text = f"the bucket has {sorted(have - wanted)} too many, {sorted(wanted - have)} too few"
        self._expect("c", text, holds=have == wanted)
        uploads = sorted(one.key for one in self._bucket.uploads.values())
        self._expect("c", f"open uploads: {uploads}", holds=not uploads)


def _keys(location: Tier2Location) -> tuple[str, ...]:
    return location.data_key, location.index_key, location.side_key


def _serves(context: OffloadContext, key: str) -> bool:
    """Tell whether the object is part of the copy that readers are sent to."""
    return context.complete and context.location is not None and key in _keys(context.location)


def _is_context(path: str) -> bool:
    with suppress(CorruptError):
        return paths.context_ledger_id_of(path) >= 0
    return False


def _is_ledger(path: str) -> bool:
    with suppress(CorruptError):
        return paths.ledger_id_of(path) >= 0
    return False


def _context(node: Versioned | None) -> OffloadContext | None:
    return None if node is None else records.decode_context(node.data)


def _ledger(node: Versioned | None) -> LedgerMetadata | None:
    return None if node is None else ledger_metadata.decode_znode(node.data)


def _stream(node: Versioned | None) -> Stream | None:
    return None if node is None else records.decode_stream(node.data)
