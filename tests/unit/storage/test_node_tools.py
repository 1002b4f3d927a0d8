"""``tierlog node``, ``journal``, ``entrylog`` and ``doctor`` over a real directory.

Every flipped byte that carries something is reported with its file; nothing is changed by looking.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest
import typer
from typer.testing import CliRunner

from tests.unit.storage.node_kit import SMALL, make_run, open_node, read_all, running
from tierlog.adapters.files import DiskFiles
from tierlog.format import records
from tierlog.model.ids import LedgerId, NodeId
from tierlog.model.node import Cookie
from tierlog_ingest.cli import doctor, entrylog, journal, node
from tierlog_ingest.inspection import doctor as inspection_doctor
from tierlog_ingest.inspection.doctor import file_system
from tierlog_ingest.storage.index.index_files import index_path
from tierlog_ingest.storage.journal.segments import segment_path
from tierlog_ingest.storage.seen_ids import SeenIds

LEDGERS = (1, 2, 300)
IN_LOGS, IN_JOURNAL = 40, 5


async def fill(path, *, ledger_dirs=(), freed=()):
    """Make a node with entries in its logs and more in its journal; end it like a kill."""
    files = DiskFiles(path)
    others = [DiskFiles(one) for one in ledger_dirs]
    made = await open_node(files, SMALL, ledger_dirs=tuple(others))
    async with running(made):
        for first in range(IN_LOGS):
            for ledger_id in LEDGERS:
                await made.add(make_run(ledger_id, first * 2, count=2, size=300))
        await made.fence(LedgerId(2))
        await made.checkpoint()
        for first in range(IN_LOGS, IN_LOGS + IN_JOURNAL):
            for ledger_id in (1, 300):
                await made.add(make_run(ledger_id, first * 2, count=2, size=300))
        for ledger_id in freed:
            await made.free(LedgerId(ledger_id))
        await asyncio.sleep(0.2)
        for at, one in enumerate((path, *ledger_dirs)):
            cookie = Cookie(cluster_id=UUID(int=1), node_id=NodeId("n"), instance_id=UUID(int=at))
            (one / "cookie").write_bytes(records.encode_cookie(cookie))
            shutil.copytree(one, one.with_name(f"{one.name}-killed"))
    for one in (files, *others):
        one.close()
    return path.with_name(f"{path.name}-killed")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    return asyncio.run(fill(tmp_path_factory.mktemp("node") / "data"))


TIERLOG = typer.Typer()
for noun, commands in {"node": node, "journal": journal, "entrylog": entrylog}.items():
    TIERLOG.add_typer(commands.app, name=noun)
TIERLOG.add_typer(doctor.app, name="doctor")


def run(*arguments):
    result = CliRunner().invoke(TIERLOG, [str(one) for one in arguments])
    return result, json.loads(result.stdout) if result.stdout.startswith(("{", "[")) else None


def contents(path):
    return {
        one.relative_to(path): one.read_bytes()
        for one in path.rglob("*")
        if one.is_file() and one.name != "lock"
    }


def fsck(path, *more):
    return run("node", "fsck", path, "-q", "-o", "json", *more)


def test_a_sound_node(killed):
    before = contents(killed)
    result, found = fsck(killed)
    assert result.exit_code == 0, result.output
    assert found["sound"]
    assert found["problems"] == []
    assert found["would_be_recovered"] == {
        "records": {"run": 2 * IN_JOURNAL},
        "entries": 4 * IN_JOURNAL,
        "bytes": found["would_be_recovered"]["bytes"],
        "ledgers": 2,
    }
    assert found["index"] == {"files": 3, "pages": 3, "slots": 2 * IN_LOGS * len(LEDGERS)}
    assert sum(one["runs"] for one in found["entry_logs"]) == IN_LOGS * len(LEDGERS)
    assert (found["ledgers"], found["fences"]) == (3, 1)
    assert contents(killed) == before


def test_a_ledger_that_was_freed_since_the_mark_is_no_problem(tmp_path):
    copy = asyncio.run(fill(tmp_path / "data", freed=(300,)))
    result, found = fsck(copy)
    assert result.exit_code == 0, result.output
    assert (found["ledgers"], found["freed_ids"]) == (2, 1)
    assert found["would_be_recovered"]["records"]["freed"] == 1
    _, rows = run("node", "ledgers", copy, "-q", "-o", "json")
    assert [row["ledger_id"] for row in rows] == [1, 2]


def test_the_table(killed):
    result, _ = run("node", "fsck", killed, "-q")
    assert result.exit_code == 0
    assert "would be recovered" in result.stdout
    assert "20 entries" in result.stdout


def test_ledgers(killed):
    result, rows = run("node", "ledgers", killed, "-q", "-o", "json")
    assert result.exit_code == 0
    assert [row["ledger_id"] for row in rows] == list(LEDGERS)
    assert [row["fenced"] for row in rows] == [False, True, False]
    assert rows[0]["last_entry_id"] == 2 * (IN_LOGS + IN_JOURNAL) - 1
    assert rows[1]["last_entry_id"] == 2 * IN_LOGS - 1
    assert (rows[0]["entries"], rows[0]["journal_entries"]) == (2 * IN_LOGS, 2 * IN_JOURNAL)


def test_recover_does_what_a_start_does(killed, tmp_path):
    copy = shutil.copytree(killed, tmp_path / "copy")
    result, found = run("node", "recover", copy, "-q", "-o", "json")
    assert result.exit_code == 0, result.output
    assert found["damages"] == []
    _, after = fsck(copy)
    assert after["sound"]
    assert after["would_be_recovered"]["entries"] == 0

    async def read():
        files = DiskFiles(copy)
        async with running(await open_node(files, SMALL)) as again:
            found = [run for ledger_id in LEDGERS for run in await read_all(again, ledger_id)]
        files.close()
        return found

    found = asyncio.run(read())
    assert len(found) == IN_LOGS * len(LEDGERS) + 2 * IN_JOURNAL


def test_trusting_the_metadata_store_again_is_said_once_and_aloud(killed, tmp_path):
    copy = shutil.copytree(killed, tmp_path / "copy")

    async def keep(seen_ids=None):
        files = DiskFiles(copy)
        async with running(await open_node(files, SMALL)) as node:
            if seen_ids is not None:
                await node.keep_seen_ids(seen_ids)
            kept = node.seen_ids
        files.close()
        return kept

    before = contents(copy)
    result, found = run("node", "trust-metadata", copy, "--yes", "-o", "json")
    assert result.exit_code == 0, result.output
    assert (found["was_stopped"], found["gc_stopped"]) == (False, False)
    assert contents(copy) == before, "no doubt, no change"
    doubting = SeenIds(next_id=301, tally=4, behind_at=12)
    asyncio.run(keep(doubting))
    before = contents(copy)
    result, _ = run("node", "trust-metadata", copy, "-o", "json")
    assert result.exit_code == 2
    assert "ids below 301 were given" in result.stderr
    assert "12 next" in result.stderr
    assert "--yes" in result.stderr
    assert contents(copy) == before
    result, found = run("node", "trust-metadata", copy, "--yes", "-o", "json")
    assert result.exit_code == 0, result.output
    assert found == {
        "was_stopped": True,
        "gc_stopped": False,
        "next_id_seen": 301,
        "next_id_found": 12,
    }
    assert asyncio.run(keep()) == SeenIds(trusted_to=300)
    _, after = fsck(copy)
    assert (after["sound"], after["ledgers"]) == (True, 3)


def test_dumps(killed):
    result, rows = run("journal", "dump", killed, "-o", "json")
    assert result.exit_code == 0, result.output
    assert [row["kind"] for row in rows] == ["RUN"] * 2 * IN_JOURNAL
    assert rows[0]["first"] == 2 * IN_LOGS
    result, rows = run("journal", "dump", killed, "--all", "-o", "json")
    assert len(rows) >= 2 * IN_JOURNAL
    assert {row["segment"] for row in rows} == {
        int(one.stem, 16) for one in (killed / "journal").glob("*.journal")
    }
    _, found = fsck(killed)
    runs = 0
    for one in found["entry_logs"]:
        result, rows = run("entrylog", "dump", killed, one["log_id"], "-o", "json")
        assert result.exit_code == 0
        # What is behind its length was written after the mark: a start cuts it.
        runs += sum(row["offset"] < one["bytes"] for row in rows)
        result, rows = run("entrylog", "dump", killed, one["log_id"], "--ledger", "2", "-o", "json")
        assert {row["ledger_id"] for row in rows} <= {2}
        assert not any(row["signed"] for row in rows)
    assert runs == IN_LOGS * len(LEDGERS)


@pytest.mark.parametrize("output", ["jsonl", "table"])
def test_dumps_that_nobody_reads_to_their_end(killed, output):
    """As with ``| head``: the lock is given back, and nothing is said."""
    for command in (("journal",), ("entrylog", 1)):
        noun, *more = command
        arguments = [sys.executable, "-m", "tierlog.cli.main", noun, "dump", killed, *more]
        with subprocess.Popen(
            [*map(str, arguments), "-o", output], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            errors = process.stderr.read()
        assert (process.returncode, errors) == (0, b"")


def test_a_damaged_state_takes_no_dump_with_it(killed, tmp_path):
    copy = flipped(killed, tmp_path, "state", 20)
    result, _ = run("journal", "dump", copy)
    assert result.exit_code == 6
    assert "--all" in result.stderr
    result, rows = run("journal", "dump", copy, "--all", "-o", "json")
    assert result.exit_code == 0, result.stderr
    assert len(rows) >= 2 * IN_JOURNAL
    _, found = fsck(copy)
    assert [(one["path"], one["verdict"]) for one in found["problems"]] == [("state", "refused")]
    assert found["entry_logs"][0]["runs"] >= IN_LOGS * len(LEDGERS)


def test_damage_of_an_earlier_start_is_still_told(killed, tmp_path):
    log = min((killed / "logs").iterdir())
    copy = flipped(killed, tmp_path, f"logs/{log.name}", 32 + 500)
    (copy / index_path(1)).unlink()
    result, found = run("node", "recover", copy, "-q", "-o", "json")
    assert result.exit_code == 0, result.output
    journal_path = max((killed / "journal").glob("*.journal"))
    again = shutil.copytree(killed, tmp_path / "again")
    (again / "journal" / journal_path.name).unlink()
    result, found = run("node", "recover", again, "-q", "-o", "json")
    assert result.exit_code == 6
    assert found["limbo"]
    assert len(found["damages"]) == 1
    _, found = fsck(again)
    assert found["doubtful"]["all"]


def test_silly_names(killed, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for noun in (("node", "fsck"), ("node", "ledgers"), ("node", "recover"), ("journal", "dump")):
        result, _ = run(*noun, tmp_path / "missing")
        assert (result.exit_code, "is not there" in result.stderr) == (3, True)
        result, _ = run(*noun, tmp_path / "file")
        assert (result.exit_code, "is no directory" in result.stderr) == (3, True)
        result, _ = run(*noun, killed, "--ledger-directory", killed)
        assert (result.exit_code, "named twice" in result.stderr) == (2, True)
    assert run("entrylog", "dump", killed, "--", "-1")[0].exit_code == 2
    assert run("entrylog", "dump", killed, 1, "--ledger", "-1")[0].exit_code == 2
    assert not (tmp_path / "missing").exists()


def test_a_log_that_is_not_there(killed):
    result, _ = run("entrylog", "dump", killed, 999)
    assert result.exit_code == 3
    assert "tierlog node fsck lists them" in result.stderr


def flipped(path, tmp_path, name, offset):
    copy = shutil.copytree(path, tmp_path / "flipped", dirs_exist_ok=True)
    data = bytearray((copy / name).read_bytes())
    data[offset] ^= 0x10
    (copy / name).write_bytes(data)
    return copy


@pytest.mark.parametrize(
    "kind", ["journal", "log", "index", "index header", "state", "cookie", "log header"]
)
def test_a_flipped_byte_is_named(killed, tmp_path, kind):
    logs = sorted((killed / "logs").iterdir())
    _, sound = fsck(killed)
    segment_id, mark_offset = sound["journal"]["mark"]
    journal = (killed / segment_path(segment_id)).read_bytes()
    # Behind a short record lie zeros up to the next block, which say nothing.
    of_record = next(at for at in range(mark_offset + 200, len(journal)) if journal[at])
    name, offset = {
        "journal": (segment_path(segment_id), of_record),
        "log": (f"logs/{logs[0].name}", 32 + 500),
        "log header": (f"logs/{logs[0].name}", 17),
        "index": (index_path(2), 4096 + 30),
        "index header": (index_path(2), 2000),
        "state": ("state", 20),
        "cookie": ("cookie", 4),
    }[kind]
    result, found = fsck(flipped(killed, tmp_path, name, offset))
    assert result.exit_code == 6, result.output
    assert any(one["path"] == name for one in found["problems"]), found["problems"]
    verdicts = {one["verdict"] for one in found["problems"]}
    expected = {"index": "rebuilt", "index header": "rebuilt", "state": "refused"}
    assert expected.get(kind, "refused" if kind == "cookie" else "damaged") in verdicts


@pytest.mark.parametrize("what", ["log", "index", "journal", "state", "cookie"])
def test_a_file_that_is_gone_is_named(killed, tmp_path, what):
    copy = shutil.copytree(killed, tmp_path / "copy")
    name = {
        "log": f"logs/{min((killed / 'logs').iterdir()).name}",
        "index": index_path(300),
        "journal": f"journal/{max((killed / 'journal').glob('*.journal')).name}",
        "state": "state",
        "cookie": "cookie",
    }[what]
    (copy / name).unlink()
    result, found = fsck(copy)
    assert result.exit_code == 6
    assert any(one["path"] == name for one in found["problems"])


def test_seeded_flips_of_logs_are_all_found(killed, tmp_path):
    rng = random.Random(5)
    log = min((killed / "logs").iterdir())
    _, sound = fsck(killed)
    assert sound["entry_logs"][0]["log_id"] == int(log.stem)
    for _ in range(30):
        # What is behind that was written after the mark: it is cut, and comes from the journal.
        offset = rng.randrange(sound["entry_logs"][0]["bytes"])
        result, found = fsck(flipped(killed, tmp_path, f"logs/{log.name}", offset))
        assert result.exit_code == 6, offset
        assert not found["sound"]
        shutil.rmtree(tmp_path / "flipped")


def damaged(path, rng):
    """Damage one file of a node in a random way."""
    names = sorted(one for one in path.rglob("*") if one.is_file() and one.suffix != ".spare")
    one = rng.choice([name for name in names if name.name != "lock"])
    data = bytearray(one.read_bytes())
    how = rng.choice(["flip", "cut", "zeros", "grow", "gone"])
    at = rng.randrange(len(data))
    if how == "gone":
        one.unlink()
        return
    if how == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del data[at:]
    elif how == "zeros":
        data[at : at + 600] = bytes(len(data[at : at + 600]))
    else:
        data += rng.randbytes(5000)
    one.write_bytes(data)


def test_no_damage_makes_a_command_fail_and_what_is_sound_starts(killed, tmp_path):
    sound = 0
    for seed in range(20):
        rng = random.Random(seed)
        copy = shutil.copytree(killed, tmp_path / f"{seed}")
        for _ in range(rng.choice([1, 1, 3])):
            damaged(copy, rng)
        found = {"fsck": fsck(copy)[0].exit_code}
        for command in (("node", "ledgers"), ("journal", "dump", "--all"), ("node", "recover")):
            found[command[1]] = run(*command, copy, "-o", "json")[0].exit_code
        assert set(found.values()) <= {0, 3, 6}, (seed, found)
        if found["fsck"] == 0:
            sound += 1
            assert (found["recover"], fsck(copy)[0].exit_code) == (0, 0), seed
        shutil.rmtree(copy)
    assert 0 < sound < 10


def test_several_directories(tmp_path):
    others = [tmp_path / "one", tmp_path / "two"]
    copy = asyncio.run(fill(tmp_path / "data", ledger_dirs=others))
    options = [part for one in others for part in ("--ledger-directory", f"{one}-killed")]
    result, found = fsck(copy, *options)
    assert result.exit_code == 0, result.output
    assert {one["directory"] for one in found["entry_logs"]} <= {0, 1}
    assert found["index"]["files"] == 3
    result, found = fsck(copy)
    assert result.exit_code == 6
    assert found["problems"][0]["verdict"] == "refused"


def test_format_asks_first(killed, tmp_path):
    copy = shutil.copytree(killed, tmp_path / "copy")
    result, _ = run("node", "format", copy)
    assert result.exit_code == 2
    assert "Add --yes" in result.stderr
    assert contents(copy) == contents(killed)
    result, found = run("node", "format", copy, "--yes", "-o", "json")
    assert result.exit_code == 0
    assert contents(copy) == {}
    assert found == {"directory": str(copy), "files_removed": len(contents(killed))}
    result, _ = run("node", "fsck", copy)
    assert result.exit_code == 3


def test_a_directory_in_use_is_left_alone(killed):
    files = DiskFiles(killed)
    files.lock()
    try:
        result, _ = run("node", "fsck", killed)
    finally:
        files.close()
    assert result.exit_code == 5
    assert "in use by process" in result.stderr


def test_what_is_no_node_directory(tmp_path):
    # A program's own folders have such names, too.
    (tmp_path / "state").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "precious").touch()
    for command in ("fsck", "ledgers", "recover", "format"):
        more = ["--yes"] if command == "format" else []
        result, _ = run("node", command, tmp_path, *more)
        assert result.exit_code == 3
        assert "not a storage node's data directory" in result.stderr
    assert {one.name for one in tmp_path.rglob("*")} == {"state", "logs", "precious"}


def test_doctor(tmp_path):
    result, rows = run("doctor", "--dir", tmp_path, "-o", "json")
    checks = {row["check"]: row for row in rows}
    assert set(checks) == {"directory", "fsync", "free space", "open files"}
    assert "ms" in checks["fsync"]["value"]
    assert all(row["remedy"] for row in rows if row["result"] != "ok")
    assert [one.name for one in tmp_path.iterdir()] == ["lock"]
    result, rows = run("doctor", "--dir", tmp_path / "missing", "-o", "json")
    assert result.exit_code == 5
    assert rows[0]["result"] == "failed"
    (tmp_path / "file").write_bytes(b"")
    result, rows = run("doctor", "--dir", tmp_path / "file", "-o", "json")
    assert result.exit_code == 5
    assert "is no directory" in rows[0]["value"]


MOUNTS = """\
/dev/root / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
/dev/vdb /dev/shm/my\\040disk xfs rw 0 0
"""


def test_a_disk_in_memory_is_told_from_one_that_stays():
    kinds = {"/": "ext4", "/dev/shmx": "ext4", "/dev/shm/n": "tmpfs", "/dev/shm/my disk/n": "xfs"}
    for directory, kind in kinds.items():
        assert file_system(Path(directory), MOUNTS) == kind
    assert file_system(Path("/"), "") == ""


def test_doctor_warns_of_a_disk_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection_doctor, "mounts", lambda: f"tmpfs {tmp_path} tmpfs rw 0 0\n")
    result, rows = run("doctor", "--dir", tmp_path, "-o", "json")
    assert result.exit_code == 0
    (fsync,) = [row for row in rows if row["check"] == "fsync"]
    assert (fsync["result"], "tmpfs" in fsync["remedy"]) == ("warning", True)
