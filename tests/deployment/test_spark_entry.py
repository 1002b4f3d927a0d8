"""What the Spark image runs in pods that Spark starts by itself, and in all others.

Which variables and words Spark gives them: resource-managers/kubernetes of apache/spark
(BasicExecutorFeatureStep, DriverCommandFeatureStep, and its own image's entry point).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deployment.rendering import ROOT
from tests.deployment.test_images import instructions
from tierlog_spark.local import spark_environment

ENTRY = ROOT / "deploy" / "docker" / "spark-entry.sh"
BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
EXECUTOR = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@127.0.0.1:1",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_EXECUTOR_MEMORY": "300m",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "127.0.0.1",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_NAME": "orders-exec-3",
}
TOLD = [
    "--driver-url",
    "spark://CoarseGrainedScheduler@127.0.0.1:1",
    "--executor-id",
    "3",
    "--cores",
    "2",
    "--app-id",
    "spark-1",
    "--hostname",
    "127.0.0.1",
    "--resourceProfileId",
    "0",
    "--podName",
    "orders-exec-3",
]


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """Give a folder with programs that say how they were called, a line for each word."""
    for name in ("java", "spark-submit"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@"\n')
        program.chmod(0o755)
    home = tmp_path / "find_spark_home.py"
    home.write_text("#!/bin/sh\necho /found/pyspark\n")
    home.chmod(0o755)
    return tmp_path


def called(stubs: Path, *words: str, **variables: str) -> list[str]:
    path = f"{stubs}:/usr/bin:/bin"
    done = subprocess.run(
        [ENTRY, *words], env={"PATH": path, **variables}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_an_executor_is_what_its_variables_say(stubs: Path) -> None:
    options = {f"SPARK_JAVA_OPT_{n}": f"-Dn={n} and more" for n in range(11)}
    more = {"SPARK_CONF_DIR": "/opt/spark/conf", "SPARK_EXTRA_CLASSPATH": "/more/*"}
    assert called(stubs, "executor", **EXECUTOR, **options, **more) == [
        "java",
        *options.values(),
        "-Xms300m",
        "-Xmx300m",
        "-cp",
        "/opt/spark/conf:/found/pyspark/jars/*:/more/*",
        BACKEND,
        *TOLD,
    ]


def test_of_spark_itself_no_more_is_needed(stubs: Path) -> None:
    found = called(stubs, "executor", **EXECUTOR, SPARK_HOME="/own spark")
    memory = ["-Xms300m", "-Xmx300m"]
    assert found == ["java", *memory, "-cp", "/own spark/conf:/own spark/jars/*", BACKEND, *TOLD]


def test_a_driver_is_a_client_in_its_own_pod(stubs: Path) -> None:
    words = ["--properties-file", "/opt/spark/conf/spark.properties", "local:///a b.py", "export"]
    assert called(stubs, "driver", *words, SPARK_DRIVER_BIND_ADDRESS="10.0.0.7") == [
        "spark-submit",
        *["--conf", "spark.driver.bindAddress=10.0.0.7", "--deploy-mode", "client"],
        *words,
    ]


def test_all_else_is_for_spark_submit(stubs: Path) -> None:
    assert called(stubs, "--version") == ["spark-submit", "--version"]
    assert called(stubs) == ["spark-submit"]


def test_what_spark_did_not_say_ends_it(stubs: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        called(stubs, "executor", SPARK_EXECUTOR_MEMORY="1g")
    assert "SPARK_DRIVER_URL" in caught.value.stderr


@pytest.mark.integration
def test_spark_s_own_executor_takes_them(tmp_path: Path) -> None:
    """It looks for its driver, at a port where nobody is."""
    found = spark_environment(tmp_path, os.environ)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [ENTRY, "executor"],
        env={**os.environ, **found, **EXECUTOR, "PATH": path, "SPARK_JAVA_OPT_0": "-Dn=0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "Connection refused: /127.0.0.1:1" in done.stdout + done.stderr


def test_the_image_begins_with_it() -> None:
    image = instructions(ROOT / "deploy" / "docker" / "spark.Dockerfile")
    assert ("ENTRYPOINT", '["/opt/tierlog/bin/spark-entry.sh"]') in image
    assert ENTRY.stat().st_mode & 0o111 == 0o111
