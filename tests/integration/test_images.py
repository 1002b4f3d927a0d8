"""An image of a service needs that service, the library, and the packages of its own lock.

A room's pyproject.toml tells which outer systems it talks to (ADR-0001); the library alone is the
client and the command line. Here each process may import what its lock brings, and nothing more.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires
from typing import TYPE_CHECKING

import orjson
import pytest
from packaging.requirements import Requirement

from tests.plugins import only_locked
from tests.plugins.fix_corner import environment_of
from tierlog.embedded.nodes import quorum_environment
from tierlog.embedded.ports import LOOPBACK, Ports
from tierlog.embedded.services import SERVICE_PORTS, EmbeddedServices, service_spec
from tools.lock import IMAGES, outer_requirements, project

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tierlog.embedded.supervisor import EmbeddedServers
    from tierlog.runtime.settings import Settings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ROOT = only_locked.REPOSITORY


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[EmbeddedServices]:
    embedded = EmbeddedServices(run_dir=tmp_path, log_dir=tmp_path)
    yield embedded
    await embedded.stop()


def with_what_they_need(requirements: Sequence[str]) -> set[str]:
    """Return these distributions and all that they need, as they are installed here."""
    todo, found = [Requirement(one) for one in requirements], set[tuple[str, str]]()
    while todo:
        wanted = todo.pop()
        for extra in ("", *wanted.extras):
            key = (only_locked.canonical(wanted.name), extra)
            if key in found:
                continue
            found.add(key)
            try:
                needs = [Requirement(one) for one in requires(wanted.name) or ()]
            except PackageNotFoundError:  # of another platform
                continue
            todo += [
                one for one in needs if one.marker is None or one.marker.evaluate({"extra": extra})
            ]
    return {name for name, _ in found}


@pytest.fixture
def library() -> set[str]:
    """What `pip install tierlog` brings, without extras."""
    return with_what_they_need(project(ROOT / "shared")["dependencies"])


async def run(names: set[str], env: dict[str, str], *words: str, stdin: bytes = b"") -> bytes:
    """Run `tierlog` with these distributions."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", only_locked.MODULE, *words,
        env={**os.environ, **only_locked.env_of(names, "tierlog.cli.main"), **env},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate(stdin)
    assert process.returncode == 0, err.decode()
    return out


async def test_the_main_job_with_each_process_on_the_packages_of_its_own_lock(
    services: EmbeddedServices,
    servers: EmbeddedServers,
    corner: Settings,
    library: set[str],
    tmp_path: Path,
) -> None:
    env = {
        **environment_of(corner),
        **quorum_environment(1, {}),
        "TIERLOG_REDIS__URL": servers.endpoints.redis_url,
        "TIERLOG_INGEST__DATA_DIR": str(tmp_path / "data"),
        "TIERLOG_SCHEDULER__INTERVAL_S": "0.5",
    }
    ports = Ports(tmp_path / "ports.json")
    specs = []
    for kind in IMAGES:
        names = only_locked.names_in(ROOT / f"requirements-{kind}.lock")
        lock = only_locked.env_of(names, f"tierlog_{kind}.main")
        taken = ports.take(kind, SERVICE_PORTS[kind])
        spec = service_spec(kind, ports=taken, env={**env, **lock})
        specs.append(replace(spec, module=only_locked.MODULE))
    await services.start(specs)

    places = {one.name: one.ports for one in specs}
    client = {
        "TIERLOG_CLIENT__INGEST_ADDRESS": f"{LOOPBACK}:{places['ingest']['grpc']}",
        "TIERLOG_CLIENT__READER_HTTP_ADDRESS": f"{LOOPBACK}:{places['reader']['http']}",
        "TIERLOG_CLIENT__SCHEDULER_HTTP_ADDRESS": f"{LOOPBACK}:{places['scheduler']['http']}",
    }
    await run(library, client, "append", "lean", "-q", stdin=b"one\ntwo\n")
    await run(library, client, "stream", "seal", "lean")
    await run(library, client, "offload", "run", "lean", "--wait", "-q")
    read = await run(library, client, "read", "lean", "-o", "jsonl")
    found = [orjson.loads(line) for line in read.splitlines()]
    assert [(one["payload"], one["tier"]) for one in found] == [("one", "tier2"), ("two", "tier2")]


async def test_what_a_lock_does_not_name_is_not_there(library: set[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", only_locked.MODULE,
        env={**os.environ, **only_locked.env_of(library, "kazoo.client")},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"is not in the lock" in err


@pytest.mark.parametrize("image", IMAGES)
def test_a_lock_has_what_its_room_names_at_the_versions_of_all_others(image: str) -> None:
    lock = ROOT / f"requirements-{image}.lock"
    named = outer_requirements(project(ROOT / "services" / image)["dependencies"])
    direct = {only_locked.canonical(Requirement(one).name) for one in named}
    assert direct <= only_locked.names_in(lock)
    pins = re.compile(r"^([a-z0-9][\w.-]*==\S+)", re.MULTILINE)
    assert set(pins.findall(lock.read_text())) <= set(
        pins.findall((ROOT / "requirements.lock").read_text())
    )
