"""What a user's own schema of ``format("tierlog")`` may be: a choice of the table's columns."""

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
)

from tierlog.model.errors import RefusedError
from tierlog_spark import TierlogDataSource
from tierlog_spark.columns import TYPES, Table
from tierlog_spark.source import schema_of

SOURCE = TierlogDataSource(CaseInsensitiveDict({"stream": "s", "bucket": "b"}))
LEDGERS = TierlogDataSource(CaseInsensitiveDict({"table": "ledgers", "bucket": "b"}))


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("size", LongType(), "size bigint"),
        ("ledger_id", IntegerType(), "ledger_id int"),
        ("Payload", BinaryType(), "Payload binary"),
        ("publish_time", TimestampNTZType(), "publish_time timestamp_ntz"),
        (
            "properties",
            MapType(StringType(), BinaryType()),
            "properties map<string,binary>",
        ),
        # Of another table.
        ("data_bytes", LongType(), "data_bytes bigint"),
    ],
)
def test_a_schema_that_is_no_choice_of_the_columns_is_refused(
    name: str, kind: DataType, words: str
) -> None:
    schema = StructType([StructField("entry_id", LongType()), StructField(name, kind)])
    for ask in (SOURCE.reader, SOURCE.streamReader):
        with pytest.raises(RefusedError, match=f"table events has no column {words}") as caught:
            ask(schema)
        assert "ledger_id bigint, entry_id bigint" in caught.value.remedy


def test_a_choice_of_the_columns_is_taken_in_its_own_order() -> None:
    fields = [StructField("payload", BinaryType()), StructField("ledger_id", LongType(), False)]
    chosen = StructType(fields)
    for ask in (SOURCE.reader, SOURCE.streamReader):
        assert vars(ask(chosen))["schema"].names == ["payload", "ledger_id"]
        assert vars(ask(SOURCE.schema()))["schema"] == schema_of(Table.EVENTS, TYPES[Table.EVENTS])
    with pytest.raises(RefusedError, match="table ledgers has no column payload binary"):
        LEDGERS.reader(chosen)
    LEDGERS.reader(LEDGERS.schema())
