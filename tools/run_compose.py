"""Runs docker-compose.yml and the proof in it: once with one node, once with three.

It needs a Docker engine with the compose plugin, and says so where there is none. The proof is
deploy/helm/tierlog/files/smoke.sh, which tests/integration/test_smoke.py runs over local processes
on machines without an engine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PROJECT: Final = "tierlog-test"
SETUPS: Final = {
    "one node": ["--profile", "core"],
    "three nodes": ["--env-file", "deploy/docker/three-nodes.env"],
}
NEEDS: Final = (
    "error: this needs a Docker engine and its compose plugin: {why}.\n"
    "remedy: install them; without them the same proof runs over local processes:\n"
    "        make test-deploy && .venv/bin/pytest tests/integration/test_smoke.py"
)


def main() -> None:
    """Run each setup, or exit with what is missing."""
    docker = shutil.which("docker")
    if docker is None:
        sys.exit(NEEDS.format(why="there is no `docker` on the PATH"))
    for words, why in (
        (["info"], "`docker info` reaches no engine"),
        (["compose", "version"], "`docker compose version` fails"),
    ):
        done = subprocess.run([docker, *words], capture_output=True, check=False)
        if done.returncode != 0:
            sys.exit(NEEDS.format(why=why))
    for name, options in SETUPS.items():
        print(f"== {name}", flush=True)
        compose = [docker, "compose", "--project-name", PROJECT, *options]
        try:
            _run([*compose, "config", "--quiet"])
            _run([*compose, "up", "--build", "--detach", "--wait", "--wait-timeout", "300"])
            _run([*compose, "run", "--rm", "smoke"])
            _run([*compose, "restart", "ingest-1"])
            _run([*compose, "up", "--detach", "--wait", "--wait-timeout", "120"])
            _run([*compose, "run", "--rm", "smoke"])
        except subprocess.CalledProcessError as error:
            subprocess.run([*compose, "logs", "--tail", "50"], cwd=ROOT, check=False)
            sys.exit(f"error: {' '.join(error.cmd)} ended with {error.returncode}")
        finally:
            down = [*compose, "--profile", "*", "down", "--volumes", "--timeout", "60"]
            subprocess.run(down, cwd=ROOT, check=False)


def _run(words: list[str]) -> None:
    subprocess.run(words, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
