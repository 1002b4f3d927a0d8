"""A back-fill whose workers are killed at chosen moments, and whose tasks run twice at once.

`python -m tests.integration.spark_bulk GIVEN` runs it and prints its reports. One worker is killed
between two parts of an upload, another before the index is put, once each. Spark begins no task
twice on one machine, whatever spark.speculation says: two runs take turns at its slots instead.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierlog.offload.driver import BlockOffloader
from tierlog.runtime.settings import Settings
from tierlog_spark.jobs.bulk_offload import BackFill, bulk_offload
from tierlog_spark.jobs.frame import JobRun
from tierlog_spark.jobs.session import job_session

if TYPE_CHECKING:
    from tierlog.offload.drivers import DriverParts
    from tierlog.ports.files import Buffer
    from tierlog.ports.objects import ObjectInfo, ObjectStore, Part

DRIVER = "deadly"


def taking_turns() -> dict[str, str]:
    """The environment of a process whose Spark gives slots to two jobs in turns."""
    return {
        **os.environ,
        "PYSPARK_SUBMIT_ARGS": "--conf spark.scheduler.mode=FAIR pyspark-shell",
    }


class DeadlyStore:
    """A store that kills its process at two calls, each once."""

    def __init__(self, store: ObjectStore, marks: Path) -> None:
        self._store = store
        self._marks = marks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _die_once(self, mark: str) -> None:
        try:
            (self._marks / mark).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    async def upload_part(
        self, key: str, upload_id: str, number: int, body: Sequence[Buffer], *, crc32c: int
    ) -> Part:
        if number == 2:
            self._die_once("part")
        return await self._store.upload_part(key, upload_id, number, body, crc32c=crc32c)

    async def put(
        self, key: str, body: bytes, *, metadata: Mapping[str, str], **more: Any
    ) -> ObjectInfo:
        if key.endswith("-index"):
            self._die_once("index")
        return await self._store.put(key, body, metadata=metadata, **more)


def deadly(marks: Path, parts: DriverParts) -> BlockOffloader:
    store: Any = DeadlyStore(parts.objects, marks)
    return BlockOffloader(store, parts.settings, budget=parts.budget, retries=parts.retries)


def main() -> None:
    given = json.loads(sys.argv[1])
    settings = Settings.model_validate(given["settings"])
    s3 = settings.s3.model_copy(update={"driver": DRIVER})
    wish = BackFill(streams=(given["stream"],), task_bytes=given["task_bytes"])
    with job_session(cores=4, memory_mb=512) as spark, ThreadPoolExecutor(2) as pool:

        def once(_: int) -> dict[str, Any]:
            report = bulk_offload(
                JobRun(spark=spark),
                settings.model_copy(update={"s3": s3}),
                wish,
                drivers={DRIVER: partial(deadly, Path(given["marks"]))},
            )
            return report.document()

        print(json.dumps(list(pool.map(once, range(2)))))


if __name__ == "__main__":
    main()
