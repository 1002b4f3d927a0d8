"""Conditions of appends on their way."""

import pytest

from tierlog.model.attributes import AppendCondition
from tierlog.model.errors import RefusedError
from tierlog.model.ids import INT64_MAX, EntryId, LedgerId
from tierlog.model.position import Edge, Position
from tierlog.proto.v1 import wire_pb2 as pb
from tierlog.wire.messages import condition_of, condition_to_record

WHERE = Position(LedgerId(5), EntryId(0))


@pytest.mark.parametrize("last", [None, 0, INT64_MAX])
@pytest.mark.parametrize("after", [None, Edge.EARLIEST, WHERE])
def test_a_condition_arrives_as_it_was(last, after):
    if last is None and after is None:
        return
    condition = AppendCondition(last_event_number=last, after=after)
    record = condition_to_record(condition)
    assert record is not None
    assert condition_of(pb.AppendCondition.FromString(record.SerializeToString())) == condition


@pytest.mark.parametrize(
    "record",
    [
        pb.AppendCondition(),
        pb.AppendCondition(last_event_number=-1),
        pb.AppendCondition(empty_stream=False),
        pb.AppendCondition(after=pb.EntryPosition(ledger_id=-1)),
        pb.AppendCondition(after=pb.EntryPosition(entry_id=-1)),
    ],
)
def test_a_condition_that_is_none_is_refused(record):
    with pytest.raises(RefusedError):
        condition_of(record)
