"""All routes of the reader on one application."""

from fastapi import FastAPI

from tierlog_reader.documents import Unpacking
from tierlog_reader.http import add_routes
from tierlog_reader.http_entries import EntryPages, add_entry_routes, add_ledger_route
from tierlog_reader.limits import ReadLimits
from tierlog_reader.seek import TimeSeek
from tierlog_reader.served import ServedReads


def add_all_routes(
    app: FastAPI,
    reads: ServedReads,
    seek: TimeSeek,
    limits: ReadLimits,
    unpacking: Unpacking,
) -> None:
    """Add the reader's routes to ``app``."""
    add_routes(app, reads, seek, limits)
    pages = EntryPages(reads, seek, limits, unpacking)
    add_entry_routes(app, pages)
    add_ledger_route(app, pages)
