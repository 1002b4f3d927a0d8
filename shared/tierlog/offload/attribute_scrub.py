"""What a scrub looks at of attribute indexes: each that a key in the bucket, or a stream, names.

Owns the order of indexes and what is told of each. Does not own the look at one
(``tierlog.offload.attribute_sweep``), nor what stops deletions: the scrub says that.
"""

from collections.abc import Awaitable, Callable, Iterable
from uuid import UUID

from tierlog.format.attribute_objects import attributes_folder, parse_attribute_key
from tierlog.model.errors import TierlogError
from tierlog.model.ids import StreamName
from tierlog.model.scrub import Finding, FindingKind, ScrubReport
from tierlog.offload.attribute_sweep import AttributeSweeper, Pay, Swept

Kept = Callable[[str], Awaitable[str]]
"""Says why nothing of a stream is deleted; empty: nothing stops it."""


class AttributeScrub:
    """The indexes that one scrub has met."""

    def __init__(self, sweeper: AttributeSweeper, key_prefix: str) -> None:
        self._sweeper = sweeper
        self._prefix = key_prefix
        self._seen: set[tuple[StreamName, UUID]] = set()

    def __repr__(self) -> str:
        return f"<AttributeScrub of {len(self._seen)} indexes>"

    def see(self, key: str) -> bool:
        """Take a key that was listed; False when it is none of an index."""
        parsed = parse_attribute_key(self._prefix, key)
        if parsed is not None:
            self._seen.add((parsed.stream, parsed.incarnation))
        return parsed is not None

    async def run(
        self,
        report: ScrubReport,
        known: Iterable[tuple[StreamName, UUID]],
        *,
        pay: Pay,
        kept: Kept,
    ) -> None:
        """Look at what was seen, and at the indexes of ``known`` streams; tell ``report``."""
        for name, incarnation in sorted(self._seen.union(known)):
            try:
                seen = (name, incarnation) in self._seen
                if not seen and not await self._sweeper.has_any(name):
                    continue
                why = await kept(name) if report.wish.repair else ""
                delete = report.wish.repair and not why
                swept = await self._sweeper.run(
                    name, incarnation, delete=delete, pay=pay, deep=report.wish.deep
                )
            except TierlogError as error:
                report.skip(f"the attribute index of stream {name}: {error}")
                continue
            for finding in swept.findings:
                report.add(finding)
            self._tell(report, name, incarnation, swept, why)

    def _tell(
        self, report: ScrubReport, name: StreamName, incarnation: UUID, swept: Swept, why: str
    ) -> None:
        report.counts[FindingKind.TOO_YOUNG] += swept.too_young
        report.counts[FindingKind.FOREIGN] += swept.foreign
        if swept.unneeded > swept.foreign:
            report.add(
                Finding(
                    kind=FindingKind.ORPHAN_OBJECTS,
                    stream=name,
                    key=attributes_folder(self._prefix, name, incarnation),
                    cause=f"{swept.unneeded} objects of its attribute index with "
                    f"{swept.unneeded_bytes} bytes, which no checkpoint needs",
                    repaired="deleted" if swept.deleted else "",
                    kept="" if swept.deleted else swept.kept or why,
                ),
                objects=swept.unneeded,
                size=swept.unneeded_bytes,
            )
