"""What other processes do of a scrub that is too long for one: listing, and reading copies.

Owns what goes to them and comes back. Does not own how they are run, nor the order of a scrub
(``tierlog.offload.scrub``): list first, then metadata, then what nobody named.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol
from uuid import UUID

from tierlog.format.keys import ObjectRole
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.manifest import copy_of
from tierlog.model.offload import OffloadContext
from tierlog.model.scrub import FindingKind, ScrubReport
from tierlog.offload import scrub_rules as rules
from tierlog.offload.attribute_scrub import AttributeScrub

_UNLISTED: Final = (FindingKind.POINTS_NOWHERE, "it was not looked for in the list")


class ListedAttempt(NamedTuple):
    """An attempt of which objects were listed, and their lengths."""

    uuid: UUID
    ledger_id: LedgerId
    sizes: tuple[tuple[ObjectRole, int], ...]


@dataclass(slots=True)
class Listing:
    """What was listed. ``index_keys``: one key of each attribute index, at least."""

    objects: int = 0
    foreign: int = 0
    attempts: list[ListedAttempt] = field(default_factory=list)
    index_keys: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLook:
    """What came of a look at some ledgers of a stream; ``walked`` None: it could not be read."""

    name: StreamName
    report: ScrubReport
    named: tuple[tuple[UUID, LedgerId], ...]
    walked: tuple[UUID, int] | None
    paused: bool


class Crew(Protocol):
    """The other processes. Both steps take as long as they take."""

    async def listing(self) -> Listing:
        """List the bucket."""
        ...

    def looks(self, names: Sequence[StreamName]) -> AsyncIterator[StreamLook]:
        """Look at every ledger of these streams, as ``Scrubber.look`` does."""
        ...


class NamesAlone(rules.Survey):
    """A survey without a list: keeps what is named, and has every copy's objects looked at."""

    def __init__(self, key_prefix: str = "") -> None:
        super().__init__(key_prefix)
        self.named: set[tuple[UUID, LedgerId]] = set()

    def name(self, uuid: UUID, ledger_id: LedgerId) -> None:
        self.named.add((uuid, ledger_id))

    def see_context(self, context: OffloadContext) -> rules.Verdict | None:
        super().see_context(context)
        return None if copy_of(context) is None else _UNLISTED


class Merger:
    """Puts together what a crew found."""

    def __init__(self, report: ScrubReport, survey: rules.Survey) -> None:
        self._report = report
        self._survey = survey
        self._told: set[tuple[object, ...]] = set()

    def take_listing(self, listing: Listing, indexes: AttributeScrub) -> None:
        """Take what was listed."""
        self._report.objects += listing.objects
        self._report.counts[FindingKind.FOREIGN] += listing.foreign
        for one in sorted(listing.attempts, key=lambda one: (one.uuid.bytes, one.ledger_id)):
            self._survey.see_attempt(one.uuid, one.ledger_id, dict(one.sizes))
        for key in listing.index_keys:
            indexes.see(key)

    def take(self, look: StreamLook) -> None:
        """Take what was found of a stream; what several of the crew tell of it is told once."""
        report, found = self._report, look.report
        for one in found.findings:
            about = (one.kind, one.stream, one.ledger_id, one.uuid, one.key)
            if about not in self._told:
                self._told.add(about)
                report.add(one)
        # What had no room in its own list is counted all the same.
        report.counts.update(found.counts - Counter(one.kind for one in found.findings))
        report.findings_left_off += found.findings_left_off
        for cause in found.unread:
            report.skip(cause)
        report.unread_left_off += found.unread_left_off
        report.ledgers += found.ledgers
        report.copies_checked += found.copies_checked
        report.bytes_read += found.bytes_read
        report.elsewhere += found.elsewhere
        for uuid, ledger_id in look.named:
            self._survey.name(uuid, ledger_id)
