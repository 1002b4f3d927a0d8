"""One producer of a run: ``python -m tests.exactly_once.producer STATE STREAM COUNT``.

It resumes from its state's file, sends its events from the first on, and ends with code 0 once
all of them are acknowledged. One answer in ten gets lost on its way to it.
"""

import asyncio
import sys
from pathlib import Path
from typing import Final

import orjson

from tests.exactly_once.losing import open_losing_client
from tierlog.cli.state_file import save_state
from tierlog.client import WriterState
from tierlog.runtime.settings import load_settings

BATCH_BYTES: Final = 600
PAUSE_S: Final = 0.001


def event_of(writer: str, number: int) -> bytes:
    """Return the event that a writer sends as its ``number``-th, from 1 on."""
    return f"{writer}/{number}/".encode() + b"." * (number * 7919 % 90)


async def produce(path: Path, stream: str, count: int) -> None:
    """Send what is not there yet."""
    async with open_losing_client(load_settings()) as client:
        if path.exists():
            state = WriterState.of_document(orjson.loads(path.read_bytes()))
        else:
            state = client.new_writer_state()
            save_state(path, state)
        async with client.writer(
            stream, state=state, from_start=True, batch_bytes=BATCH_BYTES
        ) as writer:
            for number in range(1, count + 1):
                await writer.send(event_of(path.stem, number))
                if not number % 10:
                    await asyncio.sleep(PAUSE_S)


if __name__ == "__main__":
    asyncio.run(produce(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
