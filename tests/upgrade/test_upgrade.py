"""The rolling upgrade of ``make test-upgrade``, from this code to itself: a share for every run.

Git's history may not be there; what a process of another release does, that target shows.
"""

import sys

import pytest

from tests.upgrade.run import FIRST, NODES, ROOT, upgrade

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


async def test_each_process_is_replaced_twice_and_nothing_is_lost(servers, tmp_path, capsys):
    with capsys.disabled():
        print("\n[upgrade]", file=sys.stderr)
        steps, troubles = await upgrade(servers, ROOT, tmp_path, events=200)
    assert troubles == []
    assert len(steps) == 2 * (len(FIRST) + NODES)
    assert steps == [*steps[:6], *steps[:6][::-1]]
