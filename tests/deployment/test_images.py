"""The Dockerfiles: small, locked, not root; hadolint finds no fault.

No engine is needed. What an image's processes may import is tests/integration/test_images.py.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deployment.rendering import ROOT, find_tool
from tests.plugins import only_locked
from tools.lock import IMAGES, LOCKED, outer_requirements, project

DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
EACH = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda one: one.stem)
UID = "10001:10001"


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return instructions and their words, continued lines joined, comments left out."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    found = re.findall(r"^([A-Z]+)\s+((?:.*\\\n)*.*)", text, re.MULTILINE)
    return [(name, words.replace("\\\n", " ")) for name, words in found]


def test_there_is_one_for_each_family():
    assert [one.name for one in DOCKERFILES] == ["service.Dockerfile", "spark.Dockerfile"]


@EACH
def test_hadolint_finds_no_fault(path: Path):
    program = find_tool("hadolint")
    if program is None:
        pytest.skip("hadolint is missing: make deploy-tools")
    done = subprocess.run(
        [program, "--no-color", str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@EACH
def test_the_last_stage_is_no_root_and_has_no_tools(path: Path):
    found = instructions(path)
    last = max(number for number, (name, _) in enumerate(found) if name == "FROM")
    build, image = found[:last], found[last:]
    assert ("USER", UID) in image
    # Nothing runs after it that root would have to do.
    assert not [one for one in image[image.index(("USER", UID)) :] if one[0] == "RUN"]
    assert not [
        words for name, words in image if name == "RUN" and re.search(r"\b(pip|uv)\b", words)
    ]
    assert [words for name, words in image if name == "ENTRYPOINT" and words.startswith("[")]
    assert {words for name, words in found if name == "FROM"} == {
        "${PYTHON_IMAGE} AS build",
        "${PYTHON_IMAGE}",
    }
    assert not [words for name, words in image if name == "COPY" and "--from=build" not in words]
    assert build


@EACH
def test_what_is_not_ours_comes_by_hash(path: Path):
    for name, words in instructions(path):
        if name != "RUN":
            continue
        for command in words.split("&&"):
            if re.search(r"\bpip (install|wheel)\b", command):
                own = re.search("--no-deps\\b", command) and re.search(
                    "--offline|--no-index", command
                )
                assert own or "--require-hashes" in command, command


def test_the_user_of_spark_has_a_name_and_a_home():
    """Without them spark-submit ends: no home for Ivy, then no name for Hadoop."""
    found = instructions(DOCKERFILES[1])
    (made,) = [words for name, words in found if name == "RUN" and "useradd" in words]
    assert "--uid 10001" in made
    assert "--home-dir /tmp" in made
    assert ("RUN", made) in found[: found.index(("USER", UID))]


@EACH
def test_no_frontend_is_fetched_to_read_it(path: Path):
    """It would come by a tag, from a registry that the base image may not come from."""
    assert not re.search(r"^#\s*syntax\s*=", path.read_text(), re.MULTILINE)


@EACH
def test_what_is_copied_is_there_and_goes_to_the_engine(path: Path):
    ignored = [line for line in (ROOT / ".dockerignore").read_text().split() if line != "#"]
    let_in = [line[1:] for line in ignored if line.startswith("!")]
    for name, words in instructions(path):
        if name != "COPY" or "--from=" in words:
            continue
        for source in words.split()[:-1]:
            for service in IMAGES:
                concrete = source.replace("${SERVICE}", service)
                assert list(ROOT.glob(concrete)), concrete
                first = concrete.rstrip("/")
                assert any(
                    fnmatch.fnmatch(first, one) or first.startswith(f"{one}/") for one in let_in
                ), concrete


def test_each_image_has_a_lock_of_all_that_its_room_names():
    assert set(LOCKED) == {*IMAGES, "spark"}
    for image, room in LOCKED.items():
        lock = ROOT / f"requirements-{image}.lock"
        named = outer_requirements(project(ROOT / room)["dependencies"])
        direct = {only_locked.canonical(Requirement(one).name) for one in named}
        assert direct <= only_locked.names_in(lock), image
