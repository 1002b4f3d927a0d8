"""Raw pages of attribute indexes in memory: the lower of the two caches (seeds/004).

Owns the pages, one budget for all streams of a process. Does not own what is fetched, nor how it
is verified: only what was verified comes in here.

Invariants:
    * Never more than ``limit_bytes`` is kept, ``PAGE_COST`` for each page included.
    * A page for whose sake nothing would be read twice is optional: what does not fit is not
      kept, and nothing fails or goes for it. Index pages push leaves out, leaves never push out
      an index page: with the index in memory a lookup reads one page at most.
    * A page is fetched once, however many ask for it at the same time; a fetch that fails is
      begun again by who waited for it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from tierlog.format.attribute_page import Page

PAGE_COST: Final = 1024
"""What a page costs beside its bytes: its name, two views of it, places in two tables."""


class PageName(NamedTuple):
    """A page: an object, and where in the index its bytes lie. It never changes."""

    object_key: str
    offset: int


class PageCache:
    """Pages by name: those used longest ago go first, leaves before index pages."""

    def __init__(self, *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = self._index_bytes = 0
        self.hits = self.fetches = 0
        self._leaves: OrderedDict[PageName, Page] = OrderedDict()
        self._index: OrderedDict[PageName, Page] = OrderedDict()
        self._flights: dict[PageName, _Flight] = {}

    def __repr__(self) -> str:
        return f"<PageCache {self.used_bytes} of {self.limit_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._leaves) + len(self._index)

    def find(self, name: PageName) -> Page | None:
        """Return a page that is here, and let it stay."""
        for pages in (self._index, self._leaves):
            page = pages.get(name)
            if page is not None:
                pages.move_to_end(name)
                return page
        return None

    def put(self, name: PageName, page: Page) -> bool:
        """Keep a page, if there is room for one of its kind; False: there is none."""
        if self.find(name) is not None:
            return True
        is_index = page.level > 0
        cost = len(page.raw) + PAGE_COST
        stays = 0 if is_index else self._index_bytes
        if stays + cost > self.limit_bytes:
            # Whatever goes: so nothing does.
            return False
        while self.used_bytes + cost > self.limit_bytes:
            self._drop_oldest()
        (self._index if is_index else self._leaves)[name] = page
        self._count(page, 1)
        return True

    def _drop_oldest(self) -> None:
        _, page = (self._leaves or self._index).popitem(last=False)
        self._count(page, -1)

    def _count(self, page: Page, sign: int) -> None:
        cost = sign * (len(page.raw) + PAGE_COST)
        self.used_bytes += cost
        if page.level:
            self._index_bytes += cost

    async def page(self, name: PageName, fetch: Callable[[], Awaitable[Page]]) -> Page:
        """Return a page, fetched and checked by ``fetch`` unless it is here."""
        while True:
            found = self.find(name)
            if found is not None:
                self.hits += 1
                return found
            flight = self._flights.get(name)
            if flight is None:
                return await self._fetch(name, fetch)
            await flight.landed.wait()
            if flight.page is not None:
                self.hits += 1
                return flight.page

    async def _fetch(self, name: PageName, fetch: Callable[[], Awaitable[Page]]) -> Page:
        flight = self._flights[name] = _Flight()
        try:
            self.fetches += 1
            page = await fetch()
            flight.page = page
            self.put(name, page)
            return page
        finally:
            del self._flights[name]
            flight.landed.set()


class _Flight:
    """A fetch under way; ``page`` once it landed, None if it failed."""

    def __init__(self) -> None:
        self.landed = asyncio.Event()
        self.page: Page | None = None
