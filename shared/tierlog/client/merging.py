"""Reads of several partitions as one.

Invariants:
    * Each partition's entries keep their order; those of two have none between them.
    * When an iteration ends, in whatever way, no task and no open iterator is left of it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import Final

from tierlog.ports.reads import FramesAnswer

Answers = AsyncGenerator[FramesAnswer, None]

_ENDED: Final = object()


async def one_after_the_other(readers: Sequence[Answers]) -> Answers:
    """Iterate over partition after partition, each to its end."""
    for index, reader in enumerate(readers):
        async with contextlib.aclosing(reader):
            async for answer in reader:
                yield replace(answer, partition=index)


async def as_they_come(readers: Sequence[Answers]) -> Answers:
    """Iterate over all partitions at once, for as long as any of them goes on."""
    loop = asyncio.get_running_loop()
    asked = {loop.create_task(_step(one)): index for index, one in enumerate(readers)}
    try:
        while asked:
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in [one for one in asked if one.done()]:
                index, answer = asked.pop(task), task.result()
                if isinstance(answer, FramesAnswer):
                    asked[loop.create_task(_step(readers[index]))] = index
                    yield replace(answer, partition=index)
    finally:
        for task in asked:
            task.cancel()
        for task in asked:
            # One error is told already, or nobody wants any more.
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await task
        for reader in readers:
            await reader.aclose()


async def _step(reader: AsyncIterator[FramesAnswer]) -> object:
    return await anext(reader, _ENDED)
