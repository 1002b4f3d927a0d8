"""Two runs of ``make exactly-once``, and that it would tell (reliability.md, part C)."""

import os
import random
import sys

import pytest

from tests.exactly_once.producer import event_of
from tests.exactly_once.run import differences, run_once

pytestmark = pytest.mark.integration

SEED = int(os.environ.get("TIERLOG_ONCE_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)


@pytest.mark.timeout(300)  # eight producers, three nodes, kills
@pytest.mark.covers("E02", "E03", "E04", "E05")
async def test_each_event_is_there_once_and_in_order_whatever_is_killed(
    start_nodes, tmp_path, capsys
):
    cluster = await start_nodes(3)
    with capsys.disabled():
        print(f"\n[exactly once] TIERLOG_ONCE_SEED={SEED}", file=sys.stderr)
    assert await run_once(cluster, tmp_path / "run", SEED, events=300) == []


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([1, 3], "lost [2]"),
        ([1, 2, 2, 3], "twice [2]"),
        ([2, 1, 3], "in order False"),
    ],
)
def test_what_is_lost_repeated_or_out_of_order_is_told(numbers, words):
    (told,) = differences("w0", numbers, 3)
    assert words in told
    assert differences("w0", [1, 2, 3], 3) == []
    assert event_of("w0", 1) != event_of("w0", 2)
