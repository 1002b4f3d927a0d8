"""Compaction: live runs go to new entry logs, so that old ones can be removed."""
