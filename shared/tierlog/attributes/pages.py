"""Pages of attribute indexes, read from tier 2.

Owns where a page of a checkpoint lies, and fetching all of one step at once. Does not own what is
kept in memory (``page_cache``), nor what is asked for (``tree``).

Invariant: each page that is read is verified before it is used or kept.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from tierlog.attributes.objects import IndexObjects
from tierlog.attributes.page_cache import PageCache, PageName
from tierlog.attributes.tree import PageRef
from tierlog.format.attribute_page import Page
from tierlog.model.attributes import Checkpoint
from tierlog.model.errors import first_error


class IndexPages:
    """Pages of checkpoints."""

    def __init__(self, objects: IndexObjects, cache: PageCache) -> None:
        self._objects = objects
        self._cache = cache

    def __repr__(self) -> str:
        return f"<IndexPages {self._objects!r} {self._cache!r}>"

    def of(
        self, checkpoint: Checkpoint
    ) -> Callable[[Sequence[PageRef]], Awaitable[Sequence[Page]]]:
        """Return what reads pages of one checkpoint."""
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
