"""A Spark cluster of two machines, as Spark sees it, for what it never does on one: speculation.

A master and two workers with a core each, on two addresses of the loopback. `python -m
tests.integration.spark_hosts GIVEN` is a driver there. The worker that first comes to some point is
killed. The next task there never ends by itself, where it exports; where it offloads, it goes on
once it was begun elsewhere too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark

from tierlog.offload.driver import BlockOffloader
from tierlog.ports.files import Buffer
from tierlog.runtime.settings import S3Settings, Settings
from tierlog_spark.jobs.bulk_offload import BackFill, bulk_offload
from tierlog_spark.jobs.export.job import export_to
from tierlog_spark.jobs.export.options import ExportOptions
from tierlog_spark.jobs.export.targets import FolderTarget
from tierlog_spark.jobs.frame import JobReport, JobRun
from tierlog_spark.local import spark_environment
from tierlog_spark.source import register

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from pyspark.sql import SparkSession

    from tierlog.offload.drivers import DriverParts
    from tierlog.ports.objects import ObjectInfo, ObjectStore

HOSTS = ("127.0.0.1", "127.0.0.2")
DEPLOY = "org.apache.spark.deploy"
LATE, LATE_S_MAX, LOCKED_S = "late", 120, 3
# Of three tasks one is killed, and one is late.
BEGUN = 5
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "200ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.4",
    # A task may fail once, as the killed one does: what is begun beyond that is speculative.
    "spark.task.maxFailures": "2",
}


def outside_spark() -> dict[str, str]:
    """What a process inherits that has no Spark yet."""
    left_out = ("PYSPARK_", "SPARK_", "JAVA_HOME")
    found = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    return found | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def is_first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@dataclass(frozen=True)
class StuckTarget(FolderTarget):
    """`marks` remembers that a worker was killed, and that a task is stuck."""

    marks: Path

    def put(self, name: str, body: Buffer) -> None:
        FolderTarget.put(self, name, body)
        if is_first(self.marks / "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if is_first(self.marks / "stuck"):
            time.sleep(600)


class LateStore:
    """A store that kills, and then is slow, at one call, once each; `marks` has each task too."""

    def __init__(self, store: ObjectStore, marks: Path) -> None:
        self._store = store
        self._marks = marks
        (marks / f"task-{uuid.uuid4()}").touch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def put(
        self, key: str, body: bytes, *, metadata: Mapping[str, str], **more: Any
    ) -> ObjectInfo:
        if key.endswith("-index"):
            if is_first(self._marks / "killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if is_first(self._marks / "late"):
                await self._be_late()
        return await self._store.put(key, body, metadata=metadata, **more)

    async def _be_late(self) -> None:
        """Wait until this task was begun elsewhere too, and has found the ledger locked."""
        async with asyncio.timeout(LATE_S_MAX):
            while len(list(self._marks.glob("task-*"))) < BEGUN:
                await asyncio.sleep(0.2)
        await asyncio.sleep(LOCKED_S)


def late(marks: Path, parts: DriverParts) -> BlockOffloader:
    store: Any = LateStore(parts.objects, marks)
    return BlockOffloader(store, parts.settings, budget=parts.budget, retries=parts.retries)


@contextlib.asynccontextmanager
async def two_hosts(folder: Path, environ: Mapping[str, str], port: int) -> AsyncIterator[str]:
    """Give the address of a master that has two workers."""
    environment = {**environ, **spark_environment(folder, environ), "SPARK_DAEMON_MEMORY": "128m"}
    del environment["SPARK_LOCAL_IP"]
    master = f"spark://{HOSTS[0]}:{port}"
    at = ("--host", HOSTS[0], "--port", str(port), "--webui-port", "0")
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(_daemon(environment, folder, f"{DEPLOY}.master.Master", at))
        for host in HOSTS:
            of_worker = ("--host", host, "--webui-port", "0", "--cores", "1", "--memory", "600m")
            place = ("--work-dir", str(folder / f"work-{host}"), master)
            worker = _daemon(environment, folder, f"{DEPLOY}.worker.Worker", (*of_worker, *place))
            await stack.enter_async_context(worker)
        yield master


@contextlib.asynccontextmanager
async def _daemon(
    environment: Mapping[str, str], folder: Path, name: str, args: Sequence[str]
) -> AsyncIterator[None]:
    start = Path(pyspark.__file__).parent / "bin" / "spark-class"
    with (folder / "daemons.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            str(start), name, *args, env=dict(environment), cwd=folder, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def exported(spark: SparkSession, given: dict[str, Any]) -> JobReport:
    options = ExportOptions(
        streams=("s",), to=given["to"], s3=S3Settings.model_validate(given["s3"])
    )
    target = StuckTarget(Path(given["to"]), Path(given["marks"]))
    return export_to(JobRun(spark=spark), options, target)


def offloaded(spark: SparkSession, given: dict[str, Any]) -> JobReport:
    settings = Settings.model_validate(given["settings"])
    s3 = settings.s3.model_copy(update={"driver": LATE})
    return bulk_offload(
        JobRun(spark=spark),
        settings.model_copy(update={"s3": s3}),
        BackFill(streams=(given["stream"],), task_bytes=1),
        drivers={LATE: partial(late, Path(given["marks"]))},
    )


def main() -> None:
    given = json.loads(sys.argv[1])
    folder = Path(given["folder"])
    os.environ.update(spark_environment(folder, os.environ))
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(given["master"]).appName("speculation")
    more = {
        "spark.driver.host": HOSTS[0],
        "spark.driver.bindAddress": HOSTS[0],
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        **SPECULATION,
    }
    for name, value in more.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    try:
        report = (offloaded if "settings" in given else exported)(spark, given)
    finally:
        spark.stop()
    print(json.dumps(report.counts))


if __name__ == "__main__":
    main()
