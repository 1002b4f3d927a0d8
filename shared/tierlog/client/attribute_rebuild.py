"""Attributes that can't be rebuilt: what is in the way, and an admin's consent to go on without it.

An owner counts in the entries behind the newest checkpoint before it takes an append. Where no
tier gives one of them, it waits, and so does the stream. Where a page of the checkpoint's index is
damaged and can't be made of entries, those wait who want what it holds. Owns what is asked and
said. Does not own finding out what is lost, nor leaving it out: the stream's owner does.
"""

import asyncio
from typing import Final
from uuid import UUID

from tierlog.catalog import Catalog
from tierlog.client.attributes import StreamAttributes
from tierlog.model.attribute_record import GivenUp, LostKeys
from tierlog.model.attributes import EVENT_COUNT
from tierlog.model.errors import CorruptError, RefusedError, RetryableError, TierlogError

ASK_S_MAX: Final = 5.0
AGAIN_S: Final = 1.0

_ANY_KEY: Final = UUID(bytes=bytes(EVENT_COUNT))


Losses = tuple[GivenUp | LostKeys, ...]


async def given_up(catalog: Catalog, attributes: StreamAttributes) -> Losses:
    """Return what was given up of a stream whose attributes are there; else raise why not."""
    trouble = await _in_the_way(attributes)
    if trouble is not None:
        raise RefusedError(
            f"nothing was done: {trouble.message}",
            remedy="Start the storage nodes of that ledger, or repair its copy; bring objects of "
            "the attribute index back (tierlog scrub names them). What is lost for good, go on "
            "without it: --accept-loss",
            details=trouble.details,
        )
    return await _on_record(catalog, attributes)


async def accept_loss(
    catalog: Catalog, attributes: StreamAttributes, *, by: str, wait_s: float
) -> Losses:
    """Let the stream's owner give up what no tier gives; return all that was, ever.

    For when nothing of it comes back: what writers and applications changed with those entries is
    as if it had not been. Raises what is in the way still after ``wait_s``.
    """
    stream = await catalog.streams.get(attributes.stream)
    if await _in_the_way(attributes) is None:
        raise RefusedError(
            f"the attributes of stream {stream.name} are there: nothing is to be given up",
            remedy="Accept a loss only while they can't be rebuilt",
        )
    await catalog.attributes.accept_loss(stream, by=by)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + wait_s
    while (trouble := await _in_the_way(attributes)) is not None:
        if loop.time() + AGAIN_S >= deadline_s:
            raise trouble
        await asyncio.sleep(AGAIN_S)
    return await _on_record(catalog, attributes)


async def _in_the_way(attributes: StreamAttributes) -> TierlogError | None:
    """Return why the owner can't tell of attributes, of all of them; None: it can."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(ASK_S_MAX) as patience:
            await attributes.get([_ANY_KEY])
            async for _ in attributes.list():
                patience.reschedule(loop.time() + ASK_S_MAX)
    except (CorruptError, RetryableError) as error:
        return error
    except TimeoutError:
        return RetryableError(
            f"the owner of stream {attributes.stream} did not tell of attributes within "
            f"{ASK_S_MAX:.0f} s",
            remedy="Its status and its log say what it waits for",
        )
    return None


async def _on_record(catalog: Catalog, attributes: StreamAttributes) -> Losses:
    record = await catalog.attributes.get(attributes.stream)
    return (*record.given_up, *record.lost_keys) if record is not None else ()
