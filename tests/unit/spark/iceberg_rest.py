"""A REST catalog that keeps its tables in one of SQL: as much of the protocol as a table takes."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyiceberg.catalog.sql import SqlCatalog

Answer = tuple[int, Any]


class RestServer(ThreadingHTTPServer):
    """``answers``: what comes, instead of 200, of the next commits; 0: nothing at all.

    ``before``: what others do before a table is begun.
    """

    def __init__(self, catalog: SqlCatalog) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.catalog = catalog
        self.answers: list[int] = []
        self.config_status = 200
        self.before: list[Callable[[], object]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: list[str], body: bytes) -> Answer:  # noqa: PLR0911
        match method, path:
            case "GET", ["config"]:
                return self.config_status, {"defaults": {}, "overrides": {}}
            case "GET" | "HEAD", ["namespaces", name]:
                return 200, {"namespace": [name], "properties": self._namespace(name)}
            case "POST", ["namespaces"]:
                [name] = json.loads(body)["namespace"]
                self.catalog.create_namespace(name)
                return 200, {"namespace": [name]}
            case "POST", ["namespaces", name, "tables"]:
                while self.before:
                    self.before.pop()()
                return 200, self._staged(name, json.loads(body))
            case "GET", ["namespaces", name, "tables", table]:
                return 200, _told(self.catalog.load_table((name, table)))
            case "POST", ["namespaces", name, "tables", table]:
                return self._commit((name, table), body)
        return 404, None

    def _staged(self, namespace: str, asked: dict[str, Any]) -> Any:
        if self.catalog.table_exists((namespace, asked["name"])):
            raise TableAlreadyExistsError(f"table {asked['name']} exists")
        schema = Schema.model_validate(asked["schema"])
        staged = self.catalog._create_staged_table(
            (namespace, asked["name"]), schema, properties=asked["properties"]
        )
        return {"metadata": json.loads(staged.metadata.model_dump_json())}

    def _namespace(self, name: str) -> Any:
        return self.catalog.load_namespace_properties(name)

    def _commit(self, name: tuple[str, str], body: bytes) -> Answer:
        asked = CommitTableRequest.model_validate_json(body)
        try:
            table = self.catalog.load_table(name)
        except NoSuchTableError:
            table = self.catalog._create_staged_table(name, Schema())
        done = self.catalog.commit_table(table, asked.requirements, asked.updates)
        return self.answers.pop(0) if self.answers else 200, _told(done)


def _told(table: Any) -> dict[str, Any]:
    return {
        "metadata-location": table.metadata_location,
        "metadata": json.loads(table.metadata.model_dump_json()),
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RestServer

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0].strip("/").split("/")[1:]
        try:
            status, answer = self.server.answer(self.command, path, body)
        except (NoSuchTableError, NoSuchNamespaceError) as error:
            status, answer = 404, _error(error, 404)
        except (CommitFailedException, TableAlreadyExistsError) as error:
            status, answer = 409, _error(error, 409)
        if status == 0:
            self.close_connection = True
            return
        raw = b"" if self.command == "HEAD" else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_HEAD = do_POST = _do  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


def _error(error: Exception, code: int) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": type(error).__name__, "code": code}}


@contextlib.contextmanager
def rest_server(catalog: SqlCatalog) -> Iterator[RestServer]:
    with RestServer(catalog) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
