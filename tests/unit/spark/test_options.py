"""Options are checked, and what is wrong with one is said with its name."""

import pytest
from pydantic import SecretStr

from tierlog.model.errors import RefusedError
from tierlog.model.ids import EntryId, LedgerId
from tierlog.model.position import Position
from tierlog.runtime.settings import S3Settings, Settings
from tierlog_spark.columns import Table
from tierlog_spark.options import ReadMode, parse_options, place_options

SETTINGS = Settings.model_construct(
    s3=S3Settings(bucket="from-settings", key_prefix="p"),
    client=Settings.model_fields["client"].default,
)


def parsed(**given):
    return parse_options({"stream": "orders", **given}, SETTINGS)


def test_what_is_not_said_comes_from_the_settings():
    found = parsed()
    assert (found.s3.bucket, found.s3.key_prefix) == ("from-settings", "p")
    assert (found.table, found.mode, found.push_filters) == (Table.EVENTS, ReadMode.DIRECT, True)
    assert (found.start, found.end, found.start_ms, found.end_ms) == (None, None, None, None)


def test_what_is_said_wins_whatever_its_case():
    found = parsed(
        BUCKET="b",
        Prefix="x/y",
        accessKey="a",
        secretkey="s",
        START="12:3",
        end="12:9",
        starttime="2026-11-01T00:00:00+01:00",
        endTime="1793500000000",
        columns="payload, stream",
        partitionBytes="1g",
        fetchBytes="512k",
        pushDownFilters="False",
    )
    assert (found.s3.bucket, found.s3.key_prefix, found.s3.access_key) == ("b", "x/y", "a")
    assert found.s3.secret_key is not None
    assert found.s3.secret_key.get_secret_value() == "s"
    assert found.start == Position(LedgerId(12), EntryId(3))
    assert found.start_ms == 1793487600000
    assert found.end_ms == 1793500000000
    assert found.columns == ("payload", "stream")
    assert (found.partition_bytes, found.fetch_bytes) == (2**30, 2**19)
    assert not found.push_filters


@pytest.mark.parametrize(
    "wanted",
    [
        S3Settings(bucket="b", region="eu-central-1"),
        S3Settings(
            bucket="b",
            key_prefix="x",
            endpoint_url="http://127.0.0.1:2",
            access_key="k",
            secret_key=SecretStr("t"),
        ),
    ],
)
def test_a_place_is_that_one_whatever_the_settings_are_of_who_reads_it(wanted):
    other = S3Settings(
        bucket="c",
        key_prefix="p",
        endpoint_url="http://127.0.0.1:1",
        access_key="a",
        secret_key=SecretStr("s"),
    )
    settings = SETTINGS.model_copy(update={"s3": other})
    found = parse_options({"stream": "orders", **place_options(wanted)}, settings)
    assert found.s3 == wanted


def test_a_time_between_two_ms_begins_at_the_later_one():
    assert parsed(startTime="2026-11-01T00:00:00.000001Z").start_ms == 1793491200001


def test_streams_and_columns_are_named_once_each():
    found = parse_options({"streams": "a, b,a", "payload": "false"}, SETTINGS)
    assert found.streams == ("a", "b")
    assert "payload" not in found.columns
    assert "entry_id" in found.columns


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"strean": "x"}, "Did you mean stream?"),
        ({"nonsense": "1"}, "There are stream"),
        ({"stream": "no spaces"}, "not allowed"),
        ({"streams": "b"}, "not both"),
        ({"keys": "k"}, "only one"),
        ({"readMode": "magic"}, "direct, service, auto"),
        ({"table": "views"}, "streams, ledgers, attempts"),
        ({"table": "ledgers", "readMode": "auto"}, "manifests alone"),
        ({"table": "ledgers", "start": "1:0"}, "option start: it chooses among events"),
        ({"table": "streams", "END": "latest"}, "option end"),
        ({"table": "attempts", "startTime": "2026-01-01T00:00:00Z"}, "option startTime"),
        ({"table": "ledgers", "endtime": "1"}, "option endTime"),
        ({"table": "attributes", "maxEntriesPerTrigger": "5"}, "option maxEntriesPerTrigger"),
        ({"table": "ledgers", "maxBytesPerTrigger": "5"}, "option maxBytesPerTrigger"),
        ({"table": "ledgers", "failOnDataLoss": "false"}, "option failOnDataLoss"),
        ({"start": "12"}, "LEDGER:ENTRY"),
        ({"start": "latest"}, "option start"),
        ({"end": "earliest"}, "option end"),
        ({"start": "3:0", "end": "2:9"}, "behind the end"),
        ({"startTime": "yesterday"}, "option startTime"),
        ({"startTime": "2026-11-01T00:00:00"}, "no zone"),
        ({"startTime": "2", "endTime": "1"}, "behind endTime"),
        ({"columns": "stream,size"}, "no column 'size'"),
        ({"columns": ","}, "names nothing"),
        ({"columns": "stream", "payload": "false"}, "option payload"),
        ({"partitionBytes": "0"}, "option partitionBytes"),
        ({"partitionBytes": "64 cows"}, "option partitionBytes"),
        ({"fetchBytes": "1g"}, "option fetchBytes"),
        ({"pushDownFilters": "maybe"}, "neither true nor false"),
        ({"endpointUrl": "minio:9000"}, "'minio:9000' is no address"),
        ({"accessKey": "a"}, "belong together"),
        ({"accessKey": "", "secretKey": "s"}, "belong together"),
    ],
)
def test_what_makes_no_sense_is_refused(given, words):
    with pytest.raises(RefusedError) as caught:
        parsed(**given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"streams": "a,b", "start": "1:0"},
        {"keys": "k", "startTime": "1"},
        {"keys": "k", "readMode": "service"},
    ],
)
def test_what_does_not_go_together_is_refused(given):
    with pytest.raises(RefusedError):
        parse_options(given, SETTINGS)
