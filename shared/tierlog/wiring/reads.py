"""The reader service for whoever reads streams and does nothing else."""

import contextlib
from collections.abc import AsyncIterator

from tierlog.ports.reads import ReaderService
from tierlog.runtime.calling import PLAIN, Calling
from tierlog.runtime.settings import ClientSettings


@contextlib.asynccontextmanager
async def open_reads(
    client: ClientSettings, *, calling: Calling = PLAIN
) -> AsyncIterator[ReaderService]:
    """Give the reads of the reader that the settings name."""
    from tierlog.adapters.rpc.reader import HttpReads

    reads = HttpReads(client.reader_http_address, timeout_s=client.timeout_s, calling=calling)
    try:
        yield reads
    finally:
        await reads.close()
