"""Scrubs over REST: begin one, and read the newest reports, whichever process made them."""

from typing import Annotated, Self
from uuid import UUID

from fastapi import Body, FastAPI, Query
from pydantic import BaseModel, ConfigDict, Field

from tierlog.model.ids import LEDGER_ID_MAX, LedgerId
from tierlog.model.scrub import ASKED_LEDGERS_MAX, Finding, ScrubReport, ScrubWish
from tierlog_scheduler.scrubs import ScrubRunner


class ScrubWishDocument(BaseModel):
    """``deep`` reads all data; ``repair`` deletes, aborts and copies anew.

    ``ledgers``: it does so of those alone, and only lists and tells of all others.
    """

    model_config = ConfigDict(extra="forbid")

    repair: bool = False
    deep: bool = False
    ledgers: Annotated[
        list[Annotated[int, Field(ge=0, le=LEDGER_ID_MAX)]] | None,
        Field(max_length=ASKED_LEDGERS_MAX),
    ] = None

    def wish(self) -> ScrubWish:
        """Return what is asked for."""
        asked = None if self.ledgers is None else frozenset(map(LedgerId, self.ledgers))
        return ScrubWish(repair=self.repair, deep=self.deep, ledgers=asked)


class LostEntries(BaseModel):
    """Entries of a ledger, both ends included."""

    first_entry_id: int
    last_entry_id: int


class FindingDocument(BaseModel):
    """Something that is wrong. ``repaired``: what was done; ``kept``: why it was not.

    ``lost``: entries that are in no copy, as many ranges as there is room for; ``lost_count``: all.
    """

    kind: str
    stream: str | None
    ledger_id: int | None
    uuid: str | None
    key: str | None
    cause: str
    remedy: str
    repaired: str | None
    kept: str | None
    lost: list[LostEntries]
    lost_count: int

    @classmethod
    def of(cls, finding: Finding) -> Self:
        """Return what is said of a finding."""
        return cls(
            kind=finding.kind.value,
            stream=finding.stream or None,
            ledger_id=finding.ledger_id,
            uuid=str(finding.uuid) if finding.uuid is not None else None,
            key=finding.key or None,
            cause=finding.cause,
            remedy=finding.remedy,
            repaired=finding.repaired or None,
            kept=finding.kept or None,
            lost=[
                LostEntries(first_entry_id=first, last_entry_id=last)
                for first, last in finding.lost
            ],
            lost_count=finding.lost_count,
        )


class ScrubSummary(BaseModel):
    """A scrub without its findings. ``counts`` also has what is no fault: too young, foreign.

    ``clean``: it has ended, everything could be looked at, and no fault is left. ``unread``: what
    could not be looked at, with ``unread_left_off`` more. ``deep_next``: the ledger where a deep
    scrub ran out of time.
    """

    scrub_id: str
    state: str
    phase: str | None
    repair: bool
    deep: bool
    clean: bool
    started_ms: int
    ended_ms: int | None
    error: str | None
    objects: int
    uploads: int
    streams: int
    ledgers: int
    copies_checked: int
    bytes_read: int
    elsewhere: int
    remaining: int
    counts: dict[str, int]
    repaired: dict[str, int]
    unread: list[str]
    unread_left_off: int
    deletions_stopped: str | None
    deep_next: int | None

    @classmethod
    def of(cls, report: ScrubReport) -> Self:
        """Return what is said of a scrub."""
        same = ("started_ms", "objects", "uploads", "streams", "ledgers", "copies_checked")
        return cls(
            **{name: getattr(report, name) for name in (*same, "bytes_read", "elsewhere")},
            scrub_id=str(report.scrub_id),
            state=report.state.value,
            phase=report.phase or None,
            repair=report.wish.repair,
            deep=report.wish.deep,
            clean=report.is_clean,
            ended_ms=report.ended_ms or None,
            error=report.error or None,
            remaining=report.remaining,
            counts={kind.value: count for kind, count in sorted(report.counts.items())},
            repaired={kind.value: count for kind, count in sorted(report.repaired.items())},
            unread=report.unread,
            unread_left_off=report.unread_left_off,
            deletions_stopped=report.deletions_stopped or None,
            deep_next=report.deep_next.ledger_id if report.deep_next is not None else None,
        )


class ScrubAnswer(ScrubSummary):
    """A scrub with its findings, as far as there is room for them."""

    findings: list[FindingDocument]
    findings_left_off: int


class ScrubsAnswer(BaseModel):
    """The newest scrubs, newest first."""

    scrubs: list[ScrubSummary]


class ScrubsApi:
    """The handlers."""

    def __init__(self, scrubs: ScrubRunner) -> None:
        self._scrubs = scrubs

    def add_routes(self, app: FastAPI) -> None:
        """Add the API to ``app``."""
        app.add_api_route("/v1/scrubs", self.begin, methods=["POST"], status_code=202)
        app.add_api_route("/v1/scrubs", self.scrubs, methods=["GET"])
        app.add_api_route("/v1/scrubs/{scrub_id}", self.scrub, methods=["GET"])

    async def begin(self, wish: Annotated[ScrubWishDocument | None, Body()] = None) -> ScrubSummary:
        """Begin a scrub; it goes on by itself. UNAVAILABLE while another one is at work."""
        report = await self._scrubs.ask((wish or ScrubWishDocument()).wish())
        return ScrubSummary.of(report)

    async def scrubs(self, limit: Annotated[int, Query(ge=1, le=100)] = 100) -> ScrubsAnswer:
        """List the newest scrubs."""
        found = await self._scrubs.reports()
        return ScrubsAnswer(scrubs=[ScrubSummary.of(one) for one in found[:limit]])

    async def scrub(self, scrub_id: UUID) -> ScrubAnswer:
        """Show a scrub, at work or ended, with what it found."""
        report = await self._scrubs.report(scrub_id)
        return ScrubAnswer(
            **ScrubSummary.of(report).model_dump(),
            findings=[FindingDocument.of(one) for one in report.findings],
            findings_left_off=report.findings_left_off,
        )
