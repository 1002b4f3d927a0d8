"""Checkpoints of attributes in tier 2: the port ``AttributeIndex`` over S3 and the metadata store.

Owns the order of a flush (protocols.md section 4): read what it needs, write an object, or some
one after the other where the index is large, then the list of a chunk if one is full, then publish
the root. Does not own the tree
(``tierlog.attributes.tree``), nor what is published (``tierlog.catalog.attributes``).

Invariants:
    * A root is published after all that it needs is written, never before.
    * Objects are written in the generation in which they are published: a sweep between the two
      is noticed, and the object written again under another name.
    * Who began to read a version goes on with it. An iteration of which a page was swept
      meanwhile goes on with the newest version, behind the last key that it gave.

Crash: before publishing, the last root is the good one, and what was written is swept. After it,
the new one is.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import structlog

from tierlog.attributes.objects import IndexObjectGoneError, IndexObjects
from tierlog.attributes.page_cache import PageCache, PageName
from tierlog.attributes.pages import IndexPages
from tierlog.attributes.salvage import salvage
from tierlog.attributes.tree import drive_async, lookup, scan
from tierlog.attributes.update import Shape, Update, update
from tierlog.catalog.attributes import (
    Anew,
    AttributeCatalog,
    GenerationRaisedError,
    Publication,
    moved_on,
)
from tierlog.format.attribute_page import LEAF_ENTRY_LEN, Page
from tierlog.model.attribute_record import AttributesRecord, KeptRoot, KeyRange, kept_of
from tierlog.model.attributes import (
    AttributeKey,
    Checkpoint,
    IndexChunk,
    IndexObject,
    IndexRoot,
    is_core,
)
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.position import Position
from tierlog.model.stream import Stream
from tierlog.ports.attributes import Salvage
from tierlog.ports.spending import Cause, spending

log = structlog.get_logger()

PUBLISH_TRIES_MAX: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexLimits:
    """How much a chunk holds before it is closed and listed by an object of its own.

    ``step_bytes``: about so much of an index is in memory at once while it is written.
    """

    chunk_bytes: int = 32 * 1024 * 1024
    chunk_objects_max: int = 512
    step_bytes: int = 64 * 1024 * 1024


class Tier2AttributeIndex:
    """The attribute indexes of a cluster's streams."""

    def __init__(
        self,
        catalog: AttributeCatalog,
        objects: IndexObjects,
        cache: PageCache,
        *,
        limits: IndexLimits | None = None,
        shape: Shape | None = None,
    ) -> None:
        self._catalog = catalog
        self._objects = objects
        self._cache = cache
        self._pages = IndexPages(objects, cache)
        self._limits = limits or IndexLimits()
        self._shape = shape or Shape()

    def __repr__(self) -> str:
        return f"<Tier2AttributeIndex {self._objects!r} {self._cache!r}>"

    async def load(self, claimed: Stream) -> Checkpoint:
        """Return the newest published checkpoint, from the metadata alone.

        Said here if nothing is there: from now on retention knows that there is something to lose.
        """
        record = await self._catalog.get(claimed.name)
        if record is None or record.incarnation != claimed.incarnation:
            try:
                record = await self._catalog.declare(claimed)
            except RefusedError as error:
                if error.reason is not Reason.STREAM_NOT_FOUND:
                    raise
                # It is being deleted, and its last ledger is still to be closed.
                return Checkpoint()
        return record.checkpoint

    async def get(
        self, checkpoint: Checkpoint, keys: Sequence[AttributeKey]
    ) -> dict[AttributeKey, int]:
        """Return the values of those keys that the index has; at most a page a level is read."""
        with spending(Cause.ATTRIBUTES):
            return await drive_async(lookup(checkpoint.root, keys), self._pages.of(checkpoint))

    async def iterate(
        self, checkpoint: Checkpoint, first: AttributeKey, last: AttributeKey
    ) -> AsyncIterator[Sequence[tuple[AttributeKey, int]]]:
        """Give keys and values from ``first`` to ``last``, both included, ascending, in runs."""
        key: AttributeKey | None = first
        while key is not None:
            try:
                with spending(Cause.ATTRIBUTES):
                    steps = scan(checkpoint.root, key, last)
                    found = await drive_async(steps, self._pages.of(checkpoint))
            except IndexObjectGoneError as error:
                checkpoint = await self._newer(checkpoint, error)
                continue
            if found.items:
                yield found.items
            key = found.next_key

    async def _newer(self, checkpoint: Checkpoint, error: IndexObjectGoneError) -> Checkpoint:
        """Return the newest checkpoint, if it is another one than that of which a page is gone."""
        key = self._objects.parse(error.details["object"])
        record = await self._catalog.get(key.stream) if key is not None else None
        if key is None or record is None or record.incarnation != key.incarnation:
            raise error
        if record.newest.root == checkpoint.root:
            raise error
        log.info("attributes.iterated_on", stream=key.stream, through=str(record.newest.through))
        return record.checkpoint

    async def flush(
        self,
        claimed: Stream,
        base: Checkpoint,
        *,
        changes: Mapping[AttributeKey, int],
        core: Mapping[AttributeKey, int],
        through: Position,
    ) -> Checkpoint:
        """Write what changed, and publish it behind ``base``; FENCED if that is not the newest.

        ``RetryableError``: nothing was published, and the same may be asked again.
        ``IndeterminateError``: load the checkpoint; it is ``base``, or this one.
        """
        assert not any(is_core(key) for key in changes)
        assert all(is_core(key) for key in core)
        after = KeptRoot(through=through, core=dict(core), root=base.root)
        with spending(Cause.ATTRIBUTES, claimed.name):
            return await self._published(claimed, base, changes, after)

    async def former(self, claimed: Stream) -> Sequence[Checkpoint]:
        """Return the checkpoints before the newest that are kept still, the newest first."""
        record = await self._catalog.declare(claimed)
        return [record.checkpoint_of(one) for one in reversed(record.ends)]

    async def salvage(self, checkpoint: Checkpoint) -> Salvage:
        """Return all of an index that can be read."""
        with spending(Cause.ATTRIBUTES):
            return await salvage(checkpoint.root, self._pages.of(checkpoint))

    async def make_anew(
        self,
        claimed: Stream,
        base: Checkpoint,
        *,
        values: Mapping[AttributeKey, int],
        good: Position | None,
        lost: Sequence[KeyRange] = (),
    ) -> Checkpoint:
        """Publish an index of all these attributes in the place of that of ``base``."""
        assert not any(is_core(key) for key in values)
        with spending(Cause.ATTRIBUTES, claimed.name):
            after, anew = kept_of(base), Anew(good, lost)
            return await self._published(claimed, base, values, after, anew)

    async def _published(
        self,
        claimed: Stream,
        base: Checkpoint,
        changes: Mapping[AttributeKey, int],
        after: KeptRoot,
        anew: Anew | None = None,
    ) -> Checkpoint:
        """Write changes, and publish them as ``after`` in the place of ``base``."""
        begin = base if anew is None else _nothing_behind(base)
        for _ in range(PUBLISH_TRIES_MAX):
            # The generation in which objects are written is that in which they are published.
            record = await self._catalog.declare(claimed)
            if after.through is not None and _is_published(record, kept_of(base), after.through):
                return record.checkpoint
            if not record.newest.is_at(kept_of(base)):
                # Before its pages are asked for: some may be swept.
                raise moved_on(claimed.name, record)
            made, root = await self._written(claimed, begin, changes)
            publication = Publication(
                base=record.newest,
                generation=record.generation,
                after=replace(after, root=root),
                made=made,
                anew=anew,
            )
            chunk = await self._chunk(claimed, publication.of(record, keep_ends=True))
            try:
                published = await self._catalog.publish(claimed, replace(publication, chunk=chunk))
            except GenerationRaisedError as error:
                log.info("attributes.written_again", stream=claimed.name, cause=str(error))
                continue
            log.info(
                "attributes.published",
                stream=claimed.name,
                through=str(after.through),
                count=root.count,
                written=sum(one.length for one in made),
            )
            return published.checkpoint
        raise RetryableError(
            f"the checkpoint of stream {claimed.name} met a sweep {PUBLISH_TRIES_MAX} times",
            remedy="Flush again",
        )

    async def _written(
        self, claimed: Stream, begin: Checkpoint, changes: Mapping[AttributeKey, int]
    ) -> tuple[tuple[IndexObject, ...], IndexRoot]:
        """Write changes, an object for so many of them as are about one step; return the root."""
        at = begin
        made: list[IndexObject] = []
        for some in self._steps(begin.root, changes):
            done = await drive_async(update(at.root, some, self._shape), self._pages.of(at))
            if done.pages:
                one = await self._objects.write(claimed, at.root.end, b"".join(done.pages))
                self._keep(one, done)
                made.append(one)
                at = replace(at, objects=(*at.objects, one))
            at = replace(at, root=done.root)
        return tuple(made), at.root

    def _steps(
        self, root: IndexRoot, changes: Mapping[AttributeKey, int]
    ) -> Iterator[Mapping[AttributeKey, int]]:
        """Give changes in steps: each writes its share of the index, which is in memory then."""
        whole = root.end - root.start + LEAF_ENTRY_LEN * len(changes)
        count = min(len(changes), -(-whole // self._limits.step_bytes))
        if count <= 1:
            yield changes
            return
        keys = sorted(changes)
        cuts = [number * len(keys) // count for number in range(count + 1)]
        for start, stop in pairwise(cuts):
            yield {key: changes[key] for key in keys[start:stop]}

    async def _chunk(self, claimed: Stream, planned: AttributesRecord) -> IndexChunk | None:
        """Write the list of a chunk that is full in a record; None: it is not."""
        limits = self._limits
        if not planned.chunk_is_due(
            chunk_bytes=limits.chunk_bytes, chunk_objects=limits.chunk_objects_max
        ):
            return None
        return await self._objects.write_list(claimed, planned.objects)

    def _keep(self, made: IndexObject, done: Update) -> None:
        """Keep what was written, as far as there is room: it is read next."""
        offset = made.start
        for raw in done.pages:
            self._cache.put(PageName(made.key, offset), Page(bytes(raw), offset))
            offset += len(raw)


def _is_published(record: AttributesRecord, base: KeptRoot, through: Position) -> bool:
    """Tell whether a flush is there already: its answer was lost."""
    return record.newest.through == through and not record.newest.is_at(base)


def _nothing_behind(base: Checkpoint) -> Checkpoint:
    """Return an empty index whose bytes will lie behind those of another."""
    end = base.root.end
    return Checkpoint(root=IndexRoot(root_offset=end, start=end, end=end))
