"""What a user may say of a table that is filled, checked (pure)."""

from dataclasses import dataclass

from tierlog.model.errors import RefusedError
from tierlog.runtime.settings import S3Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergOptions:
    """One export, and the table that it goes into.

    ``source`` is where it was exported to: a folder, or s3://BUCKET/PREFIX at the store of ``s3``.
    ``catalog`` is a name in PyIceberg's own configuration; None: the default one there.
    """

    stream: str
    source: str
    table: str
    s3: S3Settings
    catalog: str | None = None

    def identifier(self) -> tuple[str, ...]:
        """Return the table's name in its parts, or raise ``RefusedError``."""
        parts = tuple(self.table.split("."))
        if len(parts) == 1 or not all(parts):
            raise RefusedError(
                f"{self.table!r} is no name of a table",
                remedy="Give its namespace and its name, as: logs.orders",
            )
        return parts
