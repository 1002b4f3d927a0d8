"""No lock has a version that is known to be unsafe (security/minimum-versions.toml)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
WANTED = tomllib.loads((ROOT / "security" / "minimum-versions.toml").read_text(encoding="utf-8"))
LOCKS = sorted(ROOT.glob("requirements*.lock"))
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+) ", re.MULTILINE)
NUMBER = re.compile(r"(CVE-\d{4}-\d{4,6}|PYSEC-\d{4}-\d+)")


def pins(lock: Path) -> dict[str, Version]:
    return {
        name.lower(): Version(version)
        for name, version in PINNED.findall(lock.read_text(encoding="utf-8"))
    }


def unsafe(pinned: dict[str, Version]) -> list[str]:
    return [
        f"{name} {pinned[name]} is older than {one['version']}: {', '.join(one['cves'])}"
        for name, one in WANTED.items()
        if name in pinned and pinned[name] < Version(one["version"])
    ]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda one: one.name)
def test_no_lock_has_an_unsafe_version(lock):
    found = pins(lock)
    assert found
    assert unsafe(found) == []


def test_an_unsafe_version_would_be_found():
    assert unsafe({"h11": Version("0.14.0"), "other": Version("1")}) == [
        "h11 0.14.0 is older than 0.16.0: CVE-2025-43859"
    ]


def test_each_package_is_one_that_is_used_and_each_number_one_that_can_be_looked_up():
    everything = {name for lock in LOCKS for name in pins(lock)}
    assert set(WANTED) - everything == set()
    for name, one in WANTED.items():
        assert one["cves"], name
        assert one["why"], name
        assert all(NUMBER.fullmatch(number) for number in one["cves"]), name


def test_what_images_listen_with_is_among_them():
    assert {"aiohttp", "grpcio", "h11", "protobuf", "pyjwt", "starlette"} <= set(WANTED)
