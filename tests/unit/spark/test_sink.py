"""A commit of a write: attached, there before, or overtaken by what its writer wrote since."""

from typing import ClassVar
from uuid import UUID

import pytest
from pyspark.sql.datasource import WriterCommitMessage

from tierlog.model.errors import RefusedError
from tierlog.model.ids import LedgerId
from tierlog.runtime.settings import ClientSettings, Settings, ZooKeeperSettings
from tierlog_spark import sink
from tierlog_spark.sink import EventStreamWriter, EventWriter, Wrote
from tierlog_spark.write_options import parse_write_options

SETTINGS = Settings.model_construct(
    client=ClientSettings(ingest_address="a:1"), zookeeper=ZooKeeperSettings(hosts="z:1")
)
WRITER = UUID(int=9 << 100)
NO_ROWS = Wrote(WRITER, None, 0)
DONE: list[WriterCommitMessage | None] = [Wrote(WRITER, LedgerId(7), 100), NO_ROWS, None]


class Staging:
    """Stages nothing; a stream that has batch 15 of every writer."""

    number = 16
    asked: ClassVar[list[bool]] = []

    def __init__(self, settings):
        self.settings = settings

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def check(self, name):
        assert name == "orders"

    def attach(self, name, ledger_ids, *, writer_id, number, size, tell_newest):
        assert (name, list(ledger_ids), writer_id, size) == ("orders", [7], WRITER, 100)
        self.asked.append(tell_newest)
        return max(self.number, number) if tell_newest else number


@pytest.fixture(autouse=True)
def _staging(monkeypatch):
    monkeypatch.setattr(sink, "SyncStaging", Staging)


def options(*, streaming, **given):
    return parse_write_options({"stream": "orders", **given}, SETTINGS, streaming=streaming)


def test_a_query_repeats_its_last_batch_and_goes_on():
    writer = EventStreamWriter(options(streaming=True))
    for batch_id in (15, 16, 99):
        writer.commit(DONE, batch_id)


@pytest.mark.parametrize("batch_id", [0, 11, 14])
def test_a_query_whose_checkpoint_is_older_than_the_stream_is_told(batch_id):
    writer = EventStreamWriter(options(streaming=True))
    with pytest.raises(RefusedError, match=f"has batch 15 .* this is batch {batch_id},") as caught:
        writer.commit(DONE, batch_id)
    assert "new checkpoint" in caught.value.remedy
    # Nothing is lost of a batch that has no rows.
    writer.commit([NO_ROWS, None], batch_id)
    writer.commit([], batch_id)


def test_a_batch_write_that_was_overtaken_is_passed_over():
    given = {"writerId": str(WRITER), "batchId": "3"}
    EventWriter(options(streaming=False, **given)).commit(DONE)
    assert Staging.asked[-1] is False, "what is there is not asked about again, which may fail"
