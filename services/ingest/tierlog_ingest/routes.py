"""All routes of an ingest node on one application, for the process and for what describes them."""

from fastapi import FastAPI

from tierlog.ports.clock import Clock
from tierlog_ingest import http_appends, http_runs, http_status
from tierlog_ingest.app import IngestNode


def add_all_routes(app: FastAPI, node: IngestNode, *, clock: Clock) -> None:
    """Add them to ``app``."""
    http_runs.add_routes(app, node.storage)
    http_status.add_routes(app, node)
    http_appends.add_routes(app, owners=node.owners, find=node.catalog.streams.get, clock=clock)
