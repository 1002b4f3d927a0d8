"""Checkpoints of attributes in tier 2: the port ``AttributeIndex`` over S3 and the metadata store.

Owns the order of a flush (protocols.md section 4): read what it needs, write one object, then the
list of a chunk if one is full, then publish the root. Does not own the tree
(``tierlog.attributes.tree``), nor what is published (``tierlog.catalog.attributes``).

Invariants:
    * A root is published after all that it needs is written, never before.
    * Objects are written in the generation in which they are published: a sweep between the two
      is noticed, and the object written again under another name.
    * Each page that is read is verified before it is used or kept.
    * Who began to read a version goes on with it. An iteration of which a page was swept
      meanwhile goes on with the newest version, behind the last key that it gave.

Crash: before publishing, the last root is the good one, and what was written is swept. After it,
the new one is.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from tierlog.attributes.objects import IndexObjectGoneError, IndexObjects
from tierlog.attributes.page_cache import PageCache, PageName
from tierlog.attributes.tree import PageRef, drive_async, lookup, scan
from tierlog.attributes.update import Shape, Update, update
from tierlog.catalog.attributes import (
    AttributeCatalog,
    GenerationRaisedError,
    Publication,
    moved_on,
)
from tierlog.format.attribute_page import Page
from tierlog.model.attribute_record import AttributesRecord, KeptRoot, kept_of
from tierlog.model.attributes import (
    AttributeKey,
    Checkpoint,
    IndexChunk,
    IndexObject,
    is_core,
)
from tierlog.model.errors import Reason, RefusedError, RetryableError, first_error
from tierlog.model.position import Position
from tierlog.model.stream import Stream
from tierlog.ports.spending import Cause, spending

log = structlog.get_logger()

PUBLISH_TRIES_MAX: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexLimits:
    """How much a chunk holds before it is closed and listed by an object of its own."""

    chunk_bytes: int = 32 * 1024 * 1024
    chunk_objects_max: int = 512


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
            return await drive_async(lookup(checkpoint.root, keys), self._reader(checkpoint))

    async def iterate(
        self, checkpoint: Checkpoint, first: AttributeKey, last: AttributeKey
    ) -> AsyncIterator[Sequence[tuple[AttributeKey, int]]]:
        """Give keys and values from ``first`` to ``last``, both included, ascending, in runs."""
        key: AttributeKey | None = first
        while key is not None:
            try:
                with spending(Cause.ATTRIBUTES):
                    steps = scan(checkpoint.root, key, last)
                    found = await drive_async(steps, self._reader(checkpoint))
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
        with spending(Cause.ATTRIBUTES, claimed.name):
            record = await self._catalog.declare(claimed)
            if _is_published(record, kept_of(base), through):
                return record.checkpoint
            if not record.newest.is_at(kept_of(base)):
                # Before its pages are asked for: some may be swept.
                raise moved_on(claimed.name, record)
            steps = update(base.root, changes, self._shape)
            done = await drive_async(steps, self._reader(base))
            after = KeptRoot(through=through, core=dict(core), root=done.root)
            for _ in range(PUBLISH_TRIES_MAX):
                try:
                    return await self._write(claimed, kept_of(base), done, after)
                except GenerationRaisedError as error:
                    log.info("attributes.written_again", stream=claimed.name, cause=str(error))
        raise RetryableError(
            f"the checkpoint of stream {claimed.name} met a sweep {PUBLISH_TRIES_MAX} times",
            remedy="Flush again",
        )

    async def _write(
        self, claimed: Stream, base: KeptRoot, done: Update, after: KeptRoot
    ) -> Checkpoint:
        """Write one object, a list if a chunk is full, and publish."""
        # The generation in which the object is written is that in which it is published.
        record = await self._catalog.declare(claimed)
        if after.through is not None and _is_published(record, base, after.through):
            return record.checkpoint
        if not record.newest.is_at(base):
            raise moved_on(claimed.name, record)
        made: IndexObject | None = None
        if done.pages:
            made = await self._objects.write(claimed, base.root.end, b"".join(done.pages))
        publication = Publication(
            base=record.newest,
            generation=record.generation,
            after=after,
            made=made,
            chunk=await self._chunk(claimed, record, after, made),
        )
        published = await self._catalog.publish(claimed, publication)
        if made is not None:
            self._keep(made, done)
        log.info(
            "attributes.published",
            stream=claimed.name,
            through=str(after.through),
            count=after.root.count,
            written=made.length if made is not None else 0,
        )
        return published.checkpoint

    async def _chunk(
        self,
        claimed: Stream,
        record: AttributesRecord,
        after: KeptRoot,
        made: IndexObject | None,
    ) -> IndexChunk | None:
        """Write the list of a chunk that is full with what was made; None: it is not."""
        planned = record.published(after, made, keep_ends=True)
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

    def _reader(
        self, checkpoint: Checkpoint
    ) -> Callable[[Sequence[PageRef]], Awaitable[Sequence[Page]]]:
        return partial(self._pages, checkpoint)

    async def _pages(self, checkpoint: Checkpoint, refs: Sequence[PageRef]) -> Sequence[Page]:
        """Return pages, those that are not in memory fetched at once."""
        if len(refs) == 1:
            return [await self._page(checkpoint, refs[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._page(checkpoint, ref)) for ref in refs]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
        return [task.result() for task in tasks]

    async def _page(self, checkpoint: Checkpoint, ref: PageRef) -> Page:
        holder = await self._objects.holder(checkpoint, ref.offset)

        async def fetch() -> Page:
            raw = await self._objects.read(holder, ref.offset, ref.length)
            return Page(raw, ref.offset)

        return await self._cache.page(PageName(holder.key, ref.offset), fetch)


def _is_published(record: AttributesRecord, base: KeptRoot, through: Position) -> bool:
    """Tell whether a flush is there already: its answer was lost."""
    return record.newest.through == through and not record.newest.is_at(base)
