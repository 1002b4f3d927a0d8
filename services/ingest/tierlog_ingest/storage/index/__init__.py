"""The index files of ledgers, and the cache of their pages."""
