"""The Spark session of a job: the one that spark-submit gives, or one on this machine.

Invariant: what was started here is stopped here.
"""

import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tierlog_spark.local import local_session, spark_environment
from tierlog_spark.source import register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# spark-submit sets it for the program that it starts.
_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
# As many as a cluster gives a task.
TRIES: Final = 4


def _is_not_py4j(record: logging.LogRecord) -> bool:
    """Leave out what Py4J logs of a call that failed: it raises it too, and Ctrl-C fails some."""
    return record.module != "java_gateway"


@contextlib.contextmanager
def job_session(
    *, cores: int, memory_mb: int, environ: Mapping[str, str] = os.environ
) -> "Iterator[SparkSession]":
    """Give a session; ``cores`` and ``memory_mb`` are for one on this machine alone."""
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_is_not_py4j)
    if _SUBMITTED in environ:
        from pyspark.sql import SparkSession  # noqa: PLC0415

        session = SparkSession.builder.getOrCreate()
        register(session)
        try:
            yield session
        finally:
            session.stop()
        return
    with tempfile.TemporaryDirectory(prefix="tierlog-spark-") as name:
        folder = Path(name)
        with _set(spark_environment(folder, environ)):
            session = local_session(folder, cores=cores, memory_mb=memory_mb, tries=TRIES)
            with contextlib.suppress(ValueError):  # not on the main thread
                # Spark's own handler calls the JVM in the middle of another call, and fails.
                signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                yield session
            finally:
                session.stop()


@contextlib.contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Have these in the environment within the context; they name a folder that goes with it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
