"""Ledgers to objects and back: offloader, verification, cleaning rules."""
