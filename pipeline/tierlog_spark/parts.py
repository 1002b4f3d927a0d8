"""What a task does with its part: the batches of it, of the types that Spark expects."""

from collections.abc import Iterator
from typing import Any

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from tierlog_spark.options import ReadOptions
from tierlog_spark.planning import ServicePart, StorePart
from tierlog_spark.reading import store_batches
from tierlog_spark.service import service_batches
from tierlog_spark.worker import in_steps


def read_part(part: object, options: ReadOptions, schema: StructType) -> Iterator[Any]:
    """Return the batches of a part; None is what Spark makes of a plan without any."""
    if part is None:
        return iter(())
    wanted, fetch_bytes = arrow_schema(schema), options.fetch_bytes
    if isinstance(part, ServicePart):
        batches = service_batches(
            part, options.client, options.security, wanted, fetch_bytes=fetch_bytes
        )
        return in_steps(batches)
    assert isinstance(part, StorePart)
    return in_steps(store_batches(part, options.s3, wanted, fetch_bytes=fetch_bytes))


def arrow_schema(schema: StructType) -> Any:  # noqa: ANN401 - pyarrow ships no types
    """Return a schema as Spark compares it with that of a batch."""
    return to_arrow_schema(schema, timezone="UTC")
