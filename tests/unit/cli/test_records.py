"""Where the demo's records come from: changelogs, else the history of the repository."""

import gzip
import subprocess

import pytest

from tierlog.cli.demo.records import load, replayed
from tierlog.model.errors import RefusedError

LOG = """\
hello (2.10-3) unstable; urgency=medium

  * A change.

 -- A. Person <a@example.org>  Mon, 26 Dec 2022 16:30:00 +0100
"""


@pytest.fixture
def repository(tmp_path):
    """A repository with two commits."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    for text in ("first: what it was for", "second: why"):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", text], check=True)
    return folder


def test_changelogs_come_before_the_history(tmp_path, repository):
    (tmp_path / "doc" / "hello").mkdir(parents=True)
    with gzip.open(tmp_path / "doc" / "hello" / "changelog.Debian.gz", "wt") as file:
        file.write(LOG)
    found = load(tmp_path / "doc", repository)
    assert [one.version for one in found.records] == ["2.10-3"]
    assert found.name.startswith("1 packages' changelogs")


def test_without_changelogs_the_history_is_replayed_until_it_is_enough(tmp_path, repository):
    found = load(tmp_path / "no-doc", repository)
    assert found.name == "this repository's git history"
    assert sorted(one.text for one in found.records) == ["first: what it was for", "second: why"]
    events = list(replayed(found, 10_000))
    assert sum(len(one.payload) for one in events) >= 10_000
    assert len({(one.event_time_ms, one.payload) for one in events}) == len(events)


def test_with_neither_the_way_out_is_named(tmp_path):
    with pytest.raises(RefusedError, match="no records") as caught:
        load(tmp_path / "no-doc", tmp_path)
    assert "git" in caught.value.remedy
