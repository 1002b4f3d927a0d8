"""``format("tierlog")``: what Spark asks, passed on (ADR-0028).

Owns Spark's classes. Does not own anything that they do. Spark pickles them, from the driver to
the process that plans and from there to each task: they hold options and a schema.

Each of these processes imports this module first, a second or more of work: what few of them need,
the client above all, is imported by whoever does.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tierlog.model.errors import RefusedError
from tierlog.runtime.settings import load_settings
from tierlog_spark.columns import TYPES, Table
from tierlog_spark.driving import plan
from tierlog_spark.filters import push
from tierlog_spark.options import ReadOptions, parse_options
from tierlog_spark.parts import arrow_schema, read_part
from tierlog_spark.planning import ALL
from tierlog_spark.streaming import EventStreamReader
from tierlog_spark.tables import table_batches
from tierlog_spark.worker import in_steps
from tierlog_spark.write_options import WriteOptions, parse_write_options

FORMAT = "tierlog"
_PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"


_TYPES: Final[Mapping[str, DataType]] = {
    one.simpleString(): one
    for one in (
        BinaryType(),
        BooleanType(),
        IntegerType(),
        LongType(),
        StringType(),
        TimestampType(),
        ArrayType(StringType()),
        MapType(StringType(), StringType()),
    )
}
assert {kind for types in TYPES.values() for kind in types.values()} <= set(_TYPES)


def register(spark: SparkSession) -> None:
    """Make ``format("tierlog")`` known to a session, with filters pushed down."""
    spark.conf.set(_PUSH_DOWN, "true")
    spark.dataSource.register(TierlogDataSource)


class TierlogDataSource(DataSource):
    """Streams and ledgers of Tierlog, and objects that Apache Pulsar offloaded."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def _options(self) -> ReadOptions:
        given: Mapping[str, str] = dict(self.options)
        return parse_options(given, load_settings())

    def schema(self) -> StructType:
        options = self._options()
        return schema_of(options.table, options.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options()
        check_schema(schema, options.table)
        if options.table is not Table.EVENTS:
            return TableReader(options, schema)
        if options.push_filters:
            return FilteringReader(options, schema)
        return EventReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        options = self._options()
        check_schema(schema, options.table)
        return EventStreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        from tierlog_spark.sink import EventWriter, checked_schema  # noqa: PLC0415 - see above

        checked_schema(schema, overwrite=overwrite)
        return EventWriter(self._write_options(streaming=False))

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamWriter:
        from tierlog_spark.sink import EventStreamWriter, checked_schema  # noqa: PLC0415

        checked_schema(schema, overwrite=overwrite)
        return EventStreamWriter(self._write_options(streaming=True))

    def _write_options(self, *, streaming: bool) -> WriteOptions:
        given: Mapping[str, str] = dict(self.options)
        return parse_write_options(given, load_settings(), streaming=streaming)


class EventReader(DataSourceReader):
    """Reads events; Spark applies all filters itself."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema
        self.bounds = ALL

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(one) for one in asyncio.run(plan(self.options, self.bounds))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_part(partition.value, self.options, self.schema)


class FilteringReader(EventReader):
    """Reads what filters let through, as far as they can be understood."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802 - Spark's name
        self.bounds, left = push(self.bounds, filters)
        return left


class TableReader(DataSourceReader):
    """Reads one of the tables about streams, in one task."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(self.options.table)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return in_steps(table_batches(self.options, arrow_schema(self.schema)))


def schema_of(table: Table, columns: Iterable[str]) -> StructType:
    """Return columns of a table with their types."""
    types = TYPES[table]
    return StructType([StructField(name, _TYPES[types[name]]) for name in columns])


def check_schema(schema: StructType, table: Table) -> None:
    """Refuse a schema that a user gave and that is no choice of the table's columns."""
    types = TYPES[table]
    for field in schema.fields:
        if types.get(field.name) != field.dataType.simpleString():
            known = ", ".join(f"{name} {kind}" for name, kind in types.items())
            raise RefusedError(
                f"table {table} has no column {field.name} {field.dataType.simpleString()}",
                remedy=f"It has {known}",
            )
