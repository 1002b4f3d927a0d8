"""Power cuts at every operation of the storage node's disk (protocols.md section 2).

"An acknowledged entry is never lost", nor changed, nor doubled: on no disk that a cut may leave.
``make soak`` looks at more of them.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.crash_states.explore import Plan, explore
from tests.crash_states.life import ROOTS, TINY, Client, bulk, mixed, record_first_life, running
from tests.crash_states.model import DiskModel
from tests.crash_states.mutants import MUTANTS, hunt
from tests.crash_states.recorder import Mark, Names, Recorder, Recording, Sync, SyncDirectory
from tests.crash_states.run import EXHAUSTIVE
from tierlog.adapters.files import DiskFiles
from tierlog.adapters.memory.ids import SeededIds
from tierlog_ingest.storage.node import StorageNode

CI_STATES = 5000
"""Of each plan, before those that come twice are struck out."""


@pytest.mark.covers("D03", "D22", "D35", "D37")
@pytest.mark.parametrize(
    ("plan", "states_min"),
    [
        (EXHAUSTIVE, 1500),
        *((Plan(kind="mixed", seed=seed, states_max=CI_STATES), 1000) for seed in range(3)),
        *((Plan(kind="bulk", seed=seed, states_max=CI_STATES), 1000) for seed in range(2)),
    ],
    ids=lambda value: f"{value.kind}-{value.seed}" if isinstance(value, Plan) else "",
)
def test_no_power_cut_loses_changes_or_invents_anything(plan, states_min):
    tally = explore(plan)
    assert tally.lives > 3, "lives that begin after a crash are cut, too"
    assert tally.states >= states_min


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_is_caught_within_the_share_of_ci(name):
    plans = [EXHAUSTIVE, *(Plan(kind=kind, seed=0) for kind in ("mixed", "bulk"))]
    assert hunt(name, [replace(one, states_max=CI_STATES) for one in plans]) is not None


def test_workloads_do_what_they_are_for():
    """Segments roll, files are renamed, ledgers are freed and fenced, adds are answered."""
    recordings = {kind: record_first_life(kind, 0) for kind in ("one_by_one", "mixed", "bulk")}
    for kind, recording in recordings.items():
        marks = [one.what for one in recording.operations if isinstance(one, Mark)]
        assert marks.count("stored") >= min(10, marks.count("asked"))
        assert marks.count("freed") >= 1 or kind == "mixed"
        assert any(isinstance(one, Names) and len(one.changes) == 2 for one in recording.operations)
    names = [one for one in recordings["bulk"].operations if isinstance(one, Names)]
    assert sum("/journal/" in path for one in names for path, _ in one.changes) > 5


async def test_a_recording_of_a_real_folder_is_what_lies_there(tmp_path):
    """The same recorder over system calls: when nothing is lost, the model is the folder."""
    recording, rng = Recording(), random.Random(1)
    recorder = Recorder(recording, sync_s=0)
    folders = {root: DiskFiles(tmp_path / root) for root in ROOTS}
    mounted = [recorder.mount(files, root) for root, files in folders.items()]
    client = Client(recording, rng)
    node = await StorageNode.open(mounted[0], SeededIds(rng), TINY)
    async with running(node):
        await bulk(node, client, rng, steps=6, pause_s=0.01)
        await mixed(node, client, rng, steps=20, pause_s=0.01)
    for files in folders.values():
        files.close()
    model = DiskModel(recording)
    for index, operation in enumerate(recording.operations):
        model.follow(index, operation)
    found = {
        path.relative_to(tmp_path).as_posix(): path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert model.everything().files == found
    assert sum(isinstance(one, Sync) for one in recording.operations) > 10
    assert sum(isinstance(one, SyncDirectory) for one in recording.operations) > 5
