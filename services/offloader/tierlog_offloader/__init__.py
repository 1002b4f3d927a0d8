"""Copies sealed ledgers to the object store."""
