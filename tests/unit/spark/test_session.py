"""The session of a job under spark-submit is the one that it gives, with the format known to it."""

import contextlib
import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tierlog_spark import TierlogDataSource
from tierlog_spark.jobs import session
from tierlog_spark.jobs.session import job_session


class Given:
    """A session as much as it is asked, and what was done with it."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.conf = SimpleNamespace(set=lambda *one: self.done.append(one))
        self.dataSource = SimpleNamespace(register=self.done.append)

    def stop(self) -> None:
        self.done.append("stopped")


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    root, py4j = logging.getLogger(), logging.getLogger("py4j")
    filters, level = list(root.filters), py4j.level
    yield
    root.filters[:] = filters
    py4j.setLevel(level)


@pytest.mark.parametrize("fails", [False, True])
def test_what_spark_submit_gives_is_used_and_stopped(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    given = Given()
    builder = SimpleNamespace(getOrCreate=lambda: given)
    monkeypatch.setattr("pyspark.sql.SparkSession", SimpleNamespace(builder=builder))

    def none_of_its_own(*_: Any, **__: Any) -> None:
        raise AssertionError("it starts a session on this machine")

    monkeypatch.setattr(session, "local_session", none_of_its_own)
    environ = {"PYSPARK_GATEWAY_PORT": "4711"}
    ends: Any = pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext()
    with ends, job_session(cores=1, memory_mb=512, environ=environ) as found:
        used: Any = found
        assert used is given
        assert TierlogDataSource in given.done
        assert "stopped" not in given.done
        if fails:
            raise KeyboardInterrupt
    assert given.done[-1] == "stopped"


def test_without_it_a_job_starts_one_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    given, asked = Given(), dict[str, Any]()

    def local(_: Any, **how: Any) -> Given:
        asked.update(how)
        return given

    monkeypatch.setattr(session, "local_session", local)
    ours = {"JAVA_HOME": "/ours", "TIERLOG_TEST_NEW": "1"}
    monkeypatch.setattr(session, "spark_environment", lambda *_: ours)
    monkeypatch.setenv("JAVA_HOME", "/theirs")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    before = dict(os.environ)
    with job_session(cores=3, memory_mb=700, environ={}):
        assert (asked["cores"], asked["memory_mb"]) == (3, 700)
        assert given.done == []
        assert ours.items() <= os.environ.items()
    assert given.done == ["stopped"]
    assert dict(os.environ) == before, "what it names of a folder is gone with that"

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no Java")

    monkeypatch.setattr(session, "local_session", fails)
    with pytest.raises(RuntimeError), job_session(cores=3, memory_mb=700, environ={}):
        pass
    assert dict(os.environ) == before
