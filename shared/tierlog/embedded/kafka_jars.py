"""The jars of a Kafka broker: fetched once by PySpark's Ivy, checked, kept in the user's cache.

Owns the cache folder and its check against `kafka_jars.sha256`, which is committed: whatever a
registry answers, only these very bytes are run.

Invariants:
    * A folder under its final name is complete: it is checked, then renamed into place.
    * The check runs at every start; a damaged cache is fetched anew.

Crash (leaks): a temporary folder beside the final one; the next fetch removes those it finds.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import pwd
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from tierlog.embedded.java import SMALL_JVM, class_path, pyspark_jars
from tierlog.embedded.process import Child, Launch, log_tail
from tierlog.embedded.trust import PASSWORD, python_authorities, trust_store
from tierlog.model.errors import RetryableError
from tierlog.ports.progress import Progress

KAFKA_VERSION: Final = "4.3.1"
SCALA_VERSION: Final = "2.13"
SUMS: Final = Path(__file__).with_name("kafka_jars.sha256")
FETCH_S_MAX: Final = 600.0
REMEDY: Final = (
    "Check that the Maven registry can be reached from here and run again; or, on a machine "
    "without a network, put the jars that kafka_jars.sha256 lists into {folder}; or name an "
    "external Kafka in the settings"
)


def expected() -> dict[str, str]:
    """Return the file names of the jars and their SHA-256."""
    pairs = (line.split() for line in SUMS.read_text(encoding="utf-8").splitlines())
    return {name: digest for digest, name in pairs}


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return where the jars are kept (XDG_CACHE_HOME, else ~/.cache)."""
    home = environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    base = environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    return Path(base) / "tierlog" / f"kafka-{KAFKA_VERSION}"


def differences(folder: Path) -> list[str]:
    """Name the jars that are not in the folder with the bytes that are expected."""
    wanted = expected()
    found = {path.name: _sha256(path) for path in folder.glob("*.jar")}
    names = sorted(wanted.keys() | found.keys())
    return [name for name in names if wanted.get(name) != found.get(name)]


async def kafka_jars(java: Path, environ: Mapping[str, str], progress: Progress) -> Path:
    """Return the folder with the jars, fetching them first when it is not there or damaged."""
    folder = cache_folder(environ)
    if not differences(folder):
        return folder
    async with _sole_fetcher(folder.parent, progress):
        if not differences(folder):  # another process was quicker
            return folder
        for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
        try:
            await _fetch(java, environ, work, progress)
            _accept(work / "lib", folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


@contextlib.asynccontextmanager
async def _sole_fetcher(cache: Path, progress: Progress) -> AsyncIterator[None]:
    """Let one process of this machine fetch at a time."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / "kafka.lock").open("w", encoding="utf-8")
    except OSError as error:
        raise RetryableError(
            f"the cache folder {cache} cannot be written: {error.strerror}",
            remedy="Set XDG_CACHE_HOME to a folder of yours",
        ) from error
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("waiting for another process that fetches the jars of Kafka", 0, None)
                await asyncio.sleep(1.0)
        yield


def _accept(fetched: Path, folder: Path) -> None:
    wrong = differences(fetched)
    if wrong:
        raise RetryableError(
            f"the registry answered with other jars than expected: {', '.join(wrong[:5])}",
            remedy=REMEDY.format(folder=folder),
        )
    if folder.exists():  # damaged
        shutil.rmtree(folder)
    fetched.replace(folder)


async def _fetch(java: Path, environ: Mapping[str, str], work: Path, progress: Progress) -> None:
    """Try with Java's own authorities; when it knows none of the machine's, with Python's."""
    log = work / "ivy.log"
    exit_code = await _ivy(java, environ, work, log, progress, trust=[])
    if not any((work / "lib").glob("*.jar")) and "PKIX" in log.read_text(errors="replace"):
        store = work / "trust.jks"
        store.write_bytes(trust_store(python_authorities()))
        trust = [
            f"-Djavax.net.ssl.trustStore={store}",
            f"-Djavax.net.ssl.trustStorePassword={PASSWORD}",
        ]
        exit_code = await _ivy(java, environ, work, log, progress, trust=trust)
    if exit_code != 0 or not any((work / "lib").glob("*.jar")):
        lines = [line for line in log_tail(log).splitlines() if line.strip(" .:\t")]
        raise RetryableError(
            f"Kafka's jars could not be fetched: {' | '.join(lines[-3:])}",
            remedy=REMEDY.format(folder=cache_folder(environ)),
        )


async def _ivy(
    java: Path,
    environ: Mapping[str, str],
    work: Path,
    log: Path,
    progress: Progress,
    *,
    trust: list[str],
) -> int:
    """Run Ivy in a folder of its own, telling how many jars have come."""
    log.unlink(missing_ok=True)
    argv = [str(java), *SMALL_JVM, *trust, f"-Divy.default.ivy.user.dir={work / 'ivy'}"]
    argv += ["-jar", *class_path(pyspark_jars(), ["ivy-2*"]), "-warn", "-cache", str(work / "ivy")]
    argv += ["-dependency", "org.apache.kafka", f"kafka_{SCALA_VERSION}", KAFKA_VERSION]
    pattern = f"{work / 'lib'}/[artifact]-[revision](-[classifier]).[ext]"
    argv += ["-confs", "default", "-retrieve", pattern]
    launch = Launch(argv=argv, cwd=work, log=log, env=environ)
    child = Child.spawn("ivy", launch, run_dir=work)
    total = len(expected())
    ends_at = asyncio.get_running_loop().time() + FETCH_S_MAX
    try:
        while child.running and asyncio.get_running_loop().time() < ends_at:
            fetched = sum(1 for _ in (work / "ivy").rglob("*.jar"))
            described = sum(1 for _ in (work / "ivy").rglob("*.original"))
            what = f"fetching the jars of Kafka (44 MB, once; {described} descriptions read)"
            progress(what, min(fetched, total), total)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await child.wait()
    finally:
        if child.running:
            child.kill()
    return await child.wait()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
