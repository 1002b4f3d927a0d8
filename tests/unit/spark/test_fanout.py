"""Work is cut so that each item is in one task and no task is much heavier than the others."""

import random

import pytest

from tierlog.model.errors import RefusedError
from tierlog.ports.spending import Cause, CostMeter, spending
from tierlog_spark.jobs.fanout import (
    Asked,
    Requests,
    asked_of,
    slots_of_executor,
    spread,
    task_count,
)


@pytest.mark.parametrize("seed", range(20))
def test_each_item_is_in_one_task_and_tasks_are_of_about_equal_weight(seed):
    rng = random.Random(seed)
    items = [(number, rng.choice([0, 1, 10, 10**6]) * rng.random()) for number in range(60)]
    number = rng.randrange(1, 80)
    tasks = spread(items, lambda one: int(one[1]), number)
    assert sorted(one for task in tasks for one in task) == sorted(items)
    assert len(tasks) == min(number, len(items))
    assert all(tasks)
    loads = [sum(int(one[1]) for one in task) for task in tasks]
    heaviest = max(int(weight) for _, weight in items)
    # What list scheduling guarantees.
    assert max(loads) <= sum(loads) / len(loads) + heaviest


def test_the_same_items_make_the_same_tasks():
    items = [("a", 3), ("b", 3), ("c", 1)]
    assert spread(items, lambda one: one[1], 2) == spread(items, lambda one: one[1], 2)
    assert spread([], len, 3) == []


@pytest.mark.parametrize(
    ("total", "items", "slots", "tasks"),
    [(0, 0, 4, 1), (100, 2, 4, 2), (100, 50, 4, 10), (5, 50, 4, 4), (1000, 50, 4, 50)],
)
def test_tasks_are_as_many_as_slots_and_none_is_too_heavy(total, items, slots, tasks):
    assert task_count(total, items, slots, weight_max=10) == tasks


@pytest.mark.parametrize(
    ("master", "cores", "slots"),
    [
        ("local[3]", None, 3),
        ("spark://master:7077", "4", 4),
        ("yarn", None, 1),
        ("k8s://https://kubernetes", "2", 2),
    ],
)
def test_a_rate_of_an_executor_is_shared_by_its_tasks(master, cores, slots):
    assert slots_of_executor(master, cores, 3) == slots


def test_a_rate_that_nobody_knows_how_to_share_is_refused():
    """An executor of a standalone cluster takes all cores of its machine unless told."""
    with pytest.raises(RefusedError, match="share --bytes-per-s") as caught:
        slots_of_executor("spark://master:7077", None, 8)
    assert "spark.executor.cores" in caught.value.remedy


def test_what_tasks_asked_for_is_added_up_beside_their_rows():
    meter = CostMeter()
    for stream in ("a", "b"):
        with spending(Cause.READ, stream):
            meter.count("get_object", received=5)
    rows = ["x", *asked_of(meter), ("y",), Asked("put_object", 1, 7, 0)]
    requests = Requests()
    assert list(requests.rest(rows)) == ["x", ("y",)]
    assert requests.counts == {"requests_sent": 3, "bytes_sent": 7, "bytes_received": 10}
