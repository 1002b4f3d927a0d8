"""Asking storage nodes until they answer, for one recovery, and saying what it waits for.

Owns deadlines, back-off, and the dropping of connections that don't answer. Does not own what an
answer means.

Invariants:
    * Each node is asked at its own pace: a silent one holds up no other.
    * A connection is dropped only where there was no answer. Others use it too, and an answer
      that is an error says that the node is there.
    * Nothing is given up for a node that failed before the loss was accepted, nor for one that
      fails now and then: it must give no answer for ``loss_patience_s``, or say that it can't.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, TypeVar

import structlog

from tierlog.ledger.directory import NodeDirectory, is_gone
from tierlog.model.errors import IndeterminateError, Reason, RetryableError, TierlogError
from tierlog.model.ids import LedgerId, NodeId
from tierlog.ports.ids import Ids
from tierlog.ports.storage_node import StorageNodeClient

log = structlog.get_logger()

Decision = TypeVar("Decision")
Call = Callable[[StorageNodeClient], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryLimits:
    """Every bound of a recovery."""

    answer_timeout_s: float = 10.0
    backoff_s_first: float = 0.05
    backoff_s_max: float = 5.0
    batch_bytes_max: int = 4 * 1024 * 1024
    patience_s: float = 0.5
    """So long a run that has its ack quorum waits for its other copies."""
    tell_s_first: float = 0.25
    """Waiting is told of from so long on."""
    loss_patience_s: float = 10.0
    """Once a loss was accepted, a node is lost that gives no answer for so long. Longer than
    ``backoff_s_max``: one that has just come back is asked before."""


class Failure(NamedTuple):
    """A call that brought no answer, or an error for an answer."""

    error: TierlogError
    client: StorageNodeClient | None


class Asking:
    """The questions of one recovery."""

    def __init__(
        self,
        ledger_id: LedgerId,
        nodes: NodeDirectory[StorageNodeClient],
        *,
        ids: Ids,
        limits: RecoveryLimits,
        waiting: dict[LedgerId, str],
    ) -> None:
        self.limits = limits
        self.news = asyncio.Event()
        """Set whenever something came that may decide."""
        self._ledger_id = ledger_id
        self._nodes = nodes
        self._ids = ids
        self._waiting = waiting
        self._trouble: dict[NodeId, TierlogError] = {}
        self._silent_since_s: dict[NodeId, float] = {}
        """Nodes that give no answer, since the loss was accepted or later."""
        self.loss_accepted = False

    def accept_loss(self) -> None:
        """Give up what no node can give: it is not waited for any more."""
        self.loss_accepted = True
        self.news.set()

    def is_vain(self, node_ids: Iterable[NodeId], failed: Collection[NodeId]) -> bool:
        """Tell whether a loss was accepted, and each of these nodes failed or is silent for long.

        ``failed``: those that say of what is asked that they can't give it.
        """
        since_s = asyncio.get_running_loop().time() - self.limits.loss_patience_s
        return self.loss_accepted and all(
            one in failed or self._silent_since_s.get(one, inf) <= since_s for one in node_ids
        )

    async def ask(
        self, node_id: NodeId, what: str, call: Call, failed: set[NodeId] | None = None
    ) -> None:
        """Make a call until it succeeds.

        From when on a loss was accepted, who says that it can't is put in ``failed``. Raises no
        ``TierlogError``.
        """
        backoff_s = self.limits.backoff_s_first
        while True:
            failure = await self.once(node_id, what, call)
            if failure is None:
                return
            if failed is not None and self.loss_accepted and not _may_pass(failure.error):
                failed.add(node_id)
            await self.drop(node_id, failure)
            await self.back_off(backoff_s)
            backoff_s = min(self.limits.backoff_s_max, 2 * backoff_s)

    async def once(self, node_id: NodeId, what: str, call: Call) -> Failure | None:
        """Make a call and wait for it in bounds. Who gets a failure passes it to ``drop``."""
        client: StorageNodeClient | None = None
        failure: Failure | None = None
        try:
            async with _deadline(self.limits.answer_timeout_s, f"node {node_id}, {what}"):
                client = await self._nodes.client(node_id)
                await call(client)
        except TierlogError as error:
            failure = Failure(error, client)
            self._trouble[node_id] = error
        else:
            self._trouble.pop(node_id, None)
        if failure is None or not _may_pass(failure.error):
            self._silent_since_s.pop(node_id, None)
        elif self.loss_accepted:
            self._silent_since_s.setdefault(node_id, asyncio.get_running_loop().time())
        self.news.set()
        return failure

    async def drop(self, node_id: NodeId, failure: Failure) -> None:
        """Have the next call connect anew, if this one had no answer."""
        if failure.client is not None and is_gone(failure.error):
            await self._nodes.report_failed(node_id, failure.client)

    async def back_off(self, seconds: float) -> None:
        """Wait about so long."""
        await asyncio.sleep(self._ids.uniform(0.5, 1.0) * seconds)

    async def until(self, what: str, decide: Callable[[], Decision | None]) -> Decision:
        """Wait until what came decides, and tell what is missing meanwhile."""
        loop = asyncio.get_running_loop()
        tell_s = self.limits.tell_s_first
        due_s = loop.time() + tell_s
        while True:
            self.news.clear()
            decided = decide()
            if decided is not None:
                self._waiting.pop(self._ledger_id, None)
                return decided
            try:
                async with asyncio.timeout_at(due_s):
                    await self.news.wait()
            except TimeoutError:
                self.tell(what)
                tell_s = min(self.limits.backoff_s_max, 2 * tell_s)
                due_s = loop.time() + tell_s

    def tell(self, what: str) -> None:
        """Say what the recovery waits for, where people look."""
        causes = _causes(self._trouble) or "no answer yet"
        self._waiting[self._ledger_id] = f"{what}: {causes}"
        log.warning("recovery.waiting", ledger_id=self._ledger_id, what=what, cause=causes)


def _may_pass(error: TierlogError) -> bool:
    """Tell whether an error says nothing of what the node has: no answer, or not at present."""
    return isinstance(error, (RetryableError, IndeterminateError)) and (
        error.reason is not Reason.UNKNOWN
    )


def _causes(trouble: Mapping[NodeId, TierlogError]) -> str:
    return "; ".join(f"{node_id}: {trouble[node_id]}" for node_id in sorted(trouble))


class _deadline:  # noqa: N801 - reads as the statement it stands for
    """``asyncio.timeout`` whose end is an error of ours."""

    def __init__(self, seconds: float, what: str) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._what = f"{what}: no answer within {seconds:g} s"

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._timeout.__aexit__(*error)  # type: ignore[arg-type]
        except TimeoutError:
            raise RetryableError(
                self._what, remedy="Check that the storage node is up; recovery goes on by itself"
            ) from None
