"""The model of a power cut: which disks it leaves, shown on logs of a few operations."""

from __future__ import annotations

import asyncio
import random

from tests.crash_states.model import DiskModel, cuts
from tests.crash_states.ram import RamFiles
from tests.crash_states.recorder import (
    Mark,
    Names,
    Recording,
    Sync,
    SyncDirectory,
    Truncate,
    Write,
    recorded_ram,
)
from tests.simulation.virtual_loop import run_virtual

A, B = b"a" * 512, b"b" * 512


def disks(operations, *, base=None, states_max=1000):
    model = DiskModel(Recording(base or {}))
    for index, operation in enumerate(operations):
        model.follow(index, operation)
    return [one.files for one in model.states(random.Random(1), states_max=states_max)]


def made(path, inode=1):
    return [Names(((path, inode),)), SyncDirectory("d", 10**9)]


def test_a_write_is_lost_kept_torn_or_only_counted_in_the_length():
    found = disks([*made("d/x"), Write(1, 0, A + B)])
    zeros = bytes(512)
    assert {one["d/x"] for one in found} == {b"", A + B, A, zeros + B, zeros + zeros}
    assert len(found) == 5


def test_writes_are_lost_each_by_itself():
    base = {"d/x": bytes(1024)}
    found = disks([Write(-1, 0, A), Write(-1, 512, B)], base=base)
    zeros = bytes(512)
    assert {one["d/x"] for one in found} == {zeros * 2, A + zeros, zeros + B, A + B}


def test_a_sync_covers_what_came_before_it_began():
    log = [*made("d/x"), Write(1, 0, b"one"), Write(1, 3, b"two"), Sync(1, 3)]
    assert {one["d/x"] for one in disks(log)} == {b"one", b"onetwo", b"one\0\0\0"}


def test_a_truncate_is_lost_or_kept():
    found = disks([Truncate(-1, 1)], base={"d/x": b"abc"})
    assert {one["d/x"] for one in found} == {b"abc", b"a"}


def test_a_name_is_lost_or_kept_and_its_bytes_are_another_matter():
    log = [*made("d/new"), Write(1, 0, b"2"), Names((("d/new", None), ("d/old", 1)))]
    found = disks(log, base={"d/old": b"1"})
    assert {tuple(sorted(one.items())) for one in found} == {
        (("d/new", b""), ("d/old", b"1")),
        (("d/new", b"2"), ("d/old", b"1")),
        (("d/new", b"\0"), ("d/old", b"1")),
        (("d/old", b""),),
        (("d/old", b"2"),),
        (("d/old", b"\0"),),
    }


def test_names_of_one_folder_survive_in_any_choice_but_build_on_each_other():
    log = [Names((("d/a", 1),)), Names((("d/b", 2),)), Names((("d/a", None), ("d/c", 1)))]
    assert {frozenset(one) for one in disks(log)} == {
        frozenset(),
        frozenset({"d/a"}),
        frozenset({"d/b"}),
        frozenset({"d/a", "d/b"}),
        frozenset({"d/c"}),
        frozenset({"d/b", "d/c"}),
    }


def test_a_sync_of_a_folder_covers_its_own_names():
    log = [Names((("d/a", 1),)), Names((("e/b", 2),)), SyncDirectory("d", 2)]
    assert {frozenset(one) for one in disks(log)} == {
        frozenset({"d/a"}),
        frozenset({"d/a", "e/b"}),
    }


def test_many_choices_are_sampled_with_their_corners():
    log = [Write(-1, 512 * at, A) for at in range(40)]
    found = disks(log, base={"d/x": bytes(512 * 40)}, states_max=50)
    assert 30 < len(found) <= 50
    assert {"d/x": bytes(512 * 40)} in found
    assert {"d/x": A * 40} in found


def test_marks_belong_to_the_cut_before_them():
    recording = Recording(operations=[*made("d/x"), Mark("a", 1), Mark("b", 2), Truncate(1, 5)])
    assert [(cut.first, cut.last) for cut, _ in cuts(recording)] == [(1, 1), (2, 4), (5, 5)]


def test_what_is_written_while_a_sync_runs_is_not_covered():
    recording = Recording()

    async def work():
        (files,) = recorded_ram(recording, ["d"])
        file = await files.open("x", create=True)
        await files.sync_directory("")
        await file.write(0, [b"1"])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(file.sync())
            await asyncio.sleep(0)
            await file.write(1, [b"2"])

    run_virtual(work())
    model = DiskModel(recording)
    for index, operation in enumerate(recording.operations):
        model.follow(index, operation)
    found = {one.files["d/x"] for one in model.states(random.Random(1), states_max=99)}
    assert found == {b"1", b"12", b"1\0"}


async def test_the_quick_disk_is_a_disk():
    files = RamFiles({"d/x": b"abc"}, root="d")
    file = await files.open("x")
    await file.write(5, [b"f"])
    await files.rename("x", "y")
    await file.truncate(4)
    assert (await file.read(0, 99), await files.list("")) == (b"abc\0", ["y"])
    await files.make_directory("sub")
    assert await files.list("") == ["sub", "y"]
    assert not await files.exists("x")
