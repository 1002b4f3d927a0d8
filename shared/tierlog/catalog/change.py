"""How a change of metadata is made to happen exactly once.

``settle`` runs one round of "read, decide, change" until it settles. The round itself begins by
asking whether its change is there already; so a lost answer needs no case of its own: after
``sync`` the next round reads what became of it (protocols.md, first rule). A late request of a
lost connection can't slip in between: the session has moved to the new connection, and the store
refuses what still comes from the old one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog

from tierlog.model.errors import IndeterminateError, RetryableError
from tierlog.ports.ids import Ids
from tierlog.ports.metadata import (
    MetadataStore,
    NodeExistsError,
    NoNodeError,
    VersionConflictError,
)

log = structlog.get_logger()

Settled = TypeVar("Settled")

ROUNDS_MAX: Final = 40
BACKOFF_S_MAX: Final = 1.0
BACKOFF_S_FIRST: Final = 0.01


class Moved:
    """Told by a round: what was read has moved; read again."""


MOVED: Final = Moved()


async def settle(
    store: MetadataStore,
    ids: Ids,
    path: str,
    one_round: Callable[[], Awaitable[Settled | Moved]],
) -> Settled:
    """Run rounds until one settles. Raises what a round refuses.

    After ``ROUNDS_MAX`` rounds the last trouble is raised: ``IndeterminateError`` if the outcome
    of a change is still unknown, else ``RetryableError``.
    """
    trouble: Exception | None = None
    unknown = False
    for attempt in range(ROUNDS_MAX):
        try:
            if attempt:
                await store.sync(path)
            settled = await one_round()
        except (VersionConflictError, NodeExistsError, NoNodeError) as conflict:
            # The round has read what became of any change before the one that it tried.
            unknown, trouble = False, conflict
        except IndeterminateError as lost:
            unknown, trouble = True, lost
            log.warning("metadata.answer_lost", path=path, cause=str(lost))
        except RetryableError as error:
            trouble = error
        else:
            if not isinstance(settled, Moved):
                return settled
        backoff_s = min(BACKOFF_S_MAX, BACKOFF_S_FIRST * 2**attempt)
        await asyncio.sleep(ids.uniform(0.5, 1.0) * backoff_s)
    if unknown:
        raise IndeterminateError(
            f"the outcome of a change of {path} is unknown after {ROUNDS_MAX} tries",
            remedy="Check that the metadata store is reachable; the change will be read back",
        ) from trouble
    raise RetryableError(
        f"a change of {path} did not settle in {ROUNDS_MAX} tries",
        remedy="Check that the metadata store is reachable; try again",
    ) from trouble


async def ensure_node(store: MetadataStore, path: str) -> None:
    """Make an empty node, and its parents, unless it is there."""
    if await store.get(path) is None:
        try:
            await store.create(path, b"")
        except (NodeExistsError, IndeterminateError):
            # Someone made it, or it may be ours: the change that needs it will tell.
            return
