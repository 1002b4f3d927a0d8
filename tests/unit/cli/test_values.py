"""What people write as sizes and times, and what tables and dumps show."""

import pytest

from tierlog.cli.demo.records import parse
from tierlog.cli.demo.report import picture_of
from tierlog.cli.objects import hex_lines
from tierlog.cli.output import size_text, time_text
from tierlog.cli.policy import parse_size, parse_time, parse_yes
from tierlog.cli.up import without_password
from tierlog.model.errors import RefusedError

LOG = """\
hello (2.10-3) unstable; urgency=medium

  * First change
    goes on.
  * Second.

 -- A. Person <a@example.org>  Mon, 26 Dec 2022 16:30:00 +0100

hello (2.10-2) stable testing; urgency=low

  * Older.

 -- A. Person <a@example.org>  nonsense

hello (2.10-1) unstable; urgency=low

  * Oldest.

 -- A. Person <a@example.org>  Sun, 22 Mar 2015 11:56:00 +0000
"""


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512", 512), ("1k", 1024), ("64M", 64 << 20), ("1GiB", 1 << 30), ("2mb", 2 << 20)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [("500ms", 500), ("30s", 30_000), ("1.5m", 90_000), ("4h", 14_400_000), ("never", -1)],
)
def test_times(text, time_ms):
    assert parse_time(text) == time_ms


@pytest.mark.parametrize("text", ["", "x", "true", "YES", "1"])
def test_yes_and_no_are_the_only_answers(text):
    assert (parse_yes("yes"), parse_yes("no")) == (True, False)
    with pytest.raises(RefusedError, match="is not yes or no"):
        parse_yes(text)


@pytest.mark.parametrize("text", ["", "x", "-5", "64X", "5 parsecs", "1e3"])
def test_what_is_no_amount_is_refused_with_examples(text):
    with pytest.raises(RefusedError) as caught:
        parse_size(text)
    assert "64M" in caught.value.remedy
    with pytest.raises(RefusedError):
        parse_time(text)


@pytest.mark.parametrize("text", ["99999999999999999999G", "9" * 400, "8589934592G"])
def test_more_than_64_bits_hold_is_refused(text):
    with pytest.raises(RefusedError, match="64 bits"):
        parse_size(text)
    with pytest.raises(RefusedError, match="64 bits"):
        parse_time(f"{text.rstrip('G')}000000000d")


def test_a_changelog_becomes_records_without_people():
    records = list(parse(LOG))
    assert [(one.version, one.text) for one in records] == [
        ("2.10-3", "* First change\ngoes on.\n* Second."),
        ("2.10-1", "* Oldest."),
    ]
    assert records[0].time_ms == 1672068600000
    assert not any("Person" in one.text or "example.org" in one.text for one in records)


def test_a_dump_leaves_out_what_repeats():
    lines = list(hex_lines(bytes(64) + b"ab"))
    assert lines[0].startswith("00000000  00 00")
    assert lines[1] == "*"
    assert lines[2].startswith("00000040  61 62")
    assert lines[2].endswith("|ab|")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@cache:6379/0", "redis://***@cache:6379/0"),
        ("redis://someone:secret@cache/0", "redis://***@cache/0"),
        ("redis://cache:6379/0", "redis://cache:6379/0"),
    ],
)
def test_addresses_are_shown_without_their_password(url, shown):
    assert without_password(url) == shown


def test_texts_of_sizes_and_times():
    assert [size_text(size) for size in (0, 1023, 1024, 5 << 20)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
    ]
    assert time_text(0) == "-"
    assert time_text(1700000000000) == "2023-11-14 22:13:20"


def test_the_picture_is_in_proportion_and_shows_every_ledger():
    ledgers = [
        {"entries": 900, "where": "S3"},
        {"entries": 99, "where": "both"},
        {"entries": 1, "where": "local"},
    ]
    marks = [marks for marks, _ in picture_of(ledgers, width=100)]
    assert marks == ["#" * 90, "=" * 10, "."]
