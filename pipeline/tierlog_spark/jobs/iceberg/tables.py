"""Tables of Iceberg, by PyIceberg: what one says of itself, and files added to it in one commit.

Owns all that is PyIceberg's: catalogs, schemas, commits, and what its errors mean here. Does not
own which files are added (``state``), nor what is done when a commit did not come (``job``).

PyIceberg repeats a commit that another one came before, on top of that one. Here it must not do so
when the other one added files of the same export: ``_Export.refresh`` looks.

Invariants:
    * Files, schema and properties are one commit, on top of a snapshot with the number that was
      read, or on top of later ones that changed nothing about it.
    * A commit whose answer did not come is neither there nor not: ``has`` tells.
    * Nothing that a commit may name is deleted.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    BadRequestError,
    CommitFailedException,
    ForbiddenError,
    NoSuchNamespaceError,
    NoSuchPropertyException,
    NoSuchTableError,
    NotInstalledError,
    OAuthError,
    RESTError,
    TableAlreadyExistsError,
    UnauthorizedError,
    ValidationError,
    ValidationException,
)
from pyiceberg.io import FileIO, load_file_io
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import DayTransform
from pyiceberg.utils.concurrent import ExecutorFactory
from pyiceberg.utils.config import Config
from requests import RequestException
from sqlalchemy.exc import SQLAlchemyError

from tierlog.model.errors import (
    CorruptError,
    Reason,
    RefusedError,
    RetryableError,
    TierlogError,
)
from tierlog.runtime.settings import S3Settings
from tierlog_spark.jobs.export.committed import Committed
from tierlog_spark.jobs.iceberg.state import Known, known_of

TIME: Final = "publish_time"
_CONFIGURE: Final = (
    "Set what PyIceberg's configuration has of the catalog: PYICEBERG_CATALOG__NAME__URI and the "
    "like, or .pyiceberg.yaml"
)
Schema = Any  # pyarrow ships no types


class Came(Enum):
    """What became of a commit."""

    ADDED = auto()
    OVERTAKEN = auto()
    UNKNOWN = auto()


@contextlib.contextmanager
def opened_catalog(name: str | None, s3: S3Settings) -> Iterator[Catalog]:
    """Give the catalog that PyIceberg's configuration names."""
    try:
        with plain_errors("the catalog"):
            catalog = load_catalog(name, **_store(name, s3))
    except (ValueError, TypeError, NoSuchPropertyException) as error:
        raise RefusedError(f"the catalog can't be opened: {error}", remedy=_CONFIGURE) from error
    with catalog:
        yield catalog


def _store(name: str | None, s3: S3Settings) -> dict[str, str]:
    """Return how the store of the export is reached, unless the catalog's own settings say it."""
    config = Config()
    given = config.get_catalog_config(name or config.get_default_catalog_name()) or {}
    if any(key.startswith("s3.") for key in given):
        return {}
    secret = None if s3.secret_key is None else s3.secret_key.get_secret_value()
    wanted = {
        "s3.endpoint": s3.endpoint_url,
        "s3.region": s3.region,
        "s3.access-key-id": s3.access_key,
        "s3.secret-access-key": secret,
        "s3.connect-timeout": str(s3.connect_timeout_s),
        "s3.request-timeout": str(s3.read_timeout_s),
    }
    return {key: value for key, value in wanted.items() if value}


@contextlib.contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Raise what PyIceberg, its catalogs and its files raise as an error of ours."""
    try:
        yield
    except TierlogError:
        raise
    except NotInstalledError as error:
        raise RefusedError(f"{what}: {error}", remedy="Install what it names") from error
    except NotImplementedError as error:
        raise RefusedError(
            f"{what}: PyIceberg can't do with this kind of catalog what it takes",
            remedy="Use a catalog of kind REST, SQL, Glue or Hive",
        ) from error
    except (UnauthorizedError, OAuthError) as error:
        raise RefusedError(
            f"{what}: {error}", reason=Reason.UNAUTHENTICATED, remedy=_CONFIGURE
        ) from error
    except (ForbiddenError, PermissionError) as error:
        raise RefusedError(
            f"{what}: {error}",
            reason=Reason.PERMISSION_DENIED,
            remedy="The catalog must let these credentials change the table, and the store let "
            "them read the export and write where the table is",
        ) from error
    except (BadRequestError, NoSuchNamespaceError) as error:
        raise RefusedError(f"{what}: {error}", remedy=_CONFIGURE) from error
    except FileNotFoundError as error:
        raise CorruptError(
            f"{what}: {error}", remedy="Bring the file back from a backup, or make another table"
        ) from error
    except (RESTError, SQLAlchemyError, RequestException, OSError) as error:
        raise RetryableError(
            f"{what} can't be reached: {error}",
            remedy="See that the catalog and the store run, that their addresses are those in "
            "PyIceberg's configuration, and that the keys open both; then run it again",
        ) from error


class _OvertakenError(Exception):
    """The table has another number than the commit was made for: another run's, or its own."""


class _Export(Table):
    """A table to which one commit is added, if it is still as it was known to be."""

    known: Known | None

    def refresh(self) -> Table:
        """Read the table again, as PyIceberg does before it repeats a commit."""
        Table.refresh(self)
        if known_from(self.metadata) != self.known:
            # No error of PyIceberg's: behind those it deletes what the commit may name.
            raise _OvertakenError
        return self


def known_from(metadata: TableMetadata) -> Known | None:
    """Return what a table says that it has of its export."""
    return known_of(_lineage(metadata), metadata.properties)


def _lineage(metadata: TableMetadata) -> Iterator[Mapping[str, str]]:
    """Iterate over the properties of the current snapshot and those before it, as far as known."""
    by_id = {one.snapshot_id: one for one in metadata.snapshots}
    snapshot = by_id.get(metadata.current_snapshot_id or 0)
    while snapshot is not None:
        if snapshot.summary is not None:
            yield snapshot.summary.additional_properties
        snapshot = by_id.get(snapshot.parent_snapshot_id or 0)


@dataclass(frozen=True, slots=True)
class Tables:
    """One table of a catalog."""

    catalog: Catalog
    name: tuple[str, ...]

    @property
    def text(self) -> str:
        """Its name, for people."""
        return ".".join(self.name)

    def load(self) -> Table | None:
        """Return the table as it is now, None if there is none."""
        with plain_errors(f"table {self.text}"):
            try:
                return self.catalog.load_table(self.name)
            except (NoSuchTableError, NoSuchNamespaceError):
                return None

    def create(
        self,
        files: Sequence[Committed],
        then: Known,
        *,
        dated: bool,
        properties: Mapping[str, str],
    ) -> "Added":
        """Make the table with files in it, in one commit; another run may make it at the same time.

        Whatever is killed or refused on the way, there is no table without them.
        """
        first = files[0]
        with plain_errors(f"table {self.text}"), _refused(self.text, first.path):
            schemas = _schemas(load_file_io(self.catalog.properties, uri_of(first)), files)
            try:
                transaction = self._begun(schemas, properties)
            except TableAlreadyExistsError as error:
                return Added(None, Came.OVERTAKEN, error)
            if dated:
                with transaction.update_spec() as spec:
                    spec.add_field(TIME, DayTransform())
            self._stage(transaction, schemas, files, then)
        return self._committed(transaction)

    def _begun(
        self, schemas: Sequence[tuple[Schema, Committed]], properties: Mapping[str, str]
    ) -> Transaction:
        begin = partial(
            self.catalog.create_table_transaction,
            self.name,
            schemas[0][0],
            properties=dict(properties),
        )
        try:
            return begin()
        except NoSuchNamespaceError:
            self.catalog.create_namespace_if_not_exists(self.name[:-1])
            return begin()

    def _grow(self, transaction: Transaction, schemas: Sequence[tuple[Schema, Committed]]) -> None:
        for schema, file in schemas:
            with _refused(self.text, file.path), transaction.update_schema() as change:
                change.union_by_name(schema)

    def add(self, table: Table, files: Sequence[Committed], then: Known) -> "Added":
        """Add files in one commit, after which the table has all up to ``then``."""
        export = _Export(
            table.name(),
            table.metadata,
            table.metadata_location,
            table.io,
            table.catalog,
            table.config,
        )
        export.known = known_from(table.metadata)
        with plain_errors(f"table {self.text}"), _refused(self.text, "the files"):
            transaction = export.transaction()
            self._stage(transaction, _schemas(export.io, files), files, then)
        return self._committed(transaction)

    def _stage(
        self,
        transaction: Transaction,
        schemas: Sequence[tuple[Schema, Committed]],
        files: Sequence[Committed],
        then: Known,
    ) -> None:
        self._grow(transaction, schemas)
        transaction.set_properties(then.properties())
        transaction.add_files([uri_of(one) for one in files], snapshot_properties=then.properties())

    def _committed(self, transaction: Transaction) -> "Added":
        snapshot = transaction.table_metadata.current_snapshot_id
        assert snapshot is not None
        try:
            transaction.commit_transaction()
        except (
            CommitFailedException,
            TableAlreadyExistsError,
            ValidationException,
            _OvertakenError,
        ) as error:
            return Added(snapshot, Came.OVERTAKEN, error)
        except (UnauthorizedError, ForbiddenError, BadRequestError, NotImplementedError):
            with plain_errors(f"table {self.text}"):
                raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the commit may be there
            return Added(snapshot, Came.UNKNOWN, error)
        return Added(snapshot, Came.ADDED)


@dataclass(frozen=True, slots=True)
class Added:
    """What became of a commit, and the snapshot that it is; None: it was not even sent."""

    snapshot: int | None
    came: Came
    error: Exception | None = None

    def is_in(self, table: Table) -> bool:
        """Tell whether a table, as it was read since, has it."""
        if self.snapshot is None:
            return False
        return table.metadata.snapshot_by_id(self.snapshot) is not None


def uri_of(file: Committed) -> str:
    """Return the name by which Iceberg knows a file."""
    return file.path if "://" in file.path else f"file://{file.path}"


def _schemas(io: FileIO, files: Sequence[Committed]) -> list[tuple[Schema, Committed]]:
    """Return the schemas of files, each once, with the first that has it."""
    footers = ExecutorFactory.get_or_create().map(lambda one: _footer(io, one), files)
    found: list[tuple[Schema, Committed]] = []
    for schema, file in zip(footers, files, strict=True):
        if all(schema != one for one, _ in found):
            found.append((schema, file))
    return found


def _footer(io: FileIO, file: Committed) -> Schema:
    """Return the schema of a file, which must be the one that the log names."""
    try:
        with io.new_input(uri_of(file)).open() as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            found = pq.read_metadata(stream)
    except pa.ArrowInvalid as error:
        raise _differs(file) from error
    if (size, found.num_rows) != (file.bytes, file.rows):
        raise _differs(file)
    return found.schema.to_arrow_schema().remove_metadata()


def _differs(file: Committed) -> CorruptError:
    return CorruptError(
        f"{file.path} is not what was written",
        remedy="Export the stream to another place, and make a table of that",
    )


@contextlib.contextmanager
def _refused(table: str, files: str) -> Iterator[None]:
    """Raise what PyIceberg finds wrong with files as a refusal."""
    try:
        yield
    except (ValidationError, ValueError, TypeError) as error:
        raise RefusedError(
            f"table {table} can't take {files}: {error}",
            remedy="Its columns can be added and widened, not changed otherwise: export to a "
            "place of its own, and make a table of that",
        ) from error
