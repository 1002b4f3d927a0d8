"""Defects put into the running code, each of a kind that the design forbids.

What a trouble at every call is worth is what it catches: ``test_bite`` demands that each of these
is found by the story, the process and the troubles that belong to it. Those that the simulation
has already are taken from there.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest.mock import patch

from tests.faults.stories import Ending, run_story
from tests.faults.troubles import Point, Trouble, fits
from tests.simulation.mutants import MUTANTS
from tierlog.model.offload import OffloadContext
from tierlog.offload.uploading import BlockUpload
from tierlog_scheduler import policy
from tierlog_scheduler.actions import Actions

Patching = contextlib.AbstractContextManager[Any]
KILLS: Final = (Trouble.KILL_BEFORE, Trouble.KILL_AFTER)


@dataclass(frozen=True, slots=True)
class Defect:
    """``troubles``: the process meets each, at each call of the story, until something is found.

    ``says``: what must be among what is found. Without a trouble nothing may be found, unless
    ``at_once``: the defect shows by itself.
    """

    apply: Callable[[], Patching]
    says: str
    story: str = "offload"
    victim: str = "worker"
    troubles: tuple[Trouble, ...] = KILLS
    at_once: bool = False


def _index_before_data() -> Patching:
    """Write an index object before the data that it tells of."""
    begin = BlockUpload.begin

    async def early(self: Any, metadata: Any) -> None:
        index_key = f"{self.key}-index"
        await self._objects.put(index_key, b"to be replaced", metadata={}, content_type="")
        await begin(self, metadata)

    return patch.object(BlockUpload, "begin", early)


def _struck_off_before_deleted() -> Patching:
    """Strike an attempt off, and delete what it left after that."""

    async def sweep(self: Any, stream: Any, action: Any, now: Any) -> None:
        del stream, now
        ledger_id, attempt = action.ledger_id, action.attempt
        await self._catalog.contexts.strike_off(ledger_id, attempt.uuid)
        await self._offloader.delete_offloaded(ledger_id, attempt.uuid, attempt.location)

    return patch.object(Actions, "sweep", sweep)


def _old_attempt_forgotten() -> Patching:
    """Begin an attempt without abandoning the one before it."""
    begun = OffloadContext.attempt_begun

    def forgetful(self: OffloadContext, **what: Any) -> OffloadContext:
        return replace(begun(self, **what), abandoned=())

    return patch.object(OffloadContext, "attempt_begun", forgetful)


def _damaged_copy_forgotten() -> Patching:
    """Put a repaired copy into the place of a damaged one, and forget that one."""
    completed = OffloadContext.repair_completed

    def forgetful(self: OffloadContext, **what: Any) -> OffloadContext:
        return replace(completed(self, **what), abandoned=self.abandoned)

    return patch.object(OffloadContext, "repair_completed", forgetful)


def _asked_once() -> Patching:
    """Ask for a ledger once, and rely on the queue for the rest."""
    return patch.object(policy, "_may_ask", lambda asked, _now, _delays: asked is None)


DEFECTS: Final = {
    "the uuid after the first byte": Defect(
        MUTANTS["uuid after upload"].apply, "which the metadata do not name", at_once=True
    ),
    "the index before the data": Defect(_index_before_data, "is there before", at_once=True),
    "struck off before the objects are deleted": Defect(
        _struck_off_before_deleted, "nobody names", story="trim", victim="scheduler"
    ),
    "an attempt that is not abandoned": Defect(_old_attempt_forgotten, "open uploads"),
    "leftovers that are not swept": Defect(MUTANTS["never sweep"].apply, "open uploads"),
    "complete, whoever it is": Defect(
        MUTANTS["complete whoever it is"].apply,
        "has another copy now",
        troubles=(Trouble.STOP_BEFORE, Trouble.STOP_AFTER),
    ),
    "ambiguous taken for failure": Defect(
        MUTANTS["ambiguous is failure"].apply,
        "is in neither tier|not there",
        troubles=(Trouble.DROP_REPLY,),
    ),
    "local copies of what is not complete deleted": Defect(
        MUTANTS["delete what is not complete"].apply, "is in neither tier"
    ),
    "a queue that is relied on": Defect(
        _asked_once, "never became complete", troubles=(Trouble.WIPE_AND_KILL,)
    ),
    "a damaged copy that is not named any more": Defect(
        _damaged_copy_forgotten, "nobody names", story="scrub", victim="scrub", at_once=True
    ),
}


def found_by(defect: Defect) -> tuple[Point | None, Ending] | None:
    """Return the first point at which a defect shows, and how; None: it never does."""
    with defect.apply():
        calm = run_story(defect.story, defect.victim)
        if calm.broken:
            return None, calm
        for number, call in enumerate(calm.calls):
            for trouble in defect.troubles:
                if fits(trouble, call):
                    point = Point(number, trouble)
                    ending = run_story(defect.story, defect.victim, point)
                    if ending.broken:
                        return point, ending
    return None
