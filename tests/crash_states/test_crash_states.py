"""Power cuts at every operation of the storage node's disk (protocols.md section 2).

"An acknowledged entry is never lost", nor changed, nor doubled: on no disk that a cut may leave.
``make soak`` looks at more of them.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.crash_states.explore import Plan, explore
from tests.crash_states.life import (
    ROOTS,
    Client,
    bulk,
    mixed,
    open_node,
    record_first_life,
    running,
)
from tests.crash_states.model import DiskModel
from tests.crash_states.mutants import MUTANTS, hunt
from tests.crash_states.recorder import Mark, Names, Recorder, Recording, Sync, SyncDirectory
from tests.crash_states.run import EXHAUSTIVE
from tierlog.adapters.files import DiskFiles

CI_STATES = 1200
"""Of each plan, before those that come twice are struck out: a minute for all plans."""
PLANS = [
    replace(EXHAUSTIVE, next_lives=4, states_per_next_cut=24),
    *(
        Plan(kind=kind, seed=seed, steps=steps, roots=roots, states_max=CI_STATES)
        for kind, steps in (("mixed", 40), ("bulk", 20), ("scattered", 30))
        for seed, roots in enumerate((ROOTS[:1], ROOTS))
    ),
]


@pytest.mark.covers("D03", "D22", "D35", "D37")
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.kind}-{len(plan.roots)}")
def test_no_power_cut_loses_changes_or_invents_anything(plan):
    tally = explore(plan)
    assert tally.lives > 3, "lives that begin after a crash are cut, too"
    assert tally.states > 400


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_defect_is_caught_within_the_share_of_ci(name):
    assert hunt(name, PLANS) is not None


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
    async with running(await open_node(mounted)) as node:
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
