"""A node over several directories: the journal in the first, logs where most is free, all of them
needed (ADR-0014, point 8; "over several directories the minimum", protocols.md section 2).
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from uuid import UUID

import pytest

from tests.simulation.virtual_loop import run_virtual
from tests.unit.storage.node_kit import (
    make_run,
    open_node,
    outcome,
    read_all,
    reading_error,
    running,
)
from tierlog.adapters.memory.files import MemoryDisk
from tierlog.adapters.memory.ids import SeededIds
from tierlog.adapters.memory.metadata import MemoryMetadata
from tierlog.model.errors import CorruptError, Reason, RefusedError
from tierlog.model.ids import LedgerId, NodeId
from tierlog_ingest.storage.cookies import check_cookie
from tierlog_ingest.storage.journal.segments import list_segments

CLUSTER, NODE = UUID(int=1), NodeId("n1")


class Machine:
    """Three disks: the journal's, and two for logs."""

    def __init__(self, seed=1):
        self.disks = [MemoryDisk(random.Random(seed + at)) for at in range(3)]

    @asynccontextmanager
    async def node(self, order=(0, 1, 2)):
        first, *others = [self.disks[at].mount() for at in order]
        node = await open_node(first, ledger_dirs=tuple(others))
        async with running(node):
            yield node

    def logs(self):
        return [[one for one in disk.paths() if one.startswith("logs/")] for disk in self.disks]


async def fill(machine):
    async with machine.node() as node:
        for first in range(120):
            for ledger_id in (1, 2, 3):
                await node.ready()
                await node.add(make_run(ledger_id, first, size=900))
        await node.checkpoint()


def checking(test):
    def run():
        async def with_machine():
            machine = Machine()
            await fill(machine)
            await test(machine)

        run_virtual(with_machine(), until_s=1000)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@checking
async def test_logs_spread_and_everything_is_found_again(machine):
    of_journal, *of_logs = machine.logs()
    assert not of_journal
    assert all(of_logs)
    assert not await list_segments(machine.disks[1].mount())
    for _ in range(2):
        async with machine.node() as node:
            assert node.damages == []
            for ledger_id in (1, 2, 3):
                assert len(await read_all(node, ledger_id)) == 120
    assert all(disk.paths().count("state") == 1 for disk in machine.disks)


@checking
async def test_a_log_goes_where_most_is_free(machine):
    machine.disks[1].capacity_bytes = 2**40
    before = len(machine.logs()[2])
    async with machine.node() as node:
        for first in range(120, 400):
            await node.ready()
            await node.add(make_run(1, first, size=900))
        await node.checkpoint()
    assert len(machine.logs()[2]) > before + 1
    machine.disks[2].capacity_bytes = 2**30
    before = len(machine.logs()[1])
    async with machine.node() as node:
        for first in range(400, 700):
            await node.ready()
            await node.add(make_run(1, first, size=900), recovery=True)
        await node.checkpoint()
        assert len(await read_all(node, 1)) == 700
    assert len(machine.logs()[1]) > before + 1


@checking
async def test_another_order_or_a_missing_directory_is_refused(machine):
    for order in ((0, 2, 1), (0, 1), (1, 0, 2), (0,)):
        with pytest.raises((RefusedError, CorruptError)):
            async with machine.node(order):
                pass
    async with machine.node() as node:
        assert len(await read_all(node, 1)) == 120


@checking
async def test_a_directory_that_lost_its_state_loses_no_entry(machine):
    """It is a damage: what is absent may have been in it."""
    for at in range(3):
        await machine.disks[at].mount().remove("state")
        async with machine.node() as node:
            assert len(node.damages) == 1
            assert node.limbo_unlimited
            for ledger_id in (1, 2, 3):
                assert len(await read_all(node, ledger_id)) == 120
            assert (await reading_error(node, 9)).reason is Reason.UNKNOWN
            node.limit_limbo(LedgerId(0))
        async with machine.node() as node:
            assert node.damages == []


@checking
async def test_a_lost_disk_is_unknown_never_absent(machine):
    machine.disks[2] = MemoryDisk(random.Random(9))
    async with machine.node() as node:
        assert node.damages
        known = set()
        for ledger_id in (1, 2, 3):
            for entry_id in range(121):
                found = await outcome(read_all(node, ledger_id, entry_id, bytes_max=1))
                if isinstance(found, list):
                    known.add(found[0].first_entry_id)
                else:
                    assert found.reason is Reason.UNKNOWN
        assert 0 < len(known) <= 120


@checking
async def test_while_indexes_have_no_room_no_copies_of_runs_pile_up_elsewhere(machine):
    """Their directory is full, another takes entry logs all the same."""
    sent = []
    async with machine.node() as node:
        for ledger_id in range(10, 30):
            await node.add(make_run(ledger_id, 0))
        await node.checkpoint()
        before = node.statistics()["entry_log_bytes"]
        full = machine.disks[1]
        full.capacity_bytes = full.used_bytes
        for first in range(1, 6000, 600):
            for ledger_id in range(10, 30):
                run = make_run(ledger_id, first)
                if await outcome(node.add(run)) is None:
                    sent.append(run)
        buffered = sum(len(run.encoded) for run in sent)
        await asyncio.sleep(100)
        assert node.statistics()["buffered_bytes"] > 0, "the flush is held up"
        assert node.statistics()["entry_log_bytes"] < before + 2 * buffered
        full.capacity_bytes = 2**50
        await asyncio.sleep(100)
        assert node.statistics()["buffered_bytes"] == 0
        assert node.statistics()["entry_log_bytes"] < before + 3 * buffered
    async with machine.node() as node:
        for run in sent:
            assert run in await read_all(node, run.header.ledger_id, run.first_entry_id)


async def cookie_of(disks, metadata):
    first, *others = [disk.mount() for disk in disks]
    ids = SeededIds(random.Random(1))
    store = metadata.connect()
    return await check_cookie(
        first, store, ids, cluster_id=CLUSTER, node_id=NODE, ledger_dirs=others
    )


def new_disks():
    return [MemoryDisk(random.Random(at)) for at in range(3)]


def test_every_directory_has_the_cookie():
    async def check():
        disks, metadata = new_disks(), MemoryMetadata()
        known = await cookie_of(disks, metadata)
        assert await cookie_of(disks, metadata) == known
        for at in range(3):
            fresh = [*disks[:at], MemoryDisk(random.Random(7)), *disks[at + 1 :]]
            with pytest.raises(RefusedError, match="cookie"):
                await cookie_of(fresh, metadata)
            assert fresh[at].paths() == []
        others = new_disks()
        await cookie_of(others, MemoryMetadata())
        others[0].write_whole("cookie", disks[0].read_whole("cookie")[:-1] + b"?")
        with pytest.raises((RefusedError, CorruptError)):
            await cookie_of([disks[0], disks[1], others[0]], metadata)

    run_virtual(check(), until_s=100)


def test_a_format_that_was_cut_short_is_finished():
    """As if the other directories, and the metadata store, had not come to it."""

    async def check():
        for made in range(3):
            disks = new_disks()
            first = await cookie_of(disks, MemoryMetadata())
            for disk in disks[made:]:
                await disk.mount().remove("cookie")
            metadata = MemoryMetadata()
            found = await cookie_of(disks, metadata)
            assert found == await cookie_of(disks, metadata)
            assert made == 0 or found == first

    run_virtual(check(), until_s=100)
