"""Runs between processes: what a storage node gives is what its client yields, however it is cut.

Performance.md: reads of runs are HTTP bodies. A body that was cut never passes as a short one, and
what came before the cut is not lost.
"""

import os

import pytest

from tierlog.adapters.rpc.run_inflow import PIECE_BYTES
from tierlog.adapters.rpc.storage_node import ControlConnector
from tierlog.format.frame import pack_entries
from tierlog.format.run import Run, build_run
from tierlog.model.errors import Reason, RefusedError, RetryableError
from tierlog.model.ids import EntryId, LedgerId, NodeId
from tierlog.model.node import NodeInfo
from tierlog.runtime.http import build_http_app, serve_http
from tierlog_ingest import http_runs

LEDGER = LedgerId(7)


class GivenRuns:
    """A storage node that has these runs, and then perhaps an error."""

    def __init__(self, runs, error=None, *, runs_a_list=7):
        self.runs = runs
        self.runs_a_list = runs_a_list
        self.error = error

    async def read(self, ledger_id, first_entry_id, **_):
        for start in range(0, len(self.runs), self.runs_a_list):
            yield self.runs[start : start + self.runs_a_list]
        if self.error is not None:
            raise self.error


def runs_of(*sizes):
    runs = []
    for entry_id, size in enumerate(sizes):
        frames, offsets = pack_entries([os.urandom(size)], entry_id)
        runs.append(build_run(frames, offsets, ledger_id=LEDGER, first_entry_id=entry_id))
    return runs


async def read_back(node):
    """Return what a client yields, and the error that ended it."""
    app = build_http_app("storage node", checks={})
    http_runs.add_routes(app, node)
    got: list[Run] = []
    error = None
    async with serve_http(app, host="127.0.0.1", port=0) as port:
        info = NodeInfo(
            node_id=NodeId("node-1"),
            wire_address="127.0.0.1:1",
            grpc_address="127.0.0.1:1",
            http_address=f"127.0.0.1:{port}",
        )
        client = await ControlConnector().connect(info)
        try:
            async for runs in client.read(LEDGER, EntryId(0), bytes_max=2**28):
                assert runs
                got += runs
        except (RetryableError, RefusedError) as caught:
            error = caught
        finally:
            await client.close()
    return got, error


@pytest.mark.parametrize(
    "sizes",
    [
        [0],
        [1] * 1000,
        [60_000] * 100,
        [http_runs.PIECE_BYTES] * 5,
        [3 * PIECE_BYTES, 1, 2 * PIECE_BYTES, 0],
        [PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1],
    ],
)
async def test_runs_come_whole_and_in_order(sizes):
    runs = runs_of(*sizes)
    got, error = await read_back(GivenRuns(runs))
    assert error is None
    assert got == runs


async def test_an_empty_read_is_no_cut_one():
    assert await read_back(GivenRuns([])) == ([], None)


async def test_what_fails_before_the_first_run_is_told_as_it_is():
    refused = RefusedError("no such entry", reason=Reason.NO_SUCH_ENTRY, remedy="none")
    got, error = await read_back(GivenRuns([], refused))
    assert got == []
    assert error.reason is Reason.NO_SUCH_ENTRY


@pytest.mark.parametrize("count", [1, 3, 40])
async def test_a_read_that_fails_later_is_cut_and_never_short(count):
    runs = runs_of(*[60_000] * count)
    failure = RetryableError("the disk hiccups", remedy="none")
    got, error = await read_back(GivenRuns(runs, failure))
    assert error is not None
    assert error.reason is Reason.UNKNOWN
    assert got == runs[: len(got)]
