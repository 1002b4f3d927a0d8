"""Commits are contiguous prefixes: whoever resumes at one misses nothing that is not done."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.adapters.offsets import Backoff, PartitionProgress


@given(
    gaps=st.lists(st.integers(1, 3), max_size=30),
    begin=st.integers(0, 5),
    order=st.randoms(use_true_random=False),
    share=st.floats(0, 1),
)
def test_the_commit_offset_is_below_all_that_is_open_and_above_all_before(
    gaps, begin, order, share
):
    assert PartitionProgress().commit_offset is None
    assert PartitionProgress().window == 0
    progress = PartitionProgress()
    waiting: list[int] = []  # delivered, not done
    delivered: list[int] = []
    last = -1
    offset = begin
    for gap in gaps:
        progress.deliver(offset)
        delivered.append(offset)
        waiting.append(offset)
        while waiting and order.random() < share:
            done = waiting.pop(order.randrange(len(waiting)))
            progress.done(done)
            progress.done(done)
        commit = progress.commit_offset
        assert commit is not None
        # The oracle: every delivered offset below the commit is done, the commit itself is not.
        assert all(each >= commit for each in waiting)
        assert commit in waiting or (not waiting and commit == offset + 1)
        assert commit >= last
        assert progress.window == offset + 1 - commit
        last = commit
        offset += gap


def test_misuse_is_loud():
    progress = PartitionProgress()
    with pytest.raises(AssertionError):
        progress.done(0)
    progress.deliver(5)
    with pytest.raises(AssertionError):
        progress.deliver(4)
    with pytest.raises(AssertionError):
        progress.done(6)


def test_backoff_doubles_up_to_its_bound():
    backoff = Backoff(first_s=1, max_s=30)
    assert [backoff.after(n) for n in (1, 2, 3, 5, 6, 10_000)] == [1, 2, 4, 16, 30, 30]
    with pytest.raises(AssertionError):
        Backoff(first_s=2, max_s=1)
