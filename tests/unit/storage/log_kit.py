"""What the tests of entry logs share: logs over memory disks, and a ``state`` that is a value."""

from __future__ import annotations

import random
from typing import NamedTuple

from tests.unit.storage.node_kit import make_run
from tierlog.adapters.memory.ids import SeededIds
from tierlog.format.run import Run
from tierlog.model.errors import CorruptError, RetryableError
from tierlog_ingest.storage.entrylog.entry_log import EntryLogs, LogLength

RUNS = [make_run(ledger, n, size=300) for ledger in (1, 2, 3) for n in range(20)]
RUN_LEN = 396


class State(NamedTuple):
    """What a node's ``state`` would say of its logs."""

    lengths: list[list[LogLength]]
    maps: dict[int, dict[int, int]]

    @classmethod
    def of(cls, logs: EntryLogs, directories: int = 1) -> State:
        return cls(
            [logs.lengths(one) for one in range(directories)],
            {log_id: dict(ledgers) for log_id, ledgers in logs.open_maps().items()},
        )


def make_logs(*folders, log_bytes_max=4000, open_files_max=2, seed=1) -> EntryLogs:
    return EntryLogs(
        folders,
        SeededIds(random.Random(seed)),
        log_bytes_max=log_bytes_max,
        open_files_max=open_files_max,
    )


async def new_logs(*folders, **how) -> EntryLogs:
    logs = make_logs(*folders, **how)
    assert await logs.open([[] for _ in folders], {}) == []
    return logs


async def opened_logs(state: State, *folders, **how) -> tuple[EntryLogs, list[str]]:
    logs = make_logs(*folders, **how)
    return logs, await logs.open(*state)


async def runs_of(logs: EntryLogs, log_id: int, ledger_id: int | None = None) -> list[Run]:
    return [run async for window in logs.scan(log_id, ledger_id=ledger_id) for _, run in window]


async def all_runs(logs: EntryLogs) -> list[Run]:
    return [run for info in logs.logs() for run in await runs_of(logs, info.log_id)]


async def read_run(logs: EntryLogs, place) -> Run | None:
    """Read a run as the node does; None where the bytes are not that of a run."""
    try:
        data = memoryview(await logs.read(*place))
        return Run.decode(data[: Run.encoded_len(data)])
    except CorruptError:
        return None


async def refused(work) -> RetryableError:
    """Return the error of what must be refused."""
    try:
        await work
    except RetryableError as error:
        return error
    raise AssertionError("it was not refused")
