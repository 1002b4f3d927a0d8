"""Work is cut so that each item is in one task and no task is much heavier than the others."""

import random
import traceback
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.errors import PySparkException

from tests.unit.spark.test_export_comparing import Here
from tierlog.model.errors import Reason, RefusedError
from tierlog.ports.spending import Cause, CostMeter, spending
from tierlog_spark.jobs import fanout
from tierlog_spark.jobs.fanout import (
    TASKS_A_SLOT,
    Asked,
    Requests,
    asked_of,
    pace_of_task,
    slots_of_executor,
    spread,
    task_count,
)
from tierlog_spark.jobs.frame import JobRun


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


@pytest.mark.parametrize(
    ("master", "given", "slots", "pace"),
    [
        ("local[4]", {}, 4, 10.0),
        ("yarn", {"spark.executor.cores": "2"}, 9, 20.0),
        ("yarn", {}, 9, 40.0),
    ],
)
def test_what_an_executor_may_send_a_second_is_shared_by_the_tasks_of_its_session(
    master, given, slots, pace
):
    context = SimpleNamespace(master=master, defaultParallelism=slots, getConf=lambda: given)
    run = JobRun(spark=cast("Any", SimpleNamespace(sparkContext=context)))
    assert pace_of_task(run, 40.0) == pace
    # Nothing is shared, whoever has how many.
    context.master = "spark://master:7077"
    given.clear()
    assert pace_of_task(run, 0) == 0.0
    with pytest.raises(RefusedError, match="share --bytes-per-s"):
        pace_of_task(run, 40.0)


async def doubled(numbers):
    return [2 * one for one in numbers]


def test_progress_is_told_before_the_first_task_and_behind_each_round(monkeypatch):
    monkeypatch.setattr(fanout, "configure_logging", lambda *_, **__: None)
    told: list[tuple[str, int, int | None]] = []
    run = JobRun(
        spark=cast("Any", SimpleNamespace(sparkContext=Here())),
        progress=lambda *one: told.append(one),
    )
    a_round = TASKS_A_SLOT * Here.defaultParallelism
    tasks = [[number, number] for number in range(2 * a_round + 1)]
    rows = fanout.run_tasks(run, "copy", tasks, doubled)
    assert next(rows) == 0
    assert told == [("copy", 0, len(tasks) * 2)]
    assert [0, *rows] == [2 * one for task in tasks for one in task]
    assert [done for _, done, _ in told] == [0, 2 * a_round, 4 * a_round, 4 * a_round + 2]
    assert {(what, total) for what, _, total in told} == {("copy", 4 * a_round + 2)}
    told.clear()
    assert list(fanout.run_tasks(run, "scrub", [], doubled)) == []
    assert told == [("scrub", 0, 0)]


def test_what_tasks_asked_for_is_added_up_beside_their_rows():
    meter = CostMeter()
    for stream in ("a", "b"):
        with spending(Cause.READ, stream):
            meter.count("get_object", received=5)
    rows = ["x", *asked_of(meter), ("y",), Asked("put_object", 1, 7, 0)]
    requests = Requests()
    assert list(requests.rest(rows)) == ["x", ("y",)]
    assert requests.counts == {"requests_sent": 3, "bytes_sent": 7, "bytes_received": 10}


class Refused(Here):
    """Executors, of which one may not do what it was told."""

    def mapPartitions(self, _: Any) -> "Refused":  # noqa: N802 - Spark's name
        return self

    def collect(self) -> list[Any]:
        error = RefusedError(
            "the store refuses it", reason=Reason.PERMISSION_DENIED, remedy="Allow it"
        )
        pages = "".join(traceback.format_exception(error))
        raise PySparkException(f"Job aborted due to stage failure:\n{pages}\n\tat org.x(Y)")


def test_a_job_that_is_called_as_a_function_raises_what_its_executors_raised(monkeypatch):
    monkeypatch.setattr(Here, "parallelize", lambda *_: Refused())
    run = JobRun(spark=cast("Any", SimpleNamespace(sparkContext=Here())))
    with pytest.raises(RefusedError) as caught:
        list(fanout.run_tasks(run, "looks", [[1]], doubled))
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert (caught.value.message, caught.value.remedy) == ("the store refuses it", "Allow it")
