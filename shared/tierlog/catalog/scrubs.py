"""The newest reports of scrubs, and when the last ones began, in the metadata store.

There and not in the bucket: a bucket that can't be reached, or refuses what is put there, is what
a report may have to tell of; and nothing of ours lies there that no ledger names.

Invariants:
    * Which report is the newer one its number says, whatever the clocks said when they began; of
      one that a release kept which gave none, a rolling upgrade's, the clock.
    * As many reports as are asked for, and the few older ones that say what these could not look
      at, and since when, each at most ``REPORT_LEN_MAX`` bytes.
    * What of it is damaged, or of another version, is passed over and goes first: nothing is
      decided by a report, and without the times a scrub comes early.
    * That the cluster was restored is a mark of its own (``tierlog.catalog.restore``), and goes
      once somebody has asked for a scrub that repairs, and nothing stopped it from deleting; one
      that was left since they asked stays.
"""

from collections.abc import Mapping
from functools import partial

import structlog

from tierlog.catalog.change import ensure_node, settle
from tierlog.format import paths
from tierlog.format.scrub_records import decode_report, decode_times, encode_report, encode_times
from tierlog.model.errors import CorruptError, RefusedError
from tierlog.model.scrub import (
    KnownFaults,
    ScrubReport,
    ScrubState,
    ScrubTimes,
    counted_from,
    known_faults,
    places_of,
)
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import MetadataStore, NoNodeError

log = structlog.get_logger()


class ScrubCatalog:
    """What is kept of scrubs for whoever leads next."""

    def __init__(self, store: MetadataStore, *, ids: Ids) -> None:
        self._store = store
        self._ids = ids

    async def save(self, report: ScrubReport, *, keep: int) -> None:
        """Keep the report of a scrub as it is now, and of those before it the newest."""
        path = paths.scrub_path(report.scrub_id)
        await ensure_node(self._store, paths.SCRUBS)
        if not report.number:
            kept = [one for one in (await self._all()).values() if one is not None]
            report.number = 1 + max((one.number for one in kept), default=0)
        data = encode_report(report)
        made = False

        async def one_round() -> None:
            nonlocal made
            # Its name is its own: who finds it has made it.
            found = await self._store.get(path)
            if found is None:
                made = True
                await self._store.create(path, data)
            elif found.data != data:
                await self._store.set(path, data, version=found.version)

        await settle(self._store, self._ids, path, one_round)
        if not made:
            return
        found = await self._all()
        # What can't be read goes first.
        by_age = _by_age(found)
        # What a deep one found is known by no other, however many come behind it.
        deep = [name for name in by_age if _is_deep(found[name])][-1:]
        # Nor since when nobody could look at everything.
        since = counted_from(_newest_first(found))
        for name in by_age[: max(0, len(by_age) - keep)]:
            rest = {one: report for one, report in found.items() if one != name}
            # Nor what any found of what those behind it could not look at.
            if name in deep or (since is not None and found[name] is since):
                continue
            if _known(rest) == _known(found):
                found = rest
                await self._forget(name)

    async def _forget(self, name: str) -> None:
        try:
            await self._store.delete(f"{paths.SCRUBS}/{name}", version=-1)
        except NoNodeError:
            # Another scheduler was quicker.
            return

    async def reports(self) -> list[ScrubReport]:
        """Return what is kept, newest first, as of now (after ``sync``)."""
        return _newest_first(await self._all())

    async def _all(self) -> dict[str, ScrubReport | None]:
        """Return what is kept by name; None: it can't be read."""
        await self._store.sync(paths.SCRUBS)
        found: dict[str, ScrubReport | None] = {}
        for name in await self._store.children(paths.SCRUBS) or []:
            node = await self._store.get(f"{paths.SCRUBS}/{name}")
            if node is None:
                continue
            try:
                found[name] = decode_report(node.data)
            except (CorruptError, RefusedError) as error:
                log.warning("scrub.report_unread", name=name, cause=str(error))
                found[name] = None
        return found

    async def times(self) -> ScrubTimes:
        """Return when scrubs last began, as of now (after ``sync``)."""
        await self._store.sync(paths.SCRUBS)
        found = await self._store.get(paths.SCRUBS)
        try:
            return ScrubTimes() if found is None or not found.data else decode_times(found.data)
        except (CorruptError, RefusedError) as error:
            log.warning("scrub.times_unread", cause=str(error))
            return ScrubTimes()

    async def is_restored(self) -> bool:
        """Tell whether the cluster came back from its bucket, or its metadata from a backup.

        As long as nobody let a scrub repair.
        """
        return await self.mark() is not None

    async def mark(self) -> int | None:
        """Return the number of that mark as of now, another one where it is left anew; None: none.

        Who asks for a scrub that repairs asks about the mark that stands then.
        """
        await self._store.sync(paths.ROOT)
        found = await self._store.get(paths.RESTORED)
        return None if found is None else found.version

    async def note_behind(self) -> None:
        """Leave that mark: what the metadata do not name may be what they have forgotten."""
        # Nothing comes behind it that would tell whether it is there.
        await self._store.sync(paths.ROOT)
        await settle(self._store, self._ids, paths.RESTORED, partial(leave_mark, self._store))

    async def note_repaired(self, mark: int) -> bool:
        """Take that mark away, but none that was left since; tell whether none is there now."""

        async def one_round() -> bool:
            found = await self._store.get(paths.RESTORED)
            if found is None or found.version != mark:
                return found is None
            await self._store.delete(paths.RESTORED, version=mark)
            return True

        await self._store.sync(paths.ROOT)
        return await settle(self._store, self._ids, paths.RESTORED, one_round)

    async def save_times(self, times: ScrubTimes) -> None:
        """Say when scrubs last began."""
        data = encode_times(times)
        await ensure_node(self._store, paths.SCRUBS)

        async def one_round() -> None:
            found = await self._store.get(paths.SCRUBS)
            if found is None:
                await self._store.create(paths.SCRUBS, data)
            elif found.data != data:
                await self._store.set(paths.SCRUBS, data, version=found.version)

        await settle(self._store, self._ids, paths.SCRUBS, one_round)


async def leave_mark(store: MetadataStore) -> None:
    """Leave the mark of metadata that may have forgotten something, in a round of a change."""
    found = await store.get(paths.RESTORED)
    if found is None:
        await store.create(paths.RESTORED, b"")
    else:
        await store.set(paths.RESTORED, b"", version=found.version)


def _by_age(found: Mapping[str, ScrubReport | None]) -> list[str]:
    """Return the names, the oldest first; those of what can't be read before all."""
    places = places_of(one for one in found.values() if one is not None)

    def age(name: str) -> tuple[int, int, int]:
        one = found[name]
        if one is None:
            return (-1, 0, 0)
        return (places[one.scrub_id], one.started_ms, one.scrub_id.int)

    return sorted(found, key=age)


def _newest_first(found: Mapping[str, ScrubReport | None]) -> list[ScrubReport]:
    by_age = (found[name] for name in reversed(_by_age(found)))
    return [one for one in by_age if one is not None]


def _known(found: Mapping[str, ScrubReport | None]) -> KnownFaults | None:
    return known_faults(_newest_first(found))


def _is_deep(report: ScrubReport | None) -> bool:
    return report is not None and report.wish.deep and report.state is ScrubState.DONE
