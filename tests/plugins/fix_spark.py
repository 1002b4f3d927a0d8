"""One Spark session on this machine for all tests that ask for it, `format("tierlog")` known.

Small: two threads, no console, nothing written outside of the session's temporary folder. A query
takes seconds: ask the source itself where its answer is what matters (`spark_kit.Read`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from pyspark import SparkContext

    from tierlog_spark.local import local_session, spark_environment

    folder = tmp_path_factory.mktemp("spark")
    quick = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in spark_environment(folder, os.environ).items():
            patch.setenv(name, value)
        session = local_session(folder, cores=2, memory_mb=768, java_options=quick)
        gateway = SparkContext._gateway
        yield session
        session.stop()
        assert gateway is not None
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=20)
