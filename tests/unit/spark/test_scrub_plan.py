"""A crew of executors sees what one process sees: every ledger in one look, every object once."""

import json
import random
from uuid import UUID

import pytest

from tierlog.cli.scrub import read_report
from tierlog.format.attribute_objects import attribute_key, attributes_folder
from tierlog.format.keys import ObjectRole, object_keys
from tierlog.format.manifest import manifest_key
from tierlog.model.ids import LedgerId, StreamName
from tierlog.model.scrub import Finding, FindingKind, ScrubReport, ScrubState, ScrubWish
from tierlog.offload.scrub_crew import ListedAttempt
from tierlog.ports.objects import ObjectInfo
from tierlog_spark.jobs.frame import JobReport
from tierlog_spark.jobs.scrub_plan import Lister, joined, look_items, report_counts, report_rows

LOGS = StreamName("logs")


@pytest.mark.parametrize("seed", range(10))
def test_every_ledger_is_in_one_look_and_looks_are_no_longer_than_they_should_be(seed):
    rng = random.Random(seed)
    ledgers = [(LedgerId(number), rng.randrange(60)) for number in range(rng.randrange(40))]
    found = look_items(LOGS, ledgers, bytes_max=100)
    assert [one for item in found for one in item.ledgers] == [one for one, _ in ledgers]
    assert sum(item.bytes for item in found) == sum(size for _, size in ledgers)
    assert all(item.bytes <= 100 for item in found)
    assert len(found) >= 1, "the manifest of an empty stream is read, too"


def test_one_that_is_longer_than_a_look_has_one_of_its_own():
    found = look_items(LOGS, [(LedgerId(1), 5), (LedgerId(2), 500), (LedgerId(3), 5)], bytes_max=9)
    assert [item.ledgers for item in found] == [(1,), (2,), (3,)]


def info(key: str, size: int = 3) -> ObjectInfo:
    return ObjectInfo(key=key, size=size, etag="", metadata={}, modified_ms=1)


def test_what_is_listed_is_told_by_attempt_and_by_index():
    one = object_keys("", UUID(int=1), LedgerId(4))
    other = object_keys("", UUID(int=1), LedgerId(5))
    folder = attributes_folder("", LOGS, UUID(int=9))
    keys = [
        one.data,
        one.index,
        other.data,
        manifest_key("", LOGS, UUID(int=9), 1),
        *(attribute_key(folder, start=at, owner_epoch=1, suffix=UUID(int=at)) for at in (0, 8)),
        "holiday.jpg",
    ]
    lister = Lister("")
    for size, key in enumerate(keys):
        lister.see(info(key, size))
    found = joined([lister.listing(), Lister("").listing()])
    assert (found.objects, found.foreign, found.index_keys) == (7, 1, [keys[4]])
    assert found.attempts == [
        ListedAttempt(UUID(int=1), LedgerId(4), ((ObjectRole.DATA, 0), (ObjectRole.INDEX, 1))),
        ListedAttempt(UUID(int=1), LedgerId(5), ((ObjectRole.DATA, 2),)),
    ]


def test_the_report_is_what_the_command_line_repairs_from(tmp_path):
    report = ScrubReport(scrub_id=UUID(int=1), wish=ScrubWish(), started_ms=1, findings_max=9)
    report.add(Finding(kind=FindingKind.DAMAGED_DATA, stream="logs", ledger_id=LedgerId(7)))
    report.add(Finding(kind=FindingKind.ORPHAN_OBJECTS, ledger_id=LedgerId(3), uuid=UUID(int=2)))
    report.add(Finding(kind=FindingKind.MANIFEST_UNREADABLE, stream="logs"))
    report.add(Finding(kind=FindingKind.TOO_YOUNG))
    report.skip("stream b: unreachable")
    report.state = ScrubState.DONE
    counts = report_counts(report)
    assert (counts["remaining"], counts["unread"], counts["found_too_young"]) == (3, 1, 1)
    made = JobReport(job="scrub", dry_run=False, counts=counts, rows=report_rows(report))
    path = tmp_path / "report.json"
    path.write_text(json.dumps(made.document()), encoding="utf-8")
    told = read_report(path)
    assert (told.ledgers, told.cut) == ([3, 7], "its scrub could not look at everything")
    assert made.rows[0]["remedy"]
    assert made.rows[-1]["cause"] == "stream b: unreachable"
