"""Reads of one bucket by obstore: a second way to the port ``ObjectReads``, which is opted into."""

from tierlog.adapters.obstore.reads import ObstoreReads, open_obstore

__all__ = ["ObstoreReads", "open_obstore"]
