"""How Java and Spark are found, and how it and its Python workers talk, on one machine."""

import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pyspark
import pytest

from tierlog_spark.local import SOCKETS_PATH_MAX, socket_options, spark_environment

DIR = "spark.python.unix.domain.socket.dir"


@pytest.fixture
def short():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_sockets_are_files_that_nobody_else_reaches(short: Path):
    before = os.umask(0)
    try:
        found = socket_options(short)
    finally:
        os.umask(before)
    assert found["spark.python.unix.domain.socket.enabled"] == "true"
    folder = Path(found[DIR])
    assert folder.is_relative_to(short.resolve())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert socket_options(short) == found


@pytest.mark.parametrize("more", [0, 1])
def test_a_path_too_long_for_a_socket_stays_with_tcp(more: int, short: Path):
    room = SOCKETS_PATH_MAX - len(str(short.resolve())) - len("/") - len("/s")
    folder = short / ("x" * (room + more))
    assert bool(socket_options(folder)) is (more == 0)
    assert (folder / "s").exists() is (more == 0)


def test_java_may_lie_in_a_folder_whose_name_has_spaces(tmp_path: Path):
    home = tmp_path / "my $project's java"
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        '#!/bin/sh\necho \'openjdk version "21.0.1"\' >&2\necho "$@"\n', encoding="utf-8"
    )
    java.chmod(0o755)
    found = spark_environment(tmp_path, {"JAVA_HOME": str(home)})
    done = subprocess.run(
        [Path(found["JAVA_HOME"]) / "bin" / "java", "--add-modules=jdk.incubator.vector", "-x"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "-x\n"


def test_an_environment_is_made_anew_out_of_itself(tmp_path: Path):
    """A script that stands before Java never stands before itself."""
    found = spark_environment(tmp_path, os.environ)
    again = spark_environment(tmp_path, {**os.environ, **found})
    assert found.items() >= again.items()
    java = Path(found["JAVA_HOME"]) / "bin" / "java"
    subprocess.run([java, "-version"], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("lacks", ["bin", "jars"])
def test_a_spark_that_is_not_within_pyspark_is_found_by_it(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As where PySpark is that of a Spark beside it."""
    package = tmp_path / "pyspark"
    for name in {"bin", "jars", "conf"} - {lacks}:
        (package / name).mkdir(parents=True)
    monkeypatch.setattr(pyspark, "__file__", str(package / "__init__.py"))
    given = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    assert "SPARK_HOME" not in spark_environment(tmp_path, given)
    (package / lacks).mkdir()
    (package / "conf" / "spark-defaults.conf").write_text("spark.x y", encoding="utf-8")
    home = Path(spark_environment(tmp_path, given)["SPARK_HOME"])
    assert sorted(one.name for one in home.iterdir()) == ["bin", "conf", "jars"]
    assert (home / "conf" / "spark-defaults.conf").is_file()


def test_a_spark_that_was_chosen_comes_before_the_one_within_pyspark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """PYSPARK_HADOOP_VERSION puts it beside PySpark's own, which is there all the same."""
    package = tmp_path / "pyspark"
    for name in ("bin", "jars", "spark-distribution/bin", "spark-distribution/jars"):
        (package / name).mkdir(parents=True)
    monkeypatch.setattr(pyspark, "__file__", str(package / "__init__.py"))
    given = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    assert "SPARK_HOME" not in spark_environment(tmp_path, given)


def test_workers_import_the_package_and_not_spark_s_archive_of_it(tmp_path: Path):
    """Out of the archive, all of it is compiled anew by each process."""
    given = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    found = spark_environment(tmp_path, given)
    home = Path(found["SPARK_HOME"])
    assert (home / "bin" / "spark-submit").is_file()
    assert list((home / "jars").glob("spark-core_*.jar"))
    assert not (home / "python").exists()
    assert str(Path(pyspark.__file__).parents[1]) in found["PYTHONPATH"].split(os.pathsep)
    assert spark_environment(tmp_path, given) == found
    assert "SPARK_HOME" not in spark_environment(tmp_path, {**given, "SPARK_HOME": str(tmp_path)})
    gone = {**given, "SPARK_HOME": str(tmp_path / "gone")}
    assert spark_environment(tmp_path, gone) == found
