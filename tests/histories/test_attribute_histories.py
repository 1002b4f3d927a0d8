"""Real nodes under faults: what clients were told of attributes, registers explain.

Three nodes of which the owner is killed, with answers that get lost; ``make histories`` has longer
histories, more seeds, all faults and five nodes. A failure names its history and its seed.
"""

import os
import random
import sys

import pytest

from tests.histories.attribute_life import SMALL, record_attributes
from tests.histories.cluster import HistoryCluster
from tests.histories.life import Plan

pytestmark = pytest.mark.integration

SEED = int(os.environ.get("TIERLOG_HISTORY_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)


@pytest.mark.timeout(120)  # three nodes, of which one is killed and started again
@pytest.mark.covers("E09", "E15", "E16", "E17", "E18")
async def test_each_verb_is_a_registers_while_the_owner_is_killed(
    checker, servers, tmp_path, capsys
):
    path = tmp_path / "history.jsonl"
    with capsys.disabled():
        print(f"\n[histories] TIERLOG_HISTORY_SEED={SEED}, attributes", file=sys.stderr)
    plan = Plan(seconds=5.0, faults=("kill",), rounds=1)
    async with HistoryCluster(servers, tmp_path, nodes=3, env=SMALL) as cluster:
        counts = await record_attributes(cluster, path, seed=SEED, plan=plan)
    (told,) = checker.judge(path)
    with capsys.disabled():
        print(f"[histories] {told}; {counts}", file=sys.stderr)
    assert told.verdict == "linearizable", f"seed {SEED}: {told}"
    assert counts["kill"] >= 1
    assert told.acknowledged > 50
    assert told.checks_failed > 5
    assert told.reads > 50
