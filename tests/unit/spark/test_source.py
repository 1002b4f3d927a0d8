"""What a user's own schema of ``format("tierlog")`` may be: a choice of the table's columns.

And the how-tos have a row for whatever a user can say.
"""

import re
from collections.abc import Collection
from pathlib import Path

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
from tierlog_spark import TierlogDataSource, options, write_options
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


def cells(page: str) -> list[list[list[str]]]:
    """Return the names in each cell of a how-to's tables, row by row."""
    text = (Path(__file__).parents[3] / "docs" / "how-to" / page).read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return [[re.findall(r"`(\w+)`", cell) for cell in row] for row in rows]


@pytest.mark.parametrize(
    ("page", "known"),
    [
        ("read-with-spark.md", options.OPTIONS),
        ("write-with-spark.md", write_options.OPTIONS),
    ],
)
def test_the_how_to_has_every_option(page: str, known: Collection[str]) -> None:
    assert set(known) <= {name for row in cells(page) for name in row[0]}


@pytest.mark.parametrize("table", Table)
def test_the_how_to_has_every_column_of_every_table(table: Table) -> None:
    rows, columns = cells("read-with-spark.md"), list(TYPES[table])
    if table is Table.EVENTS:
        assert set(columns) <= {name for row in rows for name in row[0]}
    else:
        assert [row[1] for row in rows if row[0] == [table]] == [columns]
