"""What a user may say of an export, checked (pure)."""

from dataclasses import dataclass

from tierlog.model.errors import RefusedError
from tierlog.model.ids import StreamName, stream_name
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs.export.values import ValueSchema
from tierlog_spark.options import MIB

BATCH_BYTES = 1024 * MIB
FILE_BYTES = 128 * MIB
FILE_BYTES_MAX = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """One export.

    ``to`` is a folder or s3://BUCKET/PREFIX at the store of ``s3``, whose bucket is read. With a
    ``schema`` there is a column ``value``; without ``payload`` the bytes themselves are left out.
    """

    streams: tuple[str, ...]
    to: str
    s3: S3Settings
    schema: ValueSchema | None = None
    payload: bool = True
    keep_bad: bool = False
    """Events that are not of the schema have ``value`` null; else one of them ends the export."""
    skip_trimmed: bool = False
    """Go on behind what retention, or the stream's deletion, took before it was exported."""
    batch_bytes: int = BATCH_BYTES
    """What one commit holds of entries, about."""
    file_bytes: int = FILE_BYTES
    """What one task reads, and what it holds in memory before it writes a file, about."""

    def names(self) -> list[StreamName]:
        """Return the streams, each once, or raise ``RefusedError`` for what makes no sense."""
        if not self.streams:
            raise RefusedError("no stream is named", remedy="Name the streams to export")
        if self.schema is None and not self.payload:
            raise RefusedError(
                "an export without payload and without a schema holds no data",
                remedy="Give a schema, or keep the payload",
            )
        if self.keep_bad and not self.payload:
            raise RefusedError(
                "events that are not of the schema would be lost: their payload is left out",
                remedy="Keep the payload too, or let such events end the export",
            )
        if self.batch_bytes < 1:
            raise RefusedError(f"batch_bytes is {self.batch_bytes}", remedy="Give 1 or more")
        if not 1 <= self.file_bytes <= FILE_BYTES_MAX:
            raise RefusedError(
                f"file_bytes is {self.file_bytes}", remedy=f"Give 1 to {FILE_BYTES_MAX}"
            )
        return list(dict.fromkeys(stream_name(name) for name in self.streams))
