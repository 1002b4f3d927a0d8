"""REST of the dead letters: requests that kept failing, and asking for them again."""

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Self

from fastapi import Body, FastAPI, Query
from pydantic import BaseModel, ConfigDict

from tierlog.model.ids import stream_name
from tierlog.offload.dead_letters import (
    DeadLetter,
    DeadLetters,
    Letter,
    LetterState,
    parse_place,
)

SHOWN_MAX = 1000
VALUE_SHOWN_MAX = 4096
HEADER_SHOWN_MAX = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterDocument(Letter):
    """A request that was put aside. Stream and ledger are null when it is no request at all."""

    place: str

    @classmethod
    def of(cls, letter: DeadLetter) -> Self:
        """Return what is said of a letter."""
        given = {one.name: getattr(letter, one.name) for one in fields(cls)}
        return cls(**{**given, "place": str(letter.place), "state": letter.state.value})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterAnswer(DeadLetterDocument):
    """A letter with what is in it: headers as text, the beginning of the value in hexadecimal."""

    headers: dict[str, str]
    value_hex: str


class DeadLettersAnswer(BaseModel):
    """Letters, newest first. ``left_off``: how many older ones are not shown."""

    dead_letters: list[DeadLetterDocument]
    left_off: int


class ReplayRequestDocument(BaseModel):
    """Which of the waiting letters to replay; null does not restrict."""

    model_config = ConfigDict(extra="forbid")

    stream: str | None = None
    reason: str | None = None


class NotReplayedDocument(BaseModel):
    """A letter that is no request."""

    place: str
    cause: str


class ReplayAnswer(BaseModel):
    """What a replay came to, oldest first; ``left``: how many it did not come to: it is bounded."""

    replayed: list[str]
    refused: list[NotReplayedDocument]
    left: int


class DeadLettersApi:
    """The handlers."""

    def __init__(self, letters: DeadLetters) -> None:
        self._letters = letters

    def add_routes(self, app: FastAPI) -> None:
        """Add the API to ``app``."""
        root = "/v1/dead-letters"
        app.add_api_route(root, self.dead_letters, methods=["GET"])
        app.add_api_route(f"{root}/replay", self.replay_waiting, methods=["POST"])
        app.add_api_route(f"{root}/{{place}}", self.dead_letter, methods=["GET"])
        app.add_api_route(f"{root}/{{place}}/replay", self.replay, methods=["POST"])
        app.add_api_route(f"{root}/{{place}}/dismiss", self.dismiss, methods=["POST"])

    async def dead_letters(
        self,
        state: Annotated[LetterState | None, Query()] = None,
        stream: Annotated[str | None, Query()] = None,
        reason: Annotated[str | None, Query()] = None,
        limit: Annotated[int, Query(ge=1, le=SHOWN_MAX)] = SHOWN_MAX,
    ) -> DeadLettersAnswer:
        """List the dead letters; without ``state`` also those that were replayed or dismissed."""
        name = stream_name(stream) if stream is not None else None
        found = await self._letters.find(state=state, stream=name, reason=reason)
        return DeadLettersAnswer(
            dead_letters=[DeadLetterDocument.of(one) for one in found[:limit]],
            left_off=max(0, len(found) - limit),
        )

    async def dead_letter(self, place: str) -> DeadLetterAnswer:
        """Show one dead letter, with what is in it."""
        letter, event = await self._letters.get(parse_place(place))
        return DeadLetterAnswer(
            **asdict(DeadLetterDocument.of(letter)),
            headers={
                name: value[:HEADER_SHOWN_MAX].decode("utf-8", "replace")
                for name, value in event.headers.items()
            },
            value_hex=event.value[:VALUE_SHOWN_MAX].hex(),
        )

    async def replay(self, place: str) -> DeadLetterDocument:
        """Ask again for what a dead letter asked for."""
        return DeadLetterDocument.of(await self._letters.replay(parse_place(place)))

    async def replay_waiting(
        self, wish: Annotated[ReplayRequestDocument | None, Body()] = None
    ) -> ReplayAnswer:
        """Ask again for everything that waits, or for that of one stream or reason."""
        wish = wish or ReplayRequestDocument()
        stream = stream_name(wish.stream) if wish.stream is not None else None
        done = await self._letters.replay_waiting(stream=stream, reason=wish.reason)
        return ReplayAnswer(
            replayed=[str(place) for place in done.replayed],
            refused=[
                NotReplayedDocument(place=str(place), cause=cause) for place, cause in done.refused
            ],
            left=done.left,
        )

    async def dismiss(self, place: str) -> DeadLetterDocument:
        """Note that a dead letter needs nothing any more."""
        return DeadLetterDocument.of(await self._letters.dismiss(parse_place(place)))
