"""Real nodes under faults: what clients were told is explained by a log (protocols.md, section 1).

One node and three; ``make histories`` has longer histories, more seeds and five nodes. A failure
names its history and its seed.
"""

import os
import random
import sys

import pytest

from tests.histories.cluster import HistoryCluster
from tests.histories.life import Plan, record

pytestmark = pytest.mark.integration

SEED = int(os.environ.get("TIERLOG_HISTORY_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)


async def judge(checker, servers, folder, capsys, *, nodes, plan):
    """Live a history, and have it judged."""
    path = folder / "history.jsonl"
    with capsys.disabled():
        print(f"\n[histories] TIERLOG_HISTORY_SEED={SEED}, {nodes} nodes", file=sys.stderr)
    async with HistoryCluster(servers, folder, nodes=nodes) as cluster:
        counts = await record(cluster, path, seed=SEED, plan=plan)
    (told,) = checker.judge(path)
    with capsys.disabled():
        print(f"[histories] {told}; {counts}", file=sys.stderr)
    assert told.verdict == "linearizable", f"seed {SEED}: {told}"
    assert counts.keys() == set(plan.faults)
    assert told.acknowledged > 100
    assert told.reads > 20


@pytest.mark.covers("A03", "D09", "D37")
async def test_one_node_that_fails_and_comes_back(checker, servers, tmp_path, capsys):
    plan = Plan(seconds=0, rounds=1, faults=("kill", "expire", "zookeeper"))
    await judge(checker, servers, tmp_path, capsys, nodes=1, plan=plan)


@pytest.mark.timeout(300)  # seven faults, each with processes to start again
@pytest.mark.covers("D02", "D03", "D09", "D17")
async def test_three_nodes_of_which_one_fails_or_loses_its_disk(checker, servers, tmp_path, capsys):
    plan = Plan(seconds=0, rounds=1)
    await judge(checker, servers, tmp_path, capsys, nodes=3, plan=plan)
