"""The parts of the embedded mode that need no server: ports, trust store, Java, probes, cache."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tierlog.embedded import kafka_jars, seaweedfs
from tierlog.embedded.java import java_version, packaged_java
from tierlog.embedded.kafka import count_brokers
from tierlog.embedded.ports import PORT_FIRST, Ports, is_free, port_end
from tierlog.embedded.process import Child, Launch, end_leftovers, identify, log_tail
from tierlog.embedded.trust import PASSWORD, trust_store
from tierlog.model.errors import RetryableError


def test_ports_are_distinct_below_the_ephemeral_range_and_kept(tmp_path: Path) -> None:
    ports = Ports(tmp_path / "ports.json")
    one = ports.take("one", ["a", "b", "c"])
    two = ports.take("two", ["a"])
    assert len({*one.values(), *two.values()}) == 4
    assert all(PORT_FIRST <= port < port_end() for port in one.values())
    again = Ports(tmp_path / "ports.json")
    assert again.take("one", ["a", "b", "c"]) == one


def test_a_port_in_use_or_forgotten_is_replaced(tmp_path: Path) -> None:
    ports = Ports(tmp_path / "ports.json")
    first = ports.take("one", ["a"])["a"]
    with socket.create_server(("127.0.0.1", first)):
        assert not is_free(first)
        second = ports.take("one", ["a"])["a"]
    assert second != first
    ports.forget("one")
    assert ports.take("one", ["a"])["a"] != second


def test_a_cut_ports_file_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "ports.json").write_text('{"one": {"a"')
    assert Ports(tmp_path / "ports.json").take("one", ["a"])["a"] >= PORT_FIRST


def test_no_usable_port_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(RetryableError, match="ss -ltn"):
        Ports(tmp_path / "ports.json").take("one", ["a"], usable=lambda _port: False)


def test_the_trust_store_is_one_that_java_reads() -> None:
    """Byte table of the module, with one certificate of three bytes."""
    store = trust_store([b"der"])
    body = (
        b"\xfe\xed\xfe\xed"  # magic
        b"\x00\x00\x00\x02"  # version
        b"\x00\x00\x00\x01"  # one entry
        b"\x00\x00\x00\x02"  # a trusted certificate
        b"\x00\x0bauthority-0"
        b"\x00\x00\x00\x00\x00\x00\x00\x00"  # created
        b"\x00\x05X.509"
        b"\x00\x00\x00\x03der"
    )
    salt = b"\0" + b"\0".join(bytes([letter]) for letter in PASSWORD.encode())
    assert store == body + hashlib.sha1(salt + b"Mighty Aphrodite" + body).digest()


def test_the_packaged_java_is_new_enough() -> None:
    assert java_version(packaged_java()) >= 17


def test_what_is_no_java_has_version_0(tmp_path: Path) -> None:
    assert java_version(tmp_path / "java") == 0
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'shim: not installed' >&2; exit 127\n")
    broken.chmod(0o755)
    assert java_version(broken) == 0


def described(brokers: int, *, error: int = 0) -> bytes:
    """An answer to DescribeCluster version 0, by hand from Kafka's message definition."""
    answer = struct.pack(">iBih", 1, 0, 0, error)
    answer += b"\x00"  # no error message
    answer += bytes([22 + 1]) + b"A" * 22  # cluster id
    answer += struct.pack(">i", 1)  # controller
    answer += bytes([brokers + 1])
    answer += b"".join(
        struct.pack(">i", 1) + b"\x0a127.0.0.1" + struct.pack(">iBB", 9092, 0, 0)
        for _ in range(brokers)
    )
    return struct.pack(">i", len(answer)) + answer + b"\x80\x00\x00\x00\x00"


@pytest.mark.parametrize(
    ("answer", "brokers"),
    [
        (described(1), 1),
        (described(0), 0),
        (described(1, error=35), 0),
        (described(1)[:20], 0),
        (b"", 0),
    ],
)
def test_brokers_are_counted(answer: bytes, brokers: int) -> None:
    assert count_brokers(answer) == brokers


def test_kafkas_jars_are_told_apart_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = tmp_path / "sums"
    sums.write_text(f"{hashlib.sha256(b'good').hexdigest()}  a.jar\n")
    monkeypatch.setattr(kafka_jars, "SUMS", sums)
    jars = tmp_path / "jars"
    jars.mkdir()
    assert kafka_jars.differences(jars) == ["a.jar"]
    (jars / "a.jar").write_bytes(b"bad")
    assert kafka_jars.differences(jars) == ["a.jar"]
    (jars / "a.jar").write_bytes(b"good")
    assert kafka_jars.differences(jars) == []
    (jars / "b.jar").write_bytes(b"more")
    assert kafka_jars.differences(jars) == ["b.jar"]


def test_the_cache_folder_follows_xdg_then_home() -> None:
    name = f"kafka-{kafka_jars.KAFKA_VERSION}"
    xdg = kafka_jars.cache_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"})
    assert str(xdg) == f"/x/tierlog/{name}"
    assert str(kafka_jars.cache_folder({"HOME": "/h"})) == f"/h/.cache/tierlog/{name}"


async def test_jars_that_cannot_be_fetched_name_the_ways_out(tmp_path: Path) -> None:
    """A java that fails as it does without a network."""
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'Connection refused' >&2; exit 1\n")
    java.chmod(0o755)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with pytest.raises(RetryableError, match="Connection refused") as failed:
        await kafka_jars.kafka_jars(java, environ, lambda *_: None)
    assert str(tmp_path / "cache") in failed.value.remedy
    assert [path.name for path in (tmp_path / "cache" / "tierlog").iterdir()] == ["kafka.lock"]


def test_sockets_that_nobody_listens_on_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seaweedfs, "SOCKETS", tmp_path)
    stale, alive = tmp_path / "seaweedfs-s3-1.sock", tmp_path / "seaweedfs-s3-2.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(alive))
        listener.listen()
        seaweedfs.remove_stale_sockets()
    assert [path.name for path in tmp_path.iterdir()] == [alive.name]


def spawn(tmp_path: Path, *argv: str) -> Child:
    launch = Launch(argv=argv, cwd=tmp_path, log=tmp_path / "log", env={"PATH": "/usr/bin:/bin"})
    return Child.spawn("child", launch, run_dir=tmp_path)


async def test_a_child_that_ignores_sigterm_is_killed_at_the_deadline(tmp_path: Path) -> None:
    program = "import signal,time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)"
    child = spawn(tmp_path, sys.executable, "-c", program + "; time.sleep(60)")
    while "up" not in log_tail(tmp_path / "log"):
        await asyncio.sleep(0.01)
    assert await child.stop(deadline_s=0.1) is False
    assert child.exit_code == -9
    assert not list(tmp_path.glob("*.pid"))


async def test_a_child_gives_way_to_others_by_itself_and_in_its_session(tmp_path: Path) -> None:
    group = Path("/proc/self/autogroup")
    program = "import os; print('nice', os.nice(0))"
    if group.exists():
        program += f"; print(open({str(group)!r}).read())"
    children = []
    for niceness in (0, 1, 2):  # side by side: the kernel takes one change at a time
        place = tmp_path / str(niceness)
        place.mkdir()
        argv, log = (sys.executable, "-c", program), place / "log"
        launch = Launch(argv=argv, cwd=place, log=log, env={"PATH": "/bin"}, niceness=niceness)
        children.append(Child.spawn("child", launch, run_dir=place))
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    for niceness, child in enumerate(children):
        assert await child.wait() == 0
        own, *of_group = log_tail(tmp_path / str(niceness) / "log").splitlines()
        assert own == f"nice {min(19, ours + niceness)}"
        assert [line.partition(" ")[2] for line in of_group if line] == (
            [f"nice {niceness}"] if group.exists() else []
        )


async def test_a_program_that_is_not_there_says_so_in_the_log(tmp_path: Path) -> None:
    child = spawn(tmp_path, "/nowhere/program")
    assert await child.wait() == 1
    assert "cannot run /nowhere/program" in log_tail(tmp_path / "log")


async def test_a_zombie_is_nobody_and_leftovers_without_process_are_forgotten(
    tmp_path: Path,
) -> None:
    process = subprocess.Popen(["true"])
    noted = identify(process.pid)
    process.wait()
    assert identify(process.pid) is None
    (tmp_path / "old.pid").write_text(json.dumps({"name": "old", **(noted or {"pid": 1})}))
    assert await end_leftovers(tmp_path) == []
    assert not list(tmp_path.glob("*.pid"))
