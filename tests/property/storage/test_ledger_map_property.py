"""The ledgers map of an entry log: a counter in columns, and its bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.format.checksum import crc32c
from tierlog.model.errors import CorruptError
from tierlog_ingest.storage.entrylog.entry_log_format import pack_map, unpack_map
from tierlog_ingest.storage.entrylog.ledger_map import LedgerMap, all_ids

ids = st.integers(0, 12) | st.integers(2**63 - 4, 2**63 - 1)
rows = st.tuples(ids, st.integers(1, 1000))
adding = st.tuples(st.just("add"), st.lists(rows, max_size=8))
forgetting = st.tuples(st.just("forget"), st.lists(ids, max_size=4))
asking = st.just(("ask", list[int]()))
maps = st.dictionaries(ids, st.integers(1, 2**20), max_size=20)


def columns(pairs):
    return (
        np.array([one for one, _ in pairs], np.int64),
        np.array([one for _, one in pairs], np.int64),
    )


@given(st.lists(adding | forgetting | asking, max_size=20))
def test_it_counts_as_a_dictionary_does(steps) -> None:
    counted, model = LedgerMap(), dict[int, int]()
    for what, arguments in steps:
        if what == "add":
            counted.add(*columns(arguments))
            for ledger_id, size in arguments:
                model[ledger_id] = model.get(ledger_id, 0) + size
        elif what == "forget":
            counted.forget(np.array(arguments, np.int64))
            for ledger_id in arguments:
                model.pop(ledger_id, None)
        else:
            assert len(counted) == len(model)
        assert counted.total == sum(model.values())
    assert counted == model
    assert list(counted) == sorted(model)
    assert all_ids([counted]) == set(model)
    for ledger_id in (0, 5, 13, 2**63 - 1):
        assert counted.get(ledger_id) == model.get(ledger_id)
    copy = LedgerMap(counted)
    copy.merge(counted)
    assert copy == {ledger_id: 2 * size for ledger_id, size in model.items()}


@given(maps, maps)
def test_agreeing_is_holding_each_ledger_of_the_other(one: dict[int, int], two: dict[int, int]):
    expected = all(one.get(ledger_id) == size for ledger_id, size in two.items())
    assert LedgerMap(one).agrees_with(LedgerMap(two)) == expected
    assert LedgerMap({**two, **one}).agrees_with(LedgerMap(one))


@given(maps, st.integers(1, 2**24 - 1))
def test_its_bytes_are_what_their_table_says(sizes: dict[int, int], log_id: int) -> None:
    map_offset = 32 + sum(sizes.values())
    data = pack_map(LedgerMap(sizes), log_id=log_id, map_offset=map_offset)
    naive = b"".join(struct.pack(">qq", one, sizes[one]) for one in sorted(sizes))
    naive += b"TLEM" + struct.pack(">IqQI", 1, log_id, map_offset, len(sizes))
    assert data == naive + struct.pack(">I", crc32c(naive))
    assert unpack_map(data, log_id=log_id, map_offset=map_offset) == sizes


contradictions = [
    [(5, 10), (5, 10)],
    [(6, 10), (5, 10)],
    [(-1, 10)],
    [(1, 0)],
    [(1, -5), (2, 7)],
    [(1, 101)],
    [(1, 60), (2, 41)],
    [(1, 2**32)],
    [(1, 2**63 - 1), (2, 2**63 - 1)],
]


@pytest.mark.parametrize("pairs", contradictions)
def test_a_map_that_contradicts_itself_is_damage_though_its_checksum_is_right(pairs) -> None:
    naive = b"".join(struct.pack(">qq", *pair) for pair in pairs)
    offset = 132 if max(size for _, size in pairs) < 2**32 else 2**63
    naive += b"TLEM" + struct.pack(">IqQI", 1, 1, offset, len(pairs))
    with pytest.raises(CorruptError):
        unpack_map(naive + struct.pack(">I", crc32c(naive)), log_id=1, map_offset=offset)


@given(maps, st.data())
def test_every_change_of_its_bytes_is_found(sizes: dict[int, int], data: st.DataObject) -> None:
    map_offset = 32 + sum(sizes.values())
    packed = bytearray(pack_map(LedgerMap(sizes), log_id=1, map_offset=map_offset))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptError):
        unpack_map(packed, log_id=1, map_offset=map_offset)
