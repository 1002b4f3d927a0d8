"""Waiting for whichever comes first, without leaving a task behind."""

import asyncio


async def first_of(*events: asyncio.Event) -> None:
    """Return once one of ``events`` is set."""
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(event.wait()) for event in events]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()
