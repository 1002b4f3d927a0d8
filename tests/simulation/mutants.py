"""Defects put into the running code, each of a kind that the design forbids.

A simulation is worth what it catches: ``test_mutants`` demands that each of these breaks a rule
for some seed within a bound. ``python -m tests.simulation.mutants`` tells for each, or for those
that are named, which seed did, and which rule.
"""

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from tests.simulation import once_mutants as once
from tests.simulation.losses import LOSSES_SIZE
from tests.simulation.once import ONCE_SIZE
from tests.simulation.scenarios import run
from tests.simulation.steps import Plan
from tests.simulation.trace import Trace
from tests.simulation.world import ViolationError
from tierlog.adapters.memory.files import MemoryFile
from tierlog.catalog import ContextCatalog, underreplication
from tierlog.ledger.one_recovery import OneRecovery
from tierlog.ledger.placement import choose_replacement
from tierlog.ledger.writer import LedgerWriter
from tierlog.model.errors import IndeterminateError
from tierlog.model.offload import OffloadContext, OffloadState
from tierlog.offload import attempting
from tierlog_ingest.replication.copying import Copier
from tierlog_ingest.replication.worker import Worker
from tierlog_ingest.storage.node import StorageNode
from tierlog_offloader.worker import OffloadWorker
from tierlog_scheduler import policy, retention, scheduler
from tierlog_scheduler.actions import Actions
from tierlog_scheduler.manifests import BucketManifests


@dataclass(frozen=True, slots=True)
class Mutant:
    """A defect, and the rules of which one must break."""

    apply: Callable[[], contextlib.AbstractContextManager[Any]]
    rules: str
    """Their letters; ``!`` stands for an error in a log."""
    focus: str = ""
    likely_seed: int = 1
    """A seed that is known to catch it; the search begins there."""
    losses: bool = False
    """It is about ledgers whose nodes are lost; found by ``lose_nodes``."""
    trims: bool = False
    """It is about retention; found by ``trim_many``."""
    once: bool = False
    """It is about conditional appends; found by ``write_once``."""

    def plan(self, ledgers: int) -> Plan:
        """Return what is to find it."""
        plan = Plan(ledgers=ledgers, focus=self.focus)
        if self.trims:
            # Each has a retention to wait for.
            return replace(plan, ledgers=1, scenario="trim_many")
        if self.once:
            return replace(plan, size=ONCE_SIZE, scenario="write_once")
        if not self.losses:
            return plan
        return replace(plan, size=LOSSES_SIZE, scenario="lose_nodes")


def _uuid_after_upload() -> contextlib.AbstractContextManager[Any]:
    """Upload first, and put the attempt's UUID into the metadata when it worked."""

    async def attempt(self: Any, request: Any, policy: Any) -> Any:
        ledger_id, uuid = request.ledger_id, self._ids.uuid()
        handle = self._open_ledger(ledger_id, await self._checked_metadata(ledger_id))
        copy = await self._copy(request, handle, uuid, policy)
        await handle.close()
        contexts = self._catalog.contexts
        location = self._offloader.location(ledger_id, uuid)
        await contexts.begin_attempt(ledger_id, uuid=uuid, location=location, worker="x")
        await contexts.complete_attempt(ledger_id, uuid=uuid, copy=copy)
        return attempting.Done(outcome=attempting.COMPLETED, uuid=uuid, copy=copy)

    return patch.object(OffloadWorker, "_attempt", attempt)


def _complete_whoever_it_is() -> contextlib.AbstractContextManager[Any]:
    """Complete the ledger without asking whether the newest attempt is this one."""

    def completed(self: OffloadContext, *, uuid: Any, copy: Any, now_ms: int) -> OffloadContext:
        moved = self.moved_to(OffloadState.COMPLETE)
        return replace(moved, complete=True, timestamp_ms=now_ms, copy=copy)

    return patch.object(OffloadContext, "attempt_completed", completed)


@contextlib.contextmanager
def _delete_incomplete() -> Iterator[None]:
    """Delete local copies of ledgers whose attempt has only begun."""
    decide = policy.decide

    def too_much(view: Any, now: Any, delays: Any) -> Any:
        begun = [
            policy.DeleteTier1(context=one.context, grounds=view.grounds)
            for one in view.ledgers
            if one.context is not None and one.context.state is OffloadState.OFFLOADING
        ]
        return [*decide(view, now, delays), *begun]

    async def delete(self: Any, action: policy.DeleteTier1) -> None:
        context = action.context
        deleting = await self._catalog.contexts.change(
            context.ledger_id,
            lambda found: replace(found, state=OffloadState.TIER1_DELETING),
            applied=lambda found: found.state is OffloadState.TIER1_DELETING,
        )
        await self._catalog.ledgers.delete_tier1(context.ledger_id, deleting)

    with (
        patch.object(scheduler, "decide", too_much),
        patch.object(Actions, "delete_tier1", delete),
    ):
        yield


def _answer_before_sync() -> contextlib.AbstractContextManager[Any]:
    """Write the journal without making it durable."""

    async def write_only(self: MemoryFile, offset: int, buffers: Any) -> None:
        await self.write(offset, buffers)
        if offset == 0 or not self._path.startswith("journal/"):
            await self.sync()

    return patch.object(MemoryFile, "write_and_sync", write_only)


@contextlib.contextmanager
def _never_sweep() -> Iterator[None]:
    """Strike abandoned attempts off without deleting what they left."""

    async def nothing(self: Any, context: Any) -> None:
        """Leave it all."""

    async def strike_off(self: Any, stream: Any, action: Any, now: Any) -> None:
        await self._catalog.contexts.strike_off(action.ledger_id, action.attempt.uuid)

    with (
        patch.object(OffloadWorker, "_clean_abandoned", nothing),
        patch.object(Actions, "sweep", strike_off),
    ):
        yield


def _wall_clock_alone() -> contextlib.AbstractContextManager[Any]:
    """Believe the wall clock when it says that the lag is over."""

    def deletions(view: Any, now: Any) -> Any:
        for one in view.ledgers:
            context = one.context
            if context is None or context.state is not OffloadState.COMPLETE:
                continue
            if now.wall_ms - context.timestamp_ms >= view.policy.deletion_lag_ms:
                yield policy.DeleteTier1(context=context, grounds=view.grounds)

    return patch.object(policy, "_deletions", deletions)


def _trim_by_stamps() -> contextlib.AbstractContextManager[Any]:
    """Believe the wall clocks of whoever closed a ledger and of who looks at it."""

    def by_limits(view: Any, one: Any, now: Any, behind: Any) -> retention.Verdict:
        del behind
        left_ms = view.policy.retention_time_ms - (now.wall_ms - one.listed.closed_ms)
        return retention.Verdict(goes=left_ms <= 0, in_ms=max(0, left_ms), why="")

    return patch.object(retention, "_by_limits", by_limits)


def _delete_before_manifest() -> contextlib.AbstractContextManager[Any]:
    """Delete local copies as soon as they are off the list, whatever a manifest still has."""

    async def begin(self: Any, stream: Any, action: Any) -> None:
        catalog = self._catalog.retention
        await catalog.begin_trim(
            stream.name, stream.incarnation, action.ledger_ids, grounds=action.grounds
        )
        for ledger_id in action.ledger_ids:
            await catalog.drop_tier1(ledger_id)

    return patch.object(Actions, "_begin_trim", begin)


def _recover_up_to_lac() -> contextlib.AbstractContextManager[Any]:
    """Close a recovered ledger at the LAC that was found, without reading forward."""
    whole = OneRecovery.rewrite

    async def rewrite(self: Any, lac: Any) -> Any:
        _, length = await whole(self, lac)
        return lac, length

    return patch.object(OneRecovery, "rewrite", rewrite)


@contextlib.contextmanager
def _ambiguous_is_failure() -> Iterator[None]:
    """Take a lost answer to the completing change for a refusal, and clean up."""

    async def complete(self: Any, ledger_id: Any, *, uuid: Any, copy: Any) -> Any:
        from tierlog.format import paths, records

        path = paths.context_path(ledger_id)
        found = await self._store.get(path)
        context = records.decode_context(found.data)
        planned = context.attempt_completed(uuid=uuid, copy=copy, now_ms=self._clock.wall_ms())
        await self._store.set(path, records.encode_context(planned), version=found.version)
        return planned

    attempt = OffloadWorker._attempt

    async def clean_up(self: Any, request: Any, policy: Any) -> Any:
        try:
            return await attempt(self, request, policy)
        except IndeterminateError:
            context = await self._checked_context(request)
            await self._offloader.delete_offloaded(request.ledger_id, context.uuid)
            raise

    with (
        patch.object(ContextCatalog, "complete_attempt", complete),
        patch.object(OffloadWorker, "_attempt", clean_up),
    ):
        yield


def _recover_without_fence() -> contextlib.AbstractContextManager[Any]:
    """Ask for the end of a ledger that its former owner may still write."""

    async def ask(self: StorageNode, ledger_id: Any) -> Any:
        return await self.last_add_confirmed(ledger_id)

    return patch.object(StorageNode, "fence", ask)


@contextlib.contextmanager
def _edited(owner: type, name: str, before: str, after: str) -> Iterator[None]:
    """Have a method run with one passage of its text replaced."""
    method = getattr(owner, name)
    text = textwrap.dedent(inspect.getsource(method))
    assert text.count(before) == 1, f"{name} is not what this defect was made for"
    made: dict[str, Any] = {}
    source = "from __future__ import annotations\n" + text.replace(before, after)
    exec(compile(source, f"<{name} with a defect>", "exec"), method.__globals__, made)
    with patch.object(owner, name, made[name]):
        yield


def _keep_late_acks() -> contextlib.AbstractContextManager[Any]:
    """Let what a replaced node acknowledged count for the one in its place."""
    return _edited(
        LedgerWriter,
        "_drop_acks",
        "sent.acked.difference_update(gone)",
        "pass",
    )


@contextlib.contextmanager
def _confirm_during_change() -> Iterator[None]:
    """Confirm by the old ensemble while the new one is on its way to the metadata."""
    with (
        _edited(LedgerWriter, "_advance", "self._changing or self.ended", "self.ended"),
        # What would find it at once: an assertion of the writer's own.
        _edited(
            LedgerWriter,
            "_take_over",
            "metadata.segments[-1].first_entry_id == self.last_add_confirmed + 1",
            "True",
        ),
    ):
        yield


@contextlib.contextmanager
def _read_without_fence() -> Iterator[None]:
    """Look for the end of a ledger whose nodes take what its writer still sends.

    One half of it alone does no harm: who recovers fences, and so does each of its reads.
    """
    with (
        _edited(OneRecovery, "_fence_node", ".fence(", ".last_add_confirmed("),
        _edited(StorageNode, "read", "await self.fence(ledger_id)", "pass"),
    ):
        yield


def _absent_on_one_answer() -> contextlib.AbstractContextManager[Any]:
    """Take an entry for absent as soon as one node does not have it."""
    return _edited(
        OneRecovery,
        "_read",
        "len(found.absent) >= self._metadata.covering",
        "len(found.absent) >= 1",
    )


@contextlib.contextmanager
def _move_what_is_written() -> Iterator[None]:
    """Have auto-recovery change the last ensemble of ledgers that are still written."""

    async def mend_unclosed(self: Any, one: Any, metadata: Any, cluster: Any) -> str:
        last = metadata.segments[-1]
        for at, leaving in enumerate(last.ensemble):
            if leaving in one.nodes:
                joining = choose_replacement(
                    cluster.live.values(),
                    last.ensemble,
                    at,
                    write_quorum=metadata.write_quorum,
                    seed=b"",
                    excluded=cluster.draining,
                )
                if joining is not None:
                    await self._catalog.underreplicated.replace_member(
                        one.ledger_id,
                        first_entry_id=last.first_entry_id,
                        leaving=leaving,
                        joining=joining,
                    )
        return "the ledger is not closed yet"

    with (
        patch.object(Worker, "_work_unclosed", mend_unclosed),
        patch.object(underreplication, "with_member", _with_any_member),
    ):
        yield


def _with_any_member(
    ledger_id: Any, metadata: Any, *, first_entry_id: Any, leaving: Any, joining: Any
) -> Any:
    def moved(segment: Any) -> Any:
        if segment.first_entry_id != first_entry_id:
            return segment
        ensemble = tuple(joining if one == leaving else one for one in segment.ensemble)
        return replace(segment, ensemble=ensemble)

    return replace(metadata, segments=tuple(moved(one) for one in metadata.segments))


@contextlib.contextmanager
def _name_before_copying() -> Iterator[None]:
    """Give another node a place in an ensemble first, and its copies then."""

    async def begin_only(self: Any, *what: Any, **how: Any) -> None:
        """Leave the copying to who compares the copies the next time."""

    with (
        _edited(Worker, "_move", "if lacking:", "if False:"),
        patch.object(Copier, "copy", begin_only),
    ):
        yield


def _answer_repeats_at_once() -> contextlib.AbstractContextManager[Any]:
    """Answer an add that came before, though the first of both may not be durable yet."""
    return _edited(StorageNode, "_add_checked", "return appended.done", "return done()")


@contextlib.contextmanager
def _write_no_manifest() -> Iterator[None]:
    """Delete local copies though the bucket's own manifest does not name the other ones."""

    async def nothing(self: Any, *given: Any) -> None:
        del given

    async def allowed(self: Any, context: OffloadContext) -> bool:
        return context.complete

    with (
        patch.object(BucketManifests, "record", nothing),
        patch.object(BucketManifests, "may_delete_local", allowed),
    ):
        yield


MUTANTS: dict[str, Mutant] = {
    "uuid after upload": Mutant(_uuid_after_upload, "c"),
    "complete whoever it is": Mutant(_complete_whoever_it_is, "ab", "stall", 2),
    "delete what is not complete": Mutant(_delete_incomplete, "abe"),
    "answer before sync": Mutant(_answer_before_sync, "ad!", likely_seed=2),
    "never sweep": Mutant(_never_sweep, "c"),
    "write no manifest": Mutant(_write_no_manifest, "i"),
    "wall clock alone": Mutant(_wall_clock_alone, "e", "jump_clock"),
    "trim by the wall clock": Mutant(_trim_by_stamps, "j", "jump_clock", trims=True),
    "delete before a manifest": Mutant(_delete_before_manifest, "j", likely_seed=2, trims=True),
    "recover up to the LAC": Mutant(_recover_up_to_lac, "d"),
    "recover without a fence": Mutant(_recover_without_fence, "df", "usurp"),
    "ambiguous is failure": Mutant(_ambiguous_is_failure, "a", likely_seed=2),
    "late acks count": Mutant(_keep_late_acks, "g", "lose_first", losses=True),
    "confirm during a change": Mutant(_confirm_during_change, "gh", "congest", losses=True),
    "read without a fence": Mutant(_read_without_fence, "df", "recover_written", losses=True),
    "absent on one answer": Mutant(_absent_on_one_answer, "d", "die_at_ack", losses=True),
    "move what is written": Mutant(_move_what_is_written, "h", "decommission", losses=True),
    "answer repeats at once": Mutant(_answer_repeats_at_once, "adg", "repeat", 6, losses=True),
    "tell before confirm": Mutant(once.tell_before_confirm, "k", "lose_unconfirmed", once=True),
    "skip the rebuild": Mutant(once.skip_rebuild, "k", once=True),
    "send before the check": Mutant(once.send_before_check, "k", once=True),
    "flush what is sent": Mutant(once.flush_what_is_sent, "k", "strand_owner", 10, once=True),
    "tell without asking": Mutant(once.tell_without_asking, "k", "strand_owner", once=True),
    "name before copying": Mutant(_name_before_copying, "h", "decommission", losses=True),
}


def hunt(mutant: Mutant, *, seeds_max: int, ledgers: int) -> tuple[int, str] | None:
    """Return the first seed that breaks one of the mutant's rules, and how; None: none did."""
    for seed in range(mutant.likely_seed, mutant.likely_seed + seeds_max):
        with mutant.apply():
            try:
                run(seed, mutant.plan(ledgers), Trace())
            except ViolationError as violation:
                first = str(violation).splitlines()[0]
                told = "!" if first.startswith("an error was logged") else first[len("rule ")]
                if told in mutant.rules:
                    return seed, first
                print(f"seed {seed}: {first}", file=sys.stderr)
            except Exception as error:  # noqa: BLE001 - a defect may also end the run
                print(f"seed {seed}: {error!r}"[:300], file=sys.stderr)
    return None


if __name__ == "__main__":
    for name, one in MUTANTS.items():
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            print(name, "->", hunt(one, seeds_max=10, ledgers=30), flush=True)
