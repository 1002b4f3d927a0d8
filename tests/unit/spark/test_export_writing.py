"""A task's files: each event in one of them, by the day it was published; schemas of payloads."""

import hashlib
import io
import pickle
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf import timestamp_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from pyspark.cloudpickle import cloudpickle

from tierlog.model.errors import RefusedError
from tierlog_spark.jobs.export.log import NO_DATE, file_number
from tierlog_spark.jobs.export.protobufs import ProtobufSchema
from tierlog_spark.jobs.export.targets import FolderTarget
from tierlog_spark.jobs.export.values import JsonSchema
from tierlog_spark.jobs.export.writing import WriteTask, by_day, with_values, written

DAY_US = 86_400_000_000
TIMES = pa.timestamp("us", "UTC")


def batch_of(first, times_us, payloads=None):
    count = len(times_us)
    return pa.RecordBatch.from_pydict(
        {
            "stream": ["s"] * count,
            "ledger_id": [7] * count,
            "entry_id": list(range(first, first + count)),
            "event_index": [0] * count,
            "publish_time": pa.array(times_us, TIMES),
            "payload": pa.array(payloads or [b"p" * 100] * count, pa.binary()),
        }
    )


def task_of(folder, **more):
    return WriteTask(
        target=FolderTarget(folder), number=5, run="c" * 32, **{"file_bytes": 10**6, **more}
    )


def read(folder, row):
    body = (folder / row["name"]).read_bytes()
    assert (len(body), hashlib.sha256(body).hexdigest()) == (row["bytes"], row["sha256"])
    return pq.ParquetFile(io.BytesIO(body)).read()


def run(task, batches, attempt=3):
    return list(written(task, batches, attempt=attempt))


def test_each_event_is_in_one_file_of_its_day(tmp_path):
    days = [0, 20_000, 20_001]
    batches = [
        batch_of(100 * number, [day * DAY_US + number for day in days for _ in range(20)])
        for number in range(30)
    ]
    rows = run(task_of(tmp_path, file_bytes=40_000), [*batches, batches[0].slice(0, 0)])
    assert len(rows) > len(days)
    seen: Counter[int] = Counter()
    for row in rows:
        table = read(tmp_path, row)
        assert table.num_rows == row["rows"]
        assert file_number(row["name"]) == 5
        day = datetime.fromisoformat(row["name"].split("/")[0].removeprefix("date="))
        assert {one.date() for one in table["publish_time"].to_pylist()} == {day.date()}
        # About what it may hold, and a batch.
        assert table.nbytes < 40_000 + batches[0].nbytes
        seen.update(table["entry_id"].to_pylist())
    assert seen == Counter(n for one in batches for n in one["entry_id"].to_pylist())
    # Nothing lies there that nobody was told of.
    assert FolderTarget(tmp_path).names() == sorted(row["name"] for row in rows)


WITHOUT_PANDAS = """
import sys
from pathlib import Path
import numpy as np
import pyarrow as pa
from tierlog_spark.jobs.export.targets import FolderTarget
from tierlog_spark.jobs.export.writing import WriteTask, written

times = pa.py_buffer(np.array([0, 86_400_000_000]))
column = pa.Array.from_buffers(pa.timestamp("us", "UTC"), 2, [None, times])
batch = pa.RecordBatch.from_arrays([column], ["publish_time"])
task = WriteTask(target=FolderTarget(Path(sys.argv[1])), number=1, run="c" * 32, file_bytes=10**6)
rows = list(written(task, [batch], attempt=1))
print(len(rows), "pandas" in sys.modules)
"""


def test_files_are_written_without_pandas(tmp_path):
    """A fresh worker of Spark would take over a second to import what nothing of it is used."""
    command = [sys.executable, "-c", WITHOUT_PANDAS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("2 False\n", "")


def test_two_attempts_of_a_task_write_files_of_their_own(tmp_path):
    batches = [batch_of(0, [5])]
    first, second = (run(task_of(tmp_path), batches, attempt=one) for one in (1, 2))
    assert first[0]["name"] != second[0]["name"]
    assert first[0]["sha256"] == second[0]["sha256"]


def test_days_are_those_of_utc_before_1970_too():
    times = [-1, 0, DAY_US - 1, DAY_US]

    def found(batch):
        days = by_day(batch, np.zeros(batch.num_rows, np.bool_))
        return {date: some["entry_id"].to_pylist() for date, (some, _) in days}

    batch = batch_of(0, times)
    assert found(batch) == {"1969-12-31": [0], "1970-01-01": [1, 2], "1970-01-02": [3]}
    assert found(batch.slice(1)) == {"1970-01-01": [1, 2], "1970-01-02": [3]}


def test_events_of_a_raw_stream_have_no_day(tmp_path):
    [row] = run(task_of(tmp_path), [batch_of(0, [None, None])])
    assert row["name"].startswith(f"date={NO_DATE}/")
    assert read(tmp_path, row).num_rows == 2


def test_a_json_value_that_spark_could_not_make_is_bad(tmp_path):
    kind = pa.struct([("id", pa.int64()), ("_tierlog_corrupt", pa.string())])
    values = [{"id": 1}, {"id": 2, "_tierlog_corrupt": "{..."}, None, {"id": None}]
    batch = batch_of(0, [0] * 4).append_column("value", pa.array(values, kind))
    schema = JsonSchema("id BIGINT")
    found, bad = with_values(task_of(tmp_path, schema=schema, keep_bad=True), batch)
    assert found["value"].to_pylist() == [{"id": 1}, None, None, {"id": None}]
    assert bad.tolist() == [False, True, True, False]
    # A slice of a batch, whose children begin elsewhere.
    part, bad = with_values(task_of(tmp_path, schema=schema, keep_bad=True), batch.slice(1, 3))
    assert part["value"].to_pylist() == [None, None, {"id": None}]
    with pytest.raises(RefusedError, match="s: event 0 of entry 7:1 is not a JSON object of id B"):
        with_values(task_of(tmp_path, schema=schema), batch)
    [row] = run(task_of(tmp_path, schema=schema, keep_bad=True), [batch])
    assert (row["rows"], row["bad"]) == (4, 2)


def test_json_that_goes_on_behind_its_object_or_is_no_text_is_bad(tmp_path):
    good = [
        b'{"id": 1}',
        b' {"id": 1, "more": [{"a": {}}, "}"]}\r\n\t ',
        # What Spark takes, though it is not strictly JSON.
        b"{'id': 1}",
        b"{'id': NaN, '}': \"it's {\", 'b': 'a \\' } \"', \"c\": \"\\\\\"} ",
        b'{"id": 1, "lone": "\\ud800"}\n',
    ]
    more = [b'{"id": 2}', b"garbage", b"}", b"]", b', {"id": 2}', b"\0", b"\xff", b"''"]
    pairs = [(one, False) for one in good]
    pairs += [(one + two, True) for one in good for two in more]
    # Spark would put U+FFFD into it.
    pairs += [(b'{"id": 1, "a": "\xff"}', True), (b"{'id': 1, 'a': '\xc3('}", True)]
    pairs.append((b"{'id': 1, 'a': '\xc3\xa9'}", False))
    kind = pa.struct([("id", pa.int64()), ("_tierlog_corrupt", pa.string())])
    values = pa.array([{"id": 1}] * len(pairs), kind)
    batch = batch_of(0, [0] * len(pairs), [one for one, _ in pairs]).append_column("value", values)
    schema = JsonSchema("id BIGINT")
    found, bad = with_values(task_of(tmp_path, schema=schema, keep_bad=True), batch)
    assert bad.tolist() == [is_bad for _, is_bad in pairs]
    assert found["value"].to_pylist() == [None if is_bad else {"id": 1} for _, is_bad in pairs]
    with pytest.raises(RefusedError, match=f"7:{len(good)} is not a JSON object"):
        with_values(task_of(tmp_path, schema=schema, payload=False), batch)


def descriptors():
    """A message with each kind of field; protoc isn't needed to make one."""
    times = FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(times)
    file = FileDescriptorProto(
        name="shop.proto", package="shop", syntax="proto3", dependency=[times.name]
    )
    colour = file.enum_type.add(name="Colour")
    colour.value.add(name="GREY", number=0)
    colour.value.add(name="RED", number=1)
    file.message_type.add(name="Empty")
    item = file.message_type.add(name="Item")
    item.field.add(name="sku", number=1, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL)
    order = file.message_type.add(name="Order")
    entry = order.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=Field.TYPE_UINT32, label=Field.LABEL_OPTIONAL)
    fields: list[tuple[str, Any, dict[str, Any]]] = [
        ("id", Field.TYPE_INT64, {}),
        ("big", Field.TYPE_UINT64, {}),
        ("price", Field.TYPE_DOUBLE, {}),
        ("note", Field.TYPE_STRING, {"proto3_optional": True, "oneof_index": 0}),
        ("colour", Field.TYPE_ENUM, {"type_name": ".shop.Colour"}),
        ("at", Field.TYPE_MESSAGE, {"type_name": ".google.protobuf.Timestamp"}),
        ("items", Field.TYPE_MESSAGE, {"type_name": ".shop.Item"}),
        ("counts", Field.TYPE_MESSAGE, {"type_name": ".shop.Order.CountsEntry"}),
        ("nothing", Field.TYPE_MESSAGE, {"type_name": ".shop.Empty"}),
    ]
    for number, (name, kind, more) in enumerate(fields, 1):
        several = name in {"items", "counts"}
        label = Field.LABEL_REPEATED if several else Field.LABEL_OPTIONAL
        order.field.add(name=name, number=number, type=kind, label=label, **more)
    order.oneof_decl.add(name="_note")
    tree = file.message_type.add(name="Tree")
    tree.field.add(
        name="below",
        number=1,
        type=Field.TYPE_MESSAGE,
        label=Field.LABEL_OPTIONAL,
        type_name=".shop.Tree",
    )
    return FileDescriptorSet(file=[times, file])


def message_class(name):
    pool = DescriptorPool()
    for file in descriptors().file:
        pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(name))


def test_protobuf_messages_become_structs(tmp_path):
    order = message_class("shop.Order")
    full = order(id=-5, big=2**64 - 1, price=1.5, note="", colour=1, counts={"a": 2**32 - 1})
    full.at.seconds, full.at.nanos = 1_000_000_000, 123_456_789
    full.items.add(sku="x")
    full.items.add(sku="y")
    payloads = [full.SerializeToString(), b"", order(colour=9).SerializeToString(), b"\xff\xff"]
    schema = ProtobufSchema(descriptors().SerializeToString(), "shop.Order")
    schema.check()
    task = task_of(tmp_path, schema=schema, keep_bad=True)
    [row] = run(task, [batch_of(0, [0] * 4, payloads)])
    assert (row["rows"], row["bad"]) == (4, 1)
    first, second, third, fourth = read(tmp_path, row)["value"].to_pylist()
    assert first == {
        "id": -5,
        "big": Decimal(2**64 - 1),
        "price": 1.5,
        "note": "",
        "colour": "RED",
        "at": datetime.fromtimestamp(1_000_000_000, UTC).replace(microsecond=123_456),
        "items": [{"sku": "x"}, {"sku": "y"}],
        "counts": [("a", 2**32 - 1)],
    }
    assert second["note"] is None
    assert second["at"] is None
    assert (second["id"], second["colour"], second["items"]) == (0, "GREY", [])
    assert third["colour"] == "9"
    assert fourth is None
    with pytest.raises(RefusedError, match=r"7:3 is not a protobuf message shop.Order"):
        run(task_of(tmp_path, schema=schema), [batch_of(0, [0] * 4, payloads)])


OF_A_WORKER = """
import pickle
import sys
from tierlog_spark.jobs.export.writing import written

task, batch = pickle.load(sys.stdin.buffer)
rows = list(written(task, [batch], attempt=1))
sys.stdout.buffer.write(pickle.dumps(rows))
"""


def test_a_protobuf_schema_that_the_driver_used_is_pickled_to_a_process_of_its_own(tmp_path):
    """As Spark pickles what tasks do; a worker is not forked from the driver."""
    schema = ProtobufSchema(descriptors().SerializeToString(), "shop.Order")
    order = message_class("shop.Order")(id=7, colour=1)
    order.items.add(sku="x")
    schema.check()
    batch = batch_of(0, [0, 0], [order.SerializeToString(), b"\xff"])
    task = task_of(tmp_path, schema=schema, keep_bad=True)
    done = subprocess.run(
        [sys.executable, "-c", OF_A_WORKER],
        input=cloudpickle.dumps((task, batch)),
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    [row] = pickle.loads(done.stdout)
    assert (row["rows"], row["bad"]) == (2, 1)
    value, bad = read(tmp_path, row)["value"].to_pylist()
    assert (value["id"], value["colour"], value["items"]) == (7, "RED", [{"sku": "x"}])
    assert bad is None


def test_a_protobuf_value_that_a_column_cant_hold_is_bad(tmp_path):
    order = message_class("shop.Order")
    good, late = order(id=1), order(id=2)
    late.at.seconds = 2**62
    # A string, as proto2 lets it pass.
    text = FileDescriptorProto(name="old.proto", package="old", syntax="proto2")
    message = text.message_type.add(name="Text")
    message.field.add(name="text", number=1, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL)
    old = FileDescriptorSet(file=[text]).SerializeToString()
    for raw, name, payloads in (
        (descriptors().SerializeToString(), "shop.Order", [good, late, good]),
        (old, "old.Text", [b"\x0a\x01a", b"\x0a\x02\xff\xfe", b"\x0a\x01b"]),
    ):
        found = [one if isinstance(one, bytes) else one.SerializeToString() for one in payloads]
        schema, batch = ProtobufSchema(raw, name), batch_of(0, [0] * 3, found)
        with pytest.raises(RefusedError, match=f"7:1 is not a protobuf message {name}"):
            run(task_of(tmp_path, schema=schema), [batch])
        [row] = run(task_of(tmp_path, schema=schema, keep_bad=True), [batch])
        first, second, third = read(tmp_path, row)["value"].to_pylist()
        assert (row["bad"], second) == (1, None)
        assert first
        assert third


def test_the_payload_may_be_left_out(tmp_path):
    schema = ProtobufSchema(descriptors().SerializeToString(), "shop.Item")
    task = task_of(tmp_path, schema=schema, payload=False)
    payload = message_class("shop.Item")(sku="x").SerializeToString()
    [row] = run(task, [batch_of(0, [0], [payload])])
    table = read(tmp_path, row)
    assert "payload" not in table.column_names
    assert table["value"].to_pylist() == [{"sku": "x"}]


@pytest.mark.parametrize(
    ("raw", "name", "words"),
    [
        (b"\xff\xff\xff", "shop.Order", "can't be used"),
        (b"", "shop.Order", "no message shop.Order"),
        (descriptors().SerializeToString(), "shop.Tree", "shop.Tree in shop.Tree"),
        (descriptors().SerializeToString(), "shop.Empty", "has no field"),
        (
            FileDescriptorSet(file=descriptors().file[1:]).SerializeToString(),
            "shop.Order",
            "can't be used",
        ),
    ],
)
def test_descriptors_that_are_of_no_use_are_told(raw, name, words):
    with pytest.raises(RefusedError, match=words) as caught:
        ProtobufSchema(raw, name).check()
    assert caught.value.remedy
