"""The public API, sync and async: writer, reader, admin."""
