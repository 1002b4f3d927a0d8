"""The jars that Pulsar's offloader stands on: fetched once by PySpark's Ivy, checked, kept.

Owns the cache folder and its check against ``pulsar/jars.sha256``, which is committed: whatever a
registry answers, only these very bytes are run. ``python -m tests.interop.jars`` writes that file
anew from ``pulsar/pom.xml``, which needs Maven; nothing else here does.

Invariant: a folder under its final name is complete: it is checked, then renamed into place.

Crash (leaks): a temporary folder beside the final one, which the next fetch removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tierlog.embedded.java import SMALL_JVM, class_path, pyspark_jars
from tierlog.embedded.trust import PASSWORD, python_authorities, trust_store

HOME: Final = Path(__file__).with_name("pulsar")
SUMS: Final = HOME / "jars.sha256"
FETCH_S_MAX: Final = 900.0
TELL_EVERY_S: Final = 5.0

Tell = Callable[[str], None]


class InteropError(Exception):
    """Pulsar's program can't be had; the text says why, and the remedy."""


class Jar(NamedTuple):
    """One artifact, as the registry knows it."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """What it is called in the folder."""
        return f"{self.artifact}-{self.version}.jar"


def expected() -> list[Jar]:
    """Return the jars that ``jars.sha256`` names."""
    found = []
    for line in SUMS.read_text(encoding="utf-8").splitlines():
        digest, name = line.split()
        group, artifact, version = name.split(":")
        found.append(Jar(group, artifact, version, digest))
    return found


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return where the jars are kept (XDG_CACHE_HOME, else ~/.cache): another list, another one."""
    base = environ.get("XDG_CACHE_HOME") or str(
        Path(environ.get("HOME", "~")).expanduser() / ".cache"
    )
    mark = hashlib.sha256(SUMS.read_bytes()).hexdigest()[:12]
    return Path(base) / "tierlog" / f"pulsar-{mark}"


def differences(folder: Path) -> list[str]:
    """Name the jars that are not in the folder with the bytes that are expected."""
    return [one.file_name for one in expected() if _sha256(folder / one.file_name) != one.sha256]


def pulsar_jars(java: Path, environ: Mapping[str, str], tell: Tell) -> Path:
    """Return the folder with the jars, fetching them first when it is not there or damaged."""
    folder = cache_folder(environ)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "pulsar.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not differences(folder):
            return folder
        for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.tmp-", dir=folder.parent) as made:
            work = Path(made)
            _fetch(java, environ, work, tell)
            wrong = differences(work / "lib")
            if wrong:
                raise InteropError(
                    f"the registry answered with other jars than expected: {', '.join(wrong[:5])}; "
                    f"remedy: put the ones that {SUMS.name} names into {folder}"
                )
            shutil.rmtree(folder, ignore_errors=True)
            (work / "lib").replace(folder)
    return folder


def _fetch(java: Path, environ: Mapping[str, str], work: Path, tell: Tell) -> None:
    """Try with Java's own authorities, then with those that Python trusts."""
    (work / "ivy.xml").write_text(_module(), encoding="utf-8")
    store = work / "trust.jks"
    store.write_bytes(trust_store(python_authorities()))
    trust = [
        f"-Djavax.net.ssl.trustStore={store}",
        f"-Djavax.net.ssl.trustStorePassword={PASSWORD}",
    ]
    told = ""
    for flags in ([], trust):
        code, told = _ivy([str(java), *SMALL_JVM, *flags], environ, work, tell)
        if code == 0:
            return
        if "PKIX" not in told:
            break
    lines = [line for line in told.splitlines() if line.strip(" .:\t")]
    raise InteropError(
        f"the jars of Pulsar could not be fetched: {' | '.join(lines[-3:])}; remedy: check that "
        f"the Maven registry can be reached from here, or put the jars that {SUMS.name} names into "
        f"{cache_folder(environ)}"
    )


def _module() -> str:
    """Return the list of jars as Ivy reads it, each without what it stands on itself."""
    wanted = "".join(
        f'<dependency org="{one.group}" name="{one.artifact}" rev="{one.version}"'
        ' transitive="false" conf="default->master">'
        # Some descriptions call their jar otherwise.
        f'<artifact name="{one.artifact}" type="jar" ext="jar"/></dependency>\n'
        for one in expected()
    )
    return (
        '<ivy-module version="2.0"><info organisation="tierlog" module="interop"/>\n'
        f'<configurations><conf name="default"/></configurations>\n'
        f"<dependencies>\n{wanted}</dependencies></ivy-module>\n"
    )


def _ivy(java: list[str], environ: Mapping[str, str], work: Path, tell: Tell) -> tuple[int, str]:
    """Run Ivy, telling how many jars have come; return its exit code and its words."""
    argv = [*java, f"-Divy.default.ivy.user.dir={work / 'ivy'}"]
    argv += ["-jar", *class_path(pyspark_jars(), ["ivy-2*"]), "-warn", "-cache", str(work / "ivy")]
    argv += ["-ivy", str(work / "ivy.xml"), "-confs", "default"]
    argv += ["-retrieve", f"{work / 'lib'}/[artifact]-[revision].[ext]"]
    log, total = work / "ivy.log", len(expected())
    with log.open("w", encoding="utf-8") as words:
        process = subprocess.Popen(argv, env=dict(environ), stdout=words, stderr=words)
        try:
            ends_at = time.monotonic() + FETCH_S_MAX
            while process.poll() is None and time.monotonic() < ends_at:
                described = sum(1 for _ in (work / "ivy").rglob("*.original"))
                fetched = sum(1 for _ in (work / "ivy").rglob("*.jar"))
                tell(
                    f"fetching the jars of Pulsar (50 MB, once): {described} descriptions read, "
                    f"{fetched} of {total} jars"
                )
                try:
                    process.wait(TELL_EVERY_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            process.wait()
    return process.returncode, log.read_text(encoding="utf-8", errors="replace")


def lock() -> int:
    """Write ``jars.sha256`` of what Maven resolves ``pom.xml`` to; the process's exit code."""
    maven = shutil.which("mvn")
    if maven is None:
        print("error: no mvn on the PATH\nremedy: install Maven and a JDK 17", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="tierlog-interop-") as made:
        copy = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
        done = subprocess.run(
            [
                maven, "-B", "-q", "-f", str(HOME / "pom.xml"), copy, "-DincludeScope=runtime",
                f"-DoutputDirectory={made}", "-Dmdep.useRepositoryLayout=true",
            ],
            check=False,
        )  # fmt: skip
        if done.returncode != 0:
            return done.returncode
        lines = []
        for path in Path(made).rglob("*.jar"):
            *group, artifact, version, name = path.relative_to(made).parts
            assert name == f"{artifact}-{version}.jar", f"{name} has a classifier"
            lines.append((f"{'.'.join(group)}:{artifact}:{version}", _sha256(path)))
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(lines))
    SUMS.write_text(text, encoding="utf-8")
    print(f"{len(lines)} jars in {SUMS}")
    return 0


def _sha256(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(lock())
